"""The episodes of one ticket, side by side, and who of them is waited for.

The members' first prompts are the same, so the first turn is one request with n completions: the
engine computes the prompt once. Members that find the environment full begin later, on their own.
A group ends at its deadline at the latest; stragglers may be cut before.
"""

import asyncio
import math
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from deltawire.protocol.errors import (
    CapacityReached,
    EnvironmentFault,
    ProtocolError,
    RemoteError,
    VersionNotServed,
)
from deltawire.protocol.generation import MOST_COMPLETIONS
from deltawire.protocol.rollouts import RolloutGroup, Ticket
from deltawire.rollout.completer import Completer, Sampled
from deltawire.rollout.deadline import Deadline
from deltawire.rollout.environment import EnvironmentClient
from deltawire.rollout.episode import Episode
from deltawire.rollout.renderer import Renderer
from deltawire.rollout.together import together
from deltawire.rollout.waits import Waits

_BAD_REQUEST = (400, 413, 422)
"""Statuses by which a replica says that the request itself is wrong, such as a prompt too long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StragglerPolicy:
    """When a group stops waiting for its slowest members. The default waits to the deadline.

    Cutting the slowest favours short episodes; over-sampling does so as well. Use with care.
    """

    enough: float = 1.0
    """Share of the group that must have finished before anyone is a straggler."""
    grace_s: float = 0.0
    """How long the rest may then still take. They become rollouts with the status `error`."""
    oversample: int = 0
    """Further episodes that are started; the first `group_size` to finish are the group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workshop:
    """What episodes are made with."""

    environment: EnvironmentClient
    renderer: Renderer
    completer: Completer
    waits: Waits


async def run_group(
    ticket: Ticket,
    shop: Workshop,
    *,
    producer_id: str,
    stragglers: StragglerPolicy = StragglerPolicy(),
) -> RolloutGroup:
    """All episodes of a ticket. Raises EngineError when the policy cannot generate, and
    RemoteError when it refuses us: then there is no group."""
    deadline = Deadline.after(ticket.deadline_s)
    episodes = [
        Episode(
            ticket,
            number,
            environment=shop.environment,
            renderer=shop.renderer,
            completer=shop.completer,
            waits=shop.waits,
            deadline=deadline,
        )
        for number in range(ticket.group_size + stragglers.oversample)
    ]
    try:
        await _play(episodes, ticket, shop, deadline, stragglers)
    finally:
        await asyncio.gather(*(episode.close() for episode in episodes))
    # Finished ones first, in their order: with over-sampling the rest is not part of the group.
    kept = sorted(episodes, key=lambda episode: episode.status == "error")[: ticket.group_size]
    return RolloutGroup(
        group_id=ticket.ticket_id,
        run_id=ticket.run_id,
        task=ticket.task,
        rollouts=[episode.rollout() for episode in kept],
        purpose=ticket.purpose,
        producer_id=producer_id,
        finished_at=time.time(),
    )


async def _play(
    episodes: Sequence[Episode],
    ticket: Ticket,
    shop: Workshop,
    deadline: Deadline,
    stragglers: StragglerPolicy,
) -> None:
    openings: dict[int, Sampled] = {}
    if stragglers == StragglerPolicy():
        # One request for all would make the quick ones wait for the slow ones of the first turn.
        await together(*(_begin(episode) for episode in episodes))
        openings = await _first_turns(episodes, shop, deadline)
    tasks = {
        asyncio.create_task(_member(episode, openings.get(number)))
        for number, episode in enumerate(episodes)
        if not episode.done
    }
    await _wait_for_members(tasks, episodes, ticket, stragglers)


async def _begin(episode: Episode) -> None:
    """Begin now; one that finds no room is left as it is, to begin later."""
    with _faults_are_data(episode):
        try:
            await episode.begin(wait_for_room=False)
        except CapacityReached:
            return


async def _first_turns(
    episodes: Sequence[Episode], shop: Workshop, deadline: Deadline
) -> dict[int, Sampled]:
    """A completion for each episode whose prompt others share; one request for all who do."""
    alike: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for number, episode in enumerate(episodes):
        if episode.begun and not episode.done:
            alike[tuple(episode.request().prompt_ids)].append(number)
    answers: dict[int, Sampled] = {}

    async def ask(numbers: list[int]) -> None:
        with _faults_are_data(*(episodes[number] for number in numbers)):
            request = episodes[numbers[0]].request(n=len(numbers))
            sampled = await shop.completer.complete(request, deadline=deadline)
            for number, completion in zip(numbers, sampled.completions, strict=True):
                answers[number] = replace(sampled, completions=[completion])

    shared = [numbers for numbers in alike.values() if 1 < len(numbers) <= MOST_COMPLETIONS]
    await together(*(ask(numbers) for numbers in shared))
    return answers


async def _member(episode: Episode, opening: Sampled | None) -> None:
    """One episode to its end, or to the fault that ends it; its session is then free for others."""
    try:
        with _faults_are_data(episode):
            if opening is not None:
                await episode.take(opening)
            elif not episode.begun:
                await episode.begin()
            await episode.play()
    finally:
        await episode.close()


async def _wait_for_members(
    tasks: set[asyncio.Task[None]],
    episodes: Sequence[Episode],
    ticket: Ticket,
    stragglers: StragglerPolicy,
) -> None:
    """Until all have ended, or enough have and the grace of the others is over."""
    enough = math.ceil(stragglers.enough * ticket.group_size)
    grace: Deadline | None = None
    try:
        while tasks:
            timeout_s = None if grace is None else grace.left_s
            done, tasks = await asyncio.wait(
                tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
            for task in done:
                task.result()
            if not done:
                break
            if grace is None and sum(e.done and e.status != "error" for e in episodes) >= enough:
                grace = Deadline.after(stragglers.grace_s)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for episode in episodes:
        if not episode.done:
            episode.end("error", "straggler: the others had finished")


@contextmanager
def _faults_are_data(*episodes: Episode) -> Iterator[None]:
    """What the environment, the task or the time is to blame for ends the episodes concerned.

    What the policy is to blame for is raised: another producer may do better.
    """
    try:
        yield
    except (EnvironmentFault, ProtocolError, VersionNotServed) as error:
        _end_all(episodes, f"{type(error).__name__}: {error}")
    except TimeoutError:
        _end_all(episodes, "deadline: the ticket's time was over")
    except RemoteError as error:
        if error.status not in _BAD_REQUEST:
            raise
        _end_all(episodes, f"the policy refused the request: {error}")


def _end_all(episodes: Sequence[Episode], reason: str) -> None:
    for episode in episodes:
        episode.end("error", reason[:500])
