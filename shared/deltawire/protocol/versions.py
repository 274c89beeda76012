"""Policy versions and the spans of tokens they produced."""

from collections.abc import Iterable, Sequence
from typing import NewType, Self

from pydantic import Field, model_validator

from deltawire.protocol.wire_model import WireModel

PolicyVersion = NewType("PolicyVersion", int)
"""Counter of published weights; 0 is the base model."""

BASE_VERSION = PolicyVersion(0)


class VersionSpan(WireModel):
    """Tokens [start, end) of a completion were sampled by one policy version.

    Example: a completion of 12 tokens with an update after the fifth has the spans
    ``[VersionSpan(version=7, start=0, end=5), VersionSpan(version=8, start=5, end=12)]``.
    """

    version: PolicyVersion = Field(ge=0)
    start: int = Field(ge=0)
    end: int

    @model_validator(mode="after")
    def _not_inverted(self) -> Self:
        if self.end <= self.start:
            raise ValueError(f"span [{self.start}, {self.end}) is empty or inverted")
        return self


def spans_of(versions: Sequence[int]) -> list[VersionSpan]:
    """Run-length code the version of each token. ``[7, 7, 8] -> [7: 0..2, 8: 2..3]``."""
    spans: list[VersionSpan] = []
    start = 0
    for position in range(1, len(versions) + 1):
        if position == len(versions) or versions[position] != versions[start]:
            version = PolicyVersion(versions[start])
            spans.append(VersionSpan(version=version, start=start, end=position))
            start = position
    return spans


def oldest(spans: Iterable[VersionSpan]) -> PolicyVersion | None:
    """The oldest version in the spans; None when there are no tokens."""
    return min((span.version for span in spans), default=None)


def newest(spans: Iterable[VersionSpan]) -> PolicyVersion | None:
    """The newest version in the spans; None when there are no tokens."""
    return max((span.version for span in spans), default=None)
