"""Keys <-> (kind, version): a round trip, and nothing else gets through."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltawire.protocol.errors import InvalidKey
from deltawire.protocol.layout import (
    ObjectKind,
    check_run_id,
    in_run,
    model_file_key,
    object_key,
    parse_key,
)

versions = st.integers(0, 10**9)
shards = st.none() | st.tuples(st.integers(1, 99999), st.integers(1, 99999))


@given(
    kind=st.sampled_from(ObjectKind),
    version=versions,
    epoch=st.integers(1, 10**6),
    base=st.none() | versions,
    shard=shards,
)
def test_a_key_parses_back_into_what_it_was_made_of(
    kind: ObjectKind, version: int, epoch: int, base: int | None, shard: tuple[int, int] | None
) -> None:
    parsed = parse_key(object_key(kind, version, epoch=epoch, base=base, shard=shard))

    assert (parsed.kind, parsed.version, parsed.epoch, parsed.base) == (kind, version, epoch, base)
    assert (parsed.shard, parsed.shards) == (shard or (None, None))


def test_keys_are_those_of_the_agreement() -> None:
    assert object_key(ObjectKind.ANCHOR, 0) == "anchors/step_000000.safetensors"
    assert object_key(ObjectKind.DELTA, 11) == "deltas/step_000011.safetensors"
    assert object_key(ObjectKind.DELTA, 11, epoch=2) == "deltas/step_000011.2.safetensors"
    assert object_key(ObjectKind.ADAPTER, 1) == "adapters/step_000001.safetensors"
    assert object_key(ObjectKind.SKIP, 16, base=8) == "skips/from_000008_step_000016.safetensors"
    assert (
        object_key(ObjectKind.ANCHOR, 10, shard=(1, 4))
        == "anchors/step_000010-00001-of-00004.safetensors"
    )


@given(st.lists(versions, min_size=2, max_size=2, unique=True), st.integers(1, 3))
def test_two_versions_never_share_a_key(pair: list[int], epoch: int) -> None:
    one, other = (object_key(ObjectKind.DELTA, v, epoch=epoch) for v in pair)
    assert one != other


@pytest.mark.parametrize(
    "key",
    [
        "",
        "deltas/step_11.safetensors",
        "deltas/step_000011.safetensors/",
        "deltas/step_000011.safetensors\n",
        "deltas//step_000011.safetensors",
        "../deltas/step_000011.safetensors",
        "/deltas/step_000011.safetensors",
        "run/deltas/step_000011.safetensors",
        "deltas/step_000011.pt",
        "deltas/step_-00011.safetensors",
        "deltas/step_000011-1-of-2.safetensors",
        "weights/step_000011.safetensors",
        "https://host/deltas/step_000011.safetensors",
        "deltas/step_\u0660\u0660\u0660\u0660\u0661\u0661.safetensors",
        f"deltas/step_{'9' * 5000}.safetensors",
    ],
)
def test_what_is_no_key_is_refused(key: str) -> None:
    with pytest.raises(InvalidKey):
        parse_key(key)


@given(st.text(max_size=60))
def test_any_text_is_a_key_or_a_typed_error(text: str) -> None:
    try:
        parsed = parse_key(text)
    except InvalidKey:
        return
    assert parsed.kind in ObjectKind


@pytest.mark.parametrize("name", ["config.json", "chat_template.jinja", "merges.txt", "a.model"])
def test_model_files_are_configuration_and_tokenizer(name: str) -> None:
    assert model_file_key(name) == f"model/{name}"


@pytest.mark.parametrize(
    "name", ["modeling.py", "model.safetensors", ".json", "../config.json", "a/b.json", "x.json.py"]
)
def test_code_weights_and_paths_are_no_model_files(name: str) -> None:
    with pytest.raises(InvalidKey):
        model_file_key(name)


def test_an_empty_run_id_is_the_flat_layout() -> None:
    assert in_run("", "latest.json") == "latest.json"
    assert in_run("run-1", "latest.json") == "run-1/latest.json"


@pytest.mark.parametrize("run_id", ["Run", "a/b", "..", ".hidden", "-x", "a b", "x" * 97, "ü"])
def test_a_run_id_is_one_plain_path_element(run_id: str) -> None:
    with pytest.raises(InvalidKey, match="lower-case"):
        check_run_id(run_id)
