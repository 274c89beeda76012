"""One episode: the policy and an environment take turns until one of them is through.

Token-in token-out: a sequence grows by what the template puts in and what the engine sampled, and
no sampled text is ever tokenised again. In a world with several agents each has its own sequence;
the environment says who speaks next. What goes wrong in the environment is data: the rollout gets
the status `error` with its reason (see group.py), and the group goes on.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from deltawire.protocol.generation import Completion, GenerateRequest
from deltawire.protocol.rollouts import Rollout, RolloutStatus, Ticket
from deltawire.rollout.completer import Completer, Sampled
from deltawire.rollout.deadline import Deadline
from deltawire.rollout.environment import EnvironmentClient, EnvSession
from deltawire.rollout.observation import Observation
from deltawire.rollout.renderer import Renderer
from deltawire.rollout.sequence import SequenceBuilder
from deltawire.rollout.waits import Waits


class Episode:
    """begin -> (sample -> take) ... -> done. `rollout()` is the record at any moment."""

    def __init__(
        self,
        ticket: Ticket,
        number: int,
        *,
        environment: EnvironmentClient,
        renderer: Renderer,
        completer: Completer,
        waits: Waits,
        deadline: Deadline,
    ) -> None:
        self._ticket = ticket
        self._number = number
        self._rollout_id = f"{ticket.ticket_id}/{number}"
        self._environment = environment
        self._renderer = renderer
        self._completer = completer
        self._waits = waits
        self._deadline = deadline
        self._session: EnvSession | None = None
        self._sequences: dict[str, SequenceBuilder] = {}
        self._speaker = "policy"
        self._taken: list[tuple[SequenceBuilder, int]] = []
        """Who took each turn of the episode, and its number in that sequence."""
        self._rewards: list[float] = []
        self._agent_rewards: dict[str, float] = {}
        self._reward_parts: dict[str, float] = {}
        self._metrics: dict[str, float] = {}
        self._info: dict[str, Any] = {}
        self._timings_s: dict[str, float] = {}
        self._replica_id = ""
        self._began_at = time.monotonic()
        self.status: RolloutStatus = "ok"
        self.reason = ""
        self.done = False

    async def begin(self, *, wait_for_room: bool = True) -> None:
        """Start the session and read the task. CapacityReached unless it may wait for room."""
        with self._timed("environment"), self._waits.on("environment"):
            self._session, observation = await self._environment.start(
                self._ticket.task, deadline=self._deadline, wait_for_room=wait_for_room
            )
        self._note(observation)
        if not self.done:
            self._read(observation)

    @property
    def begun(self) -> bool:
        """Whether the task was read."""
        return self._session is not None

    async def play(self) -> None:
        """To the end, turn by turn."""
        while not self.done:
            await self.take(await self.sample())

    def request(self, *, n: int = 1) -> GenerateRequest:
        """What to ask the policy now."""
        ticket, ids = self._ticket, self._sequences[self._speaker].token_ids
        stops = [*ticket.sampling.stop_token_ids, *self._renderer.stop_token_ids]
        sampling = ticket.sampling.model_copy(
            update={
                "max_new_tokens": min(ticket.sampling.max_new_tokens, ticket.max_tokens - len(ids)),
                "stop_token_ids": list(dict.fromkeys(stops)),
                "seed": self._seed(),
            }
        )
        return GenerateRequest(
            prompt_ids=ids,
            n=n,
            sampling=sampling,
            policy_version=ticket.policy_version,
            # Born fresh: what has begun goes on wherever it is.
            min_version=None if self._taken else ticket.min_version,
            want_sampling_mask=sampling.top_p < 1.0 or sampling.top_k > 0,
            want_routed_experts=True,  # only an engine that was started for it has them
            session=self._rollout_id,
        )

    def _seed(self) -> int | None:
        """Another one for each member and turn, or equal prompts would get equal completions."""
        seed = self._ticket.sampling.seed
        return None if seed is None else seed + 7919 * self._number + len(self._taken)

    async def sample(self) -> Sampled:
        """One completion for whoever speaks now."""
        with self._timed("generate"):
            return await self._completer.complete(self.request(), deadline=self._deadline)

    async def take(self, sampled: Sampled) -> None:
        """Take one turn: record what was sampled, say it, read the answer."""
        assert self._session is not None
        completion = sampled.completions[0]
        self._replica_id = sampled.replica_id
        builder = self._sequences[self._speaker]
        builder.sampled(completion)
        self._taken.append((builder, len(builder.turns) - 1))
        text = self._renderer.text(completion.token_ids)
        with self._timed("environment"), self._waits.on("environment"):
            observation = await self._session.step(text, deadline=self._deadline)
        self._note(observation)
        if self.done:
            self._finish_last_turn(completion)
        elif len(self._taken) >= self._ticket.max_turns:
            self.end("truncated", "max_turns")
        else:
            self._read(observation)

    def end(self, status: RolloutStatus, reason: str) -> None:
        """Nothing more happens in this episode."""
        self.done, self.status, self.reason = True, status, reason

    async def close(self) -> None:
        """Let go of the session."""
        if self._session is not None:
            await self._session.close()

    def rollout(self) -> Rollout:
        """The record."""
        reward = sum(self._rewards)
        return Rollout(
            rollout_id=self._rollout_id,
            status=self.status,
            reason=self.reason,
            sequences=[
                builder.build(reward=self._agent_rewards.get(agent, reward))
                for agent, builder in self._sequences.items()
            ],
            reward=reward,
            reward_parts=self._reward_parts,
            metrics={**self._metrics, "turns": float(len(self._taken))},
            info=self._info,
            timings_s={**self._timings_s, "total": time.monotonic() - self._began_at},
            replica_id=self._replica_id,
            environment_id=self._session.environment_id if self._session else "",
        )

    def _read(self, observation: Observation) -> None:
        """Put new messages before whoever speaks next, if there is room to answer."""
        self._speaker = observation.agent
        builder = self._sequences.get(self._speaker)
        if builder is None:
            builder = self._sequences[self._speaker] = SequenceBuilder(self._speaker)
            builder.read(self._renderer.prompt(observation.messages))
        else:
            builder.read(self._renderer.continuation(builder.last_turn_ids, observation.messages))
        if len(builder.token_ids) >= self._ticket.max_tokens:
            self.end("truncated", "max_tokens")

    def _note(self, observation: Observation) -> None:
        """Keep what the environment said of the turn that led to it."""
        self._metrics |= observation.metrics
        self._info |= observation.info
        self._reward_parts |= observation.reward_parts
        self._agent_rewards |= observation.agent_rewards
        if observation.reward is not None:
            self._rewards.append(observation.reward)
        if self._taken:
            self._score_turns(observation)
        if observation.status == "error":
            self.end("error", observation.reason or "the environment says so")
        elif observation.done:
            self.end(observation.status, observation.reason)

    def _score_turns(self, observation: Observation) -> None:
        builder, turn = self._taken[-1]
        scores = {len(self._taken) - 1: observation.turn_reward}
        scores |= dict(enumerate(observation.turn_rewards[: len(self._taken)]))
        for index, score in scores.items():
            if score is not None:
                taker, number = self._taken[index]
                taker.reward_turn(number, score)
        said, start = builder.last_turn_ids, builder.turns[turn].start
        for _, end, score in observation.span_rewards:
            if said:
                builder.reward_token(start + self._renderer.token_at(said, max(0, end - 1)), score)

    def _finish_last_turn(self, completion: Completion) -> None:
        if self.status == "ok" and completion.finish_reason == "length":
            self.end("truncated", "length")

    @contextmanager
    def _timed(self, what: str) -> Iterator[None]:
        began_at = time.monotonic()
        try:
            yield
        finally:
            spent_s = time.monotonic() - began_at
            self._timings_s[what] = self._timings_s.get(what, 0.0) + spent_s
