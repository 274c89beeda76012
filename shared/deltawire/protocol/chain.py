"""run.json, latest.json, and the cheapest route through a chain. Pure, over small records."""

import heapq
from typing import Literal

from pydantic import Field

from deltawire.protocol.adapters import AdapterManifest
from deltawire.protocol.errors import VersionGap
from deltawire.protocol.layout import ObjectKind
from deltawire.protocol.versions import BASE_VERSION, PolicyVersion
from deltawire.protocol.wire_model import OpenWireModel

CHAIN_SCHEMA = 1

SwapMode = Literal["keep", "keep_kv", "drain", "abort"]
"""keep: running requests go on, their KV recomputed under the new weights; keep_kv: they go on with
the old KV; drain: they finish first; abort: they end and their caller resubmits with the prefix."""


class TensorSpec(OpenWireModel):
    """One tensor of the run, in layout order. dtype is safetensors' word: BF16, F16, F32, ..."""

    name: str
    shape: list[int]
    dtype: str


class ModelFile(OpenWireModel):
    """A configuration or tokenizer file under model/, so that a replica needs only the bucket."""

    name: str
    sha256: str
    bytes: int


class RunManifest(OpenWireModel):
    """run.json: written once. What every anchor and delta of this run agrees on."""

    schema_number: int = CHAIN_SCHEMA
    run_id: str
    base_model: str
    """Hub id or a plain name, for people; replicas load from the bucket."""
    layout_digest: str
    """sha256 over the canonical JSON of `tensors`."""
    tensors: list[TensorSpec]
    tied: dict[str, str] = Field(default_factory=dict)
    """Name that is not stored -> name that holds its data (tied weights)."""
    model_files: list[ModelFile] = Field(default_factory=list)
    adapter: AdapterManifest | None = None
    """Set in a LoRA run: only the adapter's tensors ever change."""
    created_at: float = 0.0
    """Unix seconds."""


class Shard(OpenWireModel):
    """One file of a sharded object."""

    key: str
    bytes: int
    sha256: str
    xet_hash: str | None = None


class Link(OpenWireModel):
    """One object of the live chain, as latest.json names it."""

    version: PolicyVersion
    kind: ObjectKind
    key: str
    """Relative to the run. For a sharded object the first shard's key."""
    base_version: PolicyVersion | None = None
    """The version it must be applied on; None for an anchor, which needs nothing below it, and for
    a whole adapter, which goes onto any version."""
    bytes: int
    sha256: str
    """Of the file; for a sharded object over the shards' sha256 in order."""
    new_digest: str
    encoding: str = "seed"
    """seed, compact, classes, plain or packed (anchors), adapter (whole adapters)."""
    changed: int | None = None
    total: int | None = None
    shards: list[Shard] = Field(default_factory=list)
    xet_hash: str | None = None
    created_at: float = 0.0


class Head(OpenWireModel):
    """latest.json: the only mutable object, written last. What it names is committed."""

    schema_number: int = CHAIN_SCHEMA
    run_id: str
    version: PolicyVersion = BASE_VERSION
    """The newest committed version."""
    epoch: int = 1
    """Fencing epoch: a trainer that finds a higher one than its own must stop."""
    owner: str = ""
    """Random id of the trainer process that holds the run."""
    state: Literal["running", "finished"] = "running"
    links: list[Link] = Field(default_factory=list)
    swap_mode: SwapMode | None = None
    """What the job asks of replicas; None leaves it to them."""
    updated_at: float = 0.0

    def link_digest(self, version: int) -> str | None:
        """The digest announced for a version by any link that leads to it."""
        return next((link.new_digest for link in self.links if link.version == version), None)


_OBJECT_COST_BYTES = 64 * 1024
"""One more object costs about a round trip; counted as this many bytes when routes are compared."""


def plan_route(links: list[Link], *, have: int | None, want: int) -> list[Link]:
    """The cheapest list of objects that brings a replica from `have` to `want`, in order.

    Cheapest by bytes, plus a fixed cost per object; an anchor starts from anything, even nothing; a
    whole adapter from any version, as all versions of its run have the same base.
    Dijkstra's algorithm over versions. Raises VersionGap when there is no route.
    """
    if have == want:
        return []
    nowhere = -1
    start = nowhere if have is None else have
    best: dict[int, tuple[int, list[Link]]] = {start: (0, [])}
    queue: list[tuple[int, int]] = [(0, start)]
    while queue:
        cost, at = heapq.heappop(queue)
        if at == want:
            return best[at][1]
        if cost > best[at][0]:
            continue
        for link in links:
            if link.version > want or not _applies(link, None if at == nowhere else at):
                continue
            total = cost + link.bytes + _OBJECT_COST_BYTES
            if link.version not in best or total < best[link.version][0]:
                best[link.version] = (total, [*best[at][1], link])
                heapq.heappush(queue, (total, link.version))
    raise VersionGap(have=have, want=want)


def _applies(link: Link, at: int | None) -> bool:
    """Whether a replica that holds version `at` (None: nothing) can take this object."""
    if link.base_version is not None:
        return link.base_version == at
    return link.kind is not ObjectKind.ADAPTER or at is not None
