"""Samples -> packed micro-batches in which a shared prefix is forwarded once.

The sequences of a micro-batch form a forest: tokens are nodes, and two sequences share a node as
long as they agree. Each node is one position of one packed row, sees exactly its ancestors and
itself, and keeps the position it has in its own sequence. So a group's prompt costs one forward
instead of one per rollout, and so does a system prompt that several groups share; and the
logprobs are those of separate forwards (tested). The language model's head runs only over nodes
that predict a trained token.

Limits: needs full attention in every layer (see Policy.shares_prefixes); the mask is N x N, so
`tokens` bounds its memory. A single sequence needs no mask and suits any architecture.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray

from deltawire_trainer.samples import TrainingSample

_ROOT = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """What fits one micro-batch. A sequence above it travels alone."""

    tokens: int
    """Packed positions: attention memory grows with their square."""
    rows: int = 4096
    """Positions whose logits over the vocabulary are held at once."""
    share_prefixes: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedBatch:
    """One micro-batch. N packed positions, R rows of logits, T trained tokens of S samples.

    Example: ``[p q a b]`` and ``[p q c d]`` with the last two tokens trained pack to input_ids
    ``[p q a c]`` (b and d are only targets), position_ids ``[0 1 2 2]``, rows ``[1 2 3]`` and
    token_row ``[0 1 0 2]``: q predicts both a and c.
    """

    input_ids: torch.Tensor
    """[1, N] int64"""
    position_ids: torch.Tensor
    """[1, N] int64"""
    attention_mask: torch.Tensor | None
    """[1, 1, N, N] bool, true where a position sees another; None for one plain sequence."""
    rows: torch.Tensor
    """[R] int64 packed positions whose logits are needed."""
    token_row: torch.Tensor
    """[T] int64 index into rows of the position that predicts each trained token."""
    targets: torch.Tensor
    """[T] int64 the trained tokens."""
    sample_index: torch.Tensor
    """[T] int64 index into samples, non-decreasing."""
    behaviour_logprobs: torch.Tensor
    """[T] float32"""
    advantages: torch.Tensor
    """[T] float32"""
    versions: torch.Tensor
    """[T] int64"""
    samples: tuple[TrainingSample, ...]

    def to(self, device: torch.device) -> "PackedBatch":
        """The same batch with its tensors on a device."""
        mask = self.attention_mask
        return replace(
            self,
            input_ids=self.input_ids.to(device),
            position_ids=self.position_ids.to(device),
            attention_mask=None if mask is None else mask.to(device),
            rows=self.rows.to(device),
            token_row=self.token_row.to(device),
            targets=self.targets.to(device),
            sample_index=self.sample_index.to(device),
            behaviour_logprobs=self.behaviour_logprobs.to(device),
            advantages=self.advantages.to(device),
            versions=self.versions.to(device),
        )

    @property
    def sampling_mask(self) -> list[list[int]] | None:
        """[T] ids that could have been drawn, when every sample recorded them."""
        if any(sample.sampling_mask is None for sample in self.samples):
            return None
        return [ids for sample in self.samples for ids in sample.sampling_mask or []]


def pack(samples: Iterable[TrainingSample], budget: Budget) -> list[PackedBatch]:
    """Micro-batches within a budget, longest shared prefixes side by side.

    Deterministic: the same samples in any order give the same micro-batches.
    """
    ordered = sorted(samples, key=lambda sample: (sample.token_ids.tolist(), sample.rollout_id))
    packs: list[_Forest] = []
    for sample in ordered:
        fits = bool(packs) and budget.share_prefixes and packs[-1].has_room(sample, budget)
        if not fits:
            packs.append(_Forest())
        packs[-1].add(sample)
    return [forest.packed() for forest in packs]


@dataclass(slots=True)
class _Forest:
    """A micro-batch under construction."""

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    children: dict[tuple[int, int], int] = field(default_factory=dict)
    """(parent node, token) -> node"""
    paths: list[list[int]] = field(default_factory=list)
    """Per sample the node of each of its inputs."""
    samples: list[TrainingSample] = field(default_factory=list)
    trained_tokens: int = 0

    def has_room(self, sample: TrainingSample, budget: Budget) -> bool:
        """Whether the sample fits; counts only the tokens that are not shared."""
        node, shared = _ROOT, 0
        inputs = sample.inputs.tolist()
        for token in inputs:
            following = self.children.get((node, token))
            if following is None:
                break
            node, shared = following, shared + 1
        grown = len(self.tokens) + len(inputs) - shared
        return grown <= budget.tokens and self.trained_tokens + len(sample.trained) <= budget.rows

    def add(self, sample: TrainingSample) -> None:
        """Insert a sequence; its nodes follow those it shares."""
        node = _ROOT
        path: list[int] = []
        for token in sample.inputs.tolist():
            following = self.children.get((node, token))
            if following is None:
                following = len(self.tokens)
                self.tokens.append(token)
                self.parents.append(node)
                self.children[node, token] = following
            node = following
            path.append(node)
        self.paths.append(path)
        self.samples.append(sample)
        self.trained_tokens += len(sample.trained)

    def packed(self) -> PackedBatch:
        """The finished micro-batch."""
        sources = np.concatenate(
            [_sources(p, s) for p, s in zip(self.paths, self.samples, strict=True)]
        )
        rows, token_row = np.unique(sources, return_inverse=True)
        lengths = [len(sample.trained) for sample in self.samples]
        branches = any(parent != i - 1 for i, parent in enumerate(self.parents))
        return PackedBatch(
            input_ids=torch.tensor([self.tokens]),
            position_ids=torch.from_numpy(_depths(self.parents))[None],
            attention_mask=_ancestor_mask(self.parents)[None, None] if branches else None,
            rows=torch.from_numpy(rows),
            token_row=torch.from_numpy(token_row),
            targets=_joined([s.token_ids[s.trained] for s in self.samples]),
            sample_index=torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)),
            behaviour_logprobs=_joined([s.behaviour_logprobs for s in self.samples]),
            advantages=_joined([s.advantages for s in self.samples]),
            versions=_joined([s.versions for s in self.samples]),
            samples=tuple(self.samples),
        )


def _joined(arrays: Sequence[NDArray[np.generic]]) -> torch.Tensor:
    return torch.from_numpy(np.concatenate(arrays))


def _sources(path: list[int], sample: TrainingSample) -> NDArray[np.int64]:
    """[tokens] the node before each trained token, from which it is predicted."""
    return np.asarray(path, dtype=np.int64)[sample.trained - 1]


def _depths(parents: list[int]) -> NDArray[np.int64]:
    """[N] position of each node in its own sequence. Parents come before their children."""
    depths = np.zeros(len(parents), dtype=np.int64)
    for node, parent in enumerate(parents):
        depths[node] = 0 if parent == _ROOT else depths[parent] + 1
    return depths


def _ancestor_mask(parents: list[int]) -> torch.Tensor:
    """[N, N] true where the column is the row's node or one of its ancestors."""
    mask = np.zeros((len(parents), len(parents)), dtype=bool)
    for node, parent in enumerate(parents):
        if parent != _ROOT:
            mask[node, : parent + 1] = mask[parent, : parent + 1]
        mask[node, node] = True
    return torch.from_numpy(mask)
