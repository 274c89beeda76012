"""The service as the real OpenEnv client finds it."""

import asyncio
import random
import sys
from pathlib import Path

import pytest

from deltawire_environment.worlds.wordlist import load_words

openenv = pytest.importorskip("openenv.core")

GUESSES = ["crane", "moist", "bulky", "fudge", "whelp", "jumbo"]


async def test_the_real_client_plays_a_whole_game(serve_environment) -> None:
    async with (
        serve_environment() as running,
        openenv.GenericEnvClient(base_url=running.url) as client,
    ):
        first = await client.reset(seed=7)
        assert first.reward is None
        assert not first.done
        assert first.observation["chat"][0]["role"] == "user"
        for guess in GUESSES:
            result = await client.step({"message": f"I say [{guess}]."})
            if result.done:
                break
        assert result.done
        assert result.reward in (0.0, 1.0)
        state = await client.state()
        assert state["step_count"] >= 1
        assert "secret" not in state


async def test_the_sync_client_plays_too(serve_environment) -> None:
    async with serve_environment() as running:

        def play() -> float | None:
            with openenv.GenericEnvClient(base_url=running.url).sync() as client:
                client.reset(seed=1)
                return client.step({"guess": "crane"}).observation["metrics"]["valid"]

        assert await asyncio.to_thread(play) == 1.0


async def test_the_same_seed_gives_a_group_the_same_secret_and_other_seeds_others(
    serve_environment,
) -> None:
    async with serve_environment() as running:
        secrets = []
        for seed in (5, 5, 5, 6, 7, 8):
            async with openenv.GenericEnvClient(base_url=running.url) as client:
                await client.reset(seed=seed)
                result = None
                while result is None or not result.done:
                    result = await client.step({"message": "not a guess"})
                secrets.append(result.observation["info"]["secret"])
        assert len(set(secrets[:3])) == 1
        assert len(set(secrets)) >= 3


async def test_256_parallel_games_end_and_the_rest_of_300_is_told_that_the_house_is_full(
    serve_environment,
) -> None:
    words = sorted(load_words().allowed)
    finished = asyncio.Event()

    async def play(url: str, seed: int, arrived: list[int]) -> str:
        client = openenv.GenericEnvClient(base_url=url, connect_timeout_s=60)
        rng = random.Random(seed)
        try:
            await client.reset(seed=seed)
            arrived.append(seed)
            if len(arrived) + len(refused) == 300:
                finished.set()
            await finished.wait()
            for _ in range(6):
                result = await client.step({"guess": rng.choice(words)})
                if result.done:
                    break
            return "played" if result.done else "unfinished"
        except RuntimeError as error:
            refused.append(seed)
            if len(arrived) + len(refused) == 300:
                finished.set()
            return "refused" if "CAPACITY_REACHED" in str(error) else str(error)
        finally:
            await client.close()

    refused: list[int] = []
    async with serve_environment(max_sessions=256) as running:
        arrived: list[int] = []
        ends = await asyncio.gather(*(play(running.url, seed, arrived) for seed in range(300)))
        assert sorted(set(ends)) == ["played", "refused"]
        assert ends.count("played") == 256
        assert ends.count("refused") == 44
        await running.emptied()


async def test_a_client_that_reconnects_gets_a_new_session_and_no_old_one_is_left(
    serve_environment,
) -> None:
    async with serve_environment() as running:
        client = openenv.GenericEnvClient(base_url=running.url)
        await client.reset(seed=1)
        socket = client._ws
        socket.transport.abort()
        await socket.wait_closed()
        result = await client.reset(seed=1)
        assert not result.done
        await client.close()
        await running.emptied()


async def test_the_mcp_client_lists_and_calls_the_tools_of_a_session(serve_environment) -> None:
    from openenv.core import MCPToolClient

    async with serve_environment() as running:
        async with MCPToolClient(base_url=running.url) as client:
            await client.reset(seed=3)
            assert [tool.name for tool in await client.list_tools()] == ["guess"]
            assert "C R A N E" in await client.call_tool("guess", guess="crane")
            with pytest.raises(RuntimeError, match="did you mean 'guess'"):
                await client.call_tool("gues", guess="crane")
        assert len(running.environment.sessions) == 0


async def test_openenvs_own_validator_passes_the_running_service(serve_environment) -> None:
    async with serve_environment() as running:
        validator = await asyncio.create_subprocess_exec(
            str(Path(sys.executable).parent / "openenv"),
            *("validate", "--url", running.url),
            stdout=asyncio.subprocess.PIPE,
        )
        said, _ = await asyncio.wait_for(validator.communicate(), 120)
        assert b"Verdict: PASS" in said
        assert validator.returncode == 0
