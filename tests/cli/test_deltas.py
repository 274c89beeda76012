"""`deltawire deltas` on a real bucket and on lone files."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner, Result

from deltawire.cli.delta_views import density_by_layer
from deltawire.cli.deltas import app
from deltawire.codec.decode import read_header
from deltawire.codec.inspect import TensorChanges
from deltawire.protocol.errors import JobError, ObjectMissing, VersionGap, WeightsError
from deltawire.store.local import LocalStore
from deltawire.sync.publisher import Publisher

Run = Callable[..., Result]


@pytest.fixture
def weights() -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    names = ("model.embed_tokens.weight", "model.layers.0.mlp.weight", "model.layers.1.mlp.weight")
    return {name: torch.randn(64, 64, generator=random) for name in names}


@pytest.fixture
def bucket(tmp_path: Path, weights: dict[str, torch.Tensor]) -> Path:
    """A run of four versions, an anchor at 3, and a model file."""
    (tmp_path / "config.json").write_text("{}")
    with Publisher.open(
        LocalStore(tmp_path / "bucket"),
        run_id="run-1",
        named_tensors=weights.items(),
        anchor_every=3,
        encoding="compact",
        model_files={"config.json": tmp_path / "config.json"},
    ) as publisher:
        for _ in range(4):
            for tensor in weights.values():
                tensor += 1e-4
            publisher.publish(weights.items())
            publisher.wait_for_anchor()
    return tmp_path / "bucket"


@pytest.fixture
def deltas() -> Run:
    def run(*args: object, code: int = 0) -> Result:
        result = CliRunner().invoke(app, [str(arg) for arg in args], env={"COLUMNS": "200"})
        if result.exception and not isinstance(result.exception, SystemExit):
            raise result.exception
        assert result.exit_code == code, result.output
        return result

    return run


def test_ls_lists_every_link_and_who_needs_it(bucket: Path, deltas: Run) -> None:
    out = deltas("ls", bucket).output

    assert "version 4" in out
    assert out.count("delta") == 4
    assert out.count("anchor") == 2
    assert "joiners, 0-3" in out
    assert "6 objects" in out


def test_a_store_uri_with_a_run_id_works_too(bucket: Path, deltas: Run) -> None:
    assert "version 4" in deltas("ls", f"file://{bucket}", "--run-id", "run-1").output


def test_inspect_shows_tensors_and_distances(bucket: Path, deltas: Run, tmp_path: Path) -> None:
    picture = tmp_path / "density.png"
    out = deltas("inspect", bucket, "--version", 2, "--plot", picture).output

    assert "version 2 on version 1, compact" in out
    assert "model.layers.1.mlp.weight" in out
    assert "±1" in out
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_inspect_reads_a_lone_file_beside_its_manifest(bucket: Path, deltas: Run) -> None:
    out = deltas("inspect", bucket / "run-1/deltas/step_000002.safetensors").output

    assert "version 2 on version 1" in out
    assert "model.embed_tokens.weight" in out


def test_inspect_of_an_anchor_says_what_it_is(bucket: Path, deltas: Run) -> None:
    out = deltas("inspect", bucket / "run-1/anchors/step_000003.safetensors").output

    assert "version 3, packed" in out


def test_a_lone_file_without_a_manifest_says_what_to_give(
    bucket: Path, deltas: Run, tmp_path: Path
) -> None:
    lone = tmp_path / "lone" / "deltas" / "file.safetensors"
    lone.parent.mkdir(parents=True)
    lone.write_bytes((bucket / "run-1/deltas/step_000002.safetensors").read_bytes())

    with pytest.raises(JobError, match="--manifest"):
        deltas("inspect", lone)
    assert "version 2" in deltas("inspect", lone, "--manifest", bucket / "run-1/run.json").output


def test_verify_passes_on_a_sound_bucket(bucket: Path, deltas: Run) -> None:
    out = deltas("verify", bucket).output

    assert out.count("ok ") == 6
    assert "version 4: sound" in out


def test_verify_fails_on_a_damaged_one_and_names_the_object(bucket: Path, deltas: Run) -> None:
    path = bucket / "run-1/deltas/step_000004.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    out = deltas("verify", bucket, code=1).output

    assert "ChecksumMismatch" in out
    assert "NOT sound" in out


def test_verify_of_a_lone_file(bucket: Path, deltas: Run) -> None:
    anchor = bucket / "run-1/anchors/step_000003.safetensors"
    assert "sound, " in deltas("verify", anchor).output
    assert "on its base" in deltas("verify", bucket / "run-1/deltas/step_000001.safetensors").output

    body = anchor.read_bytes()
    anchor.write_bytes(body[:-1] + bytes([body[-1] ^ 1]))
    with pytest.raises(WeightsError):
        deltas("verify", anchor)


def test_merge_writes_one_file_for_many(bucket: Path, deltas: Run, tmp_path: Path) -> None:
    out = tmp_path / "skip.safetensors"
    said = deltas("merge", bucket, "--from", 0, "--to", 4, "--out", out).output

    header = read_header(out)
    assert (header.base_version, header.model_version) == (0, 4)
    assert "versions 0 to 4" in said


def test_export_writes_the_published_weights(
    bucket: Path, deltas: Run, tmp_path: Path, weights: dict[str, torch.Tensor]
) -> None:
    deltas("export", bucket, "--out", tmp_path / "out")
    tensors = load_file(tmp_path / "out/model.safetensors")

    assert {name: tensor.tolist() for name, tensor in tensors.items()} == {
        name: tensor.to(torch.bfloat16).tolist() for name, tensor in weights.items()
    }
    assert (tmp_path / "out/config.json").exists()


@pytest.mark.parametrize("encoding", ["seed", "compact"])
def test_convert_writes_another_encoding(
    bucket: Path, deltas: Run, tmp_path: Path, encoding: str
) -> None:
    out = tmp_path / "converted.safetensors"
    deltas("convert", bucket, "--to", encoding, "--version", 2, "--out", out)

    assert read_header(out).model_version == 2
    again = tmp_path / "again.safetensors"
    if read_header(out).encoding == "seed":
        manifest = bucket / "run-1/run.json"
        deltas("convert", out, "--to", "compact", "--out", again, "--manifest", manifest)
        assert read_header(again).num_changed == read_header(out).num_changed


def test_gc_dry_run_says_and_does_nothing(bucket: Path, deltas: Run) -> None:
    orphan = bucket / "run-1/deltas/step_000005.safetensors"
    orphan.write_bytes(b"left by a crash")
    out = deltas("gc", bucket, "--dry-run", "--grace-s", 0, "--keep-versions", 1).output

    assert "would remove run-1/deltas/step_000005.safetensors" in out
    assert "may unlink deltas/step_000001.safetensors" in out
    assert orphan.exists()


def test_gc_removes_what_no_link_names_and_nothing_else(bucket: Path, deltas: Run) -> None:
    orphan = bucket / "run-1/deltas/step_000005.safetensors"
    orphan.write_bytes(b"left by a crash")
    assert "0 objects" in deltas("gc", bucket).output
    assert "removed run-1/deltas/step_000005" in deltas("gc", bucket, "--grace-s", 0).output

    assert not orphan.exists()
    assert "sound" in deltas("verify", bucket).output


def test_a_version_outside_the_chain_is_an_error_that_says_so(bucket: Path, deltas: Run) -> None:
    with pytest.raises(VersionGap):
        deltas("inspect", bucket, "--version", 9)


def test_an_empty_store_and_one_of_two_runs_are_said_so(
    bucket: Path, deltas: Run, tmp_path: Path
) -> None:
    with pytest.raises(ObjectMissing, match="no run was published"):
        deltas("ls", tmp_path / "nowhere")
    second = bucket / "run-2"
    second.mkdir()
    head = json.loads((bucket / "run-1/latest.json").read_bytes())
    (second / "latest.json").write_text(json.dumps({**head, "run_id": "run-2"}))
    with pytest.raises(JobError, match="--run-id: run-1, run-2"):
        deltas("ls", bucket)


def test_density_is_summed_by_layer() -> None:
    tensors = [
        TensorChanges(name="model.embed_tokens.weight", changed=1, elements=10, steps=None),
        TensorChanges(name="model.layers.0.a.weight", changed=1, elements=10, steps=None),
        TensorChanges(name="model.layers.0.b.weight", changed=2, elements=20, steps=None),
        TensorChanges(name="model.layers.11.a.weight", changed=5, elements=10, steps=None),
    ]
    assert density_by_layer(tensors) == {"embed_tokens": 0.1, "0": 0.1, "11": 0.5}
