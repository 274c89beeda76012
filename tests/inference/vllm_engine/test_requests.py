"""Our records and vLLM's JSON, both ways."""

import base64
import io
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from deltawire.protocol.errors import (
    EngineError,
    MalformedObject,
    SettingsError,
    VersionNotServed,
)
from deltawire.protocol.generation import GenerateRequest, Sampling
from deltawire.protocol.versions import PolicyVersion, VersionSpan
from deltawire_inference.engines.vllm.adapters import CONFIG_KEY, peft_folder
from deltawire_inference.engines.vllm.options import VllmOptions, serve_command, serve_environment
from deltawire_inference.engines.vllm.requests import (
    completion_of,
    request_body,
    require_pin,
    scores_of,
)
from deltawire_inference.engines.vllm.streaming import tokens_of_event
from deltawire_inference.engines.vllm.workspace import Workspace


def choice(**changes: object) -> dict[str, object]:
    content = [
        {"token_id": 5, "logprob": -0.5, "top_logprobs": [{"token_id": 5, "logprob": -0.5}]},
        {"token_id": 9, "logprob": -1.5, "top_logprobs": []},
    ]
    return {
        "index": 0,
        "token_ids": [5, 9],
        "finish_reason": "length",
        "logprobs": {"content": content},
        "weight_versions": [
            {"version": "3", "start": 0, "end": 1},
            {"version": "4", "start": 1, "end": 2},
        ],
    } | changes


def test_a_request_is_salted_with_the_version_it_starts_at() -> None:
    request = GenerateRequest(
        prompt_ids=[1, 2], n=3, sampling=Sampling(temperature=0, stop=["x"], seed=7), top_logprobs=2
    )

    body = request_body(request, version=4, model="policy-v4")

    assert body["cache_salt"] == "v4"
    assert body["model"] == "policy-v4"
    assert body["token_ids"] == [1, 2]
    wanted = {"n": 3, "seed": 7, "logprobs": 2, "stop": ["x"], "detokenize": True, "top_k": 0}
    assert wanted.items() <= body["sampling_params"].items()


def test_spans_logprobs_and_extras_come_back() -> None:
    routed = io.BytesIO()
    np.save(routed, np.array([[[1, 2]]], np.uint8))
    request = GenerateRequest(
        prompt_ids=[1], want_sampling_mask=True, want_routed_experts=True, top_logprobs=1
    )
    row = choice(
        sampling_mask=[[5, 6], [9]], routed_experts=base64.b64encode(routed.getvalue()).decode()
    )

    completion = completion_of(row, request=request, version=4)

    assert completion.token_ids == [5, 9]
    assert completion.logprobs == [-0.5, -1.5]
    assert completion.spans == [
        VersionSpan(version=3, start=0, end=1),
        VersionSpan(version=4, start=1, end=2),
    ]
    assert completion.sampling_mask == [[5, 6], [9]]
    assert completion.routed_experts == [[[1, 2]]]
    assert completion.top_logprobs == [{5: -0.5}, {}]


def test_without_spans_the_live_version_is_meant_and_a_foreign_label_is_refused() -> None:
    request = GenerateRequest(prompt_ids=[1])

    plain = completion_of(choice(weight_versions=None), request=request, version=4)

    assert plain.spans == [VersionSpan(version=4, start=0, end=2)]
    assert plain.sampling_mask is None
    foreign = [{"version": "default", "start": 0, "end": 2}]
    with pytest.raises(EngineError, match="'default'"):
        completion_of(choice(weight_versions=foreign), request=request, version=4)
    with pytest.raises(EngineError, match="0 logprobs"):
        completion_of(choice(logprobs=None), request=request, version=4)
    with pytest.raises(EngineError, match="'error'"):
        completion_of(choice(finish_reason="error"), request=request, version=4)


def test_a_pin_holds_for_every_token() -> None:
    pinned = GenerateRequest(prompt_ids=[1], policy_version=PolicyVersion(3))
    require_pin(pinned, [PolicyVersion(3)], PolicyVersion(4))
    require_pin(GenerateRequest(prompt_ids=[1]), [PolicyVersion(2)], PolicyVersion(4))
    with pytest.raises(VersionNotServed) as caught:
        require_pin(pinned, [PolicyVersion(3), PolicyVersion(4)], PolicyVersion(4))
    assert caught.value.serving == 4


def test_scores_are_those_of_the_prompt_itself() -> None:
    rows = [None, {"7": {"logprob": -2.0}, "1": {"logprob": -0.1}}]
    answer = {"choices": [{"prompt_logprobs": rows}]}

    assert scores_of(answer, [3, 7]) == [0.0, -2.0]
    with pytest.raises(EngineError, match="2 of 3"):
        scores_of(answer, [3, 7, 8])


def test_streamed_tokens_end_with_the_finish_reason_and_an_error_is_raised() -> None:
    tokens = list(tokens_of_event({"choices": [choice()]}, version=4))
    assert [(t.token_id, t.logprob, t.finish_reason) for t in tokens] == [
        (5, -0.5, None),
        (9, -1.5, "length"),
    ]

    ended = list(
        tokens_of_event(
            {"choices": [choice(token_ids=[], logprobs=None, finish_reason="abort")]}, version=4
        )
    )
    assert [(t.token_id, t.finish_reason) for t in ended] == [(None, "abort")]
    with pytest.raises(EngineError, match="too long"):
        list(tokens_of_event({"error": {"message": "too long"}}, version=4))


def test_the_child_gets_no_secret_of_ours_and_our_arguments_win() -> None:
    options = VllmOptions(arguments=("--dtype", "float16"), adapters=3, environment={"A": "1"})
    inherited = {"PATH": "/bin", "INFERENCE_TOKEN": "s", "HF_TOKEN": "s", "AWS_SECRET": "s"}
    inherited["DELTAWIRE_TOKEN"] = "s"

    environment = serve_environment(options, inherited)
    command = serve_command(options, model_dir=Path("/m"), socket=Path("/s.sock"), dtype="bfloat16")

    assert "s" not in environment.values()
    assert environment["PATH"] == "/bin"
    assert environment["A"] == "1"
    assert environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"
    assert command[:3] == ["vllm", "serve", "/m"]
    assert command[-2:] == ["--dtype", "float16"]
    assert "adapters" in options.capabilities


def test_a_single_file_adapter_becomes_a_folder_that_peft_opens(tmp_path: Path) -> None:
    config = json.dumps({"peft_type": "LORA", "r": 2})
    path = tmp_path / "step_000001.safetensors"
    save_file({"lora_A": torch.zeros(2)}, path, metadata={CONFIG_KEY: config})

    folder = peft_folder(path, tmp_path / "adapter-v1")

    assert json.loads((folder / "adapter_config.json").read_text())["r"] == 2
    assert (folder / "adapter_model.safetensors").stat().st_size == path.stat().st_size
    assert peft_folder(folder, tmp_path / "other") == folder
    save_file({"lora_A": torch.zeros(2)}, path)
    with pytest.raises(MalformedObject, match=CONFIG_KEY):
        peft_folder(path, tmp_path / "adapter-v2")


def test_a_workspace_is_private_and_cleared_of_what_a_predecessor_left(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path / "state")
    workspace.open()
    (workspace.disk / "checkpoint-3").mkdir()
    (workspace.disk / "adapter-policy-v7").mkdir()
    (workspace.memory / "old-plan").write_text("x")

    workspace.open()

    assert [p.name for p in workspace.disk.iterdir() if p.is_dir()] in ([], ["patches"])
    assert list(workspace.memory.iterdir()) == []
    assert workspace.disk.stat().st_mode & 0o077 == 0
    assert workspace.memory.stat().st_mode & 0o077 == 0
    workspace.close()
    assert not workspace.memory.exists()
    with pytest.raises(SettingsError, match="too long"):
        Workspace(tmp_path / ("x" * 120))
