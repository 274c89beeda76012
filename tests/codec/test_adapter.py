"""Whole adapters: what `peft` opens and what a replica checks, in one file."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from deltawire.codec.adapter import adapter_layout, base_layout, write_adapter
from deltawire.codec.bits import BitArray
from deltawire.codec.decode import decode_delta, read_header
from deltawire.codec.digest import Digest, check_digests, digest_full, digest_part
from deltawire.codec.patch import Layout
from deltawire.protocol.adapters import (
    ADAPTER_CONFIG_KEY,
    AdapterManifest,
    AdapterPart,
    adapter_key,
    adapter_part,
)
from deltawire.protocol.chain import TensorSpec
from deltawire.protocol.errors import DigestMismatch, LayoutMismatch
from deltawire.protocol.header import ObjectHeader
from deltawire.protocol.versions import PolicyVersion

ADAPTER = AdapterManifest(rank=2, alpha=4.0, targets=["q_proj"])
LAYOUT = Layout(
    [
        TensorSpec(name="embed.weight", shape=[11, 3], dtype="BF16"),
        TensorSpec(name="layers.0.q_proj.weight", shape=[4, 3], dtype="BF16"),
        TensorSpec(name=adapter_key("layers.0.q_proj", "A"), shape=[2, 3], dtype="BF16"),
        TensorSpec(name=adapter_key("layers.0.q_proj", "B"), shape=[4, 2], dtype="F32"),
    ]
)


class Held(dict[str, BitArray]):
    """Weights as bits, in the shape of OldValues."""

    def gather(self, name: str, indices: BitArray) -> BitArray:
        return self[name][indices]

    def read(self, name: str, begin: int, end: int) -> BitArray:
        return self[name][begin:end]


def weights(seed: int) -> Held:
    random = np.random.default_rng(seed)
    return Held({n: random.integers(0, 60, t.numel).astype(t.bits) for n, t in LAYOUT.items()})


def written(path: Path, held: Held, *, digest: Digest | None = None) -> Path:
    new = digest_full(held.items(), LAYOUT) if digest is None else digest
    header = ObjectHeader(
        sparse=False, model_version=PolicyVersion(7), run_id="r", new_digest=str(new)
    )
    part = adapter_layout(LAYOUT)
    write_adapter(((n, held[n]) for n in part), header, path, layout=LAYOUT, adapter=ADAPTER)
    return path


def test_a_name_and_its_part_are_inverse_and_other_names_are_no_parts() -> None:
    key = adapter_key("model.layers.3.self_attn.q_proj", "B")
    assert key == "base_model.model.model.layers.3.self_attn.q_proj.lora_B.weight"
    assert adapter_part(key) == AdapterPart("model.layers.3.self_attn.q_proj", "B")
    for other in ("model.embed_tokens.weight", key.replace("lora_B", "lora_B.default"), key + "x"):
        assert adapter_part(other) is None


def test_parts_of_the_digest_sum_up_to_it() -> None:
    held = weights(1)
    base = digest_part(((n, held[n]) for n in base_layout(LAYOUT)), LAYOUT)
    rest = digest_part(((n, held[n]) for n in adapter_layout(LAYOUT)), LAYOUT)
    assert base.plus((rest.a, rest.b)) == digest_full(held.items(), LAYOUT)


def test_the_file_is_what_peft_saves(tmp_path: Path) -> None:
    held = weights(1)
    with safe_open(written(tmp_path / "a.safetensors", held), framework="numpy") as file:
        config = json.loads(file.metadata()[ADAPTER_CONFIG_KEY])
        assert set(file.keys()) == set(adapter_layout(LAYOUT))
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", 2, 4.0)


def test_onto_any_version_of_the_run_it_leads_to_its_own(tmp_path: Path) -> None:
    target = weights(1)
    path = written(tmp_path / "a.safetensors", target)
    for seed in (2, 3):
        held = weights(seed)
        held |= {n: target[n] for n in base_layout(LAYOUT)}
        patches = decode_delta(path, LAYOUT, held)
        before = digest_full(held.items(), LAYOUT)
        after = check_digests(read_header(path), patches, LAYOUT, held=before, name="a")
        for patch in patches:
            held[patch.name][patch.indices] = patch.values
        assert all(np.array_equal(held[n], target[n]) for n in LAYOUT)
        assert after == digest_full(target.items(), LAYOUT)
    assert decode_delta(path, LAYOUT, target) == []
    assert sum(p.changed for p in decode_delta(path, LAYOUT)) == 14


def test_on_another_base_it_is_refused(tmp_path: Path) -> None:
    path, held = written(tmp_path / "a.safetensors", weights(1)), weights(2)
    before = digest_full(held.items(), LAYOUT)
    patches = decode_delta(path, LAYOUT, held)
    with pytest.raises(DigestMismatch):
        check_digests(read_header(path), patches, LAYOUT, held=before, name="a")


def test_a_delta_that_names_no_base_is_still_refused() -> None:
    header = ObjectHeader(
        sparse=True, model_version=PolicyVersion(1), encoding="adapter", new_digest=str(Digest())
    )
    with pytest.raises(DigestMismatch):
        check_digests(header, [], LAYOUT, held=Digest(1, 1), name="a")


def test_an_adapter_of_other_layers_or_another_rank_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "a.safetensors", weights(1))
    specs = LAYOUT.specs
    wider = [*specs[:2], specs[2].model_copy(update={"shape": [6]}), specs[3]]
    for other in (specs[:3], wider):
        with pytest.raises(LayoutMismatch):
            decode_delta(path, Layout(other), None)
    with pytest.raises(LayoutMismatch, match="all of 2 tensors"):
        write_adapter([], read_header(path), path, layout=LAYOUT, adapter=ADAPTER)
