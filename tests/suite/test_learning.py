"""Learning is right: ours, asynchronous and in step, and TRL's trainer reach the same reward."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from bench.learning.curve import Comparison, Curve, compare
from bench.learning.setting import WAYS

ROOT = Path(__file__).parents[2]
SEEDS = (0, 1)
STEPS = 24
"""The reward is near its ceiling by then, so a way that learns alike ends alike."""
RISE = 0.5
"""From 0.1, what a random model gets; every run of bench/results/learning.json ends above 0.99."""
MARGIN = 0.15


def curve(way: str, ends: list[float]) -> list[Curve]:
    return [
        Curve(way=way, seed=seed, rewards=[0.0, 0.0, 0.0, end], seconds=1.0)
        for seed, end in enumerate(ends)
    ]


def test_ways_whose_seeds_overlap_are_the_same_and_others_are_not() -> None:
    found: dict[tuple[str, str], Comparison] = {
        comparison.ways: comparison
        for comparison in compare(
            [*curve("a", [0.5, 0.6, 0.7]), *curve("b", [0.55, 0.6, 0.75]), *curve("c", [0.0, 0.1])]
        )
    }

    assert found["a", "b"].within_noise
    assert not found["a", "c"].within_noise
    assert found["a", "b"].difference == pytest.approx(0.6 - 0.6333, abs=1e-3)


def test_differences_too_small_to_matter_are_noise_whatever_the_seeds_say() -> None:
    (found,) = compare([*curve("a", [1.0, 1.0]), *curve("b", [0.99, 0.99])])

    assert found.within_noise


def test_one_seed_tells_nothing() -> None:
    assert compare([*curve("a", [1.0]), *curve("b", [0.0, 0.0])]) == []


@pytest.mark.e2e
@pytest.mark.timeout(900)
def test_asynchronous_in_step_and_trl_reach_the_same_reward(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bench.learning", "tiny", "--out", str(tmp_path)]
    command += ["--seeds", *map(str, SEEDS), "--set", f"train.steps={STEPS}"]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=850, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]

    found = json.loads((tmp_path / "learning.json").read_text())
    curves = [Curve(**row) for row in found["curves"]]
    assert {(c.way, c.seed) for c in curves} == {(w.name, s) for w in WAYS for s in SEEDS}
    assert [len(c.rewards) for c in curves] == [STEPS] * len(curves)
    assert {c.way for c in curves if max(c.staleness, default=0.0) > 0.5} == {"asynchronous"}
    for learned in curves:
        assert learned.end - learned.start > RISE, learned
    for pair in compare(curves):
        assert abs(pair.difference) <= max(pair.band, MARGIN), pair
