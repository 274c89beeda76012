"""Trainer and replica through a bucket: bit-identical at every version, whatever happens."""

import errno
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from deltawire.protocol.errors import (
    Fenced,
    LayoutMismatch,
    ObjectMissing,
    StoreError,
    StoreUnavailable,
)
from deltawire.protocol.layout import ObjectKind
from deltawire.sync.replay import replay

OpenPublisher = Callable[..., Any]
ExpectedBits = Callable[[Any], dict[str, list[int]]]


@pytest.fixture
def publisher(trainer: Any, open_publisher: OpenPublisher) -> Any:
    """Of a run that the trainer has just founded."""
    return open_publisher(trainer)


def test_a_warm_replica_equals_the_trainer_at_every_version(
    trainer: Any, publisher: Any, replica: Any, expected_bits: ExpectedBits
) -> None:
    assert replica.catch_up() == 0
    assert replica.bits() == expected_bits(trainer)

    for version in range(1, 6):
        trainer.step()
        published = publisher.publish(trainer.named())

        assert replica.catch_up() == version == published.record.version
        assert replica.bits() == expected_bits(trainer)
        assert str(replica.digest) == publisher.digest
        assert published.link.kind is ObjectKind.DELTA
        assert 0 < published.record.density < 0.5


def test_a_late_replica_arrives_at_the_same_bits(
    trainer: Any, open_publisher: OpenPublisher, replica: Any, expected_bits: ExpectedBits
) -> None:
    publisher = open_publisher(trainer, anchor_every=3)
    for _ in range(7):
        trainer.step()
        publisher.publish(trainer.named())
    publisher.wait_for_anchor()

    assert replica.catch_up() == 7
    assert replica.bits() == expected_bits(trainer)
    kinds = [link.kind for link in replica.follower.route(None, 7)]
    assert kinds == [ObjectKind.ANCHOR, ObjectKind.DELTA]


def test_a_version_without_changes_is_a_version(trainer: Any, publisher: Any, replica: Any) -> None:
    published = publisher.publish(trainer.named())

    assert published.record.changed == 0
    assert replica.catch_up() == 1


def test_a_delta_larger_than_an_anchor_becomes_an_anchor(
    trainer: Any, open_publisher: OpenPublisher, replica: Any, expected_bits: ExpectedBits
) -> None:
    publisher = open_publisher(trainer, encoding="seed")
    replica.catch_up()
    trainer.step(size=1.0)
    published = publisher.publish(trainer.named())

    assert published.link.kind is ObjectKind.ANCHOR
    assert published.record.kind == "anchor"
    assert replica.catch_up() == 1
    assert replica.bits() == expected_bits(trainer)


def test_a_delta_larger_than_a_packed_anchor_becomes_one_too(open_publisher: OpenPublisher) -> None:
    """Exponents pack well: here a packed anchor is a third smaller than the dense weights."""
    weight = torch.randn(256, 256)
    model = _Weight(weight)
    publisher = open_publisher(model, encoding="seed")
    weight[:70] += 1.0
    published = publisher.publish(model.named())

    assert published.record.full_bytes > 6 * published.record.changed > published.link.bytes
    assert published.link.kind is ObjectKind.ANCHOR


class _Weight:
    """A model of one tensor."""

    def __init__(self, weight: torch.Tensor) -> None:
        self._weight = weight

    def named(self) -> list[tuple[str, torch.Tensor]]:
        return [("weight", self._weight)]


def test_upload_comes_before_commit_and_nothing_is_visible_between(
    trainer: Any, publisher: Any, store: Any, replica: Any
) -> None:
    store.events.clear()
    trainer.step()
    publisher.publish(trainer.named())

    assert store.events == ["put run/deltas/step_000001.safetensors", "swap run/latest.json"]


def test_a_failed_upload_loses_nothing(
    trainer: Any, publisher: Any, store: Any, replica: Any, expected_bits: ExpectedBits
) -> None:
    trainer.step()
    store.before["put run/deltas"] = 1
    with pytest.raises(StoreUnavailable):
        publisher.publish(trainer.named())
    assert publisher.version == 0
    assert replica.catch_up() == 0

    trainer.step()
    publisher.publish(trainer.named())

    assert replica.catch_up() == 1
    assert replica.bits() == expected_bits(trainer)


def full_disk(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.timeout(60)
@pytest.mark.parametrize("refused", ["tempfile.mkdtemp", "deltawire.sync.publisher.encode_delta"])
def test_a_version_that_the_disk_does_not_take_is_contained_in_the_next(
    trainer: Any,
    publisher: Any,
    replica: Any,
    expected_bits: ExpectedBits,
    monkeypatch: pytest.MonkeyPatch,
    refused: str,
) -> None:
    trainer.step()
    pending = publisher.diff(trainer.named())
    with monkeypatch.context() as full:
        full.setattr(refused, full_disk)
        with pytest.raises(StoreError, match="No space left"):
            publisher.commit(pending)

    trainer.step()
    publisher.publish(trainer.named())

    assert replica.catch_up() == 1
    assert replica.bits() == expected_bits(trainer)


def test_an_anchor_that_the_disk_does_not_take_is_due_again_and_stops_nobody(
    trainer: Any, open_publisher: OpenPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher = open_publisher(trainer, anchor_every=1)
    with monkeypatch.context() as full:
        full.setattr("deltawire.sync.upload.write_anchor_shards", full_disk)
        trainer.step()
        publisher.publish(trainer.named())
        publisher.wait_for_anchor()
    trainer.step()
    publisher.publish(trainer.named())
    publisher.wait_for_anchor()

    anchors = [link.version for link in publisher.head.links if link.kind is ObjectKind.ANCHOR]
    assert anchors == [0, 2]


def test_what_a_killed_trainer_left_among_temporary_files_goes_when_it_comes_back(
    trainer: Any, open_publisher: OpenPublisher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    open_publisher(trainer, owner="another").close()
    killed = open_publisher(trainer, owner="another")
    (left,) = temporary.iterdir()
    killed.close()
    assert list(temporary.iterdir()) == []
    (left / "half").mkdir(parents=True)
    (left / "half" / "anchor.safetensors").write_bytes(b"half")
    stranger = temporary / "deltawire-publish-of-somebody-else"
    stranger.mkdir()

    open_publisher(trainer, owner="another").close()

    assert list(temporary.iterdir()) == [stranger]


def test_an_upload_whose_commit_failed_is_never_met_again(
    trainer: Any, publisher: Any, store: Any, replica: Any, expected_bits: ExpectedBits
) -> None:
    trainer.step()
    store.before["swap"] = 1
    with pytest.raises(StoreUnavailable):
        publisher.publish(trainer.named())

    trainer.step()
    published = publisher.publish(trainer.named())

    assert published.link.key == "deltas/step_000001.2.safetensors"
    assert replica.catch_up() == 1
    assert replica.bits() == expected_bits(trainer)
    assert publisher.sweep(grace_s=-1) == ["run/deltas/step_000001.safetensors"]


def test_a_commit_whose_answer_was_lost_counts_as_committed(
    trainer: Any, publisher: Any, store: Any, replica: Any, expected_bits: ExpectedBits
) -> None:
    trainer.step()
    store.after["swap"] = 1
    with pytest.raises(StoreUnavailable):
        publisher.publish(trainer.named())
    assert replica.catch_up() == 1
    assert replica.bits() == expected_bits(trainer)

    trainer.step()
    published = publisher.publish(trainer.named())

    assert published.record.version == 2
    assert replica.catch_up() == 2
    assert replica.bits() == expected_bits(trainer)


def test_while_the_outcome_is_unknown_nothing_goes_on(
    trainer: Any, publisher: Any, store: Any
) -> None:
    trainer.step()
    store.after["swap"] = 1
    with pytest.raises(StoreUnavailable):
        publisher.publish(trainer.named())
    store.before["read"] = 1
    with pytest.raises(StoreUnavailable):
        publisher.diff(trainer.named())

    assert publisher.publish(trainer.named()).record.version == 2


def test_a_discarded_diff_is_found_again(
    trainer: Any, publisher: Any, replica: Any, expected_bits: ExpectedBits
) -> None:
    trainer.step()
    pending = publisher.diff(trainer.named())
    publisher.discard(pending)
    with pytest.raises(ValueError, match="discarded already"):
        publisher.commit(pending)
    again = publisher.publish(trainer.named())

    assert again.record.changed == pending.changed
    replica.catch_up()
    assert replica.bits() == expected_bits(trainer)


def test_a_diff_waits_for_the_commit_before_it(trainer: Any, publisher: Any) -> None:
    trainer.step()
    first = publisher.diff(trainer.named())
    order: list[str] = []

    def second() -> None:
        order.append(f"diff of version {publisher.diff(trainer.named()).version}")

    waiting = threading.Thread(target=second)
    waiting.start()
    waiting.join(0.05)
    order.append(f"commit of version {publisher.commit(first).record.version}")
    waiting.join()

    assert sorted(order) == ["commit of version 1", "diff of version 2"]


def test_a_restarted_trainer_goes_on_with_its_run(
    trainer: Any, open_publisher: OpenPublisher, replica: Any, expected_bits: ExpectedBits
) -> None:
    first = open_publisher(trainer)
    trainer.step()
    first.publish(trainer.named())
    first.close()

    again = open_publisher(trainer)
    assert (again.version, again.head.epoch) == (1, 2)
    trainer.step()
    published = again.publish(trainer.named())

    assert published.link.key == "deltas/step_000002.2.safetensors"
    assert replica.catch_up() == 2
    assert replica.bits() == expected_bits(trainer)


def test_a_trainer_restored_from_an_older_checkpoint_publishes_against_the_bucket(
    trainer: Any,
    other_trainer: Any,
    open_publisher: OpenPublisher,
    replica: Any,
    expected_bits: ExpectedBits,
) -> None:
    first = open_publisher(trainer)
    for _ in range(3):
        trainer.step()
        first.publish(trainer.named())
    first.close()
    replica.catch_up()

    again = open_publisher(other_trainer)
    again.publish(other_trainer.named())

    assert replica.catch_up() == 4
    assert replica.bits() == expected_bits(other_trainer)


@pytest.mark.parametrize("damage", ["lost", "spoilt"])
def test_a_trainer_that_finds_its_chain_broken_anchors_anew(
    trainer: Any,
    open_publisher: OpenPublisher,
    replica: Any,
    expected_bits: ExpectedBits,
    tmp_path: Path,
    damage: str,
) -> None:
    first = open_publisher(trainer)
    for _ in range(2):
        trainer.step()
        first.publish(trainer.named())
    first.close()
    replica.catch_up()
    path = tmp_path / "bucket/run/deltas/step_000001.safetensors"
    if damage == "lost":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-1])
    trainer.step()
    again = open_publisher(trainer)
    assert again.version == 3
    trainer.step()
    again.publish(trainer.named())

    assert replica.catch_up() == 4
    assert replica.bits() == expected_bits(trainer)


def test_a_second_trainer_is_refused_and_the_first_goes_on(
    trainer: Any, other_trainer: Any, publisher: Any, open_publisher: OpenPublisher, replica: Any
) -> None:
    with pytest.raises(Fenced, match=r"run 'run' belongs to another trainer .*take the run over"):
        open_publisher(other_trainer, owner="another")

    trainer.step()
    publisher.publish(trainer.named())
    assert replica.catch_up() == 1


def test_a_second_process_on_the_same_run_folder_is_refused(
    trainer: Any, open_publisher: OpenPublisher
) -> None:
    open_publisher(trainer)
    with pytest.raises(Fenced, match="still runs"):
        open_publisher(trainer)


def test_after_a_take_over_the_former_trainer_publishes_nothing(
    trainer: Any,
    other_trainer: Any,
    open_publisher: OpenPublisher,
    replica: Any,
    expected_bits: ExpectedBits,
) -> None:
    former = open_publisher(trainer)
    trainer.step()
    pending = former.diff(trainer.named())
    successor = open_publisher(other_trainer, owner="another", take_over=True)
    with pytest.raises(Fenced, match="taken over"):
        former.commit(pending)
    assert replica.catch_up() == 0

    successor.publish(other_trainer.named())
    with pytest.raises(Fenced):
        former.publish(trainer.named())

    assert replica.catch_up() == 1
    assert replica.bits() == expected_bits(other_trainer)


def test_objects_that_a_dead_trainer_left_under_our_epoch_are_passed_by(
    trainer: Any,
    open_publisher: OpenPublisher,
    store: Any,
    replica: Any,
    expected_bits: ExpectedBits,
) -> None:
    """It failed once, went on in an epoch that no commit ever told of, and died after an upload."""
    dead = open_publisher(trainer)
    for failing in ("put run/deltas", "swap"):
        trainer.step()
        store.before[failing] = 1
        with pytest.raises(StoreUnavailable):
            dead.publish(trainer.named())
    dead.close()
    assert store.stat("run/deltas/step_000001.2.safetensors") is not None

    successor = open_publisher(trainer, owner="another", take_over=True)
    published = successor.publish(trainer.named())

    assert published.link.key.endswith("step_000001.3.safetensors")
    assert replica.catch_up() == 1
    assert replica.bits() == expected_bits(trainer)


def test_a_trainer_with_another_model_is_refused_before_it_fences_anybody(
    trainer: Any, other_trainer: Any, publisher: Any, open_publisher: OpenPublisher
) -> None:
    del other_trainer.tensors["odd"]
    with pytest.raises(LayoutMismatch, match="odd is only in the run"):
        open_publisher(other_trainer, owner="another", take_over=True)

    trainer.step()
    assert publisher.publish(trainer.named()).record.version == 1


def test_a_trainer_killed_while_it_founded_the_run_founds_it_again(
    trainer: Any, open_publisher: OpenPublisher, store: Any, replica: Any, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text("{}")
    files = {"config.json": tmp_path / "config.json"}
    store.before["put run/run.json"] = 1
    with pytest.raises(StoreUnavailable):
        open_publisher(trainer, model_files=files)
    with pytest.raises(ObjectMissing):
        replica.catch_up()

    open_publisher(trainer, model_files=files)
    assert replica.catch_up() == 0


def test_a_model_file_of_another_model_is_not_taken_for_ours(
    trainer: Any, open_publisher: OpenPublisher, store: Any, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text("{}")
    files = {"config.json": tmp_path / "config.json"}
    store.before["put run/run.json"] = 1
    with pytest.raises(StoreUnavailable):
        open_publisher(trainer, model_files=files)

    (tmp_path / "config.json").write_text('{"hidden_size": 1}')
    with pytest.raises(StoreError, match=r"config\.json .* another model"):
        open_publisher(trainer, model_files=files)


def test_a_failed_anchor_is_due_again_and_stops_nobody(
    trainer: Any, open_publisher: OpenPublisher, store: Any, new_replica: Callable[[], Any]
) -> None:
    publisher = open_publisher(trainer, anchor_every=2)
    store.before["put run/anchors"] = 1
    for _ in range(3):
        trainer.step()
        publisher.publish(trainer.named())
        publisher.wait_for_anchor()

    anchors = [link.version for link in publisher.head.links if link.kind is ObjectKind.ANCHOR]
    assert anchors == [0, 3]
    assert new_replica().catch_up() == 3


def test_an_anchor_holds_its_version_while_training_goes_on(
    trainer: Any, open_publisher: OpenPublisher, new_replica: Callable[[], Any]
) -> None:
    publisher = open_publisher(trainer, anchor_every=1)
    for _ in range(6):
        trainer.step()
        publisher.publish(trainer.named())
    publisher.wait_for_anchor()

    anchors = [link for link in publisher.head.links if link.kind is ObjectKind.ANCHOR]
    replica = new_replica()
    for link in anchors:
        digest = replay(replica.follower.fetch([link]), replica.tensors, run_id="run")
        assert str(digest) == link.new_digest == publisher.head.link_digest(link.version)
    assert len(anchors) > 1


def test_a_large_anchor_goes_up_in_shards_and_comes_back_whole(
    trainer: Any,
    open_publisher: OpenPublisher,
    replica: Any,
    expected_bits: ExpectedBits,
) -> None:
    publisher = open_publisher(trainer, anchor_shard_bytes=1000)

    anchor = publisher.head.links[0]
    assert [shard.key for shard in anchor.shards] == [
        "anchors/step_000000-00001-of-00002.safetensors",
        "anchors/step_000000-00002-of-00002.safetensors",
    ]
    assert replica.catch_up() == 0
    assert replica.bits() == expected_bits(trainer)


def test_a_finished_run_is_one_object_for_a_joiner(
    trainer: Any,
    publisher: Any,
    open_publisher: OpenPublisher,
    replica: Any,
    expected_bits: ExpectedBits,
    other_trainer: Any,
) -> None:
    trainer.step()
    publisher.publish(trainer.named())
    head = publisher.finish()

    assert head.state == "finished"
    assert [link.kind for link in replica.follower.route(None, 1)] == [ObjectKind.ANCHOR]
    assert replica.catch_up() == 1
    assert replica.bits() == expected_bits(trainer)
    with pytest.raises(Fenced, match="is finished"):
        open_publisher(other_trainer, owner="another")


def test_retention_unlinks_and_a_sweep_removes(
    trainer: Any, open_publisher: OpenPublisher, store: Any, new_replica: Callable[[], Any]
) -> None:
    publisher = open_publisher(trainer, anchor_every=2, keep_versions=2)
    laggard = new_replica()
    for version in range(1, 9):
        trainer.step()
        publisher.publish(trainer.named())
        publisher.wait_for_anchor()
        if version == 6:
            laggard.catch_up()
    removed = publisher.sweep(grace_s=-1)

    assert "run/deltas/step_000001.safetensors" in removed
    assert laggard.catch_up() == 8
    assert new_replica().catch_up() == 8
    left = {info.key for info in store.list("run/")}
    assert left >= {f"run/{link.key}" for link in publisher.head.links}
    assert {"run/run.json", "run/latest.json"} <= left
