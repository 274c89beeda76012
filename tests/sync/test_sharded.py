"""FSDP2: each rank diffs its own shards, and what arrives is bit-exact."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Partial, Replicate, Shard

from deltawire.protocol.errors import LayoutMismatch
from deltawire.sync.shards import Part, part_of

shapes = st.lists(st.integers(0, 5), min_size=1, max_size=3)


@given(shapes, st.data())
def test_parts_cover_a_tensor_once(shape: list[int], data: st.DataObject) -> None:
    mesh = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=2))
    dims = st.integers(0, len(shape) - 1)
    placements = [data.draw(st.one_of(st.just(Replicate()), st.builds(Shard, dims))) for _ in mesh]
    seen = np.zeros(shape, np.int64)
    whole = np.arange(seen.size).reshape(shape)
    for coordinate in np.ndindex(*mesh):
        part = part_of(shape, placements, mesh, coordinate)
        seen[part.box] += 1
        positions = part.positions(np.arange(part.numel, dtype=np.int64))
        assert positions.tolist() == whole[part.box].reshape(-1).tolist()

    assert (seen == 1).all()


@pytest.mark.parametrize("rows", [1, 2, 5, 7])
@pytest.mark.parametrize("ranks", [2, 3])
def test_parts_are_cut_as_torch_cuts_them(rows: int, ranks: int) -> None:
    tensor = torch.arange(rows * 3).reshape(rows, 3)
    chunks = torch.chunk(tensor, ranks)
    for rank in range(ranks):
        part = part_of((rows, 3), [Shard(0)], [ranks], [rank])
        expected = chunks[rank] if rank < len(chunks) else tensor[:0]
        assert torch.equal(tensor[part.box], expected)


def test_the_worked_example_of_the_docstring_holds() -> None:
    part = part_of((7, 3), [Shard(0)], [2], [1])
    assert part == Part(shape=(7, 3), begin=(4, 0), end=(7, 3))
    assert part.positions(np.array([0, 4], np.int64)).tolist() == [12, 16]


def test_another_placement_is_refused() -> None:
    with pytest.raises(LayoutMismatch, match="Shard or Replicate"):
        part_of((4,), [Partial()], [2], [0])


@pytest.mark.timeout(600)
def test_an_fsdp2_model_on_two_ranks_is_published_shard_by_shard(tmp_path: Path) -> None:
    script = Path(__file__).with_name("sharded_ranks.py")
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), str(tmp_path), str(rank)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        ended = [rank.communicate(timeout=540) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(error for _, error in ended)
    report = json.loads(ended[0][0])

    assert report["seen"] == [[1, True], [2, True], [3, True], [4, True]]
    assert report["resumed_at"] == 3
    assert ["anchor", 2] in report["links"]
    assert ["delta", 4] in report["links"]
    assert report["links"][-1][1] == 4
    assert report["told"] == ["Fenced", "StoreError"]
