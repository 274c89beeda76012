"""Methods that the replica's service calls on every worker through vLLM's collective RPC.

    vllm serve MODEL --weight-transfer-config '{"backend": "deltawire"}' \\
        --worker-extension-cls deltawire_inference.vllm_plugin.worker.WorkerExtension

vLLM mixes the class into its worker, so all names begin with `deltawire_`. Results are dicts (the
HTTP route turns everything else into text). `{rank}` in a path stands for the worker's rank. The
`start_` methods return at once; the job's end appears as a file (jobs.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deltawire.protocol.errors import DeltawireError
from deltawire_inference.vllm_plugin.jobs import start_job

if TYPE_CHECKING:
    from deltawire_inference.vllm_plugin.engine import DeltawireEngine

Report = dict[str, object]


class WorkerExtension:
    """Thin: each method is one call of this worker's receiver."""

    rank: int
    model_runner: Any
    weight_transfer_engine: DeltawireEngine

    def deltawire_learn(self, model_dir: str, map_path: str) -> Report:
        """Learn and prove the map (once), and write it for the planner."""
        started = time.perf_counter()
        self.weight_transfer_engine.learn(Path(model_dir))
        where = self.weight_transfer_engine.receiver.map
        where.save(self._deltawire_path(map_path))
        return {
            "rank": self.rank,
            "mapped": len(where.pieces),
            "opaque": where.opaque,
            "ignored": len(where.ignored),
            "seconds": time.perf_counter() - started,
        }

    def deltawire_start_gather(self, key: str, plan: str, old: str, report: str) -> Report:
        """Check and hold a plan; write the old values at its places."""
        receiver = self.weight_transfer_engine.receiver
        plan_path, old_path = self._deltawire_path(plan), self._deltawire_path(old)
        return self._deltawire_start(lambda: receiver.gather(key, plan_path, old_path), report)

    def deltawire_start_read(self, names: list[str], values: str, report: str) -> Report:
        """Write out the live values of whole checkpoint tensors."""
        receiver = self.weight_transfer_engine.receiver
        path = self._deltawire_path(values)
        return self._deltawire_start(lambda: receiver.read(names, path), report)

    def deltawire_start_stage(self, key: str, values: str, report: str) -> Report:
        """Check and hold new values for a plan."""
        receiver = self.weight_transfer_engine.receiver
        path = self._deltawire_path(values)
        return self._deltawire_start(lambda: receiver.stage(key, path), report)

    def deltawire_start_stage_checkpoint(self, key: str, model_dir: str, report: str) -> Report:
        """Compare a whole checkpoint with the live weights and hold what differs."""
        receiver = self.weight_transfer_engine.receiver
        path = Path(model_dir)
        return self._deltawire_start(lambda: receiver.stage_checkpoint(key, path), report)

    def deltawire_apply(self, key: str) -> Report:
        """Scatter, between two steps. A refusal, before any write, is an answer and no error."""
        receiver = self.weight_transfer_engine.receiver
        try:
            applied = receiver.apply(key)
        except DeltawireError as refusal:
            return {"rank": self.rank, "refused": str(refusal)}
        receiver.discard(key)
        self.model_runner.reset_lora_state()
        return {"rank": self.rank, "seconds": applied.seconds, "elements": applied.elements}

    def deltawire_discard(self, key: str) -> Report:
        """Forget a patch."""
        self.weight_transfer_engine.receiver.discard(key)
        return {"rank": self.rank}

    def _deltawire_start(self, work: Callable[[], object], report: str) -> Report:
        start_job(work, self._deltawire_path(report))
        return {"rank": self.rank}

    def _deltawire_path(self, pattern: str) -> Path:
        return Path(pattern.replace("{rank}", str(self.rank)))
