"""Play one episode without a model: the lines are recorded, the world and the rewards are real."""

import asyncio
import inspect
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from deltawire.job.resolve import ResolvedJob
from deltawire.job.reward import Answer
from deltawire.job.scoring import EpisodeScore, score_episode
from deltawire.job.transcript import Message, Transcript
from deltawire.protocol.rollouts import Task

RECORDED = ("[crane]", "I think the answer is 42.", "<answer>7</answer>", "yes")
"""What the policy says, in turn, when the job brings no lines of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsal:
    """How the episode went."""

    transcript: Transcript
    score: EpisodeScore | None
    """Of the job's reward functions; None when the world owns the reward."""
    agents: list[str]
    """Who spoke, in the order of their first words."""


async def rehearse(
    resolved: ResolvedJob, *, seed: int = 0, lines: Sequence[str] = RECORDED
) -> Rehearsal:
    """Play to the end, or to the job's turn limit. Raises whatever the user's code raises."""
    world, spec = resolved.world, resolved.spec
    task = Task(seed=seed, environment=spec.env.name)
    started = world.start(task, random.Random(seed))
    episode, reply = await started if inspect.isawaitable(started) else started
    transcript = Transcript(
        task=task.model_copy(update={"row": dict(episode.row)}),
        messages=list(reply.messages),
        prompt_length=len(reply.messages),
    )
    agents: dict[str, None] = {}
    try:
        for turn in range(spec.env.max_turns):
            agents[reply.agent] = None
            said = lines[turn % len(lines)]
            stepped = episode.step({"message": said})
            reply = await stepped if inspect.isawaitable(stepped) else stepped
            transcript.messages += [Message(role="assistant", content=said), *reply.messages]
            transcript.metrics |= reply.metrics
            transcript.info |= reply.info
            transcript.reward += reply.reward or 0.0
            transcript.done = reply.done
            if reply.done:
                break
    finally:
        closing = episode.close()
        if inspect.isawaitable(closing):
            await closing
    rewards = resolved.job.rewarders
    score = await score_episode(rewards, transcript, run=run_directly) if rewards else None
    return Rehearsal(transcript=transcript, score=score, agents=list(agents))


async def run_directly(
    call: Callable[[], Answer | Awaitable[Answer]], *, timeout_s: float, blocking: bool
) -> Answer:
    """A Runner for one short call: a thread when it blocks, and the deadline."""
    async with asyncio.timeout(timeout_s):
        answer = await asyncio.to_thread(call) if blocking else call()
        return await answer if isinstance(answer, Awaitable) else answer
