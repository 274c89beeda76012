"""A job's reward functions at the end of an episode, through the running service."""

import asyncio

from deltawire.job import Env, HttpScorer, Job, Score, Transcript, reward

from .test_sockets import ask, socket_to


class OneTurn:
    def reset(self) -> str:
        return "Say a number."

    def step(self, message: str) -> dict:
        return {"done": True, "reward": 5.0, "metrics": {"length": float(len(message))}}


class PaysOnTheWay:
    def reset(self) -> str:
        return "Say two numbers."

    def step(self, message: str) -> tuple[str, float, bool]:
        done = message == "3"
        return "And another.", 5.0, done


@reward(weight=2.0)
def number(episode: Transcript) -> float:
    return float(episode.last)


@reward(weight=0.5)
async def short(episode: Transcript) -> float:
    await asyncio.sleep(0)
    return 1.0 - episode.metrics["length"]


@reward(timeout_s=0.05)
async def slow(episode: Transcript) -> float:
    await asyncio.sleep(10)
    return 1.0


@reward
def fine_grained(episode: Transcript) -> Score:
    return Score(value=1.0, turns=[0.25], spans=[(0, 1, 0.5)])


async def final(running, message: str) -> dict:
    async with socket_to(running) as socket:
        await ask(socket, type="reset", data={})
        return (await ask(socket, type="step", data={"message": message}))["data"]


async def test_functions_replace_the_worlds_reward_and_their_parts_are_shown(
    serve_environment,
) -> None:
    job = Job(name="scored", env=Env(OneTurn), rewards=[number, short])
    async with serve_environment(job=job) as running:
        end = await final(running, "3")
        assert end["reward"] == 6.0
        assert end["observation"]["reward_parts"] == {"number": 3.0, "short": 0.0}
        assert end["observation"]["status"] == "ok"


@reward(weight=0.5)
def the_worlds(episode: Transcript) -> float:
    return episode.reward


async def test_what_the_world_pays_on_the_way_is_replaced_too_and_a_function_may_read_it(
    serve_environment,
) -> None:
    job = Job(name="scored", env=Env(PaysOnTheWay), rewards=[number, the_worlds])
    async with serve_environment(job=job) as running, socket_to(running) as socket:
        await ask(socket, type="reset", data={})
        way = (await ask(socket, type="step", data={"message": "2"}))["data"]
        end = (await ask(socket, type="step", data={"message": "3"}))["data"]
        assert (way["reward"], way["done"]) == (None, False)
        assert end["reward"] == 2.0 * 3 + 0.5 * (5 + 5)


async def test_a_failing_function_drops_the_sample_with_a_reason_and_is_counted(
    serve_environment,
) -> None:
    job = Job(name="scored", env=Env(OneTurn), rewards=[number, short])
    async with serve_environment(job=job) as running, running.http() as http:
        end = await final(running, "three")
        assert end["done"] is True
        assert end["reward"] is None
        assert end["observation"]["status"] == "error"
        assert "number: ValueError" in end["observation"]["reason"]
        assert (await final(running, "3"))["reward"] == 6.0
        assert (await http.get("/status")).json()["errors_total"] == 1
        assert 'reward_errors_total{reward="number"} 1.0' in (await http.get("/metrics")).text


async def test_a_function_over_its_time_drops_the_sample_too(serve_environment) -> None:
    job = Job(name="scored", env=Env(OneTurn), rewards=[slow])
    async with serve_environment(job=job) as running:
        end = await final(running, "3")
        assert end["reward"] is None
        assert "slow: gave no answer in time" in end["observation"]["reason"]


async def test_scores_of_turns_and_characters_reach_the_observation(serve_environment) -> None:
    job = Job(name="scored", env=Env(OneTurn), rewards=[fine_grained])
    async with serve_environment(job=job) as running:
        seen = (await final(running, "3"))["observation"]
        assert seen["turn_rewards"] == [0.25]
        assert seen["span_rewards"] == [[0, 1, 0.5]]


async def test_one_service_can_judge_for_another_over_http(serve_environment) -> None:
    judge = Job(name="judge", env=Env(OneTurn), rewards=[number])
    async with serve_environment(job=judge) as judging:
        scorer = HttpScorer(f"{judging.url}/score", name="judge", weight=0.5)
        player = Job(name="player", env=Env(OneTurn), rewards=[scorer])
        async with serve_environment(job=player) as running:
            ends = await asyncio.gather(*(final(running, text) for text in "3456"))
            assert [end["reward"] for end in ends] == [3.0, 4.0, 5.0, 6.0]
            refused = await final(running, "none")
            assert refused["reward"] is None
            assert "could not be judged" in refused["observation"]["reason"]
