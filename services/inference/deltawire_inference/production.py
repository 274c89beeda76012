"""Rollouts made inside the replica: tickets from the streams, its own engine as the policy."""

import asyncio
import logging

from deltawire.protocol.control import ReplicaStatus
from deltawire.protocol.errors import (
    DeltawireError,
    EnvironmentFault,
    SettingsError,
    StreamError,
)
from deltawire.protocol.rollouts import RolloutGroup, Ticket
from deltawire.rollout.completer import Completer
from deltawire.rollout.environment import EnvironmentClient
from deltawire.rollout.group import Workshop, run_group
from deltawire.rollout.producer import Producer
from deltawire.rollout.renderer import Renderer
from deltawire.rollout.waits import Waits
from deltawire.streams.base import ProducerStreams
from deltawire_inference.replica import Replica
from deltawire_inference.text import ReplicaText

log = logging.getLogger(__name__)

_TIME_TO_LIVE_S = 15.0
"""A replica that was silent for so long is forgotten by the trainer."""


class Production:
    """What the replica does for the trainer's streams. Without streams it does nothing."""

    def __init__(
        self,
        replica: Replica,
        text: ReplicaText,
        *,
        streams: ProducerStreams | None,
        environment: EnvironmentClient | None,
        concurrency: int,
        drain_s: float,
    ) -> None:
        self._replica, self._text = replica, text
        self._streams, self._environment = streams, environment
        self._concurrency, self._drain_s = concurrency, drain_s
        self._producer: Producer | None = None
        self.problem = ""
        """Why no rollouts are made although there are streams."""
        self._stopped = asyncio.Event()

    @property
    def producer(self) -> Producer | None:
        """Once the replica serves."""
        return self._producer

    async def run(self) -> None:
        """Produce from the first version served until drained."""
        try:
            await self._replica.joined()
            self._producer = await self._begin()
            if self._producer is not None:
                await self._producer.run(drain_s=self._drain_s)
        except DeltawireError as error:  # the replica serves others all the same
            self.problem = f"no rollouts are made: {error}"
            log.error("no rollouts are made", extra={"reason": str(error)})
        finally:
            self._stopped.set()

    async def _begin(self) -> Producer | None:
        """None without streams. SettingsError without an environment, MalformedObject without a
        chat template."""
        if self._streams is None:
            return None
        if self._environment is None:
            raise SettingsError("INFERENCE_STREAMS needs INFERENCE_ENVIRONMENT_URL beside it")
        return Producer(
            streams=self._streams,
            policy=self._replica,
            environment=self._environment,
            renderer=Renderer(await self._text.tokenizer()),
            consumer=self._replica.replica_id,
            concurrency=self._concurrency,
        )

    async def drain(self) -> None:
        """Claim nothing more, finish or give back what runs."""
        if self._producer is not None:
            self._producer.drain()
            await self._stopped.wait()

    async def group(self, ticket: Ticket) -> RolloutGroup:
        """Run one group now, outside the streams. EnvironmentFault when none is configured."""
        if self._environment is None:
            raise EnvironmentFault("no environment: set INFERENCE_ENVIRONMENT_URL")
        waits = Waits()
        shop = Workshop(
            environment=self._environment,
            renderer=Renderer(await self._text.tokenizer()),
            completer=Completer(self._replica, waits=waits),
            waits=waits,
        )
        return await run_group(ticket, shop, producer_id=self._replica.replica_id)

    async def register(self, status: ReplicaStatus) -> None:
        """Tell the streams that this replica lives. Where they cannot be reached, next time."""
        if self._streams is not None:
            try:
                await self._streams.register(status, ttl_s=_TIME_TO_LIVE_S)
            except StreamError as error:
                log.warning("not registered", extra={"reason": str(error)})

    async def close(self) -> None:
        """Let go of the streams."""
        if self._streams is not None:
            await self._streams.close()
