"""Tools over a chain: verdicts, who needs what, checkpoints and files out of it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from deltawire.codec.decode import decode_delta, read_header
from deltawire.protocol.errors import VersionGap
from deltawire.protocol.layout import ObjectKind
from deltawire.sync.audit import audit
from deltawire.sync.export import convert_version, export_checkpoint, merge_versions, weights_at
from deltawire.sync.needs import in_words, needed_by


@pytest.fixture
def run(trainer: Any, open_publisher: Callable[..., Any], tmp_path: Path) -> Any:
    """Versions 0 to 6 with anchors at 0, 3 and 6 and a skip file 0-4. Keeps each one's bits."""
    config = tmp_path / "config.json"
    config.write_text('{"model_type": "tiny"}')
    publisher = open_publisher(
        trainer, anchor_every=3, skip_levels=(4,), model_files={"config.json": config}
    )
    publisher.states = [_published(trainer)]
    for _ in range(6):
        trainer.step()
        publisher.publish(trainer.named())
        publisher.wait_for_anchor()
        publisher.states.append(_published(trainer))
    return publisher


def _published(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.to(torch.bfloat16) for name, tensor in trainer.named()}


def _damage(tmp_path: Path, key: str) -> None:
    path = tmp_path / "bucket" / "run" / key
    body = path.read_bytes()
    path.write_bytes(body[:-1] + bytes([body[-1] ^ 1]))


def test_a_sound_chain_passes_link_by_link(run: Any, replica: Any) -> None:
    verdicts = list(audit(replica.follower))

    assert [verdict.problem for verdict in verdicts] == [""] * len(run.head.links)
    assert {verdict.link.key for verdict in verdicts} == {link.key for link in run.head.links}
    assert {verdict.link.kind for verdict in verdicts} == {
        ObjectKind.ANCHOR,
        ObjectKind.DELTA,
        ObjectKind.SKIP,
    }


def test_a_damaged_delta_is_named_and_the_walk_goes_on_at_the_next_object(
    run: Any, replica: Any, tmp_path: Path
) -> None:
    _damage(tmp_path, "deltas/step_000002.safetensors")
    problems = {v.link.key: v.problem for v in audit(replica.follower) if v.problem}

    assert set(problems) == {
        "deltas/step_000002.safetensors",
        "deltas/step_000003.safetensors",
    }
    assert "ChecksumMismatch" in problems["deltas/step_000002.safetensors"]
    assert "base 2" in problems["deltas/step_000003.safetensors"]


def test_a_missing_anchor_is_named(run: Any, replica: Any, tmp_path: Path) -> None:
    (tmp_path / "bucket/run/anchors/step_000003.safetensors").unlink()
    problems = {v.link.key: v.problem for v in audit(replica.follower) if v.problem}

    assert list(problems) == ["anchors/step_000003.safetensors"]
    assert "ObjectMissing" in problems["anchors/step_000003.safetensors"]


def test_a_chain_whose_first_anchor_is_gone_is_walked_from_the_next(
    run: Any, replica: Any, tmp_path: Path
) -> None:
    (tmp_path / "bucket/run/anchors/step_000000.safetensors").unlink()
    problems = [v.link for v in audit(replica.follower) if v.problem]

    assert max(link.version for link in problems if link.kind is ObjectKind.DELTA) == 3
    assert all(link.version <= 4 for link in problems)


def test_who_needs_a_link_is_who_takes_it(run: Any) -> None:
    needs = needed_by(run.head)

    assert needs["anchors/step_000006.safetensors"][0] is None
    assert needs["deltas/step_000006.safetensors"][-1] == 5
    assert needs["anchors/step_000000.safetensors"] == []
    assert set(needs) == {link.key for link in run.head.links}


@pytest.mark.parametrize(
    ("haves", "words"),
    [([], "-"), ([None], "joiners"), ([None, 3, 4, 5, 8], "joiners, 3-5, 8"), ([0], "0")],
)
def test_needs_are_said_in_words(haves: list[int | None], words: str) -> None:
    assert in_words(haves) == words


@pytest.mark.parametrize("version", [0, 2, 5, 6])
def test_an_exported_version_is_the_published_one(
    run: Any, replica: Any, tmp_path: Path, version: int
) -> None:
    digest = export_checkpoint(replica.follower, version, tmp_path / "out")

    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert tensors.keys() == run.states[version].keys()
    for name, expected in run.states[version].items():
        assert torch.equal(tensors[name].view(torch.int16), expected.view(torch.int16))
    assert str(digest) == run.head.link_digest(version)
    assert (tmp_path / "out" / "config.json").read_text() == '{"model_type": "tiny"}'


def test_a_version_that_is_not_in_the_chain_cannot_be_exported(run: Any, replica: Any) -> None:
    with pytest.raises(VersionGap):
        weights_at(replica.follower, 7)


def test_a_merged_file_leads_from_its_base_to_its_version(
    run: Any, replica: Any, tmp_path: Path
) -> None:
    report = merge_versions(replica.follower, 1, 5, tmp_path / "merged.safetensors")

    layout = replica.follower.layout()
    tensors, base = weights_at(replica.follower, 1)
    patches = decode_delta(tmp_path / "merged.safetensors", layout, tensors)
    assert str(base.updated(patches, layout)) == run.head.link_digest(5)
    assert (report.header.base_version, report.header.model_version) == (1, 5)
    with pytest.raises(VersionGap):
        merge_versions(replica.follower, 1, 9, tmp_path / "no.safetensors")


@pytest.mark.parametrize("encoding", ["seed", "compact", "classes"])
def test_a_converted_delta_says_the_same(
    run: Any, replica: Any, tmp_path: Path, encoding: Any
) -> None:
    target = tmp_path / "converted.safetensors"
    convert_version(replica.follower, 3, target, encoding=encoding)

    layout = replica.follower.layout()
    tensors, base = weights_at(replica.follower, 2)
    patches = decode_delta(target, layout, tensors)
    assert str(base.updated(patches, layout)) == run.head.link_digest(3)
    assert read_header(target).new_digest == run.head.link_digest(3)
