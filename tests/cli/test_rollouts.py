"""`deltawire rollouts`: from a run folder, newest first, and one in full."""

import asyncio
import json

import pytest
import uvicorn
from fastapi import FastAPI
from pydantic import SecretStr
from rich.console import Console

from deltawire.cli.dropped import show_dropped
from deltawire.cli.rollouts import show_rollouts, whole
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
            rollout_id=f"g{step}/{n}",
            status=status,
            sequences=[sequence],
            reward=float(n),
            info={"word": "crane"},
        )
        for n in range(2)
    ]
    return RolloutGroup(group_id=f"g{step}", task=Task(seed=step), rollouts=rollouts)


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
    assert [row["rollout_id"] for row in rows] == ["g2/0", "g2/1", "g1/0", "g1/1"]
    assert rows[0] | {"info": 0} == {
        "rollout_id": "g2/0",
        "step": 2,
        "reward": 0.0,
        "status": "error",
        "tokens": 2,
        "oldest_version": 2,
        "newest_version": 2,
        "info": 0,
    }


def test_a_status_and_a_limit_choose(run_folder, capsys):
    assert [row["rollout_id"] for row in shown(capsys, run_folder, status="ok", limit=1)] == [
        "g1/0"
    ]


def test_one_rollout_is_read_in_full(run_folder, capsys):
    show_rollouts(run_folder, show="g1/1", limit=1, status="", as_json=False)
    text = capsys.readouterr().out
    assert "g1/1" in text
    assert "v1: 1..3" in text
    assert "1011 12" in text.replace("\n", ""), "what was read, then what was sampled"


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
    app.get("/rollouts")(lambda limit: [summary])
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
        monkeypatch.setenv("DELTAWIRE_TOKEN", "wrong")
        with pytest.raises(RemoteError, match="401"):
            await asyncio.to_thread(shown, capsys, url)
    finally:
        server.should_exit = True
        await serving
        listener.close()
    assert rows == [summary]
    assert one["rollout_id"] == "g3/1"


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
