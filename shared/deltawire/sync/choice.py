"""Which encoding a version gets when it is left to the publisher, and why, in words.

`classes` saves about a quarter of a compact file, and both ends walk the whole base for it. So it
is worth its while where the saved bytes take longer on the link than the walk takes: decided for
each version from the speeds that this publisher measured on the versions before.
"""

from dataclasses import dataclass

from deltawire.codec.encode import CLASSES_SAVE, WALK_ELEMENTS_PER_S, Encoding

_COMPACT_BYTES_A_CHANGE = 1.5
"""About 11 bits, and what a header costs."""
_COMPACT_CHANGES_PER_S = 15e6
"""Encode speed until one was measured."""
_FASTEST_WALK_PER_S = 1e10
"""No memory is read faster; a walk that seems to be took no time that could be told."""
_KEEP = 0.7
"""Share of its weight that a measurement keeps when the next one comes: about three count."""
_ENDS = 2
"""The base is walked when a file is written and when it is read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """An encoding, and what spoke for it."""

    encoding: Encoding
    reason: str


class Rate:
    """Something a second, smoothed: all of the amount over all of the time, the newest most."""

    def __init__(self) -> None:
        self._amount, self._seconds = 0.0, 0.0

    def add(self, amount: float, seconds: float) -> None:
        """A measurement."""
        self._amount = _KEEP * self._amount + amount
        self._seconds = _KEEP * self._seconds + seconds

    @property
    def per_s(self) -> float | None:
        """None until something was measured."""
        return self._amount / self._seconds if self._seconds > 0 else None


class EncodingChoice:
    """Measures links and loops, and decides by them."""

    def __init__(self, wanted: Encoding) -> None:
        self._wanted = wanted
        self._link, self._compact = Rate(), Rate()
        self._walk_per_s = WALK_ELEMENTS_PER_S

    def choose(self, *, changed: int, total: int, holds_base: bool) -> Choice:
        """For a version that changes `changed` of `total` elements.

        `holds_base`: whether this process has all weights under the delta, as classes need.
        """
        if not holds_base and self._wanted in ("auto", "classes"):
            return Choice(encoding="compact", reason="no process holds the whole base for classes")
        if self._wanted != "auto":
            return Choice(encoding=self._wanted, reason="configured")
        link_per_s = self._link.per_s
        if link_per_s is None:
            return Choice(encoding="compact", reason="no upload measured yet")
        saved_s = CLASSES_SAVE * _COMPACT_BYTES_A_CHANGE * changed / link_per_s
        walk_s = _ENDS * total / self._walk_per_s
        better = saved_s > walk_s
        reason = (
            f"classes would save {saved_s:.2g} s at {link_per_s / 1e6:.3g} MB/s and cost "
            f"{walk_s:.2g} s of walking the base"
        )
        return Choice(encoding="classes" if better else "compact", reason=reason)

    def uploaded(self, size_bytes: int, seconds: float) -> None:
        """An object of the chain went up."""
        self._link.add(size_bytes, seconds)

    def encoded(self, encoding: str, *, changed: int, total: int, seconds: float) -> None:
        """A delta was encoded. While classes is not used its speed drifts back to the usual one,
        so that a busy moment does not rule it out for good."""
        if encoding == "compact":
            self._compact.add(changed, seconds)
            self._walk(WALK_ELEMENTS_PER_S)
        elif encoding == "classes":
            compact_s = changed / (self._compact.per_s or _COMPACT_CHANGES_PER_S)
            self._walk(total / max(seconds - compact_s, total / _FASTEST_WALK_PER_S))

    def _walk(self, elements_per_s: float) -> None:
        self._walk_per_s = _KEEP * self._walk_per_s + (1 - _KEEP) * elements_per_s
