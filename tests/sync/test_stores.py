"""The same loop over every store: bit-exact, and a second trainer is refused."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from deltawire.protocol.errors import Fenced
from deltawire.store.base import Store
from deltawire.store.local import LocalStore
from deltawire.store.open import open_store


def _open_local(request: pytest.FixtureRequest) -> Store:
    return LocalStore(request.getfixturevalue("tmp_path") / "bucket")


def _open_s3(request: pytest.FixtureRequest) -> Store:
    return open_store(f"s3://{request.getfixturevalue('s3_bucket')}/prefix")


def _open_hub(request: pytest.FixtureRequest) -> Store:
    hub = request.getfixturevalue("fake_hub")
    from deltawire.store.hub import HubStore

    return HubStore(
        "owner/name",
        prefix="prefix",
        token=SecretStr("hf_test_token"),
        endpoint=hub.url,
        settle_s=0.01,
        abandoned_s=0.05,
    )


OPENERS = {"file": _open_local, "s3": _open_s3, "hub": _open_hub}


@pytest.fixture(params=OPENERS)
def store(request: pytest.FixtureRequest) -> Iterator[Store]:
    opened = OPENERS[request.param](request)
    yield opened
    opened.close()


def test_a_run_through_this_store_is_bit_exact(
    trainer: Any,
    open_publisher: Callable[..., Any],
    new_replica: Callable[[], Any],
    expected_bits: Callable[[Any], Any],
    tmp_path: Path,
) -> None:
    config = tmp_path / "config.json"
    config.write_text("{}")
    publisher = open_publisher(trainer, model_files={"config.json": config}, anchor_every=2)
    warm = new_replica()
    warm.catch_up()
    for _ in range(3):
        trainer.step()
        publisher.publish(trainer.named())
        publisher.wait_for_anchor()
        warm.catch_up()
    cold = new_replica()

    assert cold.catch_up() == warm.version == 3
    assert cold.bits() == warm.bits() == expected_bits(trainer)
    assert (cold.follower.model_dir() / "config.json").read_text() == "{}"
    assert publisher.sweep(grace_s=-1) == []


def test_a_second_trainer_is_refused_on_this_store(
    trainer: Any, other_trainer: Any, open_publisher: Callable[..., Any]
) -> None:
    publisher = open_publisher(trainer)
    with pytest.raises(Fenced, match="belongs to another trainer"):
        open_publisher(other_trainer, owner="another")

    trainer.step()
    assert publisher.publish(trainer.named()).record.version == 1


def test_a_trainer_that_was_taken_over_is_refused_on_this_store(
    trainer: Any,
    other_trainer: Any,
    open_publisher: Callable[..., Any],
    new_replica: Callable[[], Any],
    expected_bits: Callable[[Any], Any],
) -> None:
    former = open_publisher(trainer)
    trainer.step()
    pending = former.diff(trainer.named())
    successor = open_publisher(other_trainer, owner="another", take_over=True)
    with pytest.raises(Fenced, match="taken over"):
        former.commit(pending)
    successor.publish(other_trainer.named())

    replica = new_replica()
    assert replica.catch_up() == 1
    assert replica.bits() == expected_bits(other_trainer)
