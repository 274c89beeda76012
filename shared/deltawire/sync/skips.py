"""Skip files: several deltas merged into one, for replicas that are behind.

Eight merged steps weigh about half of their eight deltas, and one object costs one round trip
instead of eight.
"""

from collections import deque
from collections.abc import Sequence
from pathlib import Path

from deltawire.codec.encode import Encoding, encode_delta
from deltawire.codec.merge import merge_deltas
from deltawire.codec.patch import Layout, SparsePatch
from deltawire.protocol.chain import Link
from deltawire.protocol.header import ObjectHeader
from deltawire.protocol.layout import ObjectKind
from deltawire.protocol.versions import PolicyVersion
from deltawire.store.base import Store
from deltawire.sync.upload import upload_object


class RecentDeltas:
    """The patches of the last versions, for the skip files that end at the newest one."""

    def __init__(self, levels: Sequence[int]) -> None:
        if any(level < 2 for level in levels):
            raise ValueError(f"a skip file spans at least 2 versions, got {list(levels)}")
        self._levels = sorted(levels)
        self._recent: deque[tuple[int, list[SparsePatch]]] = deque(maxlen=max(levels, default=0))

    def add(self, version: int, patches: list[SparsePatch]) -> list[list[list[SparsePatch]]]:
        """Note a committed version; returns the runs of deltas to merge now, one for each level
        that ends here."""
        if self._recent and self._recent[-1][0] != version - 1:
            self._recent.clear()
        self._recent.append((version, patches))
        return [
            [delta for _, delta in list(self._recent)[-level:]]
            for level in self._levels
            if version % level == 0 and len(self._recent) >= level
        ]


def upload_skip(
    store: Store,
    deltas: Sequence[Sequence[SparsePatch]],
    *,
    layout: Layout,
    run_id: str,
    version: PolicyVersion,
    base_digest: str,
    new_digest: str,
    encoding: Encoding,
    epoch: int,
    folder: Path,
) -> Link:
    """Merge the deltas that end at `version` and upload them under a skip key."""
    header = ObjectHeader(
        sparse=True,
        model_version=version,
        base_version=PolicyVersion(version - len(deltas)),
        run_id=run_id,
        base_digest=base_digest,
        new_digest=new_digest,
    )
    path = folder / "skip.safetensors"
    written = encode_delta(
        merge_deltas(deltas, layout),
        header,
        path,
        layout=layout,
        encoding="seed" if encoding == "seed" else "compact",
    )
    return upload_object(store, path, written.header, kind=ObjectKind.SKIP, epoch=epoch)
