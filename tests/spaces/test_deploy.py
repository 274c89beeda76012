"""A service becomes a Space by the real client's calls, against a small Hub on this machine."""

import base64
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

ROOT = Path(__file__).resolve().parents[2]
SPACE = "me/my-environment"


class SmallHub(ThreadingHTTPServer):
    """The routes of api/repos and api/spaces that a deployment calls."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.created: dict[str, Any] = {}
        self.secrets: dict[str, str] = {}
        self.variables: dict[str, str] = {}
        self.files: dict[str, bytes] = {}
        self.order: list[str] = []


class _Handler(BaseHTTPRequestHandler):
    server: SmallHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Quiet."""

    def _answer(self, body: object, status: int = 200) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _serve(self) -> None:
        hub, path = self.server, urlsplit(self.path).path
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        verb = f"{self.command} {path.removeprefix('/api/').replace(SPACE, '*')}"
        hub.order.append(verb)
        if self.headers.get("Authorization") != "Bearer hf_secret":
            self._answer({"error": "Invalid credentials"}, 401)
            return
        match verb:
            case "POST repos/create" if hub.created:
                self._answer({"url": f"{hub.url}/spaces/{SPACE}"}, 409)
            case "POST repos/create":
                hub.created = json.loads(body)
                self._answer({"url": f"{hub.url}/spaces/{SPACE}"})
            case "POST spaces/*/secrets" | "POST spaces/*/variables":
                said = json.loads(body)
                kept = hub.secrets if path.endswith("secrets") else hub.variables
                kept[said["key"]] = said["value"]
                self._answer({})
            case "POST spaces/*/preupload/main":
                asked = json.loads(body)["files"]
                mode = {"uploadMode": "regular", "shouldIgnore": False, "oid": None}
                self._answer({"files": [{"path": file["path"], **mode} for file in asked]})
            case "POST spaces/*/commit/main":
                self._commit([json.loads(line) for line in body.splitlines()])
            case "GET spaces/*/tree/main":
                self._answer(
                    [{"type": "file", "path": p, "size": 1, "oid": "0"} for p in hub.files]
                )
            case "GET spaces/*" | "GET spaces/*/revision/main":
                names = [{"rfilename": name} for name in hub.files]
                self._answer({"id": SPACE, "sha": "0" * 40, "siblings": names})
            case _:
                self._answer({"valid": True} if path == "/api/validate-yaml" else {})

    def _commit(self, lines: list[dict[str, Any]]) -> None:
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                self.server.files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "deletedFile":
                del self.server.files[value["path"]]
        url = f"{self.server.url}/spaces/{SPACE}/commit/1"
        self._answer({"success": True, "commitOid": "1", "commitUrl": url})

    do_GET = do_POST = _serve


@pytest.fixture
def hub() -> Iterator[SmallHub]:
    server = SmallHub()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def deploy(hub: SmallHub, tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "spaces.deploy", *arguments],
        cwd=ROOT,
        env={
            "HF_ENDPOINT": hub.url,
            "HF_HOME": str(tmp_path),
            "HF_TOKEN": "hf_secret",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "ENVIRONMENT_TOKEN": "very-secret",
            "PATH": "",
        },
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


def test_a_service_becomes_a_private_space_with_its_settings(hub: SmallHub, tmp_path: Path) -> None:
    pytest.importorskip("huggingface_hub")
    hub.files["left/over.py"] = b"of the release before"
    arguments = (
        *("environment", SPACE, "--secret", "ENVIRONMENT_TOKEN"),
        *("--variable", "ENVIRONMENT_JOB=jobs/guess.py"),
    )

    first, again = (deploy(hub, tmp_path, *arguments) for _ in range(2))

    assert first.returncode == 0, first.stderr
    assert first.stdout.strip().endswith(f"/spaces/{SPACE}")
    assert (hub.created["type"], hub.created["sdk"]) == ("space", "docker")
    assert hub.created.get("private") or hub.created.get("visibility") == "private"
    assert hub.secrets == {"ENVIRONMENT_TOKEN": "very-secret"}
    assert hub.variables == {"ENVIRONMENT_JOB": "jobs/guess.py"}
    assert hub.files["Dockerfile"] == (ROOT / "spaces/environment/Dockerfile").read_bytes()
    assert "jobs/guess.py" in hub.files
    assert "left/over.py" not in hub.files
    assert not any(b"very-secret" in content for content in hub.files.values())
    assert hub.order.index("POST spaces/*/secrets") < hub.order.index("POST spaces/*/commit/main")
    assert again.returncode == 0, again.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("trainer", SPACE, "--public"), "a public Space needs a token: --secret TRAINER_TOKEN"),
        (("trainer", SPACE, "--secret", "NOT_SET"), "set NOT_SET in the environment"),
        (("trainer", SPACE, "--variable", "TRAINER_STORE"), "is not NAME=value"),
    ],
)
def test_what_is_missing_is_said_before_anything_is_created(
    hub: SmallHub, tmp_path: Path, arguments: tuple[str, ...], said: str
) -> None:
    pytest.importorskip("huggingface_hub")
    refused = deploy(hub, tmp_path, *arguments)
    assert refused.returncode == 2
    assert said in refused.stderr
    assert hub.order == []
