"""How a trainer that comes back reaches the state it was in.

1. The newest checkpoint gives masters, optimizer and RNG of some step.
2. The journal names the groups of every step since. The streams still hold them, un-acked: the
   steps are made again and end in the same weights, which were published long ago.
3. Where that is not possible (groups gone, disk lost), the published head is adopted from the
   bucket, so no published learning is undone.
4. What differs from the published head afterwards goes out as the next version.
"""

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import torch

from deltawire.codec.bits import tensor_of
from deltawire.protocol.control import EvalRecord, StepRecord
from deltawire.sync.publisher import Publisher
from deltawire_trainer.journal import (
    Dropped,
    Evaluated,
    Event,
    Issued,
    RolledBack,
    Stopped,
    Synced,
    TakenOver,
    Trained,
)
from deltawire_trainer.ledger import Ledger
from deltawire_trainer.policy import Policy

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Recovered:
    """What the journal knows."""

    ledger: Ledger = field(default_factory=Ledger)
    steps: dict[int, Trained] = field(default_factory=dict)
    evaluations: list[EvalRecord] = field(default_factory=list)
    tickets: int = 0
    """Training tickets issued so far: the data position."""
    lineage: str = ""
    """Marks the tickets of a trainer that took the run over."""
    stop_reason: str = ""
    """Why the run is to train no more; empty when nobody asked for its end."""

    def history(self, step: int) -> list[StepRecord]:
        """Records of the steps up to and including `step`."""
        return [made.record for at, made in sorted(self.steps.items()) if at <= step]

    def after(self, step: int) -> list[Trained]:
        """Steps that a checkpoint of `step` does not contain, in order and without a gap."""
        found: list[Trained] = []
        while (made := self.steps.get(step + 1 + len(found))) is not None:
            found.append(made)
        return found


def recover(events: Iterable[Event], *, checkpoint_step: int) -> Recovered:
    """Read the journal. Groups of steps after the checkpoint count as open again.

    A step whose sync failed was published with a later one: the version is that of the sync.
    """
    state = Recovered()
    for event in events:
        match event:
            case TakenOver(lineage=lineage):
                state.lineage, state.tickets = lineage, 0
            case Issued(ids=ids):
                state.ledger.issue(ids)
                state.tickets += len(ids)
            case Dropped(group_id=group_id, reason=reason):
                state.ledger.adopt(group_id)
                state.ledger.drop(group_id, reason)
            case Trained():
                state.steps[event.record.step] = event
            case Synced(step=step, record=record) if step in state.steps:
                made = state.steps[step]
                kept = made.record.model_copy(update={"sync": record, "version": record.version})
                state.steps[step] = made.model_copy(update={"record": kept})
            case RolledBack(step=step):
                state.steps = {at: made for at, made in state.steps.items() if at <= step}
            case Evaluated(record=evaluation):
                state.evaluations.append(evaluation)
            case Stopped(reason=reason):
                state.stop_reason = reason
            case _:
                pass
    for step, made in state.steps.items():
        for group_id in made.groups:
            state.ledger.adopt(group_id)
        if step <= checkpoint_step:
            state.ledger.train(made.groups, step=step)
    return state


def last_published(steps: Iterable[Trained], *, version: int) -> int:
    """The newest step whose version the bucket's head contains; 0 when there is none."""
    return max((made.record.step for made in steps if made.record.version <= version), default=0)


def adopt_head(publisher: Publisher, policy: Policy) -> int:
    """Make the masters round to what the head really publishes. Returns elements changed.

    A master that already rounds to the published value keeps its finer one.
    """
    pending = publisher.diff(policy.working.items())
    with torch.no_grad():
        for patch in pending.patches:
            assert patch.old is not None  # a diff always records what was published
            flat = policy.masters[patch.name].view(-1)
            index = torch.from_numpy(patch.indices.astype(np.int64)).to(flat.device)
            published = tensor_of(patch.old, publisher.layout[patch.name].dtype)
            flat[index] = published.to(device=flat.device, dtype=flat.dtype)
    policy.refresh()
    publisher.discard(pending)
    log.info("head adopted", extra={"version": publisher.version, "changed": pending.changed})
    return pending.changed
