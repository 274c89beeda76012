"""A URI chooses the store."""

from pathlib import Path

import pytest

from deltawire.protocol.errors import InvalidKey, SettingsError
from deltawire.store.open import open_store


@pytest.mark.parametrize("form", ["file://{}", "file://localhost{}", "{}"])
def test_a_folder_has_three_spellings_and_one_uri(tmp_path: Path, form: str) -> None:
    store = open_store(form.format(tmp_path / "bucket"))

    assert store.uri == f"file://{tmp_path}/bucket"


def test_a_folder_with_a_space_keeps_it(tmp_path: Path) -> None:
    store = open_store(f"file://{tmp_path}/my%20bucket")
    store.swap("a", b"1", expect=None)

    assert (tmp_path / "my bucket" / "a").read_bytes() == b"1"
    assert open_store(store.uri).read("a")[0] == b"1"


@pytest.mark.parametrize(
    "uri",
    [
        "",
        "file://host/folder",
        "file:///folder?x=1",
        "ftp://host/bucket",
        "hf://owner/name",
        "hf://buckets/owner",
        "hf://buckets/owner//name",
        "s3:///prefix",
        "s3://bucket?secret=1",
    ],
)
def test_a_uri_that_names_no_bucket_says_what_to_write(uri: str) -> None:
    with pytest.raises(SettingsError, match=r"expected|known"):
        open_store(uri)


def test_a_prefix_cannot_climb() -> None:
    with pytest.raises(InvalidKey):
        open_store("hf://buckets/owner/name/../other")
