"""For any sequence of updates, base + chain is bit-identical to what was published."""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deltawire.codec.bits import bits_of
from deltawire.store.local import LocalStore
from deltawire.sync.follower import Follower
from deltawire.sync.publisher import Publisher
from deltawire.sync.replay import empty_tensors, replay

SHAPES = [(), (0,), (1,), (7, 3), (2, 1, 5)]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
ODD_BITS = [0x0000, 0x8000, 0x7F80, 0xFF80, 0x7FC1, 0xFFFF, 0x7C01, 0x3F80]

Update = list[tuple[int, int, int]]
"""(tensor, position, bits): which element takes which pattern; many per version."""

updates = st.lists(
    st.tuples(
        st.integers(0, len(SHAPES) * len(DTYPES) - 1),
        st.integers(0, 20),
        st.sampled_from(ODD_BITS) | st.integers(0, 0xFFFF),
    ),
    max_size=60,
)


def _model() -> dict[str, torch.Tensor]:
    named = {
        f"{dtype}.{shape}".removeprefix("torch."): torch.zeros(shape, dtype=dtype)
        for dtype in DTYPES
        for shape in SHAPES
    }
    named["tied"] = next(iter(named.values()))
    return named


def _write(tensor: torch.Tensor, position: int, bits: int) -> None:
    if tensor.numel() == 0:
        return
    flat = bits_of(tensor)
    word = bits if flat.itemsize == 2 else bits << 16 | bits
    flat[position % flat.size] = np.array(word, flat.dtype)


@settings(max_examples=25, deadline=None)
@given(
    chain=st.lists(updates, min_size=1, max_size=5),
    encoding=st.sampled_from(["auto", "seed", "compact", "classes"]),
)
def test_base_and_chain_give_the_published_bits(chain: list[Update], encoding: Any) -> None:
    model = _model()
    names = list(model)
    with tempfile.TemporaryDirectory() as folder:
        store = LocalStore(Path(folder, "bucket"))
        follower = Follower(store, "", Path(folder, "cache"))
        with Publisher.open(
            store,
            run_id="",
            named_tensors=model.items(),
            master_dtype="F32",
            encoding=encoding,
            anchor_every=3,
        ) as publisher:
            tensors = empty_tensors(follower.layout())
            digest, have = None, None
            for update in [[], *chain]:
                for tensor, position, bits in update:
                    _write(model[names[tensor]], position, bits)
                if update:
                    publisher.publish(model.items())
                want = follower.head().version
                route = follower.route(have, want)
                if route:
                    digest = replay(follower.fetch(route), tensors, run_id="", digest=digest)
                have = want

                assert str(digest) == publisher.digest
                for name, held in tensors.named_bits():
                    assert held.tobytes() == bits_of(model[name]).tobytes(), name
        assert follower.manifest().tied == {"tied": names[0]}
