"""A replica tells the trainer where notices reach it, wherever it runs."""

import socket

import pytest

from deltawire.service.settings import load_settings
from deltawire_inference.settings import InferenceSettings


@pytest.mark.parametrize(
    ("variables", "url"),
    [
        ({"INFERENCE_PUBLIC_URL": "https://me.example"}, "https://me.example"),
        ({"SPACE_HOST": "me-inference.hf.space"}, "https://me-inference.hf.space"),
        ({"INFERENCE_HOST": "0.0.0.0"}, f"http://{socket.gethostname()}:7862"),
        ({}, "http://127.0.0.1:7862"),
    ],
)
def test_a_replica_knows_its_address(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], url: str
) -> None:
    base = {"INFERENCE_STORE": "file:///b", "INFERENCE_PORT": "7862", "INFERENCE_TOKEN": "t"}
    for name, value in {**base, **variables}.items():
        monkeypatch.setenv(name, value)
    assert load_settings(InferenceSettings, []).url == url
