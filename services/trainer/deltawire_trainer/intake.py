"""From the stream to batches of fresh, whole groups. Every group met here gets exactly one fate.

Guarantees: a group is trained at most once, whatever is delivered how often; what is dropped is
written to the journal with its reason before it is acked; what is trained on is acked only once a
checkpoint contains it (see checkpointing.py). Bad groups never stop the trainer.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from deltawire.job.spec import JobSpec
from deltawire.protocol.rollouts import Rollout, RolloutGroup
from deltawire.protocol.rollouts import Sequence as TokenSequence
from deltawire.streams.base import DeliveredGroup, TrainerStreams
from deltawire_trainer.credit import Credit, scores_of
from deltawire_trainer.errors_seen import ErrorTally
from deltawire_trainer.journal import Dropped, Journal
from deltawire_trainer.ledger import Ledger
from deltawire_trainer.losses.algorithms import ALGORITHMS


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What makes a group usable."""

    vocabulary: int
    """Token ids are below this."""
    group_size: int
    min_group: int
    needs_spread: bool
    """Groups whose rewards are all equal teach nothing and are replaced (dynamic sampling)."""
    credit: Credit = "episode"
    """Scores inside an episode that teach as well."""
    agents: tuple[str, ...] = ()
    """Whose sequences are trained on; none named: all."""

    @classmethod
    def of(cls, job: JobSpec, *, vocabulary: int) -> "Rules":
        """The rules of a job."""
        return cls(
            vocabulary=vocabulary,
            group_size=job.train.group_size,
            min_group=min(job.train.min_group, job.train.group_size),
            needs_spread=ALGORITHMS[job.train.algorithm].dynamic_sampling,
            credit=job.train.credit,
            agents=tuple(job.train.agents),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Which rollouts of a group may be trained on; none, with the reason, drops it."""

    keep: tuple[int, ...] = ()
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class UsableGroup:
    """A group in a batch, with the rollouts that count."""

    delivered: DeliveredGroup
    keep: tuple[int, ...]

    @property
    def group(self) -> RolloutGroup:
        """The group as it was delivered."""
        return self.delivered.group

    @property
    def rollouts(self) -> list[Rollout]:
        """The rollouts that count, in order."""
        return [self.group.rollouts[index] for index in self.keep]


def judge(
    group: RolloutGroup,
    rules: Rules,
    *,
    live_version: int,
    max_staleness: int,
    sound: Sequence[int] | None = None,
) -> Verdict:
    """Which rollouts to keep: those that ended well, are sound, and whose oldest token is fresh.

    `sound` is what `sound_members` said of the group before; None asks it now.
    """
    if sound is None:
        sound = sound_members(group, rules)
    if len(sound) < rules.min_group:
        return Verdict(reason="unusable")
    sound = [index for index in sound if _has_agent(group.rollouts[index], rules.agents)]
    if len(sound) < rules.min_group:
        return Verdict(reason="no_agent")
    fresh = tuple(
        index
        for index in sound
        if live_version - (group.rollouts[index].oldest_version or 0) <= max_staleness
    )
    if len(fresh) < rules.min_group:
        return Verdict(reason="stale")
    earned = {
        (
            _rewards(group.rollouts[index], rules.agents),
            scores_of(group.rollouts[index], rules.credit),
        )
        for index in fresh
    }
    if rules.needs_spread and len(earned) == 1:
        return Verdict(reason="no_signal")
    return Verdict(keep=fresh)


def sound_members(group: RolloutGroup, rules: Rules) -> list[int]:
    """Rollouts that ended well and are sound. Looks at every token: ask once a group."""
    return [i for i, r in enumerate(group.rollouts) if is_sound(r, vocabulary=rules.vocabulary)]


def _rewards(rollout: Rollout, agents: tuple[str, ...]) -> tuple[float, ...]:
    """What the sequences trained on were paid; a lone one has its episode's reward."""
    if len(rollout.sequences) == 1:
        return (rollout.reward,)
    return tuple(s.reward for s in rollout.sequences if not agents or s.agent in agents)


def _has_agent(rollout: Rollout, agents: tuple[str, ...]) -> bool:
    return not agents or any(
        sequence.agent in agents and any(sequence.loss_mask[1:]) for sequence in rollout.sequences
    )


def is_sound(rollout: Rollout, *, vocabulary: int) -> bool:
    """Whether a rollout can be trained on: no error, finite numbers, ids the model knows, as many
    scores as tokens."""
    return (
        rollout.status != "error"
        and math.isfinite(rollout.reward)
        and any(any(sequence.loss_mask[1:]) for sequence in rollout.sequences)
        and all(_sequence_is_sound(sequence, vocabulary) for sequence in rollout.sequences)
    )


def _sequence_is_sound(sequence: TokenSequence, vocabulary: int) -> bool:
    scores = sequence.token_rewards
    return (
        math.isfinite(sequence.reward)
        and (scores is None or len(scores) == len(sequence.token_ids))
        and all(math.isfinite(score) for score in scores or ())
        and all(math.isfinite(turn.reward or 0.0) for turn in sequence.turns)
        and all(math.isfinite(logprob) for logprob in sequence.logprobs)
        and all(0 <= token < vocabulary for token in sequence.token_ids)
        and all(
            ids and min(ids) >= 0 and max(ids) < vocabulary for ids in sequence.sampling_mask or ()
        )
    )


@dataclass(frozen=True, slots=True)
class _Held:
    """A group that waits for its step, and which of its rollouts are sound."""

    delivered: DeliveredGroup
    sound: list[int]


class Intake:
    """Holds the groups that were delivered and not yet used."""

    def __init__(
        self,
        streams: TrainerStreams,
        ledger: Ledger,
        journal: Journal,
        rules: Rules,
        *,
        run_id: str,
        trusts_redelivered: bool = True,
    ) -> None:
        self._streams = streams
        self._ledger = ledger
        self._journal = journal
        self._rules = rules
        self._run_id = run_id
        self._trusts_redelivered = trusts_redelivered
        self._arrived: deque[DeliveredGroup] = deque()
        """Delivered, which streams do once in a process, and not sorted yet."""
        self._held: dict[str, _Held] = {}
        self._to_ack: dict[str, None] = {}
        """Entries that wait for a checkpoint."""
        self._settled: dict[str, None] = {}
        """Entries that wait for nothing but streams that answer."""
        self.duplicates = 0
        """Deliveries of groups that already had their fate."""
        self.errors = ErrorTally()
        """Of groups that were dropped since `take_errors`."""
        self.on_eval: Callable[[RolloutGroup], None] | None = None
        """Told of evaluation groups, which are never trained on."""

    @property
    def held(self) -> int:
        """Groups waiting for their step."""
        return len(self._held)

    @property
    def rollouts_held(self) -> int:
        """Rollouts of those groups."""
        return sum(len(held.delivered.group.rollouts) for held in self._held.values())

    def take_errors(self) -> ErrorTally:
        """The errors of groups dropped so far, to go on the record of one step."""
        taken, self.errors = self.errors, ErrorTally()
        return taken

    def holds(self, group_id: str) -> bool:
        """Whether this group is here and waits for its step."""
        return group_id in self._held

    async def read(self, *, timeout_s: float, limit: int = 64) -> int:
        """Take delivery of what has arrived. Returns how many entries that were.

        Where it is cut short (streams that do not answer, a cancellation) the next call goes on.
        """
        if not self._arrived:
            self._arrived += await self._streams.read(limit=limit, timeout_s=timeout_s)
        taken = 0
        while self._arrived:
            await self._receive(self._arrived[0])
            self._arrived.popleft()
            taken += 1
        await self._ack_settled()
        return taken

    async def drain(self) -> None:
        """Take delivery of everything there is: what an earlier process had not acked, and more."""
        while await self.read(timeout_s=0.0):
            pass

    def batch(self, count: int, *, live_version: int, max_staleness: int) -> list[UsableGroup]:
        """The `count` oldest usable groups, or nothing while there are fewer. Drops the rest that
        cannot be used any more; the next `read` acks them."""
        usable = []
        for group_id, held in list(self._held.items()):
            verdict = judge(
                held.delivered.group,
                self._rules,
                live_version=live_version,
                max_staleness=max_staleness,
                sound=held.sound,
            )
            if verdict.keep:
                usable.append(UsableGroup(delivered=held.delivered, keep=verdict.keep))
            else:
                del self._held[group_id]
                self._drop(held.delivered, verdict.reason)
        if len(usable) < count:
            return []
        return self._take(usable[:count])

    def recorded(self, groups: dict[str, list[int]]) -> list[UsableGroup]:
        """The very batch of a journaled step, to make it again; nothing when part is missing."""
        if any(group_id not in self._held for group_id in groups):
            return []
        found = [
            UsableGroup(delivered=self._held[group_id].delivered, keep=tuple(keep))
            for group_id, keep in groups.items()
        ]
        return self._take(found)

    def settle(self, group_ids: Iterable[str]) -> None:
        """Those of these groups that are here were trained on by an earlier process: they wait for
        a checkpoint only."""
        for group_id in group_ids:
            held = self._held.pop(group_id, None)
            if held is not None:
                self._to_ack[held.delivered.entry_id] = None

    def trained_entries(self) -> list[str]:
        """Entries of every group taken so far and not yet acked."""
        return list(self._to_ack)

    async def ack_trained(self, entry_ids: list[str]) -> None:
        """A checkpoint holds these groups: the streams may forget them."""
        if entry_ids:
            await self._streams.ack(entry_ids)
        for entry_id in entry_ids:
            self._to_ack.pop(entry_id, None)

    async def drop_all(self, reason: str) -> None:
        """Give every held group the same end."""
        for held in self._held.values():
            self._drop(held.delivered, reason)
        self._held.clear()
        await self._ack_settled()

    def _take(self, groups: list[UsableGroup]) -> list[UsableGroup]:
        for usable in groups:
            del self._held[usable.group.group_id]
            self._to_ack[usable.delivered.entry_id] = None
        return groups

    async def _receive(self, delivered: DeliveredGroup) -> None:
        """Sort one delivery: evaluation, already settled, another run's, or held for training."""
        group = delivered.group
        if group.purpose == "eval":
            if self.on_eval is not None:
                self.on_eval(group)
            self._settled[delivered.entry_id] = None
            return
        if group.run_id not in ("", self._run_id):
            await self._streams.dead_letter(delivered, reason=f"of run {group.run_id!r}")
            return
        if self._is_known(delivered):
            self.duplicates += 1
        elif self._ledger.fate(group.group_id) in ("trained", "dropped"):
            # Settled, and its ack was cut short.
            self.duplicates += 1
            self._settled[delivered.entry_id] = None
        elif group.group_id in self._held:
            self.duplicates += 1
            self._settled[delivered.entry_id] = None
        elif delivered.redelivered and not self._trusts_redelivered:
            # A trainer whose journal is gone may have trained on it: never twice.
            self._drop(delivered, "uncertain")
        else:
            self._ledger.adopt(group.group_id)
            self._held[group.group_id] = _Held(delivered, sound_members(group, self._rules))

    def _is_known(self, delivered: DeliveredGroup) -> bool:
        """Whether this very entry is held, or trained on and waiting for a checkpoint."""
        held = self._held.get(delivered.group.group_id)
        return delivered.entry_id in self._to_ack or (
            held is not None and held.delivered.entry_id == delivered.entry_id
        )

    def _drop(self, delivered: DeliveredGroup, reason: str) -> None:
        group_id = delivered.group.group_id
        adopted = self._ledger.fate(group_id) == "unknown"
        self._journal.append(Dropped(group_id=group_id, reason=reason, adopted=adopted))
        self._ledger.adopt(group_id)
        self._ledger.drop(group_id, reason)
        self.errors.add(delivered.group.rollouts)
        self._settled[delivered.entry_id] = None

    async def _ack_settled(self) -> None:
        entries = list(self._settled)
        if entries:
            await self._streams.ack(entries)
        for entry_id in entries:
            del self._settled[entry_id]
