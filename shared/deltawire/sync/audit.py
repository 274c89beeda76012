"""Walk a run's chain from its oldest anchor and check every object that latest.json names.

Each delta and skip file is decoded on the weights it is based on, each anchor read whole, each
whole adapter laid onto the version before; after every version the digest is recomputed over all
weights, so that the running digest is checked too.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from deltawire.codec.anchor import iter_anchor
from deltawire.codec.apply import LiveTensors, scatter
from deltawire.codec.decode import decode_delta, read_header
from deltawire.codec.digest import Digest, check_digests, digest_full
from deltawire.codec.patch import SparsePatch
from deltawire.protocol.chain import Link
from deltawire.protocol.errors import DigestMismatch, StoreError, WeightsError
from deltawire.protocol.layout import ObjectKind
from deltawire.sync.follower import Follower
from deltawire.sync.replay import check_header, empty_tensors

_Check = Callable[[Link, list[Path]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What was found of one link."""

    link: Link
    problem: str = ""
    """Empty: the object is what its link promises."""


def audit(follower: Follower) -> Iterator[Verdict]:
    """A verdict on every link of the newest head, in the order of the walk."""
    head = follower.head()
    walk = _Walk(follower)
    left = sorted(head.links, key=lambda link: (link.version, link.kind != ObjectKind.ANCHOR))
    versions = sorted({link.version for link in left})
    for version in versions:
        for link in [link for link in left if link.version == version and _is_anchor(link)]:
            yield walk.anchor(link)
        for link in [link for link in left if link.version == version and _is_adapter(link)]:
            yield walk.adapter(link)
        for link in [link for link in left if link.base_version == version]:
            yield walk.delta(link)
        walk.advance(version)
    yield from walk.unreached(left)


class _Walk:
    """The weights of one version, and what leads on from it."""

    def __init__(self, follower: Follower) -> None:
        self._follower = follower
        self._tensors = empty_tensors(follower.layout())
        self._version: int | None = None
        self._digest = Digest()
        self._next: dict[int, tuple[list[SparsePatch], Digest]] = {}
        self._seen: set[str] = set()

    def anchor(self, link: Link) -> Verdict:
        """Read an anchor; where the walk has no weights yet, stand on it."""
        return self._judged(link, self._read_anchor)

    def adapter(self, link: Link) -> Verdict:
        """Lay a whole adapter onto whatever version the walk stands on."""
        if self._version is None:
            self._seen.add(link.key)
            return Verdict(link=link, problem="no version before it can be reached")
        return self._judged(link, self._read_adapter)

    def delta(self, link: Link) -> Verdict:
        """Decode a delta or skip file on the weights it is based on."""
        if self._version != link.base_version:
            self._seen.add(link.key)
            return Verdict(link=link, problem=f"its base {link.base_version} cannot be reached")
        return self._judged(link, self._read_delta)

    def advance(self, version: int) -> None:
        """Go to the nearest version that a good object leads to."""
        if self._version != version or not self._next:
            return
        nearest = min(self._next)
        patches, digest = self._next[nearest]
        self._next = {}
        scatter(self._tensors, patches)
        self._version, self._digest = nearest, digest
        if _full(self._tensors) != digest:
            self._version = None

    def unreached(self, links: Sequence[Link]) -> Iterator[Verdict]:
        """Links that the walk never came to."""
        for link in links:
            if link.key not in self._seen:
                problem = f"no object of the chain leads to its base {link.base_version}"
                yield Verdict(link=link, problem=problem)

    def _judged(self, link: Link, check: _Check) -> Verdict:
        self._seen.add(link.key)
        try:
            paths = [path for _, path in self._follower.fetch([link])]
            for path in paths:
                check_header(
                    read_header(path),
                    link,
                    run_id=self._follower.run_id,
                    layout=self._tensors.layout,
                    name=link.key,
                )
            check(link, paths)
        except (WeightsError, StoreError) as error:
            return Verdict(link=link, problem=f"{type(error).__name__}: {error}")
        return Verdict(link=link)

    def _read_anchor(self, link: Link, paths: list[Path]) -> None:
        layout = self._tensors.layout
        found = digest_full(iter_anchor(paths, layout), layout)
        _same(link, found)
        if self._version == link.version:
            _same(link, self._digest)
            return
        for name, bits in iter_anchor(paths, layout):
            self._tensors.write(name, bits)
        self._version, self._digest, self._next = link.version, found, {}

    def _read_adapter(self, link: Link, paths: list[Path]) -> None:
        patches, digest = self._decoded(link, paths)
        if self._version == link.version:
            _same(link, self._digest)
            return
        scatter(self._tensors, patches)
        self._version, self._digest, self._next = link.version, digest, {}
        if _full(self._tensors) != digest:
            self._version = None

    def _read_delta(self, link: Link, paths: list[Path]) -> None:
        self._next[link.version] = self._decoded(link, paths)

    def _decoded(self, link: Link, paths: list[Path]) -> tuple[list[SparsePatch], Digest]:
        """The patches on the weights the walk stands on, and the digest after them."""
        layout = self._tensors.layout
        patches = decode_delta(paths[0], layout, self._tensors)
        header = read_header(paths[0])
        return patches, check_digests(header, patches, layout, held=self._digest, name=link.key)


def _is_anchor(link: Link) -> bool:
    return link.kind is ObjectKind.ANCHOR


def _is_adapter(link: Link) -> bool:
    return link.kind is ObjectKind.ADAPTER


def _full(tensors: LiveTensors) -> Digest:
    return digest_full(tensors.named_bits(), tensors.layout)


def _same(link: Link, found: Digest) -> None:
    if str(found) != link.new_digest:
        raise DigestMismatch(link.key, expected=link.new_digest, actual=str(found))
