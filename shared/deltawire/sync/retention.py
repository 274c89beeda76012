"""What may be removed. Pure: from links and listings to a plan; nothing here touches a store.

Two steps, so that a reader is never robbed: first links leave latest.json (`plan_links`), then, a
grace time later, objects that no link names leave the bucket (`plan_sweep`). A follower that read
the former latest.json still finds what it names for that long, and re-plans when it does not.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from deltawire.protocol.chain import Head, Link
from deltawire.protocol.errors import InvalidKey
from deltawire.protocol.layout import ObjectKind, in_run, object_key, parse_key
from deltawire.store.base import ObjectInfo

GRACE_S = 900.0
"""An object that no link names is removed when it is this old: longer than any download takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkPlan:
    """Which links stay in latest.json."""

    keep: list[Link]
    drop: list[Link]


def plan_links(head: Head, *, keep_versions: int) -> LinkPlan:
    """Keep every way to the newest version for a replica at most `keep_versions` behind, and for
    one that holds nothing.

    The newest anchor or whole adapter at or before `head.version - keep_versions` is the floor;
    what leads only to versions at or before the floor goes, but for that object and the anchor
    below it. Without such an object all stays.
    """
    oldest_served = head.version - keep_versions
    alone = [
        link for link in head.links if link.base_version is None and link.version <= oldest_served
    ]
    if not alone:
        return LinkPlan(keep=list(head.links), drop=[])
    floor = max(link.version for link in alone)
    below = max((link.version for link in alone if link.kind is ObjectKind.ANCHOR), default=floor)
    plan = LinkPlan(keep=[], drop=[])
    for link in head.links:
        lowest = link.kind is ObjectKind.ANCHOR and link.version == below
        (plan.keep if lowest or _leads_past(link, floor) else plan.drop).append(link)
    return plan


def outlived(head: Head, link: Link, *, keep_versions: int) -> list[Link]:
    """Links that no route needs once `link` is committed, its version the newest; none until there
    are `keep_versions`, so that they leave together.

    With anchors at most `d` deltas apart latest.json so holds at most d + 2 * keep_versions links
    of deltas, however long the run: about 400 bytes each.
    """
    wider = head.model_copy(update={"version": link.version, "links": [*head.links, link]})
    drop = plan_links(wider, keep_versions=keep_versions).drop
    return drop if len(drop) >= keep_versions else []


def _leads_past(link: Link, floor: int) -> bool:
    if link.base_version is None:
        return link.version >= floor
    return link.base_version >= floor


def linked_keys(head: Head) -> set[str]:
    """Keys, relative to the run, of every object that `head` names."""
    return {shard.key for link in head.links for shard in link.shards} | {
        link.key for link in head.links
    }


def may_be_arriving(head: Head) -> set[str]:
    """Keys that the trainer of this head may be uploading, as far as others can tell: an anchor of
    any version since the last one, whose first shards can be old when the last one lands."""
    anchors = [link.version for link in head.links if link.kind is ObjectKind.ANCHOR]
    versions = range(max(anchors, default=-1) + 1, head.version + 2)
    return {object_key(ObjectKind.ANCHOR, version, epoch=head.epoch) for version in versions}


def plan_sweep(
    listing: Sequence[ObjectInfo],
    head: Head,
    *,
    now_s: float,
    grace_s: float = GRACE_S,
    arriving: Collection[str] = (),
) -> list[ObjectInfo]:
    """Objects of the run that no link names and that have been lying for `grace_s`.

    `listing` is the store's, below the run; `arriving` are keys relative to the run that this
    process is uploading, in one file or in shards. Whatever is not the key of an anchor, delta,
    adapter or skip file is not ours to remove.
    """
    named = linked_keys(head)
    prefix = in_run(head.run_id, "")
    return [
        info
        for info in listing
        if (key := info.key.removeprefix(prefix)) not in named
        and (whole := _whole_key(key)) is not None
        and whole not in arriving
        and now_s - info.modified_at >= grace_s
    ]


def _whole_key(key: str) -> str | None:
    """The object's key without its shard number; None for a key that is no object's."""
    try:
        parsed = parse_key(key)
    except InvalidKey:
        return None
    return object_key(parsed.kind, parsed.version, epoch=parsed.epoch, base=parsed.base)
