"""How long a replica's tokens stop for an update: ours against vLLM's own ways, in one run.

    .venv-vllm/bin/python bench/vllm/stall.py [--share 0.005] [--rounds 5] [--arguments "..."]

Serves a random model of SmolLM2-135M's shape (`--hidden` etc. for another), keeps four requests in
flight, and reports for each way the gap between two model steps in which the update fell. Medians
of one run; on a busy machine read ratios. On a GPU leave `--arguments` empty and raise the sizes:
the same command then checks digests and times the swap there.
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
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from deltawire.codec.decode import decode_delta
from deltawire.protocol.generation import GenerateRequest, Sampling
from deltawire.store.local import LocalStore
from deltawire.sync.follower import Follower
from deltawire.sync.publisher import Publisher
from deltawire_inference.engines.vllm.checkpoint import write_checkpoint
from deltawire_inference.engines.vllm.engine import VllmEngine
from deltawire_inference.engines.vllm.options import VllmOptions

HERE = Path(__file__).parent
IN_FLIGHT = 4
CPU = "--enforce-eager --skip-tokenizer-init"


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--share", type=float, default=0.005)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--hidden", type=int, default=576)
    parser.add_argument("--intermediate", type=int, default=1536)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--heads", type=int, default=9)
    parser.add_argument("--kv-heads", type=int, default=3)
    parser.add_argument("--vocabulary", type=int, default=49152)
    parser.add_argument("--arguments", default=CPU if not torch.cuda.is_available() else "")
    parser.add_argument("--tokens", type=int, default=60)
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
            keep_versions=100,
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


class Bench:
    """One server, measured."""

    def __init__(self, engine: VllmEngine, chosen: argparse.Namespace) -> None:
        self.engine, self.chosen = engine, chosen
        self.rows: dict[str, list[dict[str, float]]] = {}

    async def workers(self, method: str, *args: object) -> dict[str, Any]:
        assert self.engine._running is not None
        return (await self.engine._running.client.call_workers(method, *args))[0]

    async def loaded(self) -> list[asyncio.Task[Any]]:
        sampling = Sampling(max_new_tokens=self.chosen.tokens, ignore_eos=True)
        requests = [
            GenerateRequest(prompt_ids=list(range(10 + i, 42 + i)), sampling=sampling)
            for i in range(IN_FLIGHT)
        ]
        return [asyncio.create_task(self.engine.generate(request)) for request in requests]

    async def measure(self, label: str, method: str, *args: object) -> None:
        """One call to the workers in the middle of four completions."""
        await self.workers("probe_steps", True)
        running = await self.loaded()
        await asyncio.sleep(self.chosen.tokens * 0.01)
        report = await self.workers(method, *args)
        await asyncio.gather(*running)
        steps = (await self.workers("probe_steps", False))["steps"]
        self.note(label, steps, report)

    async def swap(self, label: str, staged: Any, mode: Any) -> None:
        """The whole swap as a replica does it: pause, scatter, label, go on."""
        await self.workers("probe_steps", True)
        running = await self.loaded()
        await asyncio.sleep(self.chosen.tokens * 0.01)
        started = time.perf_counter()
        await self.engine.apply(staged, mode=mode)
        report = {"span": [started, started], "cpu_s": 0.0}
        await asyncio.gather(*running)
        steps = (await self.workers("probe_steps", False))["steps"]
        self.note(label, steps, report | {"span": [started, time.perf_counter()]}, whole=True)

    def note(
        self, label: str, steps: list[list[float]], report: dict[str, Any], *, whole: bool = False
    ) -> None:
        begin, end = report["span"]
        gaps = [(a[1], b[0]) for a, b in pairwise(steps)]
        usual = statistics.median(b - a for a, b in gaps)
        inside = [(a, b) for a, b in gaps if (a <= begin and b >= end) or (whole and b > begin)]
        stalls = [max(inside, key=lambda g: g[1] - g[0])] if whole else inside
        row = {"work_ms": (end - begin) * 1e3, "cpu_ms": report["cpu_s"] * 1e3}
        if stalls:
            row["stall_ms"] = (stalls[0][1] - stalls[0][0]) * 1e3
        row["usual_gap_ms"] = usual * 1e3
        row["step_ms"] = statistics.median(b - a for a, b in steps) * 1e3
        self.rows.setdefault(label, []).append(row)

    def report(self) -> dict[str, dict[str, float]]:
        """Medians by label and column."""
        return {
            label: {
                key: round(statistics.median(r[key] for r in rows if key in r), 2)
                for key in rows[0]
            }
            for label, rows in self.rows.items()
        }


async def tokens_per_s(bench: Bench, engine: VllmEngine) -> float:
    started, before = time.perf_counter(), engine.load().tokens_total
    await asyncio.gather(*await bench.loaded())
    return (engine.load().tokens_total - before) / (time.perf_counter() - started)


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
    manifest, model_dir = follower.manifest(), follower.model_dir()
    head = follower.head()
    try:
        await engine.start(
            model_dir, follower.fetch(follower.route(None, 0)), manifest=manifest, version=0
        )
        bench = Bench(engine, chosen)
        await asyncio.gather(*await bench.loaded())
        rss = [(await bench.workers("probe_rss"))["bytes"]]
        stage_s, undisturbed, disturbed = [], [], []
        for i in range(3 * chosen.rounds):
            trainer.step(chosen.share)
            head = follower.head()
            objects = follower.fetch(follower.route(engine.version, head.version))
            undisturbed.append(await tokens_per_s(bench, engine))
            started = time.perf_counter()
            rate = asyncio.create_task(tokens_per_s(bench, engine))
            staged = await engine.stage(objects)
            stage_s.append(time.perf_counter() - started)
            disturbed.append(await rate)
            if i % 3 == 0:
                key = staged.token.key
                await bench.measure("scatter alone (one RPC, no pause)", "deltawire_apply", key)
                engine._running.version = staged.version
                engine._running.digest = type(engine._running.digest).parse(staged.new_digest)
                await engine._running.client.set_version(str(staged.version))
            else:
                mode = "keep_kv" if i % 3 == 1 else "keep"
                await bench.swap(f"whole swap, {mode}", staged, mode)
        rss.append((await bench.workers("probe_rss"))["bytes"])
        exact = await engine.verify() == trainer.publisher.digest
        merged = folder / "merged"
        route = follower.fetch(follower.route(None, head.version))
        write_checkpoint(model_dir, route, manifest=manifest, target=merged)
        delta = next(path for link, path in reversed(objects) if link.kind == "delta")
        decode_delta(delta, follower.layout())
        for _ in range(chosen.rounds):
            await bench.measure("vLLM patch loader", "probe_patch_loader", str(delta))
            await bench.measure("vLLM load_weights", "probe_load_weights", str(merged))
            await bench.measure("vLLM reload_weights", "probe_reload", str(merged))
        model_bytes = follower.layout().nbytes
        return {
            "model_mb": round(model_bytes / 1e6, 1),
            "changed_share": chosen.share,
            "bit_exact": exact,
            "medians": bench.report(),
            "stage_s": round(statistics.median(stage_s), 3),
            "tokens_per_s_undisturbed": round(statistics.median(undisturbed), 1),
            "tokens_per_s_while_staging": round(statistics.median(disturbed), 1),
            "worker_rss_growth_of_model": round((rss[1] - rss[0]) / model_bytes, 4),
        }
    finally:
        await engine.close()
        trainer.publisher.close()


def main() -> None:
    folder = Path(tempfile.mkdtemp(prefix="deltawire-bench-"))
    try:
        result = asyncio.run(run(options(), folder))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
