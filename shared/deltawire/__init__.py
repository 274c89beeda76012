"""Asynchronous RL for language models: sparse weight deltas through a bucket.

`deltawire.publish(model, store=...)` and `deltawire.follow(store)` are the two verbs for a training
loop of one's own; they load torch only when they are used.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deltawire.sync.own_loop import follow, publish

__all__ = ["follow", "publish"]


def __getattr__(name: str) -> object:
    if name in __all__:
        from deltawire.sync import own_loop

        return getattr(own_loop, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
