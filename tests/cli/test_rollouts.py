"""`deltawire rollouts`: from a run folder, newest first, and one in full."""

import asyncio
import io
import json
import re

import pytest
import uvicorn
from fastapi import FastAPI
from pydantic import SecretStr
from rich.console import Console

from deltawire.cli.dropped import show_dropped
from deltawire.cli.rollouts import overview, show_rollouts, whole
from deltawire.protocol.errors import RemoteError, SettingsError
from deltawire.protocol.rollouts import Rollout, RolloutGroup, Sequence, Task
from deltawire.protocol.versions import VersionSpan
from deltawire.service.auth import TokenAuth
from deltawire.service.serve import bind


def group(step: int, *, status: str = "ok") -> RolloutGroup:
    sequence = Sequence(
        token_ids=[10, 11, 12],
        loss_mask=[0, 1, 1],
        logprobs=[0.0, -0.5, -0.5],
        spans=[VersionSpan(version=step, start=1, end=3)],
    )
    rollouts = [
        Rollout(
            rollout_id=f"r1-g{step}/{n}",
            replica_id="inference-0",
            environment_id="http://e:1",
            status=status,
            reason="picky: ValueError: no" if status == "error" else "",
            reward_parts={"near": 0.5},
            sequences=[sequence],
            reward=float(n),
            info={"word": "crane"},
        )
        for n in range(2)
    ]
    return RolloutGroup(
        group_id=f"r1-g{step}", run_id="r1", task=Task(seed=step), rollouts=rollouts
    )


@pytest.fixture
def run_folder(tmp_path):
    folder = tmp_path / "rollouts"
    folder.mkdir()
    for step, status in ((1, "ok"), (2, "error")):
        lines = group(step, status=status).model_dump_json() + "\n"
        (folder / f"step_{step:06d}.jsonl").write_text(lines)
    return str(tmp_path)


def shown(capsys, source: str, **options) -> list[dict]:
    defaults = {"show": "", "limit": 32, "status": "", "as_json": True}
    assert show_rollouts(source, **{**defaults, **options}) == 0
    return json.loads(capsys.readouterr().out)


def test_the_newest_step_comes_first(run_folder, capsys):
    rows = shown(capsys, run_folder)
    assert [row["rollout_id"] for row in rows] == ["r1-g2/0", "r1-g2/1", "r1-g1/0", "r1-g1/1"]
    assert rows[0] | {"info": 0} == {
        "rollout_id": "r1-g2/0",
        "run_id": "r1",
        "step": 2,
        "reward": None,
        "reward_parts": {"near": 0.5},
        "status": "error",
        "reason": "picky: ValueError: no",
        "tokens": 2,
        "oldest_version": 2,
        "newest_version": 2,
        "info": 0,
    }


def test_a_status_and_a_limit_choose(run_folder, capsys):
    assert [row["rollout_id"] for row in shown(capsys, run_folder, status="ok", limit=1)] == [
        "r1-g1/0"
    ]


def test_a_line_separator_in_what_was_said_ends_no_record(tmp_path, capsys):
    said = "before\u2028after\x85end"
    first, *others = group(1).rollouts
    told = first.model_copy(update={"info": {"word": said}})
    recorded = group(1).model_copy(update={"rollouts": [told, *others]})
    (tmp_path / "rollouts").mkdir()
    path = tmp_path / "rollouts" / "step_000001.jsonl"
    path.write_text(recorded.model_dump_json() + "\n", encoding="utf-8")
    assert shown(capsys, str(tmp_path), limit=1)[0]["info"] == {"word": said}


def test_groups_that_errors_left_nothing_of_show_among_the_errors(run_folder, capsys):
    why = "picky: ValueError: bad\u2028word"
    events = [
        {"kind": "dropped", "group_id": "r1-g3", "reason": "unusable"},
        {"kind": "dropped", "group_id": "r1-g4", "reason": "stale"},
        {"kind": "trained", "record": {"step": 2, "error_reason": why}},
        {"kind": "dropped", "group_id": "r1-g5", "reason": "dead_letter: not msgpack"},
        {"kind": "dropped", "group_id": "r1-g6", "reason": "unusable"},
    ]
    text = "".join(json.dumps(event, ensure_ascii=False) + "\n" for event in events)
    with open(f"{run_folder}/journal.jsonl", "w", encoding="utf-8") as journal:
        journal.write(text)
    rows = shown(capsys, run_folder, status="error")
    assert [(row["rollout_id"], row["reason"]) for row in rows] == [
        ("r1-g2/0", "picky: ValueError: no"),
        ("r1-g2/1", "picky: ValueError: no"),
        ("r1-g6", "group dropped: unusable"),
        ("r1-g5", "group dropped: dead_letter: not msgpack"),
        ("r1-g3", f"group dropped: unusable: {why}"),
    ]
    assert all(row["reward"] is None for row in rows)
    assert drawn(rows, width=120)[3][1] == "-", "it was part of no step"
    assert len(shown(capsys, run_folder, status="error", limit=3)) == 3
    assert len(shown(capsys, run_folder, status="ok")) == 2, "no drop is among what went well"


def test_a_run_whose_every_group_failed_shows_them_too(tmp_path, capsys):
    event = {"kind": "dropped", "group_id": "r1-g0", "reason": "unusable"}
    (tmp_path / "journal.jsonl").write_text(json.dumps(event) + "\n")
    assert [row["rollout_id"] for row in shown(capsys, str(tmp_path), status="error")] == ["r1-g0"]
    with pytest.raises(SettingsError, match="holds no rollouts"):
        shown(capsys, str(tmp_path))


def test_one_rollout_is_read_in_full(run_folder, capsys):
    show_rollouts(run_folder, show="r1-g1/1", limit=1, status="", as_json=False)
    text = capsys.readouterr().out
    assert "r1-g1/1" in text
    assert "v1: 1..3" in text
    assert "replica inference-0  environment http://e:1\n" in text
    assert "1011 12" in text.replace("\n", ""), "what was read, then what was sampled"


def test_an_error_has_a_reason_where_others_have_a_reward(run_folder, capsys):
    show_rollouts(run_folder, show="g2/1", limit=1, status="", as_json=False)
    text = capsys.readouterr().out
    assert "reward -  error  picky: ValueError: no" in text
    assert "near=0.5" in text
    assert shown(capsys, run_folder, show="g2/1")["reward"] is None


def test_eighty_columns_hold_short_ids_that_show_takes(run_folder, capsys):
    rows = shown(capsys, run_folder)
    narrow = drawn(rows, width=80)
    ids = [cells[0] for cells in narrow[1:] if cells[0]]
    assert ids == [row["rollout_id"].removeprefix("r1-") for row in rows]
    assert narrow[1][2] == "-", "an error has no reward"
    assert narrow[1][6].startswith("picky:")
    assert "parts" not in narrow[0]
    assert "near=0.5" in drawn(rows, width=140)[1]


def drawn(rows: list[dict], *, width: int) -> list[list[str]]:
    """The cells of each line, without the frame."""
    console = Console(file=io.StringIO(), width=width)
    console.print(overview(rows, width=width))
    lines = [line for line in console.file.getvalue().splitlines() if line[0] in "│┃"]
    return [[cell.strip() for cell in re.split("[│┃]", line)[1:-1]] for line in lines]


def test_a_rollout_that_is_not_there_is_one_sentence(run_folder):
    with pytest.raises(SettingsError, match="no rollout 'x'"):
        show_rollouts(run_folder, show="x", limit=1, status="", as_json=False)


def test_a_folder_without_rollouts_says_what_to_name(tmp_path):
    with pytest.raises(SettingsError, match="run folder"):
        show_rollouts(str(tmp_path), show="", limit=1, status="", as_json=False)


async def test_a_running_trainer_is_asked_with_the_token(capsys, monkeypatch):
    monkeypatch.setenv("DELTAWIRE_TOKEN", "secret")
    rollout = group(3).rollouts[1]
    summary = {
        "rollout_id": "g3/1",
        "step": 3,
        "reward": 1.0,
        "status": "ok",
        "tokens": 2,
        "oldest_version": 3,
        "newest_version": 3,
        "info": {},
    }
    app = FastAPI()
    app.add_middleware(TokenAuth, token=SecretStr("secret"))
    status = {
        "dead_letters": [{"id": "r1-g9", "reason": "not msgpack"}],
        "groups": {"dropped": {"unusable": 3}},
        "error_reason": "picky: ValueError: no",
    }
    app.get("/rollouts")(lambda limit: [summary])
    app.get("/status")(lambda: status)
    app.get("/rollouts/{rollout_id:path}")(
        lambda rollout_id: {"summary": summary, "rollout": rollout.model_dump(mode="json")}
    )
    config = uvicorn.Config(app, log_config=None, timeout_graceful_shutdown=1)
    server, listener = uvicorn.Server(config), bind("127.0.0.1", 0)
    serving = asyncio.create_task(server._serve([listener]))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    try:
        rows = await asyncio.to_thread(shown, capsys, url)
        one = await asyncio.to_thread(shown, capsys, url, show="g3/1")
        failed = await asyncio.to_thread(shown, capsys, url, status="error")
        await asyncio.to_thread(show_rollouts, url, show="", limit=9, status="error", as_json=False)
        monkeypatch.setenv("DELTAWIRE_TOKEN", "wrong")
        with pytest.raises(RemoteError, match="401"):
            await asyncio.to_thread(shown, capsys, url)
    finally:
        server.should_exit = True
        await serving
        listener.close()
    assert rows == [summary]
    assert [row["rollout_id"] for row in failed] == ["r1-g9"]
    assert "3 groups dropped whole: picky: ValueError: no" in capsys.readouterr().out
    assert one["rollout_id"] == "r1-g3/1"


def test_text_from_a_rollout_is_never_markup(run_folder):
    from deltawire.cli.rollouts import Seen

    class Decoder:
        def decode(self, ids, *, skip_special_tokens):
            return "[red]x[/red]"

    rollout = group(1).rollouts[0]
    console = Console(width=80, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    with console.file:
        console.print(whole(Seen(step=1, rollout=rollout), Decoder()))
        assert "[red]x[/red]" in console.export_text()


def test_groups_that_were_left_out_are_listed_with_their_reasons(tmp_path, capsys):
    events = [
        {"kind": "issued", "ids": ["t-0", "t-1"]},
        {"kind": "dropped", "group_id": "t-0", "reason": "stale", "adopted": False},
        {"kind": "dropped", "group_id": "t-1", "reason": "dead_letter: delivered too often"},
    ]
    text = "\n".join(json.dumps(event) for event in events)
    (tmp_path / "journal.jsonl").write_text(text + '\n{"kind": "dro')
    assert show_dropped(str(tmp_path), limit=32, as_json=True) == 0
    assert json.loads(capsys.readouterr().out) == [
        {"group_id": "t-1", "reason": "dead_letter: delivered too often"},
        {"group_id": "t-0", "reason": "stale"},
    ]
    with pytest.raises(SettingsError, match="journal"):
        show_dropped(str(tmp_path / "nowhere"), limit=1, as_json=True)
