"""The policy being trained: fp32 masters, a working copy that computes, and logprobs.

The working copy holds the masters rounded to the published dtype: the very numbers that replicas
sample with, so importance ratios measure the policy and not the arithmetic, and nothing is cast in
a forward. Its gradients are added to the masters' in fp32. In full precision the two are one.
Names and order are those of the model's parameters with tied weights once: the layout of the run.
With an adapter (lora.py) only its parameters have masters; the base is frozen in the working dtype.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from deltawire.job.spec import LoraSpec
from deltawire.protocol.adapters import AdapterManifest
from deltawire_trainer.batches import PackedBatch
from deltawire_trainer.lora import Lora


@dataclass(frozen=True, slots=True, kw_only=True)
class Logprobs:
    """What the policy says of a packed batch."""

    tokens: torch.Tensor
    """[T] logprobs of the trained tokens, with gradient when wanted."""
    entropy: torch.Tensor
    """[T] entropy of the distribution each token was drawn from, in nats."""


class Reference(Protocol):
    """What a KL penalty pulls towards."""

    def logprobs(self, batch: PackedBatch) -> Logprobs:
        """Logprobs of a batch's trained tokens."""
        ...


class Policy:
    """A causal language model under training."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        working_dtype: torch.dtype = torch.float32,
        temperature: float = 1.0,
        lora: LoraSpec | None = None,
        seed: int = 0,
        base_model: str = "",
    ) -> None:
        """`model` gives the weights of version 0, and becomes the working copy.

        `lora` adds an adapter, drawn from `seed`, and trains that alone.
        """
        names = dict(model.named_parameters())
        owners = {id(parameter): name for name, parameter in names.items()}
        everything = model.named_parameters(remove_duplicate=False)
        self.tied: dict[str, str] = {
            name: owners[id(p)] for name, p in everything if owners[id(p)] != name
        }
        """Name that is not in the layout -> name that holds its data."""
        self._lora = Lora(model, lora, seed=seed, base_model=base_model) if lora else None
        trained = names if self._lora is None else self._lora.parameters
        copies = working_dtype != torch.float32
        self.masters: dict[str, torch.nn.Parameter] = {
            name: torch.nn.Parameter(weight.detach().float().clone()) if copies else weight
            for name, weight in trained.items()
        }
        """Every fp32 master by name in layout order, tied weights once."""
        self.model = model.to(working_dtype)
        # Casting a module changes what its parameters hold; the parameters stay the same objects.
        self.working: dict[str, torch.nn.Parameter] = dict(trained)
        """The weights that compute, are trained and published, under the names of the masters."""
        self.frozen: dict[str, torch.nn.Parameter] = {} if self._lora is None else names
        """The base model's weights under an adapter: published once."""
        self.temperature = temperature or 1.0
        """That of sampling; logprobs are those of the distribution sampled from."""

    @classmethod
    def load(
        cls,
        folder: Path,
        *,
        working_dtype: torch.dtype,
        temperature: float,
        gradient_checkpointing: bool,
        device: str = "cpu",
        lora: LoraSpec | None = None,
        seed: int = 0,
        base_model: str = "",
    ) -> "Policy":
        """Read a model folder, exactly. A base under an adapter needs no fp32 copy on the way."""
        model = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=working_dtype if lora else torch.float32,
            attn_implementation="sdpa",
            local_files_only=True,
        ).to(device)
        if gradient_checkpointing:
            model.gradient_checkpointing_enable()
        model.train()
        return cls(
            model,
            working_dtype=working_dtype,
            temperature=temperature,
            lora=lora,
            seed=seed,
            base_model=base_model,
        )

    @property
    def adapter(self) -> AdapterManifest | None:
        """What a reader must know of the adapter; None when all weights are trained."""
        return None if self._lora is None else self._lora.manifest

    def published(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Everything a run is founded with, tied names included."""
        yield from self.frozen.items()
        yield from self.working.items()
        weights = {**self.frozen, **self.working}
        yield from ((name, weights[owner]) for name, owner in self.tied.items())

    def base(self) -> Reference:
        """The model under the adapter, as a reference that costs no memory."""
        assert self._lora is not None
        return _WithoutAdapter(self, self._lora)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(iter(self.masters.values())).device

    @property
    def vocabulary(self) -> int:
        """Number of token ids the model can read."""
        return int(self.model.get_input_embeddings().num_embeddings)

    @torch.no_grad()
    def collect_gradients(self) -> None:
        """Add the working copy's gradients to the masters', and clear them."""
        for name, master in self.masters.items():
            weight = self.working[name]
            if weight is master or weight.grad is None:
                continue
            if master.grad is None:
                master.grad = weight.grad.float()
            else:
                master.grad.add_(weight.grad)
            weight.grad = None

    @torch.no_grad()
    def refresh(self) -> None:
        """The masters changed: round them into the working copy."""
        for name, master in self.masters.items():
            if self.working[name] is not master:
                self.working[name].copy_(master)

    @property
    def shares_prefixes(self) -> bool:
        """Whether tokens may be packed as a forest: every layer attends in full, nothing else
        carries state from one token to the next."""
        config = self.model.config.get_text_config()
        kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
        windowed = getattr(config, "use_sliding_window", True) and bool(
            getattr(config, "sliding_window", None)
        )
        recurrent = any(hasattr(config, name) for name in _RECURRENT_MARKS)
        return kinds == {"full_attention"} and not windowed and not recurrent

    def logprobs(self, batch: PackedBatch, *, entropy_gradient: bool = False) -> Logprobs:
        """Logprobs and entropies of a batch's trained tokens, at the sampling temperature."""
        logits = self._logits(batch) / self.temperature
        chosen = logits[batch.token_row, batch.targets]
        log_norm = logits.logsumexp(-1)
        with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
            entropy = log_norm - ((logits - log_norm[:, None]).exp() * logits).sum(-1)
        masks = batch.sampling_mask
        normaliser = (
            log_norm[batch.token_row] if masks is None else _masked_norm(logits, batch, masks)
        )
        return Logprobs(tokens=chosen - normaliser, entropy=entropy[batch.token_row])

    def _logits(self, batch: PackedBatch) -> torch.Tensor:
        """[R, vocabulary] float32 (or wider) logits of the rows that predict a trained token."""
        output = self.model(
            input_ids=batch.input_ids,
            position_ids=batch.position_ids,
            attention_mask=batch.attention_mask,
            logits_to_keep=batch.rows,
            use_cache=False,
        )
        logits: torch.Tensor = output.logits[0]
        return logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits


class _WithoutAdapter:
    """A policy with its adapter switched off."""

    def __init__(self, policy: Policy, lora: Lora) -> None:
        self._policy, self._lora = policy, lora

    def logprobs(self, batch: PackedBatch) -> Logprobs:
        """See Reference."""
        with self._lora.switched_off():
            return self._policy.logprobs(batch)


_RECURRENT_MARKS = ("ssm_state_size", "mamba_d_state", "linear_conv_kernel_dim", "conv_L_cache")
"""Configuration fields of layers that carry state besides attention."""


def _masked_norm(logits: torch.Tensor, batch: PackedBatch, masks: list[list[int]]) -> torch.Tensor:
    """[T] log normaliser over the ids that could have been drawn.

    With top-p or top-k the behaviour logprobs are those of the truncated distribution; dividing by
    the same set keeps the ratio right (sampling-mask replay).
    """
    width = max(len(ids) for ids in masks)
    padded = torch.full((len(masks), width), -1, dtype=torch.int64)
    for row, ids in enumerate(masks):
        padded[row, : len(ids)] = torch.tensor(ids, dtype=torch.int64)
    padded = padded.to(logits.device)
    kept = logits[batch.token_row[:, None], padded.clamp(min=0)]
    return kept.masked_fill(padded < 0, -torch.inf).logsumexp(-1)
