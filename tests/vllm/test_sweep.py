"""The map holds for many architectures, on one rank and on both of two; it says what it cannot."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from architectures import ARCHITECTURES, OPAQUE, make_checkpoint

RANK = Path(__file__).with_name("sweep_rank.py")
REPACKED = {
    "qwen3moe",
    "qwen3moe_padded",
    "mixtral",
    "olmoe",
    "gptoss",
    "deepseek_v2",
    "qwen3_next",
}
"""Fused experts that vLLM's CPU kernels repack: its own loading on a live model is wrong there."""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints")
    for name in ARCHITECTURES:
        make_checkpoint(name, folder)
    return folder


@pytest.mark.parametrize("ranks", [1, 2])
def test_every_architecture_is_exact_on_every_rank(
    checkpoints: Path, tmp_path: Path, ranks: int
) -> None:
    rows = sweep(checkpoints, tmp_path, ranks)

    assert len(rows) == ranks * len(ARCHITECTURES)
    for row in rows:
        name = row["name"]
        assert not row.get("error"), row
        assert row["wrong"] == {}, row
        assert row["opaque_refused"], row
        allowed = re.compile(OPAQUE.get(name, r"(?!)"))
        assert all(allowed.fullmatch(opaque) for opaque in row["opaque"]), row
        assert bool(row["relayouts"]) == (name in REPACKED), row
        # The same fault that the proof of the map finds when no relayout is learned:
        assert bool(row["wrong_without_relayouts"]) == (name in REPACKED), row
        assert row["equals_load_weights"] == (name not in REPACKED), row


def sweep(checkpoints: Path, scratch: Path, ranks: int) -> list[dict[str, Any]]:
    """One process per rank, as vLLM has; each prints one JSON line per architecture."""
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "VLLM_PLUGINS": "",
        "HF_HUB_OFFLINE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_DIST_IDENT": f"sweep-{os.getpid()}-{ranks}",
    }
    outputs = [scratch / f"rank-{rank}.jsonl" for rank in range(ranks)]
    errors = [scratch / f"rank-{rank}.err" for rank in range(ranks)]
    processes = []
    for rank in range(ranks):
        command = [sys.executable, str(RANK), str(checkpoints), str(ranks), str(rank)]
        command += [str(scratch / "rendezvous"), *ARCHITECTURES]
        with outputs[rank].open("w") as out, errors[rank].open("w") as err:
            processes.append(subprocess.Popen(command, env=environment, stdout=out, stderr=err))
    for rank, process in enumerate(processes):
        assert process.wait(timeout=1200) == 0, errors[rank].read_text()[-2000:]
    lines = [line for out in outputs for line in out.read_text().splitlines()]
    return [json.loads(line) for line in lines if line.startswith("{")]
