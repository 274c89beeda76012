"""The string map of a safetensors header, both ways."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltawire.protocol.errors import MalformedObject
from deltawire.protocol.header import ObjectHeader
from deltawire.protocol.versions import PolicyVersion

headers = st.builds(
    ObjectHeader,
    sparse=st.booleans(),
    model_version=st.integers(0, 10**9),
    base_version=st.none() | st.integers(0, 10**9),
    run_id=st.text(max_size=20),
    encoding=st.sampled_from(["seed", "compact", "classes", "plain", "packed"]),
    num_changed=st.integers(0, 10**12),
    total_elements=st.integers(0, 10**12),
    changed_params=st.lists(st.text(max_size=20), max_size=5),
    layout_digest=st.text("0123456789abcdef", max_size=64),
    base_digest=st.text("0123456789abcdef", max_size=32),
    new_digest=st.text("0123456789abcdef", max_size=32),
)


@given(headers)
def test_a_header_survives_the_string_map(header: ObjectHeader) -> None:
    metadata = header.to_metadata()

    assert ObjectHeader.from_metadata(metadata, name="file") == header
    assert all(isinstance(value, str) for value in metadata.values())


def test_the_seeds_readers_find_their_words() -> None:
    metadata = ObjectHeader(
        sparse=True,
        model_version=PolicyVersion(3),
        base_version=PolicyVersion(2),
        num_changed=25,
        total_elements=100,
        changed_params=["a", "b"],
    ).to_metadata()

    assert metadata["sparse"] == "True"
    assert metadata["model_version"] == "3"
    assert metadata["sparsity"] == "0.75"
    assert metadata["changed_params"] == '["a", "b"]'
    assert metadata["num_changed_params"] == "2"
    assert metadata["total_changed_elements"] == "25"


def test_density_is_the_share_that_changed() -> None:
    header = ObjectHeader(
        sparse=True, model_version=PolicyVersion(1), num_changed=1, total_elements=4
    )
    assert header.density == 0.25
    assert header.model_copy(update={"total_elements": 0}).density == 0.0
    assert header.model_copy(update={"sparse": False}).density == 1.0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("sparse", "true"),
        ("model_version", "three"),
        ("base_version", "1.5"),
        ("num_changed", ""),
        ("changed_params", "{"),
        ("changed_params", "[1]"),
        ("encoding", None),
    ],
)
def test_a_wrong_field_is_an_error_that_names_the_file(field: str, value: str | None) -> None:
    metadata = ObjectHeader(sparse=True, model_version=PolicyVersion(1)).to_metadata()
    if value is None:
        del metadata[field]
    else:
        metadata[field] = value

    with pytest.raises(MalformedObject, match=r"delta\.safetensors: header field"):
        ObjectHeader.from_metadata(metadata, name="delta.safetensors")
