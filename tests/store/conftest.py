"""One fixture over every store: the contract tests run on each."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pydantic import SecretStr

from deltawire.store.base import Store
from deltawire.store.open import open_store

OpenStore = Callable[[], Store]
"""Opens the same bucket again, as a second process would."""


@pytest.fixture
def local_root(tmp_path: Path) -> Path:
    return tmp_path / "bucket"


def _open_local(request: pytest.FixtureRequest) -> OpenStore:
    root = request.getfixturevalue("local_root")
    return lambda: open_store(f"file://{root}")


def _open_s3(request: pytest.FixtureRequest) -> OpenStore:
    bucket = request.getfixturevalue("s3_bucket")
    return lambda: open_store(f"s3://{bucket}/some/prefix")


def _open_hub(request: pytest.FixtureRequest) -> OpenStore:
    hub = request.getfixturevalue("fake_hub")
    from deltawire.store.hub import HubStore

    return lambda: HubStore(
        "owner/name",
        prefix="some/prefix",
        token=SecretStr("hf_test_token"),
        endpoint=hub.url,
        settle_s=0.02,
        abandoned_s=0.2,
    )


BACKENDS = {"local": _open_local, "s3": _open_s3, "hub": _open_hub}


@pytest.fixture(params=BACKENDS)
def open_again(request: pytest.FixtureRequest) -> OpenStore:
    return BACKENDS[request.param](request)


@pytest.fixture
def store(open_again: OpenStore) -> Iterator[Store]:
    opened = open_again()
    yield opened
    opened.close()


@pytest.fixture
def file_of(tmp_path: Path) -> Callable[[bytes], Path]:
    """Makes a source file of these bytes."""
    made: list[Path] = []

    def make(body: bytes) -> Path:
        path = tmp_path / f"source_{len(made)}"
        path.write_bytes(body)
        made.append(path)
        return path

    return make
