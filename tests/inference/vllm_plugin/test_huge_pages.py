"""Huge pages: asking for them changes neither contents nor addresses."""

import torch

from deltawire_inference.vllm_plugin.huge_pages import merged_spans, use_huge_pages

MIB = 2**20


def test_neighbours_are_joined_and_what_is_too_small_is_left_out() -> None:
    spans = [(3 * MIB + 16, 4 * MIB), (0, 100), (2 * MIB, 3 * MIB + 10), (9 * MIB, 9 * MIB + 5)]

    assert merged_spans(spans) == [(2 * MIB, 4 * MIB)]
    assert merged_spans([]) == []


def test_weights_keep_their_bits_and_their_place() -> None:
    tensors = [torch.arange(3 * MIB, dtype=torch.int32), torch.arange(7)]
    addresses = [t.data_ptr() for t in tensors]

    use_huge_pages(tensors)

    assert [t.data_ptr() for t in tensors] == addresses
    assert torch.equal(tensors[0], torch.arange(3 * MIB, dtype=torch.int32))
