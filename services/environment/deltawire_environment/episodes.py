"""Run episodes: start a world, step it, keep the transcript, score the end.

Built-in worlds run on the event loop; worlds that block run in the pool. What goes wrong in a
user's code becomes an EpisodeFailed with its reason: the session lives on, and nothing is scored 0.
"""

import asyncio
import dataclasses
import json
import logging
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeVar

from pydantic import JsonValue

from deltawire.job.fault import describe
from deltawire.job.reward import Rewarder
from deltawire.job.scoring import EpisodeScore, score_episode
from deltawire.job.suggestion import unknown
from deltawire.job.transcript import Message, Transcript
from deltawire.job.world import Action, BadAction, Episode, Reply, World
from deltawire.protocol.errors import EpisodeFailed
from deltawire.protocol.rollouts import Task
from deltawire.service.metrics import Metrics
from deltawire_environment.pool import Pool
from deltawire_environment.sessions import Session, SessionGone

Value = TypeVar("Value")

log = logging.getLogger(__name__)

_CLOSE_S = 2.0
"""How long the end of the service waits for episodes to give back what they hold."""


class Episodes:
    """The worlds that are offered, the job's rewards, and the pool they run in."""

    def __init__(
        self,
        *,
        worlds: Mapping[str, World],
        rewards: Sequence[Rewarder],
        pool: Pool,
        metrics: Metrics,
        step_timeout_s: float,
    ) -> None:
        """The first world is the default one."""
        self.worlds = dict(worlds)
        self.default = next(iter(self.worlds))
        self.rewards = tuple(rewards)
        self.steps_total = 0
        self.errors_total = 0
        self._pool, self._metrics, self._step_timeout_s = pool, metrics, step_timeout_s
        self._closing: set[asyncio.Task[None]] = set()

    def world(self, name: str = "") -> World:
        """A world by name; "" is the default one. Raises BadAction for an unknown name."""
        try:
            return self.worlds[name or self.default]
        except KeyError:
            raise BadAction(unknown("environment", name, self.worlds)) from None

    async def start(self, session: Session, task: Task, *, episode_id: str | None) -> Reply:
        """Begin an episode in a session, ending the one before."""
        world = self.world(task.environment)
        self.close(session)
        rng = random.Random(f"{task.seed}/{task.split}/{task.index}")
        episode, reply = await self._guard(world, "reset", lambda: world.start(task, rng))
        session.world, session.episode, session.episode_id = world, episode, episode_id
        if session.closed:  # while its world began: nobody else would close the episode
            self.close(session)
            raise SessionGone("the session was closed meanwhile; its episode is lost")
        self._demand_plain(world, "reset", reply)
        session.step_count = 0
        row = dict(episode.row) or task.row
        session.transcript = Transcript(
            task=task.model_copy(update={"row": row}),
            messages=list(reply.messages),
            prompt_length=len(reply.messages),
            metrics=dict(reply.metrics),
            info=dict(reply.info),
        )
        return reply

    async def step(self, session: Session, action: Action) -> Reply:
        """One turn. Raises BadAction for the client's faults, EpisodeFailed for the world's."""
        world, episode, transcript = session.world, session.episode, session.transcript
        if world is None or episode is None or transcript is None:
            raise BadAction("no episode has been started; send a reset first")
        if transcript.done:
            raise BadAction("the episode is over; send a reset to start another")
        _check_fields(world, action)
        with self._metrics.span("environment_step"):
            reply = await self._guard(world, "step", lambda: episode.step(action))
        self._demand_plain(world, "step", reply)
        session.step_count += 1
        self.steps_total += 1
        _write_down(transcript, action, reply)
        if not self.rewards:
            return reply
        if not reply.done:  # what the world pays on the way is its own reward, too
            return dataclasses.replace(reply, reward=None)
        return await self._scored(transcript, reply)

    async def score(self, transcript: Transcript) -> EpisodeScore:
        """What the job's reward functions say of a transcript."""
        score = await score_episode(self.rewards, transcript, run=self._pool)
        for name, reason in score.errors.items():
            self.errors_total += 1
            self._metrics.count("reward_errors_total", reward=name)
            log.warning("reward failed", extra={"reward": name, "reason": reason})
        return score

    def close(self, session: Session) -> None:
        """Give back what the session's episode holds, beside the event loop where it may block."""
        episode, session.episode = session.episode, None
        if episode is not None and session.world is not None:
            closing = asyncio.create_task(self._close(session.world, episode))
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    async def closed(self) -> None:
        """Return when all episodes that were closed have given back what they held, or after a
        while."""
        if self._closing:
            await asyncio.wait(self._closing, timeout=_CLOSE_S)

    async def _close(self, world: World, episode: Episode) -> None:
        try:
            await self._pool(episode.close, timeout_s=self._step_timeout_s, blocking=world.blocking)
        except Exception as error:  # noqa: BLE001 - the border to a user's close()
            log.warning("close failed", extra={"reason": describe(error)})

    async def _scored(self, transcript: Transcript, reply: Reply) -> Reply:
        score = await self.score(transcript)
        failed = "; ".join(f"{name}: {why}" for name, why in score.errors.items())
        return dataclasses.replace(
            reply,
            reward=score.reward,
            reward_parts=score.parts,
            span_rewards=score.spans or reply.span_rewards,
            extra={**reply.extra, **({"turn_rewards": [*score.turns]} if score.turns else {})},
            status="error" if score.reward is None else reply.status,
            reason=failed or reply.reason,
        )

    async def _guard(
        self, world: World, verb: str, call: Callable[[], Value | Awaitable[Value]]
    ) -> Value:
        try:
            return await self._pool(call, timeout_s=self._step_timeout_s, blocking=world.blocking)
        except BadAction:
            raise
        except Exception as error:  # the border to a world, which may be a user's
            raise self._failed(world, verb, describe(error)) from error

    def _demand_plain(self, world: World, verb: str, reply: Reply) -> None:
        """Raises EpisodeFailed for a reply that no client could be sent."""
        try:
            json.dumps([reply.observation(), reply.reward, reply.done])
        except (TypeError, ValueError, LookupError, AttributeError, RecursionError) as error:
            raise self._failed(world, verb, f"it answered no plain data: {error}") from error

    def _failed(self, world: World, verb: str, why: str) -> EpisodeFailed:
        self.errors_total += 1
        self._metrics.count("environment_errors_total", world=world.name)
        reason = f"{world.name}.{verb} failed: {why}"
        log.warning("episode failed", extra={"world": world.name, "reason": reason})
        return EpisodeFailed(reason)


def task_of(data: Mapping[str, JsonValue]) -> Task:
    """The task that a reset's arguments describe; what is no field of a task is its row.

    Example: ``task_of({"seed": 3, "question": "2+2"}) == Task(seed=3, row={"question": "2+2"})``.
    """
    fields = {name: value for name, value in data.items() if value is not None}
    row = fields.pop("row", {})
    known = {
        name: fields.pop(name)
        for name in ("seed", "split", "index", "environment")
        if name in fields
    }
    fields.pop("episode_id", None)
    return Task.model_validate(
        {**known, "row": {**fields, **(row if isinstance(row, dict) else {})}}
    )


def _check_fields(world: World, action: Action) -> None:
    properties = world.action_schema().get("properties")
    if not isinstance(properties, dict):
        return
    for name in action:
        if name not in properties and name != "metadata":
            raise BadAction(unknown("field of an action", name, properties))


def _write_down(transcript: Transcript, action: Action, reply: Reply) -> None:
    said = action.get("message")
    if not isinstance(said, str):
        said = next((value for value in action.values() if isinstance(value, str)), "")
    transcript.messages += [Message(role="assistant", content=said), *reply.messages]
    transcript.metrics |= reply.metrics
    transcript.info |= reply.info
    transcript.reward += reply.reward or 0.0
    transcript.done = reply.done
