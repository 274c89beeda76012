"""Follow a run: from latest.json to verified files on this disk, for an engine to stage.

Guarantees: what `fetch` returns has the sha256 that the chain promised; nothing larger than the
run's own layout allows is downloaded; what reader.py promises besides. Does not decide *when* to
look (the replica does) nor touch weights (the engine does).
"""

from collections.abc import Sequence
from pathlib import Path

from deltawire.codec.adapter import check_adapter
from deltawire.codec.patch import Layout
from deltawire.protocol.chain import Link, RunManifest, Shard, plan_route
from deltawire.protocol.errors import LayoutMismatch, MalformedMessage
from deltawire.protocol.layout import RUN_KEY, in_run
from deltawire.sync.reader import RunReader

_HEADER_ROOM_BYTES = 128 * 2**20
"""What an object may weigh beyond the dense weights: safetensors' header cap and streams' ends."""

Fetched = list[tuple[Link, Path]]
"""A route as files, in order. A sharded object has one entry per shard, each with its link."""


class Follower(RunReader):
    """One run, read-only. Sync code; calls may come from several threads."""

    def layout(self) -> Layout:
        """The run's tensors, in order."""
        return Layout(self.manifest().tensors)

    def route(self, have: int | None, want: int) -> list[Link]:
        """The cheapest links from the version held to the one wanted, by the newest head seen.

        Raises VersionGap when none lead there.
        """
        head = self._newest or self.head()
        return plan_route(head.links, have=have, want=want)

    def fetch(self, links: Sequence[Link]) -> Fetched:
        """Download what is not cached, check every file, forget what the route does not need.

        Raises ObjectMissing (collected meanwhile: look at the head again), ChecksumMismatch,
        MalformedMessage for a size the layout forbids, StoreUnavailable.
        """
        limit = self.layout().nbytes + _HEADER_ROOM_BYTES
        wanted = [(link, shard) for link in links for shard in _files(link)]
        for link, _ in wanted:
            if link.bytes > limit:
                raise MalformedMessage(
                    f"{link.key}: {link.bytes} bytes announced, {limit} are possible"
                )
        fetched = [(link, self._object(shard)) for link, shard in wanted]
        self._forget_all_but({path for _, path in fetched})
        return fetched

    def _check(self, manifest: RunManifest) -> None:
        """LayoutMismatch for tensors that contradict their digest or the run's adapter."""
        layout = Layout(manifest.tensors)
        if layout.digest != manifest.layout_digest:
            raise LayoutMismatch(
                f"{RUN_KEY}: its tensors have layout digest {layout.digest}, it says "
                f"{manifest.layout_digest}"
            )
        if manifest.adapter is not None:
            check_adapter(layout, manifest.adapter)

    def _object(self, shard: Shard) -> Path:
        path = self._cache / "objects" / f"{shard.sha256}.safetensors"
        key = in_run(self.run_id, shard.key)
        self._verified(key, path, shard.sha256, shard.bytes, xet_hash=shard.xet_hash)
        return path

    def _forget_all_but(self, needed: set[Path]) -> None:
        """Keep the cache to what the newest head still names, and to this route."""
        named = {
            f"{shard.sha256}.safetensors"
            for link in (self._newest.links if self._newest else [])
            for shard in _files(link)
        }
        for path in (self._cache / "objects").glob("*.safetensors"):
            if path not in needed and path.name not in named:
                path.unlink(missing_ok=True)


def _files(link: Link) -> list[Shard]:
    """An object's files: its shards, or the one file it is."""
    whole = Shard(key=link.key, bytes=link.bytes, sha256=link.sha256, xet_hash=link.xet_hash)
    return list(link.shards) or [whole]
