"""A replica and producer in a few lines: follows the bucket for real, samples with the tiny model,
and speaks the real streams. The game: say one token again and again."""

import asyncio
import itertools
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from deltawire.codec.bits import tensor_of
from deltawire.protocol.control import ReplicaStatus
from deltawire.protocol.errors import DeltawireError, LeaseLost, ObjectMissing
from deltawire.protocol.rollouts import Rollout, RolloutGroup, Sequence, Ticket
from deltawire.protocol.versions import PolicyVersion, spans_of
from deltawire.store.base import Store
from deltawire.streams.base import Lease, ProducerStreams
from deltawire.sync.adapters import merged
from deltawire.sync.follower import Follower
from deltawire.sync.replay import empty_tensors, replay

PROMPT = [5, 6, 7]
WANTED = 11
LENGTH = 4


class Player:
    """Plays tickets until stopped."""

    def __init__(
        self,
        store: Store,
        streams: ProducerStreams,
        *,
        run_id: str,
        folder: Path,
        name: str = "p",
        groups: int | None = None,
    ) -> None:
        self._groups = groups
        """Plays so many and then only follows; None plays on."""
        self.follower = Follower(store, run_id, folder)
        self.streams, self.name, self.run_id = streams, name, run_id
        self.version = -1
        self.digest = ""
        self.played: list[str] = []
        self.stopped = False
        self.starts: list[tuple[int, int]] = []
        """(min_version of the ticket, version played with)"""
        self._generator = torch.Generator().manual_seed(1)
        self._numbers = itertools.count()

    async def run(self) -> None:
        while not self.stopped:
            await self._follow()
            await self._register()
            if self._groups is not None and len(self.played) >= self._groups:
                await asyncio.sleep(0.01)
                continue
            lease = await self.streams.claim(self.name, timeout_s=0.05)
            if lease is not None:
                await self._play(lease)

    async def _play(self, lease: Lease) -> None:
        ticket = lease.ticket
        while self.version < ticket.min_version and not self.stopped:
            await asyncio.sleep(0.01)
            await self._follow()
            await self._register()
        self.starts.append((ticket.min_version, self.version))
        group = self.group(ticket)
        try:
            await self.streams.finish(lease, group)
        except LeaseLost:
            return
        self.played.append(ticket.ticket_id)

    def group(self, ticket: Ticket) -> RolloutGroup:
        """Sample every rollout of a ticket from the version held."""
        return RolloutGroup(
            group_id=ticket.ticket_id,
            run_id=self.run_id,
            task=ticket.task,
            rollouts=[self._rollout(ticket) for _ in range(ticket.group_size)],
            purpose=ticket.purpose,
            producer_id=self.name,
        )

    def _rollout(self, ticket: Ticket) -> Rollout:
        ids, logprobs = list(PROMPT), [0.0] * len(PROMPT)
        with torch.no_grad():
            for _ in range(LENGTH):
                logits = self.model(input_ids=torch.tensor([ids])).logits[0, -1].float()
                distribution = logits.log_softmax(-1)
                token = int(torch.multinomial(distribution.exp(), 1, generator=self._generator))
                ids.append(token)
                logprobs.append(float(distribution[token]))
        reward = sum(token == WANTED for token in ids[len(PROMPT) :]) / LENGTH
        mask = [0] * len(PROMPT) + [1] * LENGTH
        spans = [
            span.model_copy(
                update={"start": span.start + len(PROMPT), "end": span.end + len(PROMPT)}
            )
            for span in spans_of([self.version] * LENGTH)
        ]
        return Rollout(
            rollout_id=f"{ticket.ticket_id}.{next(self._numbers)}",
            sequences=[Sequence(token_ids=ids, loss_mask=mask, logprobs=logprobs, spans=spans)],
            reward=reward,
            metrics={"wanted": reward},
        )

    async def _follow(self) -> None:
        """Bring the model to the head, by whatever route is cheapest."""
        try:
            head = self.follower.head()
        except ObjectMissing:
            return
        if head.version == self.version:
            return
        route = self.follower.route(None, head.version)
        tensors = empty_tensors(self.follower.layout())
        try:
            digest = replay(self.follower.fetch(route), tensors, run_id=self.run_id)
        except DeltawireError:
            return
        if self.version < 0:
            config = AutoConfig.from_pretrained(self.follower.model_dir())
            self.model = AutoModelForCausalLM.from_config(config).float()
        masters = dict(self.model.named_parameters())
        layout, adapter = tensors.layout, self.follower.manifest().adapter
        bits = dict(tensors.named_bits())
        plain = ((n, tensor_of(bits[n], layout[n].dtype, layout[n].shape)) for n in bits)
        with torch.no_grad():
            for name, weight in plain if adapter is None else merged(bits, layout, adapter):
                masters[name].copy_(weight)
        self.version, self.digest = int(head.version), str(digest)

    async def _register(self) -> None:
        await self.streams.register(
            ReplicaStatus(
                replica_id=self.name,
                run_id=self.run_id,
                engine="player",
                state="serving" if self.version >= 0 else "joining",
                version=PolicyVersion(self.version) if self.version >= 0 else None,
                digest=self.digest,
            ),
            ttl_s=30.0,
        )
