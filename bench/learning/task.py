"""A job's tasks and rewards without its services: the very world and reward code, in process."""

import inspect
import random
from collections.abc import Awaitable
from typing import TypeVar

from deltawire.job.rehearsal import run_directly
from deltawire.job.resolve import ResolvedJob
from deltawire.job.scoring import score_episode
from deltawire.job.transcript import Message, Transcript
from deltawire.job.world import Episode, Reply
from deltawire.protocol.rollouts import Task
from deltawire_trainer.tickets import TicketBook

T = TypeVar("T")


def task_of(resolved: ResolvedJob, number: int) -> Task:
    """The task of the trainer's ticket with that number."""
    return TicketBook(job=resolved.spec, run_id="").train(number, min_version=0, now_s=0.0).task


async def opening(resolved: ResolvedJob, number: int) -> list[Message]:
    """What the policy reads first."""
    episode, reply = await _start(resolved, number)
    episode.close()
    return list(reply.messages)


async def reward_of(resolved: ResolvedJob, number: int, said: str) -> float:
    """Reward of a task's one-turn episode in which the policy said this."""
    episode, reply = await _start(resolved, number)
    transcript = Transcript(
        task=task_of(resolved, number),
        messages=[*reply.messages, Message(role="assistant", content=said)],
        prompt_length=len(reply.messages),
    )
    try:
        answer = await _value(episode.step({"message": said}))
    finally:
        episode.close()
    transcript.metrics |= answer.metrics
    transcript.reward = answer.reward or 0.0
    transcript.done = answer.done
    if not resolved.job.rewards:
        return transcript.reward
    score = await score_episode(resolved.job.rewarders, transcript, run=run_directly)
    if score.reward is None:
        raise RuntimeError(f"task {number} cannot be scored: {score.errors}")
    return score.reward


async def _start(resolved: ResolvedJob, number: int) -> tuple[Episode, Reply]:
    task = task_of(resolved, number)
    return await _value(resolved.world.start(task, random.Random(task.seed)))


async def _value(given: T | Awaitable[T]) -> T:
    return await given if inspect.isawaitable(given) else given
