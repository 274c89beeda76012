"""What a run shows: lines for a pipe, a panel for a terminal, a summary for a program."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from deltawire.cli.live import LiveView, render, sparkline
from deltawire.cli.observation import Observation
from deltawire.cli.plain import NOTHING_TO_LEARN, QUIET_S, PlainView
from deltawire.cli.report import print_report
from deltawire.cli.summary import RunSummary, draw_reward, summarise, write_summary
from deltawire.protocol.control import (
    AppliedUpdate,
    EvalRecord,
    GroupCounts,
    ReplicaStatus,
    StepRecord,
    SyncRecord,
    TrainerStatus,
)
from deltawire.protocol.versions import PolicyVersion


def _sync(version: int) -> SyncRecord:
    return SyncRecord(
        version=PolicyVersion(version),
        kind="delta",
        encoding="compact",
        key=f"deltas/step_{version:06d}.safetensors",
        bytes=500_000,
        full_bytes=269_000_000,
        changed=1_345_150,
        total=134_515_008,
        density=0.01,
        diff_s=0.2,
        encode_s=0.1,
        upload_s=0.01,
        commit_s=0.01,
        announce_s=0.01,
        total_s=0.33,
    )


def _step(number: int) -> StepRecord:
    return StepRecord(
        step=number,
        version=PolicyVersion(number),
        reward=0.1 * number,
        reward_std=0.1,
        staleness=1.0,
        staleness_max=1,
        groups=4,
        rollouts=32,
        tokens=700,
        loss=0.0,
        grad_norm=1.0,
        lr=1e-5,
        ess=0.9,
        mismatch_kl=0.001,
        metrics={"valid": 0.5, "distinct_words": 12.0},
        phases_s={"wait": 1.0},
        sync=_sync(number),
        finished_at=10.0 * number,
    )


def _trainer(steps: int, *, state: str = "training", lost: int = 0) -> TrainerStatus:
    return TrainerStatus.model_validate(
        {
            "run_id": "r",
            "job": "guess",
            "model": "smol",
            "state": state,
            "step": steps,
            "steps": 4,
            "version": steps,
            "digest": "abc",
            "store": "file:///b",
            "groups": GroupCounts(issued=17, trained=16, dropped={"stale": 1}, lost=lost),
            "history": [_step(n) for n in range(1, steps + 1)],
            "waits_for": "rollouts",
            "rollouts_held": 8,
            "rollouts_per_step": 32,
        }
    )


def _replica(*versions: int, digest: str = "abc") -> ReplicaStatus:
    updates = [
        AppliedUpdate(
            version=PolicyVersion(v),
            base_version=PolicyVersion(v - 1) if v else None,
            kind="delta" if v else "anchor",
            encoding="compact",
            bytes=500_000,
            changed=10,
            total=100,
            fetch_s=0.1,
            stage_s=0.1,
            pause_ms=3.0 + v if v else 900.0,
            applied_at=0.0,
        )
        for v in versions
    ]
    return ReplicaStatus(
        replica_id="inference-0",
        run_id="r",
        engine="torch",
        state="serving",
        version=PolicyVersion(versions[-1]),
        digest=digest,
        updates=updates,
        updates_total=len(updates),
    )


def _seen(steps: int, *versions: int) -> Observation:
    seen = Observation(show=["valid", "distinct_words"], trainer=_trainer(steps))
    seen.saw_replica("inference-0", _replica(*versions))
    return seen


def test_a_step_and_its_sync_are_printed_once_each() -> None:
    out = io.StringIO()
    view = PlainView(out)
    view.show(_seen(2, 0, 1))
    view.show(_seen(2, 0, 1, 2))
    view.show(_seen(2, 0, 1, 2), last=True)
    lines = out.getvalue().splitlines()
    assert [line.split("  ")[0] for line in lines] == ["step 1/4", "step 2/4", "sync 1", "sync 2"]
    assert "valid 0.5  distinct_words 12" in lines[0]
    assert "changed 1,345,150 of 134,515,008 (sparsity 99.000 %)" in lines[2]
    assert "deltas/step_000001.safetensors 0.50 MB of 269.00 MB" in lines[2]
    assert "total 0.33 s, inference paused 4.0 ms" in lines[2]


def test_a_sync_line_waits_for_the_pause_but_not_for_ever() -> None:
    out = io.StringIO()
    view = PlainView(out)
    view.show(_seen(1, 0))
    assert "sync" not in out.getvalue()
    view.show(_seen(4, 0))
    assert "sync 1" in out.getvalue()
    assert "not yet known" in out.getvalue()


def _with(seen: Observation, **changed: object) -> Observation:
    assert seen.trainer is not None
    seen.trainer = seen.trainer.model_copy(update=changed)
    return seen


def _eval(version: int, *, finished: int = 8, reward: float | None = 0.021) -> EvalRecord:
    return EvalRecord(
        version=PolicyVersion(version),
        step=version,
        reward=reward,
        episodes=finished,
        finished=finished,
        expected=8,
    )


def test_an_evaluation_is_printed_once_and_an_unfinished_one_says_so() -> None:
    out = io.StringIO()
    view = PlainView(out)
    view.show(_with(_seen(1, 0), evals=[_eval(1)]))
    view.show(_with(_seen(2, 0), evals=[_eval(1), _eval(2, finished=5)]), last=True)
    lines = [line for line in out.getvalue().splitlines() if line.startswith("eval")]
    assert lines == [
        "eval v1 reward 0.021 (8 of 8)",
        "eval of version 2 not finished: 5 of 8, reward 0.021",
    ]


def test_an_evaluation_in_which_every_reward_failed_says_why() -> None:
    failed = _eval(1, reward=None).model_copy(
        update={"episodes": 0, "error_reason": "picky: ValueError: no"}
    )
    out = io.StringIO()
    PlainView(out).show(_with(_seen(1, 0), evals=[failed]))
    said = "eval v1 without a reward (0 of 8)  errors=8 (picky: ValueError: no)"
    assert said in out.getvalue()


def test_errors_stand_in_the_line_of_their_step() -> None:
    failed = _step(1).model_copy(update={"errors": 5, "error_reason": "picky: ValueError: [x]"})
    out = io.StringIO()
    PlainView(out).show(_with(_seen(1, 0), history=[failed]))
    assert out.getvalue().splitlines()[0].endswith("errors=5 (picky: ValueError: [x])")


def test_a_step_that_teaches_nothing_is_warned_of_once() -> None:
    out = io.StringIO()
    silent = [_step(n).model_copy(update={"groups_with_signal": 0}) for n in (1, 2)]
    view = PlainView(out)
    view.show(_with(_seen(2, 0), history=silent[:1]))
    view.show(_with(_seen(2, 0), history=silent))
    assert out.getvalue().count(NOTHING_TO_LEARN) == 1


def test_who_waits_for_whom_is_said_after_silence_and_only_then() -> None:
    now, out = [0.0], io.StringIO()
    view = PlainView(out, clock=lambda: now[0])
    seen = _with(_seen(0, 0), errors_total=3, error_reason="picky: ValueError: no")
    view.show(seen)
    assert out.getvalue() == ""
    now[0] = QUIET_S
    view.show(seen)
    view.show(seen)
    assert out.getvalue() == (
        "step 1: 8 of 32 rollouts, waiting for inference-0 (0 episodes running); "
        "3 rollouts left out: picky: ValueError: no; groups dropped: 1 stale\n"
    )


def test_a_replica_that_does_not_serve_yet_and_a_missing_one_are_named() -> None:
    seen = _with(_seen(0, 0), groups=GroupCounts())
    joining = _replica(0).model_copy(update={"state": "joining"})
    seen.replicas["inference-0"] = joining
    assert seen.waiting().endswith("waiting for inference-0 (joining)")
    seen.replicas.clear()
    assert seen.waiting().endswith("waiting for a replica")
    assert "first answer" in Observation(show=[]).waiting()
    after = _with(_seen(4, 0), waits_for="evaluation of version 4", groups=GroupCounts())
    assert after.waiting().startswith("after the last step: waiting for evaluation of version 4")


def test_the_first_load_is_no_pause() -> None:
    assert _seen(2, 0, 1).pauses_ms() == {1: [4.0]}


def test_time_left_follows_the_pace_of_the_last_steps() -> None:
    assert _seen(2, 0).seconds_left() == 20.0
    assert _seen(1, 0).seconds_left() is None


def test_the_panel_shows_what_the_reader_looks_for() -> None:
    console = Console(file=io.StringIO(), width=120, force_terminal=False)
    console.print(render(_seen(3, 0, 1, 2)))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    for phrase in (
        "3 of 4",
        "0.300",
        "1.000 % of the bf16",
        "538x smaller",
        "4.5 ms",
        "step 4: 8 of 32 rollouts, waiting for inference-0 (0 episodes running)",
        "groups dropped: 1 stale",
    ):
        assert phrase in text, phrase


def test_the_live_view_draws_before_anything_is_known() -> None:
    console = Console(file=io.StringIO(), width=100)
    with LiveView(console) as view:
        view.say("starting redis")
        view.show(Observation(show=[]))


def test_a_sparkline_spans_its_own_extremes() -> None:
    assert sparkline([0.0, 1.0, 0.5]) == "▁█▅"
    assert sparkline([]) == ""


def _summary(*, state: str = "finished", digest: str = "abc", lost: int = 0) -> RunSummary:
    return summarise(
        _trainer(4, state=state, lost=lost),
        [_replica(0, 1, 2, 3, 4, digest=digest)],
        pauses={1: [4.0, 6.0]},
        show=["valid", "distinct_words", "unheard_of"],
        seconds=60.0,
        restarts={},
        paths={"logs": "/l"},
    )


def test_the_summary_joins_steps_with_pauses(tmp_path: Path) -> None:
    data = json.loads(write_summary(_summary(), tmp_path).read_text())
    assert data["steps"][0]["pause_ms"] == 5.0
    assert data["steps"][1]["pause_ms"] is None
    assert data["steps"][3]["delta_bytes"] == 500_000
    assert data["groups"]["dropped"] == {"stale": 1}
    assert RunSummary.model_validate(data) == _summary()


def test_evaluations_errors_and_silent_steps_are_in_the_summary_and_the_table() -> None:
    history = [
        _step(1).model_copy(update={"errors": 2, "error_reason": "picky: ValueError: [no]"}),
        _step(2).model_copy(update={"groups_with_signal": 0}),
    ]
    trainer = _trainer(2, state="finished").model_copy(
        update={
            "history": history,
            "evals": [_eval(0), _eval(1), _eval(2, finished=5)],
            "errors_total": 2,
            "error_reason": "picky: ValueError: [no]",
        }
    )
    summary = summarise(
        trainer, [_replica(0, 2)], pauses={}, show=[], seconds=1.0, restarts={}, paths={}
    )
    data = summary.model_dump(mode="json")
    assert [row["reward"] for row in data["evals"]] == [0.021] * 3
    assert (data["steps"][0]["errors"], data["errors"]) == (2, 2)
    assert data["error_reason"] == data["steps"][0]["error_reason"]
    console = Console(file=io.StringIO(), width=200)
    print_report(summary, console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "eval v0 reward 0.021 (8 of 8)" in text
    assert "eval v1" not in text
    assert "eval of version 2 not finished: 5 of 8" in text
    assert "2 rollouts left out: picky: ValueError: [no]" in text
    assert f"in 1 of 2 steps {NOTHING_TO_LEARN}" in text


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        (1, "0.1"),
        (2, "0.1 in the first step, 0.2 in the last"),
        (5, "0.15 in the first 2 steps, 0.45 in the last 2"),
        (7, "0.2 in the first 3 steps, 0.6 in the last 3"),
        (8, "0.2 in the first 3 steps, 0.6 in the last 5"),
        (20, "0.2 in the first 3 steps, 1.8 in the last 5"),
    ],
)
def test_the_rewards_at_both_ends_are_of_different_steps(steps: int, said: str) -> None:
    summary = summarise(_trainer(steps), [], pauses={}, show=[], seconds=1.0, restarts={}, paths={})
    console = Console(file=io.StringIO(), width=200)
    print_report(summary, console)
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    (row,) = [line for line in lines if line.startswith("│ reward")]
    assert row.split("│")[2].strip() == said


def test_the_exit_code_tells_whether_the_promises_held() -> None:
    quiet = Console(file=io.StringIO(), width=200)
    assert print_report(_summary(), quiet) == 0
    assert print_report(_summary(digest="other"), quiet) == 1
    assert print_report(_summary(lost=1), quiet) == 1
    assert print_report(_summary(state="failed"), quiet) == 1


def test_the_curve_is_a_picture(tmp_path: Path) -> None:
    draw_reward(_summary(), tmp_path / "reward.png")
    assert (tmp_path / "reward.png").read_bytes().startswith(b"\x89PNG")
