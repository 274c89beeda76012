"""A worker extension that also times vLLM's own ways to change weights, and every model step.

Used by bench/vllm/stall.py through `--worker-extension-cls probe.Probe`; never in a service.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from deltawire_inference.vllm_plugin.worker import Report, WorkerExtension


class Probe(WorkerExtension):
    """Times are `time.perf_counter`, one clock for all processes of a machine."""

    probe_log: list[tuple[float, float]]
    probe_learn_bytes: int

    def probe_steps(self, on: bool) -> Report:
        """Begin to log steps, or stop and return them as [[start, end], ...]."""
        runner = self.model_runner
        if not on:
            runner.__dict__.pop("execute_model", None)
            return {"steps": self.probe_log}
        self.probe_log = []
        execute = type(runner).execute_model

        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            result = execute(runner, *args, **kwargs)
            self.probe_log.append((started, time.perf_counter()))
            return result

        runner.execute_model = timed
        return {}

    def deltawire_learn(self, model_dir: str, map_path: str) -> Report:
        """Ours; what it adds to a plain worker's memory is kept."""
        before = resident_bytes()
        report = super().deltawire_learn(model_dir, map_path)
        self.probe_learn_bytes = resident_bytes() - before
        return report

    def deltawire_apply(self, key: str) -> Report:
        """Ours, with the span inside the worker and the processor time of its one thread."""
        return self._timed(lambda: super(Probe, self).deltawire_apply(key))

    def probe_touch(self, key: str) -> Report:
        """What page misses alone cost: one store into every page that a staged patch touches."""
        receiver = self.weight_transfer_engine.receiver
        patch = receiver._patches[key]
        pages = []
        for segment in patch.plan.segments:
            flat = receiver.live.flat(segment.target)
            per_page = 4096 // flat.element_size()
            page = torch.unique_consecutive(segment.offsets.long() // per_page) * per_page
            pages.append((flat, page, flat[page].clone()))

        def touch() -> None:
            for flat, page, same in pages:
                flat[page] = same

        return self._timed(touch) | {"pages": sum(page.numel() for _, page, _ in pages)}

    def probe_nothing(self) -> Report:
        """An RPC without work."""
        return self._timed(dict)

    def probe_reload(self, model_dir: str) -> Report:
        """vLLM's reload_weights from a checkpoint on disk (in the page cache)."""
        return self._timed(lambda: self.reload_weights(weights_path=model_dir))

    def probe_load_weights(self, model_dir: str) -> Report:
        """model.load_weights on the live model."""
        from deltawire_inference.vllm_plugin.checkpoint_files import read_tensors

        model = self.model_runner.get_model()
        return self._timed(lambda: model.load_weights(read_tensors(Path(model_dir))))

    def probe_patch_loader(self, delta: str) -> Report:
        """vLLM's checkpoint patch loader, given patches already in memory."""
        from safetensors.torch import load_file
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.checkpoint_weight_patch import (
            CheckpointWeightPatch,
            load_checkpoint_weight_patches,
        )

        specs = self.weight_transfer_engine.receiver.map.specs
        tensors = load_file(delta)
        patches = [
            CheckpointWeightPatch(
                name,
                specs[name].shape,
                specs[name].dtype,
                tensors[f"{name}.values"],
                tensors[f"{name}.indices"],
            )
            for name in specs
            if f"{name}.indices" in tensors
        ]
        model = self.model_runner.get_model()

        def load() -> None:
            with set_current_vllm_config(self.vllm_config):
                load_checkpoint_weight_patches(model, patches, validate_unique_indices=False)

        return self._timed(load)

    def probe_rss(self) -> Report:
        """Resident bytes of this worker, and how many of them learning the map added."""
        return {"bytes": resident_bytes(), "learn_bytes": self.probe_learn_bytes}

    def _timed(self, work: Callable[[], Any]) -> Report:
        started, cpu = time.perf_counter(), time.thread_time()
        result = work()
        report = result if isinstance(result, dict) else {}
        return report | {
            "span": [started, time.perf_counter()],
            "cpu_s": time.thread_time() - cpu,
        }


def resident_bytes() -> int:
    """Of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
