"""The model as transformers builds it from the run's configuration.

Weights come later, by the chain. No code from the bucket is ever run.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
from transformers.initialization import no_init_weights

from deltawire.codec.bits import torch_type
from deltawire.codec.patch import Layout
from deltawire.protocol.chain import RunManifest
from deltawire.protocol.errors import EngineError, LayoutMismatch
from deltawire_inference.engines.torch.attention import ATTENTION, install_attention
from deltawire_inference.engines.torch.kv import KVShape


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model without its weights yet, and what generation needs to know of it."""

    module: nn.Module
    decoder: Tokenizer | None
    """Finds stop strings; None when the run carries no tokenizer.json."""
    shape: KVShape
    eos_ids: frozenset[int]
    vocabulary: int
    """Token ids are below it."""
    max_length: int
    """Positions the model was made for."""

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every parameter and stored buffer under each of its names, tied ones included."""
        for name, tensor in self.module.state_dict(keep_vars=True).items():
            yield name, tensor.detach()


def build_model(model_dir: Path, manifest: RunManifest, *, device: torch.device) -> LoadedModel:
    """Raises EngineError for a model this engine cannot run, LayoutMismatch for another model."""
    install_attention()
    layout = Layout(manifest.tensors)
    try:
        config = AutoConfig.from_pretrained(model_dir, trust_remote_code=False)
        with no_init_weights():
            module = AutoModelForCausalLM.from_config(
                config,
                dtype=_main_type(layout),
                attn_implementation=ATTENTION,
                trust_remote_code=False,
            )
    except (OSError, ValueError, KeyError) as error:
        raise EngineError(f"cannot build a model from the run's config.json: {error}") from error
    module.tie_weights()  # building without initialisation leaves it out
    module = module.to(device).eval().requires_grad_(False)
    _take_types(module, layout)
    _check_names(module, manifest)
    text = config.get_text_config()
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return LoadedModel(
        module=module,
        decoder=_decoder(model_dir),
        shape=KVShape(
            layers=text.num_hidden_layers,
            heads=getattr(text, "num_key_value_heads", None) or text.num_attention_heads,
            head_dim=head_dim,
            dtype=_main_type(layout),
            device=device,
        ),
        eos_ids=_eos_ids(model_dir, config.eos_token_id),
        vocabulary=text.vocab_size,
        max_length=text.max_position_embeddings,
    )


def _main_type(layout: Layout) -> torch.dtype:
    """The dtype of most elements: the model is built in it."""
    sizes: Counter[str] = Counter()
    for tensor in layout.values():
        sizes[tensor.dtype] += tensor.numel
    return torch_type(sizes.most_common(1)[0][0])


def _take_types(module: nn.Module, layout: Layout) -> None:
    """Give each parameter the dtype it is published in (a norm may be kept in fp32)."""
    for name, tensor in module.state_dict(keep_vars=True).items():
        if name in layout and tensor.dtype != torch_type(layout[name].dtype):
            tensor.data = tensor.data.to(torch_type(layout[name].dtype))


def _check_names(module: nn.Module, manifest: RunManifest) -> None:
    """Every weight of the model must come from the run: none may keep its random start."""
    tensors = module.state_dict(keep_vars=True)
    known = {spec.name for spec in manifest.tensors}
    places = {tensors[name].data_ptr() for name in known & tensors.keys()}
    missing = sorted(
        name
        for name, tensor in tensors.items()
        if name not in known and tensor.data_ptr() not in places
    )
    if missing:
        raise LayoutMismatch(
            f"the run's layout lacks {len(missing)} tensors of this model, among them {missing[0]}"
        )


def _decoder(model_dir: Path) -> Tokenizer | None:
    path = model_dir / "tokenizer.json"
    if not path.exists():
        return None
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises nothing narrower
        raise EngineError(f"cannot load the run's tokenizer.json: {error}") from error


def _eos_ids(model_dir: Path, configured: int | list[int] | None) -> frozenset[int]:
    """generation_config.json names more than config.json does (chat models end a turn)."""
    if (model_dir / "generation_config.json").exists():
        configured = GenerationConfig.from_pretrained(model_dir).eos_token_id or configured
    if configured is None:
        return frozenset()
    return frozenset([configured] if isinstance(configured, int) else configured)
