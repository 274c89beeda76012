"""Which policy version made which token."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from deltawire.protocol.versions import PolicyVersion, VersionSpan, newest, oldest, spans_of


@given(st.lists(st.integers(0, 3), max_size=30))
def test_spans_say_the_version_of_every_token(versions: list[int]) -> None:
    spans = spans_of(versions)

    assert [span.version for span in spans for _ in range(span.start, span.end)] == versions
    for before, after in pairwise(spans):
        assert before.end == after.start
        assert before.version != after.version
    assert oldest(spans) == min(versions, default=None)
    assert newest(spans) == max(versions, default=None)


@pytest.mark.parametrize(("start", "end"), [(3, 3), (4, 2), (-1, 2)])
def test_a_span_is_not_empty_or_inverted(start: int, end: int) -> None:
    with pytest.raises(ValidationError):
        VersionSpan(version=PolicyVersion(1), start=start, end=end)
