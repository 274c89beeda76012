"""kill -9 of anybody at any moment, processes that stall, networks that fail: nothing acknowledged
is lost, nothing is trained on twice, and everybody ends with the same bits.

`make chaos` runs the long one and writes docs/reliability.md.
"""

import asyncio
import os
import random
import sys
import time
from pathlib import Path

import pytest

from .evidence import rise
from .faults import Fault, draw
from .report import page
from .storm import Outcome, weather

REPORT = Path(__file__).parents[3] / "docs" / "reliability.md"
LETTERS = Path(__file__).parents[1] / "letters_job.py"
LEASE_S = 5.0


def _overrides(model: Path, *, lr: str, checkpoint_every: int) -> list[str]:
    return [
        f"model.source={model}",
        "train.steps=1000000",
        "train.groups_per_step=2",
        "train.group_size=4",
        f"train.lr={lr}",
        "train.warmup_steps=0",
        f"train.checkpoint_every={checkpoint_every}",
        "sampling.max_new_tokens=12",
        "sync.keep_versions=1000000",
    ]


def judge(outcome: Outcome) -> None:
    """Every promise, against evidence that the parties did not write for each other."""
    account, bucket, status = outcome.account, outcome.bucket, outcome.trainer
    assert not outcome.own_ends, "\n".join(f"{e.name} {e.code}\n{e.tail}" for e in outcome.own_ends)
    assert status.state == "finished", status.reason
    # Groups.
    assert outcome.acknowledged, "the witnesses heard nothing"
    assert account.missing(outcome.acknowledged) == set()
    assert set(account.trained) <= outcome.acknowledged
    assert account.doubled == []
    assert account.made_twice == []
    assert account.rolled_back == 0
    assert account.lost == set()
    assert outcome.rollout_files == {n: set(s["groups"]) for n, s in account.steps.items()}
    assert outcome.left_in_redis == {"tickets": 0, "groups": 0}
    assert (status.groups.lost, status.groups.doubled) == (0, 0)
    # Versions and bits.
    assert sorted(account.steps) == list(range(1, len(account.steps) + 1))
    assert bucket.version == status.version == len(account.steps)
    assert bucket.gaps == []
    assert bucket.faults == []
    digests = {bucket.digest, status.digest, *(r.digest for r in outcome.replicas.values())}
    assert len(digests) == 1
    assert set(outcome.exit_codes.values()) <= {0, -15}, outcome.exit_codes


async def _run(
    folder: Path,
    model: Path,
    faults: list[Fault],
    *,
    lr: str,
    checkpoint_every: int,
    rng: random.Random,
) -> Outcome:
    began = time.monotonic()

    def say(line: str) -> None:
        sys.stderr.write(f"{time.monotonic() - began:7.1f} {line}\n")

    return await weather(
        folder,
        LETTERS,
        _overrides(model, lr=lr, checkpoint_every=checkpoint_every),
        faults,
        lease_s=LEASE_S,
        rng=rng,
        say=say,
    )


@pytest.mark.e2e
@pytest.mark.timeout(600)
async def test_a_handful_of_faults_loses_nothing(tmp_path: Path, tiny_model: Path) -> None:
    rng = random.Random(5)
    faults = draw(rng, kills=6, stops=2, cuts=4, lease_s=LEASE_S, pace_s=2.0)
    outcome = await _run(tmp_path, tiny_model, faults, lr="1e-3", checkpoint_every=5, rng=rng)
    judge(outcome)  # too few steps to say anything of the reward


@pytest.mark.chaos
@pytest.mark.timeout(0)
async def test_hundreds_of_faults_lose_nothing(tmp_path: Path, tiny_model: Path) -> None:
    kills = int(os.environ.get("CHAOS_KILLS", "200"))
    seed = int(os.environ.get("CHAOS_SEED", "1"))
    rng = random.Random(seed)
    faults = draw(rng, kills=kills, stops=kills // 12, cuts=kills // 7, lease_s=LEASE_S, pace_s=4.5)
    outcome = await _run(tmp_path, tiny_model, faults, lr="1e-4", checkpoint_every=10, rng=rng)
    await asyncio.to_thread(REPORT.write_text, page(outcome, seed=seed))
    judge(outcome)
    first, last = rise(outcome.account.rewards())
    assert last > first, f"reward {first:.3f} -> {last:.3f}"
