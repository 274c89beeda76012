"""Stock `vllm serve` with the plugin installed and nothing of ours in front: curl is enough."""

import os
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from tiny_runs import (
    CPU_ARGUMENTS,
    CPU_ENVIRONMENT,
    PROMPTS,
    RUN_ID,
    VLLM,
    FreshEngines,
    MakeRun,
    TinyRun,
)


@contextmanager
def plain_server(model_dir: Path, run: TinyRun, log: Path) -> Iterator[httpx.Client]:
    """As docs/vllm.md says: one flag, one variable for the store."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = os.environ | CPU_ENVIRONMENT
    environment |= {"VLLM_SERVER_DEV_MODE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    environment |= {"DELTAWIRE_STORE": run.store.uri, "DELTAWIRE_RUN": RUN_ID}
    command = [str(VLLM), "serve", str(model_dir), "--served-model-name", "m", "--port", str(port)]
    command += ["--host", "127.0.0.1", "--dtype", "bfloat16", *CPU_ARGUMENTS]
    command += ["--weight-transfer-config", '{"backend": "deltawire"}', "--enable-scale-out"]
    with log.open("w") as output:
        process = subprocess.Popen(
            command, env=environment, stdout=output, stderr=output, start_new_session=True
        )
    # vLLM closes the connection after each 500, and a kept one would be found broken.
    limits = httpx.Limits(max_keepalive_connections=0)
    client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=300, limits=limits)
    try:
        wait_until_healthy(client, process, log)
        yield client
    finally:
        client.close()
        os.killpg(process.pid, 9)
        process.wait()


def wait_until_healthy(client: httpx.Client, process: subprocess.Popen[bytes], log: Path) -> None:
    while True:
        assert process.poll() is None, log.read_text()[-3000:]
        try:
            if client.get("/health").is_success:
                return
        except httpx.HTTPError:
            time.sleep(0.5)


def tokens_of(client: httpx.Client) -> list[tuple[list[int], list[float]]]:
    """What `tiny_runs.greedy` asks for, of a plain server."""
    client.post("/reset_prefix_cache").raise_for_status()
    answers = []
    for prompt in PROMPTS:
        sampling = {"max_tokens": 32, "temperature": 0, "ignore_eos": True, "logprobs": 0}
        body = {"token_ids": prompt, "sampling_params": sampling}
        choice = client.post("/inference/v1/generate", json=body).json()["choices"][0]
        answers.append((choice["token_ids"], [c["logprob"] for c in choice["logprobs"]["content"]]))
    return answers


def update(client: httpx.Client, info: dict[str, Any]) -> int:
    """vLLM's own session of three calls; the status of the middle one."""
    assert client.post("/start_weight_update").is_success
    status = client.post("/update_weights", json={"update_info": info}).status_code
    if status == 200:
        assert client.post("/finish_weight_update", json={"weight_version": "n"}).is_success
    return status


def test_an_update_needs_only_bucket_coordinates_and_a_bad_one_changes_nothing(
    make_run: MakeRun, fresh: FreshEngines, tmp_path: Path
) -> None:
    run = make_run("tied", encoding="compact")
    base = run.export()
    coordinates = {"repo_id": run.store.uri}
    first = coordinates | {"filename": f"{RUN_ID}/deltas/step_000001.safetensors"}
    for _ in range(4):
        run.step()

    with plain_server(base, run, tmp_path / "vllm.log") as client:
        base_tokens = tokens_of(client)
        assert client.post("/init_weight_transfer_engine", json={"init_info": {}}).is_success

        for bad in (
            {
                "repo_id": "file:///elsewhere",
                "filename": f"{RUN_ID}/deltas/step_000001.safetensors",
            },
            coordinates | {"filename": f"{RUN_ID}/deltas/step_000099.safetensors"},
            coordinates | {"filename": "../run.json"},
            {},
        ):
            assert update(client, bad) == 500
        assert tokens_of(client) == base_tokens

        assert update(client, first | {"update_kind": "sparse_flat"}) == 200
        ahead = coordinates | {"filename": f"{RUN_ID}/deltas/step_000004.safetensors"}
        assert update(client, ahead | {"stage": True}) == 200
        assert update(client, ahead) == 200
        patched = tokens_of(client)

    assert patched != base_tokens
    checkpoint = run.export()
    assert patched == fresh.ask(checkpoint)[0]
    with plain_server(checkpoint, run, tmp_path / "fresh.log") as client:
        assert patched == tokens_of(client)
