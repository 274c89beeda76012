"""How a run is published: what a publisher and its background work need to be told."""

from dataclasses import dataclass

from deltawire.codec.encode import Encoding
from deltawire.protocol.adapters import AdapterManifest
from deltawire.protocol.chain import SwapMode

KEEP_VERSIONS = 64
"""A replica this far behind still finds a way by deltas."""
ANCHOR_SHARD_BYTES = 4 * 2**30
"""Dense bytes of one anchor file: one S3 upload carries 5 GiB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishOptions:
    """The defaults suit a run whose replicas keep up."""

    encoding: Encoding = "auto"
    anchor_every: int | None = None
    """Versions between anchors; None is adaptive (see cadence.py)."""
    anchor_packed: bool = True
    """Lossless, about a third smaller."""
    anchor_shard_bytes: int = ANCHOR_SHARD_BYTES
    """Anchors of more dense bytes than this go up as several files."""
    keep_versions: int = KEEP_VERSIONS
    """Replicas this far behind still find a way by deltas."""
    skip_levels: tuple[int, ...] = ()
    """Spans of merged files for laggards; their patches are kept in memory for so many versions."""
    swap_mode: SwapMode | None = None
    """What replicas that were not told otherwise do to running requests."""
    adapter: AdapterManifest | None = None
    """Of a LoRA run: the base is published once, versions are adapters."""
