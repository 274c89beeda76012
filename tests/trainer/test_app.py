"""The REST face over a trainer at every stage of its life."""

import json
import re
from pathlib import Path

import httpx
import pytest
from pydantic import SecretStr

from deltawire.job.spec import JobSpec
from deltawire.protocol.control import (
    TOKEN_HEADER,
    EvalRecord,
    GroupCounts,
    ReplicaStatus,
    SetAside,
    StepRecord,
    TrainerStatus,
)
from deltawire.protocol.errors import SettingsError, StreamError
from deltawire.protocol.rollouts import RolloutGroup, Task
from deltawire.service.metrics import Metrics
from deltawire.store.open import open_store
from deltawire.streams.memory import MemoryStreams
from deltawire_trainer.account import distinct_facts, rollout_metrics
from deltawire_trainer.app import create_app
from deltawire_trainer.events import EventHub
from deltawire_trainer.rollout_log import RolloutLog
from deltawire_trainer.service import read_job
from deltawire_trainer.trainer import Trainer, seconds_left

from .rig import blank_record
from .test_intake import rollout

TOKEN = "s3cret"


@pytest.fixture
def trainer(tmp_path: Path) -> Trainer:
    """One whose run is still being opened."""
    return Trainer(
        run_id="r1",
        job=JobSpec(name="j"),
        model="m",
        store=open_store(f"file://{tmp_path}/bucket"),
        events=EventHub(),
        rollouts=RolloutLog(tmp_path / "rollouts"),
    )


def client(trainer: Trainer, *, token: str = TOKEN) -> httpx.AsyncClient:
    app = create_app(
        trainer, streams=MemoryStreams(), metrics=Metrics("trainer"), token=SecretStr(TOKEN)
    )
    return httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://trainer", headers={TOKEN_HEADER: token}
    )


async def test_a_trainer_that_is_still_opening_says_so(trainer: Trainer) -> None:
    async with client(trainer) as http:
        ready = await http.get("/readyz")
        status = await http.get("/status")
        paused = await http.post("/pause")

    assert (ready.status_code, ready.json()["reason"]) == (503, "the run is being opened")
    assert TrainerStatus.model_validate(status.json()).state == "starting"
    assert (paused.status_code, paused.headers["retry-after"]) == (503, "1")


async def test_a_run_that_could_not_be_opened_stays_visible_with_its_reason(
    trainer: Trainer,
) -> None:
    trainer.fail("SettingsError: model 'x' is not a folder")

    async with client(trainer) as http:
        status = TrainerStatus.model_validate((await http.get("/status")).json())

    assert status.state == "failed"
    assert "not a folder" in status.reason


@pytest.mark.parametrize("path", ["/sync", "/pause", "/resume", "/stop"])
async def test_a_run_that_failed_acknowledges_no_command(trainer: Trainer, path: str) -> None:
    with pytest.raises(StreamError):
        await trainer.run(_FailedLoop())  # type: ignore[arg-type]
    trainer.fail("StreamError: gone")

    async with client(trainer) as http:
        refused = await http.post(path)

    assert refused.status_code == 503
    assert "StreamError: gone" in refused.json()["detail"]


class _FailedLoop:
    """A loop whose journal and threads are gone: nothing of it may be called."""

    async def run(self) -> None:
        raise StreamError("gone")


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/status"),
        ("GET", "/versions"),
        ("GET", "/rollouts"),
        ("GET", "/events"),
        ("POST", "/sync"),
        ("POST", "/pause"),
        ("POST", "/resume"),
        ("POST", "/stop"),
        ("POST", "/streams/claim"),
    ],
)
async def test_nothing_is_shown_or_changed_without_the_token(
    trainer: Trainer, method: str, path: str
) -> None:
    async with client(trainer, token="wrong") as http:
        assert (await http.request(method, path)).status_code == 401


async def test_the_dashboard_is_open_and_holds_no_data(trainer: Trainer) -> None:
    async with client(trainer, token="wrong") as http:
        page = await http.get("/")

    assert page.status_code == 200
    assert "deltawire" in page.text
    assert TOKEN not in page.text


async def test_the_dashboard_shows_what_a_status_holds_and_no_other_field(trainer: Trainer) -> None:
    async with client(trainer, token="wrong") as http:
        page = (await http.get("/")).text

    script = page[page.index("function show(status)") : page.index("async function refresh()")]
    read = {
        TrainerStatus: set(re.findall(r"\bstatus\.(\w+)", script)),
        GroupCounts: set(re.findall(r"\bgroups\.(\w+)", script)),
        EvalRecord: set(re.findall(r"\be\.(\w+)", script)),
        SetAside: set(re.findall(r"\bletter\.(\w+)", script)),
        StepRecord: set(re.findall(r"\b(?:s|last)\.(\w+)", script)),
        ReplicaStatus: set(re.findall(r"\br\.(\w+)", script)),
    }
    for kind, names in read.items():
        assert names and names <= kind.model_fields.keys(), kind
    assert {"evals", "errors_total", "error_reason", "dead_letters"} <= read[TrainerStatus]
    assert "dropped" in read[GroupCounts]
    filled = set(re.findall(r'byId\("([\w-]+)"\)', page))
    assert filled <= set(re.findall(r'id="([\w-]+)"', page))


async def test_rollouts_are_listed_newest_first_and_found_by_id(trainer: Trainer) -> None:
    for step in (1, 2):
        members = [rollout(f"s{step}.{n}", reward=float(n)) for n in range(2)]
        trainer.rollouts.record(
            step, [RolloutGroup(group_id=f"g{step}", task=Task(), rollouts=members)]
        )

    async with client(trainer) as http:
        listed = (await http.get("/rollouts", params={"limit": 3})).json()
        found = (await http.get("/rollouts/s1.0")).json()
        missing = await http.get("/rollouts/nobody")

    assert [summary["rollout_id"] for summary in listed] == ["s2.1", "s2.0", "s1.1"]
    assert found["rollout"]["sequences"][0]["token_ids"] == [1, 2, 3]
    assert missing.status_code == 404


def test_events_reach_whoever_listens_and_slow_ones_lose_the_oldest() -> None:
    hub = EventHub()
    with hub.listening() as queue:
        for step in range(300):
            hub.publish("step", blank_record(step))
        first = queue.get_nowait()
    hub.publish("step", blank_record(1))

    assert first.startswith("event: step\ndata: ")
    assert json.loads(first.split("data: ")[1])["step"] == 300 - 256
    assert queue.qsize() == 255, "a listener that left hears nothing more"


def test_a_job_that_is_wrong_is_one_sentence_naming_the_field(tmp_path: Path) -> None:
    path = tmp_path / "job.json"
    path.write_text(json.dumps({"name": "j", "train": {"lrr": 1.0}}))

    with pytest.raises(SettingsError, match="lrr"):
        read_job(path)
    with pytest.raises(SettingsError, match="No such file"):
        read_job(tmp_path / "missing.json")


def test_metrics_are_means_by_name_and_facts_are_counted_when_different() -> None:
    rollouts = [
        rollout("a", metrics={"valid": 1.0}, info={"words": ["crane", "stone"]}),
        rollout("b", metrics={"valid": 0.0}, info={"words": ["crane"]}, status="truncated"),
        rollout("c", reward_parts={"form": 0.5}),
    ]

    means, counts = rollout_metrics(rollouts), distinct_facts(rollouts)

    assert means["valid"] == 0.5
    assert means["form"] == 0.5
    assert means["truncated"] == pytest.approx(1 / 3)
    assert counts == {"distinct_words": 2.0, "distinct_completions": 1.0}


def test_the_time_left_follows_the_median_pace() -> None:
    history = [
        blank_record(n).model_copy(update={"finished_at": at})
        for n, at in enumerate([0.0, 2.0, 4.0, 60.0, 62.0])
    ]

    assert seconds_left(history, 5, 15) == 20.0
    assert seconds_left(history[:1], 1, 15) is None
