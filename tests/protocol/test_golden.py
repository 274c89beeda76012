"""The bytes other processes rely on. A change here is a change of the protocol: raise its number.

`golden/*.json` hold one message each; the test compares text, so order and spelling count too.
"""

import json
from pathlib import Path

import pytest
from pydantic import BaseModel

from deltawire.protocol.chain import Head, Link, ModelFile, RunManifest, Shard, TensorSpec
from deltawire.protocol.control import (
    AppliedUpdate,
    NoticeReceipt,
    Problem,
    ReplicaStatus,
    SyncRecord,
    WeightNotice,
)
from deltawire.protocol.header import ObjectHeader
from deltawire.protocol.layout import ObjectKind
from deltawire.protocol.versions import PolicyVersion

GOLDEN = Path(__file__).resolve().parent.parent / "golden"
SHA_A, SHA_B = "a" * 64, "b" * 64
V = PolicyVersion

MANIFEST = RunManifest(
    run_id="run-1",
    base_model="HuggingFaceTB/SmolLM2-135M-Instruct",
    layout_digest=SHA_A,
    tensors=[
        TensorSpec(name="model.embed_tokens.weight", shape=[49152, 576], dtype="BF16"),
        TensorSpec(name="model.norm.weight", shape=[576], dtype="BF16"),
    ],
    tied={"lm_head.weight": "model.embed_tokens.weight"},
    model_files=[ModelFile(name="config.json", sha256=SHA_B, bytes=704)],
    created_at=1700000000.5,
)
ANCHOR = Link(
    version=V(10),
    kind=ObjectKind.ANCHOR,
    key="anchors/step_000010-00001-of-00002.safetensors",
    bytes=300,
    sha256=SHA_A,
    new_digest="0" * 32,
    encoding="packed",
    changed=1000,
    total=1000,
    shards=[
        Shard(key="anchors/step_000010-00001-of-00002.safetensors", bytes=200, sha256=SHA_A),
        Shard(key="anchors/step_000010-00002-of-00002.safetensors", bytes=100, sha256=SHA_B),
    ],
    created_at=1700000010.0,
)
DELTA = Link(
    version=V(11),
    kind=ObjectKind.DELTA,
    key="deltas/step_000011.2.safetensors",
    base_version=V(10),
    bytes=42,
    sha256=SHA_B,
    new_digest="1" * 32,
    encoding="compact",
    changed=5,
    total=1000,
    xet_hash="c" * 64,
    created_at=1700000011.25,
)
HEAD = Head(
    run_id="run-1",
    version=V(11),
    epoch=2,
    owner="0123456789abcdef0123456789abcdef",
    links=[ANCHOR, DELTA],
    swap_mode="drain",
    updated_at=1700000012.0,
)
NOTICE = WeightNotice(
    repo_id="hf://buckets/owner/name/prefix",
    filename="run-1/deltas/step_000011.2.safetensors",
    version=V(11),
    sha256=SHA_B,
    xet_hash="c" * 64,
    size=42,
)
STATUS = ReplicaStatus(
    replica_id="replica-1",
    run_id="run-1",
    url="http://127.0.0.1:7861",
    engine="torch",
    state="serving",
    version=V(11),
    head_version=V(12),
    digest="1" * 32,
    updates=[
        AppliedUpdate(
            version=V(11),
            base_version=V(10),
            kind="delta",
            encoding="compact",
            bytes=42,
            changed=5,
            total=1000,
            fetch_s=0.5,
            stage_s=0.25,
            pause_ms=1.5,
            applied_at=1700000013.0,
            mode="keep",
            recomputed_tokens=120,
        )
    ],
    updates_total=11,
    store_budget={"calls": 60.0, "window_s": 300.0, "allowed": 1000.0},
    swap_mode="drain",
)
SYNC = SyncRecord(
    version=V(11),
    kind="delta",
    encoding="compact",
    key="deltas/step_000011.2.safetensors",
    bytes=42,
    full_bytes=2000,
    changed=5,
    total=1000,
    density=0.005,
    diff_s=0.1,
    encode_s=0.2,
    upload_s=0.3,
    commit_s=0.4,
    announce_s=0.5,
    total_s=1.5,
    encoding_reason="configured",
)
MESSAGES: dict[str, BaseModel] = {
    "run": MANIFEST,
    "latest": HEAD,
    "notice": NOTICE,
    "receipt": NoticeReceipt(accepted=False, serving=V(10), reason="another bucket"),
    "replica_status": STATUS,
    "sync_record": SYNC,
    "problem": Problem(type="Fenced", title="A newer trainer", status=409, detail="stop"),
}


@pytest.mark.parametrize("name", MESSAGES)
def test_a_message_is_the_golden_text_both_ways(name: str) -> None:
    message, path = MESSAGES[name], GOLDEN / f"{name}.json"

    assert message.model_dump_json(indent=2) + "\n" == path.read_text()
    assert type(message).model_validate_json(path.read_bytes()) == message


def test_a_header_is_the_golden_string_map() -> None:
    header = ObjectHeader(
        sparse=True,
        model_version=V(11),
        base_version=V(10),
        run_id="run-1",
        encoding="compact",
        num_changed=5,
        total_elements=1000,
        changed_params=["model.norm.weight"],
        layout_digest=SHA_A,
        base_digest="0" * 32,
        new_digest="1" * 32,
    )
    golden = json.loads((GOLDEN / "delta_header.json").read_text())

    assert header.to_metadata() == golden
    assert ObjectHeader.from_metadata(golden, name="golden") == header


@pytest.mark.parametrize("message", [MANIFEST, HEAD, NOTICE, STATUS, SYNC])
def test_a_field_of_a_newer_version_is_passed_over(message: BaseModel) -> None:
    newer = {**json.loads(message.model_dump_json()), "field_of_next_year": [1]}

    assert type(message).model_validate(newer) == message


def test_lag_is_newest_published_minus_served() -> None:
    assert STATUS.lag == 1
    assert STATUS.model_copy(update={"version": None}).lag is None
    assert STATUS.model_copy(update={"head_version": V(3)}).lag == 0


def test_the_head_knows_the_digest_of_a_version_by_any_link() -> None:
    assert HEAD.link_digest(11) == "1" * 32
    assert HEAD.link_digest(12) is None
