"""How long a replica's tokens stop for an update: ours against vLLM's own ways, in one run.

    .venv-vllm/bin/python bench/vllm/stall.py [--share 0.005] [--rounds 7] [--output FILE]

Serves a random model of SmolLM2-135M's shape (`--hidden` etc. for another), keeps four requests in
flight, and reports medians of one run; on a busy machine read ratios. Every round does all
ways in turn, so that whatever else the machine does falls on all alike. On a GPU leave
`--arguments` empty and raise the sizes: the same command then checks digests and times the swap
there.

For each way: `stall_ms`, the gap between two model steps in which the update fell; `token_gap_ms`,
what a client sees: the stall and what the next step took beyond a usual one (with `keep`, all keys
and values again); `worker_ms` and `cpu_ms`, wall and processor time inside the worker.
"""

import argparse
import asyncio
import json
import shlex
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from probe import resident_bytes

from deltawire.protocol.generation import GenerateRequest, Sampling
from deltawire.store.local import LocalStore
from deltawire.sync.follower import Follower
from deltawire.sync.publisher import Publisher
from deltawire_inference.engines.base import StagedUpdate, SwapMode
from deltawire_inference.engines.vllm.checkpoint import write_checkpoint
from deltawire_inference.engines.vllm.client import VllmClient
from deltawire_inference.engines.vllm.engine import VllmEngine
from deltawire_inference.engines.vllm.options import VllmOptions

HERE = Path(__file__).parent
IN_FLIGHT = 4
CPU = "--enforce-eager --skip-tokenizer-init"
WARM_STEPS = 8
"""Steps of four requests before anything is measured."""
Steps = list[list[float]]


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--share", type=float, default=0.005)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--hidden", type=int, default=576)
    parser.add_argument("--intermediate", type=int, default=1536)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--heads", type=int, default=9)
    parser.add_argument("--kv-heads", type=int, default=3)
    parser.add_argument("--vocabulary", type=int, default=49152)
    parser.add_argument("--arguments", default=CPU if not torch.cuda.is_available() else "")
    parser.add_argument("--output", type=Path, help="write the JSON there too")
    return parser.parse_args()


class Trainer:
    """Publishes a random model, then versions that each move a given share of its elements."""

    def __init__(self, folder: Path, chosen: argparse.Namespace) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        config = LlamaConfig(
            hidden_size=chosen.hidden,
            intermediate_size=chosen.intermediate,
            num_hidden_layers=chosen.layers,
            num_attention_heads=chosen.heads,
            num_key_value_heads=chosen.kv_heads,
            vocab_size=chosen.vocabulary,
            max_position_embeddings=2048,
            tie_word_embeddings=True,
            architectures=["LlamaForCausalLM"],
        )
        self.model = LlamaForCausalLM(config).to(torch.bfloat16)
        config.dtype = torch.bfloat16
        config.save_pretrained(folder / "model")
        self.store = LocalStore(folder / "bucket")
        self.publisher = Publisher.open(
            self.store,
            run_id="bench",
            named_tensors=self.model.named_parameters(),
            model_files={p.name: p for p in (folder / "model").iterdir()},
            owner_file=folder / "owner",
            encoding="seed",
            keep_versions=1000,
        )
        self.random = torch.Generator().manual_seed(1)

    @torch.no_grad()
    def step(self, share: float) -> None:
        """One published version; the moved elements step to the next bf16 number."""
        for parameter in self.model.parameters():
            flat = parameter.view(-1).view(torch.int16)
            count = max(1, int(flat.numel() * share))
            where = torch.randint(0, flat.numel(), (count,), generator=self.random)
            flat[where] ^= 1
        self.publisher.publish(self.model.named_parameters())


class Load:
    """Four requests that run while something is measured, and the log of the model's steps."""

    def __init__(self, engine: VllmEngine) -> None:
        self.engine = engine
        assert engine._running is not None
        self.client: VllmClient = engine._running.client
        self._requests: list[asyncio.Task[Any]] = []

    async def workers(self, method: str, *args: object) -> dict[str, Any]:
        return (await self.client.call_workers(method, *args))[0]

    async def __aenter__(self) -> "Load":
        sampling = Sampling(max_new_tokens=1500, ignore_eos=True)
        self._requests = [asyncio.create_task(self._stream(i, sampling)) for i in range(IN_FLIGHT)]
        await self._more(WARM_STEPS)
        await self.workers("probe_steps", True)
        return self

    async def __aexit__(self, *_: object) -> None:
        for request in self._requests:
            request.cancel()
        await asyncio.gather(*self._requests, return_exceptions=True)

    async def steps(self, *, more: int = 6) -> Steps:
        """The log, after some more steps."""
        await self._more(more)
        return list((await self.workers("probe_steps", False))["steps"])

    async def _more(self, steps: int) -> None:
        wanted = self.engine.load().tokens_total + IN_FLIGHT * steps
        while self.engine.load().tokens_total < wanted:  # noqa: ASYNC110  (tokens set no event)
            await asyncio.sleep(0.05)

    async def _stream(self, i: int, sampling: Sampling) -> None:
        request = GenerateRequest(prompt_ids=list(range(10 + i, 42 + i)), sampling=sampling)
        async for _ in self.engine.stream(request):
            pass


class Bench:
    """One server, measured."""

    def __init__(self, engine: VllmEngine, trainer: Trainer, follower: Follower, share: float):
        self.engine, self.trainer, self.follower, self.share = engine, trainer, follower, share
        self.rows: dict[str, list[dict[str, float]]] = {}
        self.rates: dict[str, list[float]] = {"undisturbed": [], "while_staging": []}
        self.stage_s: list[float] = []

    async def stage(self) -> StagedUpdate:
        """The newest version, published just now."""
        await asyncio.to_thread(self.trainer.step, self.share)
        head = self.follower.head()
        self.objects = self.follower.fetch(self.follower.route(self.engine.version, head.version))
        started = time.perf_counter()
        staged = await self.engine.stage(self.objects)
        self.stage_s.append(time.perf_counter() - started)
        return staged

    async def call(self, label: str, method: str, *args: object) -> None:
        """One RPC to the workers in the middle of four completions."""
        async with Load(self.engine) as load:
            report = await load.workers(method, *args)
            self.note(label, await load.steps(), report)

    async def swap(self, label: str, mode: SwapMode, *, by_parts: bool = False) -> None:
        """The whole swap as a replica does it: pause, scatter, label, go on."""
        staged = await self.stage()
        running = self.engine._running
        assert running is not None
        running.swap = running.client.swap_by_parts if by_parts else running.client.swap
        async with Load(self.engine) as load:
            started = time.perf_counter()
            await self.engine.apply(staged, mode=mode)
            report = {"span": [started, time.perf_counter()]}
            self.note(label, await load.steps(), report)

    def note(self, label: str, steps: Steps, report: dict[str, Any]) -> None:
        """The longest gap between steps that meets the span is the update's."""
        begin, end = report["span"]
        gaps = [(one[1], two[0]) for one, two in pairwise(steps)]
        met = [i for i, (a, b) in enumerate(gaps) if a <= end and b >= begin]
        at = max(met, key=lambda i: gaps[i][1] - gaps[i][0])
        stall_s = gaps[at][1] - gaps[at][0]
        usual_step_s = statistics.median(b - a for a, b in steps)
        after_s = steps[at + 1][1] - steps[at + 1][0]
        row = {
            "stall_ms": stall_s * 1e3,
            "token_gap_ms": (stall_s + max(0.0, after_s - usual_step_s)) * 1e3,
            "usual_gap_ms": statistics.median(b - a for a, b in gaps) * 1e3,
            "step_ms": usual_step_s * 1e3,
        }
        if "cpu_s" in report:
            row |= {"worker_ms": (end - begin) * 1e3, "cpu_ms": report["cpu_s"] * 1e3}
        self.rows.setdefault(label, []).append(row)

    async def rate(self, label: str, beside: Callable[[], Awaitable[object]]) -> None:
        """Tokens per second while something else goes on."""
        async with Load(self.engine) as load:
            begin = time.perf_counter()
            await beside()
            end = time.perf_counter()
            steps = await load.steps(more=1)
        done = sum(begin <= b <= end for _, b in steps)
        self.rates[label].append(done * IN_FLIGHT / (end - begin))

    def medians(self) -> dict[str, dict[str, float]]:
        """By label and column."""
        return {
            label: {k: round(statistics.median(row[k] for row in rows), 2) for k in rows[0]}
            for label, rows in self.rows.items()
        }


async def one_round(bench: Bench, folder: Path) -> None:
    """Every way once; versions that vLLM's own ways load are the live ones, so bits stay exact."""
    await bench.swap("ours, keep_kv", "keep_kv")
    await bench.swap("ours, keep", "keep")
    await bench.swap("ours by vLLM's four routes, keep_kv", "keep_kv", by_parts=True)
    staged = await bench.stage()
    key = staged.token.key
    await bench.call("pages touched, nothing else", "probe_touch", key)
    await bench.call("RPC without work", "probe_nothing")
    await bench.call("ours, one RPC and no pause", "deltawire_apply", key)
    running = bench.engine._running
    running.version = staged.version
    running.digest = type(running.digest).parse(staged.new_digest)
    await running.client.set_version(str(staged.version))
    merged = folder / "merged"
    head = bench.follower.head()
    route = bench.follower.fetch(bench.follower.route(None, head.version))
    manifest, model_dir = bench.follower.manifest(), bench.follower.model_dir()
    await asyncio.to_thread(write_checkpoint, model_dir, route, manifest=manifest, target=merged)
    delta = next(path for link, path in bench.objects if link.kind == "delta")
    await bench.call("vLLM reload_weights", "probe_reload", str(merged))
    await bench.call("vLLM load_weights", "probe_load_weights", str(merged))
    await bench.call("vLLM checkpoint patch loader", "probe_patch_loader", str(delta))

    async def stage_thrice() -> None:
        for _ in range(3):
            again = await bench.engine.stage(bench.objects)
            await bench.engine._running.client.call_workers("deltawire_discard", again.token.key)

    bench.trainer.step(bench.share)
    route = bench.follower.route(bench.engine.version, bench.follower.head().version)
    bench.objects = bench.follower.fetch(route)
    await bench.rate("undisturbed", lambda: asyncio.sleep(2.0))
    await bench.rate("while_staging", stage_thrice)
    await bench.engine.apply(await bench.engine.stage(bench.objects), mode="keep_kv")


async def run(chosen: argparse.Namespace, folder: Path) -> dict[str, Any]:
    trainer = Trainer(folder, chosen)
    engine = VllmEngine(
        VllmOptions(
            command=(str(Path(sys.executable).with_name("vllm")),),
            arguments=tuple(shlex.split(chosen.arguments)),
            environment={"PYTHONPATH": str(HERE), "VLLM_CPU_KVCACHE_SPACE": "1"},
            state_dir=folder / "state",
            worker_extension="probe.Probe",
        )
    )
    follower = Follower(trainer.store, "bench", folder / "cache")
    route = follower.fetch(follower.route(None, 0))
    try:
        await engine.start(follower.model_dir(), route, manifest=follower.manifest(), version=0)
        bench = Bench(engine, trainer, follower, chosen.share)
        async with Load(engine) as load:
            await load.steps()
        memory = [await resident(load)]
        for i in range(chosen.rounds):
            await bench.swap("ours, keep_kv", "keep_kv")
            if i == 0:
                bench.rows.clear()  # the first of a kind pays for first times
        memory.append(await resident(load))
        for _ in range(chosen.rounds):
            await one_round(bench, folder)
        exact = await engine.verify() == trainer.publisher.digest
        return summary(bench, follower.layout().nbytes, exact=exact, memory=memory)
    finally:
        await engine.close()
        trainer.publisher.close()


async def resident(load: Load) -> dict[str, int]:
    """Bytes of the worker, and of this process, which is the service's part."""
    report = await load.workers("probe_rss")
    return {
        "worker": report["bytes"],
        "learn": report["learn_bytes"],
        "service": resident_bytes(),
    }


def summary(
    bench: Bench, model_bytes: int, *, exact: bool, memory: list[dict[str, int]]
) -> dict[str, Any]:
    medians = bench.medians()
    ours = medians["ours, keep_kv"]["stall_ms"]

    def share(count: int) -> float:
        return round(count / model_bytes, 4)

    rates = {label: round(statistics.median(r), 1) for label, r in bench.rates.items()}
    return {
        "model_mb": round(model_bytes / 1e6, 1),
        "changed_share": bench.share,
        "rounds": len(bench.rows["vLLM reload_weights"]),
        "bit_exact": exact,
        "medians": medians,
        "stall_of_reload_weights_over_ours": round(
            medians["vLLM reload_weights"]["stall_ms"] / ours, 1
        ),
        "stall_of_patch_loader_over_ours": round(
            medians["vLLM checkpoint patch loader"]["stall_ms"] / ours, 1
        ),
        "stage_s": round(statistics.median(bench.stage_s), 3),
        "tokens_per_s": rates,
        "kept_while_staging": round(rates["while_staging"] / rates["undisturbed"], 3),
        "growth_of_model": {
            "worker, map and huge pages": share(memory[0]["learn"]),
            "worker, updates": share(memory[1]["worker"] - memory[0]["worker"]),
            "service, updates": share(memory[1]["service"] - memory[0]["service"]),
        },
    }


def main() -> None:
    chosen = options()
    folder = Path(tempfile.mkdtemp(prefix="deltawire-bench-"))
    try:
        result = json.dumps(asyncio.run(run(chosen, folder)), indent=1)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(result)
    if chosen.output is not None:
        chosen.output.write_text(result + "\n")


if __name__ == "__main__":
    main()
