"""A replica's side against a bucket that lies, breaks or is late."""

import hashlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deltawire.protocol.control import WeightNotice
from deltawire.protocol.errors import (
    ChecksumMismatch,
    DigestMismatch,
    LayoutMismatch,
    MalformedMessage,
    MalformedObject,
    ObjectMissing,
    StoreError,
    UnknownSchema,
    VersionGap,
    WeightsError,
)
from deltawire.sync.follower import Follower
from deltawire.sync.replay import empty_tensors, replay

OpenPublisher = Callable[..., Any]


@pytest.fixture
def published(trainer: Any, open_publisher: OpenPublisher, tmp_path: Path) -> Any:
    """A run with versions 0 to 3 and two model files."""
    files = {"config.json": tmp_path / "config.json", "chat.jinja": tmp_path / "chat.jinja"}
    for path in files.values():
        path.write_text(path.name)
    publisher = open_publisher(trainer, model_files=files)
    for _ in range(3):
        trainer.step()
        publisher.publish(trainer.named())
    return publisher


def _bucket(tmp_path: Path, key: str) -> Path:
    return tmp_path / "bucket" / "run" / key


def _rewrite_head(tmp_path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    path = _bucket(tmp_path, "latest.json")
    head = json.loads(path.read_bytes())
    change(head)
    path.write_text(json.dumps(head))


@pytest.mark.usefixtures("published")
def test_what_a_killed_follower_left_half_fetched_is_removed_and_what_still_arrives_is_not(
    replica: Any, tmp_path: Path
) -> None:
    folder = tmp_path / "cache" / "objects"
    folder.mkdir(parents=True)
    left, arriving = folder / "..0a1b.part.2c3d.part", folder / ".4e5f.part"
    for part in (left, arriving):
        part.write_bytes(b"half an object")
    a_day_ago = time.time() - 86_400
    os.utime(left, (a_day_ago, a_day_ago))

    replica.catch_up()

    assert [path for path in folder.iterdir() if path.suffix == ".part"] == [arriving]


@pytest.mark.usefixtures("published")
def test_model_files_arrive_under_their_names(replica: Any) -> None:
    folder = replica.follower.model_dir()

    assert {path.name: path.read_text() for path in folder.iterdir()} == {
        "config.json": "config.json",
        "chat.jinja": "chat.jinja",
    }


@pytest.mark.usefixtures("published")
def test_nothing_is_downloaded_twice(replica: Any, store: Any) -> None:
    replica.catch_up()
    replica.follower.model_dir()
    store.events.clear()
    replica.version = None
    replica.catch_up()
    replica.follower.model_dir()

    assert [event for event in store.events if event.startswith("fetch")] == []


@pytest.mark.usefixtures("published")
def test_a_spoilt_cache_is_fetched_again(replica: Any) -> None:
    replica.catch_up()
    for path in (replica.follower._cache / "objects").iterdir():
        path.write_bytes(b"spoilt" + path.read_bytes())
    replica.version = None

    assert replica.catch_up() == 3


def test_the_cache_keeps_what_the_chain_names_and_forgets_the_rest(
    published: Any, replica: Any, tmp_path: Path
) -> None:
    replica.catch_up()
    stray = tmp_path / "cache" / "objects" / f"{'0' * 64}.safetensors"
    stray.write_bytes(b"of a version long gone")
    replica.follower.fetch(replica.follower.route(2, 3))

    left = {path.stem for path in (tmp_path / "cache" / "objects").iterdir()}
    assert left == {link.sha256 for link in published.head.links}


@pytest.mark.parametrize("damage", ["flip", "cut", "append"])
@pytest.mark.usefixtures("published")
def test_a_file_that_is_not_the_promised_one_never_reaches_the_weights(
    replica: Any, tmp_path: Path, damage: str
) -> None:
    replica.catch_up()
    before = replica.bits()
    replica.version, replica.follower = (
        2,
        Follower(replica.follower.store, "run", tmp_path / "fresh"),
    )
    path = _bucket(tmp_path, "deltas/step_000003.safetensors")
    body = path.read_bytes()
    damaged = {"flip": body[:-1] + bytes([body[-1] ^ 1]), "cut": body[:-1], "append": body + b"0"}
    path.write_bytes(damaged[damage])

    with pytest.raises((ChecksumMismatch, StoreError), match="step_000003"):
        replica.catch_up()
    assert replica.bits() == before
    assert list((tmp_path / "fresh" / "objects").iterdir()) == []


def test_a_replayed_delta_is_refused(published: Any, replica: Any) -> None:
    """An honest old file under a link that speaks of a new version."""
    replica.catch_up()
    old, new = published.head.links[1], published.head.links[3]
    lie = new.model_copy(update={"key": old.key, "sha256": old.sha256, "bytes": old.bytes})
    objects = replica.follower.fetch([lie])

    with pytest.raises(MalformedObject, match="model_version is 1"):
        replay(objects, replica.tensors, run_id="run", digest=replica.digest)


def test_a_delta_on_the_wrong_base_is_refused(published: Any, replica: Any) -> None:
    replica.catch_up()
    before = replica.bits()
    objects = replica.follower.fetch([published.head.links[1]])

    with pytest.raises(DigestMismatch, match="re-base"):
        replay(objects, replica.tensors, run_id="run", digest=replica.digest)
    assert replica.bits() == before


def test_a_delta_of_another_run_is_refused(published: Any, replica: Any) -> None:
    objects = replica.follower.fetch([published.head.links[0]])

    with pytest.raises(MalformedObject, match="run_id is 'run'"):
        replay(objects, empty_tensors(replica.follower.layout()), run_id="other")


def test_a_route_that_begins_with_a_delta_leads_nowhere_from_nothing(
    published: Any, replica: Any
) -> None:
    objects = replica.follower.fetch([published.head.links[1]])

    with pytest.raises(VersionGap):
        replay(objects, replica.tensors, run_id="run")


def test_an_anchor_that_lies_about_its_digest_is_refused_before_a_tensor_is_written(
    published: Any, replica: Any
) -> None:
    anchor = published.head.links[0]
    objects = replica.follower.fetch([anchor])
    lie = [(anchor.model_copy(update={"new_digest": "0" * 32}), path) for _, path in objects]

    with pytest.raises(WeightsError):
        replay(lie, replica.tensors, run_id="run")
    assert all(not any(bits) for bits in replica.bits().values())


def _nothing(head: dict[str, Any]) -> None:
    head.clear()


LIES: dict[str, tuple[Callable[[dict[str, Any]], object], type[Exception]]] = {
    "empty": (_nothing, MalformedMessage),
    "newer schema": (lambda h: h.update(schema_number=2), UnknownSchema),
    "other run": (lambda h: h.update(run_id="other"), MalformedMessage),
    "version nobody leads to": (lambda h: h.update(version=99), MalformedMessage),
    "version of a string": (lambda h: h.update(version="three"), MalformedMessage),
    "link ahead of the head": (lambda h: h.update(version=2), MalformedMessage),
    "link to itself": (lambda h: h["links"][1].update(base_version=1), MalformedMessage),
    "link backwards": (lambda h: h["links"][1].update(base_version=7), MalformedMessage),
    "delta without base": (lambda h: h["links"][1].pop("base_version"), MalformedMessage),
    "anchor with base": (lambda h: h["links"][0].update(base_version=0), MalformedMessage),
    "key up and out": (lambda h: h["links"][1].update(key="../../secret"), MalformedMessage),
    "key of another version": (
        lambda h: h["links"][1].update(key="deltas/step_000009.safetensors"),
        MalformedMessage,
    ),
    "key of a URL": (lambda h: h["links"][1].update(key="https://evil/x"), MalformedMessage),
    "negative size": (lambda h: h["links"][1].update(bytes=-1), MalformedMessage),
    "hash that is a path": (lambda h: h["links"][1].update(sha256="../x"), MalformedMessage),
    "shard of another object": (
        lambda h: h["links"][0].update(
            shards=[{"key": "anchors/step_000009.safetensors", "bytes": 1, "sha256": "0" * 64}]
        ),
        MalformedMessage,
    ),
}


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.usefixtures("published")
def test_a_latest_json_that_lies_is_a_typed_error(replica: Any, tmp_path: Path, lie: str) -> None:
    change, expected = LIES[lie]
    _rewrite_head(tmp_path, change)

    with pytest.raises(expected, match=r"latest\.json"):
        replica.follower.head()


@pytest.mark.parametrize("body", [b"", b"\xff\xfe", b"[]", b"{", b"null", b'"text"'])
@pytest.mark.usefixtures("published")
def test_a_latest_json_that_is_no_json_is_a_typed_error(
    replica: Any, tmp_path: Path, body: bytes
) -> None:
    _bucket(tmp_path, "latest.json").write_bytes(body)

    with pytest.raises(MalformedMessage) as raised:
        replica.follower.head()
    assert raised.value.raw == body


@pytest.mark.usefixtures("published")
def test_a_size_the_layout_forbids_is_not_downloaded(
    replica: Any, tmp_path: Path, store: Any
) -> None:
    _rewrite_head(tmp_path, lambda head: head["links"][3].update(bytes=2**40))
    replica.follower.head()
    store.events.clear()

    with pytest.raises(MalformedMessage, match="are possible"):
        replica.follower.fetch(replica.follower.route(2, 3))
    assert store.events == []


@pytest.mark.usefixtures("published")
def test_an_older_answer_than_one_seen_is_passed_over(replica: Any, tmp_path: Path) -> None:
    path = _bucket(tmp_path, "latest.json")
    newest = replica.follower.head()
    _rewrite_head(tmp_path, lambda head: (head.update(version=2), head["links"].pop()))

    assert replica.follower.head() == newest
    assert json.loads(path.read_bytes())["version"] == 2


@pytest.mark.usefixtures("published")
def test_an_object_collected_meanwhile_is_missing_not_a_crash(replica: Any, tmp_path: Path) -> None:
    replica.follower.head()
    _bucket(tmp_path, "deltas/step_000003.safetensors").unlink()

    with pytest.raises(ObjectMissing, match="step_000003"):
        replica.follower.fetch(replica.follower.route(2, 3))


@pytest.mark.usefixtures("published")
def test_a_manifest_that_contradicts_itself_is_refused(replica: Any, tmp_path: Path) -> None:
    path = _bucket(tmp_path, "run.json")
    manifest = json.loads(path.read_bytes())
    manifest["tensors"][0]["shape"] = [1 << 60]
    path.write_text(json.dumps(manifest))

    with pytest.raises(LayoutMismatch, match=r"run\.json"):
        replica.follower.manifest()


@pytest.mark.parametrize("name", ["../config.json", "modeling.py", "/etc/passwd", "x/y.json"])
@pytest.mark.usefixtures("published")
def test_a_manifest_cannot_name_a_path_or_code(replica: Any, tmp_path: Path, name: str) -> None:
    path = _bucket(tmp_path, "run.json")
    manifest = json.loads(path.read_bytes())
    manifest["model_files"][0]["name"] = name
    path.write_text(json.dumps(manifest))

    with pytest.raises(MalformedMessage, match=r"run\.json"):
        replica.follower.manifest()


@pytest.mark.usefixtures("published")
def test_a_model_file_that_was_exchanged_is_refused(replica: Any, tmp_path: Path) -> None:
    body = b'{"evil": 1}'
    _bucket(tmp_path, "model/config.json").write_bytes(body)
    expected = hashlib.sha256(b"config.json").hexdigest()

    with pytest.raises(ChecksumMismatch, match=expected):
        replica.follower.model_dir()


@pytest.mark.usefixtures("published")
def test_a_notice_is_accepted_only_for_this_store_and_run(replica: Any) -> None:
    follower = replica.follower
    fine = WeightNotice(
        repo_id=follower.store.uri, filename="run/deltas/step_000004.safetensors", version=4
    )
    refused = [
        {"repo_id": "hf://buckets/evil/bucket"},
        {"repo_id": follower.store.uri + "/run"},
        {"filename": "deltas/step_000004.safetensors"},
        {"filename": "other/deltas/step_000004.safetensors"},
        {"filename": "run/../other/deltas/step_000004.safetensors"},
        {"filename": "run/latest.json"},
        {"filename": "run/model/config.json"},
        {"filename": "https://evil/x"},
    ]

    assert follower.accepts(fine)
    for change in refused:
        assert not follower.accepts(fine.model_copy(update=change)), change
