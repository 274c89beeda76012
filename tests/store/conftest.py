"""One fixture over every store: the contract tests run on each. A missing backend skips at home and
fails under CI=true."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from deltawire.store.base import Store
from deltawire.store.local import LocalStore

OpenStore = Callable[[], Store]
"""Opens the same bucket again, as a second process would."""


@pytest.fixture
def local_root(tmp_path: Path) -> Path:
    return tmp_path / "bucket"


@pytest.fixture(params=["local"])
def open_again(request: pytest.FixtureRequest, local_root: Path) -> Iterator[OpenStore]:
    yield lambda: LocalStore(local_root)


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
