"""Runs of tiny models published for real, and the replica that follows them through vLLM."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from deltawire.protocol.generation import Completion, GenerateRequest, Sampling
from deltawire.store.local import LocalStore
from deltawire.sync.follower import Follower
from deltawire.sync.publisher import Publisher
from deltawire_inference.engines.vllm.engine import VllmEngine

RUN_ID = "run"
VLLM = Path(sys.executable).with_name("vllm")
CPU_ARGUMENTS = ("--enforce-eager", "--max-num-seqs", "64")
CPU_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
}
IN_PROCESS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_PLUGINS": "deltawire",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}
"""For engines without processes of their own. The plugin keeps linear weights plain, as served."""
_BASE: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 517,
    "max_position_embeddings": 2048,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "head_dim": 32,
}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "untied": ("Llama", _BASE | {"tie_word_embeddings": False}),
    "tied": ("Qwen2", _BASE | {"tie_word_embeddings": True}),
    "moe": (
        "Qwen3Moe",
        _BASE
        | {
            "tie_word_embeddings": False,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "norm_topk_prob": True,
        },
    ),
}
PROMPTS = [[3 + (i * 7 + j * 13) % 500 for i in range(24)] for j in range(4)]


@dataclass
class TinyRun:
    """A trainer's end: fp32 masters of a random model, published as bf16."""

    folder: Path
    model: torch.nn.Module
    publisher: Publisher
    store: LocalStore
    random: torch.Generator

    def step(self, share: float = 0.02) -> int:
        """Move some weights, half of them by a single bf16 step, and publish."""
        with torch.no_grad():
            for parameter in self.model.parameters():
                moved = torch.rand(parameter.shape, generator=self.random) < share
                noise = torch.randn(parameter.shape, generator=self.random)
                small = torch.rand(parameter.shape, generator=self.random) < 0.5
                size = torch.where(small, 2.0**-7, 0.5)
                parameter += moved * noise.sign() * parameter.abs() * size
        return int(self.publisher.publish(self.model.named_parameters()).link.version)

    def export(self) -> Path:
        """The trainer's own weights of now as a checkpoint, written without any code of ours."""
        folder = self.folder / f"checkpoint-{self.publisher.version}"
        shutil.copytree(self.folder / "model", folder)
        tensors = {n: p.detach().bfloat16() for n, p in self.model.named_parameters()}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder

    def follower(self, name: str) -> Follower:
        return Follower(self.store, RUN_ID, self.folder / f"cache-{name}")


def open_run(kind: str, folder: Path, **options: Any) -> TinyRun:
    import transformers

    stem, config = KINDS[kind]
    random = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    settings = getattr(transformers, f"{stem}Config")(**config)
    model = getattr(transformers, f"{stem}ForCausalLM")(settings)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(torch.randn(p.shape, generator=random) * 0.1 + ("norm" in name))
    settings.dtype = torch.bfloat16
    settings.architectures = [f"{stem}ForCausalLM"]
    settings.save_pretrained(folder / "model")
    write_tokenizer(folder / "model", vocabulary=config["vocab_size"])
    store = LocalStore(folder / "bucket")
    publisher = Publisher.open(
        store,
        run_id=RUN_ID,
        named_tensors=model.named_parameters(),
        model_files={path.name: path for path in (folder / "model").iterdir()},
        owner_file=folder / "owner",
        **options,
    )
    return TinyRun(folder, model, publisher, store, random)


def write_tokenizer(folder: Path, *, vocabulary: int) -> None:
    """One word per id: `w17 w4` <-> [17, 4]."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"w{i}": i for i in range(vocabulary)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w2"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="w0", eos_token="w1", pad_token="w2", unk_token="w2"
    )
    fast.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    fast.save_pretrained(folder)


@dataclass
class Replica:
    """The few lines of a replica that these tests need."""

    engine: VllmEngine
    follower: Follower

    async def start(self, version: int | None = None) -> None:
        head = self.follower.head()
        want = head.version if version is None else version
        await self.engine.start(
            self.follower.model_dir(),
            self.follower.fetch(self.follower.route(None, want)),
            manifest=self.follower.manifest(),
            version=want,
        )

    async def follow(self, mode: str = "keep") -> float:
        """Stage and apply the newest version; returns the pause in seconds."""
        head = self.follower.head()
        route = self.follower.route(self.engine.version, head.version)
        staged = await self.engine.stage(self.follower.fetch(route))
        return (await self.engine.apply(staged, mode=mode)).pause_s


async def greedy(engine: VllmEngine, *, tokens: int = 32) -> list[Completion]:
    """Greedy completions of the four prompts: token ids and logprobs to compare."""
    sampling = Sampling(temperature=0.0, max_new_tokens=tokens, ignore_eos=True)
    answers = []
    for prompt in PROMPTS:
        request = GenerateRequest(prompt_ids=prompt, sampling=sampling)
        answers += (await engine.generate(request)).completions
    return answers


class FreshEngines:
    """What stock vLLM, started anew on a checkpoint, says (fresh_engines.py)."""

    def __init__(self, folder: Path) -> None:
        self._log = folder / "fresh-engines.log"
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("fresh_engines.py"))],
                env=os.environ | CPU_ENVIRONMENT | IN_PROCESS,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )

    def ask(
        self, checkpoint: Path, *, prompts: list[list[int]] = PROMPTS, tokens: int = 32
    ) -> tuple[list[tuple[list[int], list[float]]], dict[str, str]]:
        """What `sampled(await greedy(engine))` should be, and vLLM's sha256 of each parameter."""
        question = {"checkpoint": str(checkpoint), "prompts": prompts, "tokens": tokens}
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, self._log.read_text()[-3000:]
        answer = json.loads(line)
        return [(ids, logprobs) for ids, logprobs in answer["answers"]], answer["checksums"]

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


def sampled(completions: list[Completion]) -> list[tuple[list[int], list[float]]]:
    """What must be equal between two servers of the same weights."""
    return [(c.token_ids, c.logprobs) for c in completions]


MakeRun = Callable[..., TinyRun]
MakeReplica = Callable[..., Replica]
