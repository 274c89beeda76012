"""One step as the model sees it: all new tokens of all rows on one flat axis, no padding."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """New tokens of one row: `count` of them, the first at position `start` of its sequence."""

    slot: int
    start: int
    count: int


@dataclass(slots=True, kw_only=True)
class Block:
    """Neighbouring rows with equally many new tokens: one call of attention.

    tokens: their part of the flat axis. slots: their part of the cache. queries: new tokens of each
    row. keys: longest sequence among them. starts: [rows] position of each row's first new token.
    """

    tokens: slice
    slots: slice
    queries: int
    keys: int
    starts: torch.Tensor
    _masks: dict[tuple[int | None, int], torch.Tensor] = field(default_factory=dict)

    def mask(self, *, window: int | None, repeats: int, dtype: torch.dtype) -> torch.Tensor:
        """Additive [rows, 1, repeats * queries, keys]: causal, and inside the sliding window.

        `repeats` query heads share one key head; their queries are folded onto one axis. Made once
        a step, not once a layer.
        """
        if self.queries == 1:
            repeats = 1  # one row of the mask broadcasts over the folded heads
        if (window, repeats) not in self._masks:
            device = self.starts.device
            query_at = self.starts[:, None] + torch.arange(self.queries, device=device)
            key_at = torch.arange(self.keys, device=device)
            hidden = key_at[None, None, :] > query_at[:, :, None]
            if window is not None:
                hidden |= key_at[None, None, :] <= query_at[:, :, None] - window
            mask = torch.zeros(hidden.shape, dtype=dtype, device=device)
            mask = mask.masked_fill_(hidden, float("-inf")).repeat(1, repeats, 1)
            self._masks[window, repeats] = mask[:, None]
        return self._masks[window, repeats]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """What one forward pass computes."""

    input_ids: torch.Tensor
    """[1, tokens]"""
    positions: torch.Tensor
    """[tokens] of each token in its own sequence."""
    slots: torch.Tensor
    """[tokens] cache row of each token."""
    last: torch.Tensor
    """[rows] index on the flat axis of each row's last new token."""
    blocks: list[Block]


def plan_step(
    stretches: Sequence[Stretch], token_ids: Sequence[int], *, device: torch.device
) -> StepPlan:
    """Lay out one step. `token_ids` are the stretches' new tokens, one after the other."""
    positions = [stretch.start + i for stretch in stretches for i in range(stretch.count)]
    slots = [stretch.slot for stretch in stretches for _ in range(stretch.count)]
    ends: list[int] = []
    for stretch in stretches:
        ends.append((ends[-1] if ends else 0) + stretch.count)
    return StepPlan(
        input_ids=torch.tensor([list(token_ids)], device=device),
        positions=torch.tensor(positions, device=device),
        slots=torch.tensor(slots, device=device),
        last=torch.tensor([end - 1 for end in ends], device=device),
        blocks=_blocks(stretches, device),
    )


def _blocks(stretches: Sequence[Stretch], device: torch.device) -> list[Block]:
    blocks: list[Block] = []
    begin = token = 0
    while begin < len(stretches):
        first = stretches[begin]
        end = begin + 1
        while (
            end < len(stretches)
            and stretches[end].count == first.count
            and stretches[end].slot == first.slot + end - begin
        ):
            end += 1
        rows = stretches[begin:end]
        width = first.count * len(rows)
        blocks.append(
            Block(
                tokens=slice(token, token + width),
                slots=slice(first.slot, first.slot + len(rows)),
                queries=first.count,
                keys=max(row.start + row.count for row in rows),
                starts=torch.tensor([row.start for row in rows], device=device),
            )
        )
        begin, token = end, token + width
    return blocks
