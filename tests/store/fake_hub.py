"""A small Hugging Face Hub for tests: the bucket routes that the real client calls, over HTTP.

The bytes go where released hf_xet puts them: its token route answers `local://<folder>`, a content
store on disk. One process at a time holds that store open; a second one is refused for a moment,
which the client must survive. Faults on command: `refuse` answers 429, `lose` does the work and
answers 500, `fail_paths` reports files of a batch as failed.

    python fake_hub.py FOLDER     prints its URL and serves until it is killed
"""

import json
import struct
import sys
import threading
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

TOKEN = "hf_test_token"
_ENTRY_BYTES = 48
_SHARD_HEADER_BYTES = 48
_HAS_VERIFICATION, _HAS_METADATA = 0x8000_0000, 0x4000_0000
_END = b"\xff" * 32


@dataclass
class FakeHub:
    """What the server knows. Buckets are {path: entry as the API gives it}."""

    folder: Path
    buckets: dict[str, dict[str, dict[str, object]]] = field(default_factory=dict)
    private: dict[str, bool] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    refuse: int = 0
    lose: int = 0
    fail_paths: set[str] = field(default_factory=set)
    serves_events: bool = True
    url: str = ""
    changed: threading.Condition = field(default_factory=threading.Condition)
    batches: list[list[str]] = field(default_factory=list)
    lock: threading.RLock = field(default_factory=threading.RLock)

    def start(self) -> ThreadingHTTPServer:
        self.folder.mkdir(parents=True, exist_ok=True)
        handler = type("Handler", (_Handler,), {"hub": self})
        server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        return server

    def batch(self, bucket: str, lines: list[dict[str, str]]) -> list[dict[str, str]]:
        """Carry out the operations; returns those that failed."""
        failed = []
        for line in lines:
            path = line["path"]
            if path in self.fail_paths:
                failed.append({"path": path, "error": "storage said no"})
            elif line["type"] == "deleteFile":
                self.buckets[bucket].pop(path, None)
            else:
                self.buckets[bucket][path] = {
                    "type": "file",
                    "path": path,
                    "size": self.size_of(line["xetHash"]),
                    "xetHash": line["xetHash"],
                    "uploadedAt": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
                }
        self.tell([line["path"] for line in lines])
        return failed

    def tell(self, paths: list[str]) -> None:
        """Send the streams a batch of changes; an empty one ends them."""
        with self.changed:
            self.batches.append(paths)
            self.changed.notify_all()

    def end_streams(self) -> None:
        """As a server does when it is replaced."""
        self.tell([])

    def size_of(self, xet_hash: str) -> int:
        """A batch names hashes only; sizes stand in the shards that hf_xet wrote."""
        sizes = {"0" * 64: 0}
        for shard in self.folder.rglob("shards/*.mdb"):
            sizes.update(_sizes(shard.read_bytes()))
        return sizes[xet_hash]


def _sizes(shard: bytes) -> dict[str, int]:
    """xet hash -> bytes of each file in a shard: a header, then per file one head and its segments,
    each maybe followed by as many verification entries and one of metadata."""
    sizes, at = {}, _SHARD_HEADER_BYTES
    while (raw := shard[at : at + 32]) != _END:
        words = struct.unpack("<4Q", raw)
        flags, segments = struct.unpack_from("<II", shard, at + 32)
        at += _ENTRY_BYTES
        sizes["".join(f"{word:016x}" for word in words)] = sum(
            struct.unpack_from("<I", shard, at + i * _ENTRY_BYTES + 36)[0] for i in range(segments)
        )
        repeats = 2 if flags & _HAS_VERIFICATION else 1
        at += (segments * repeats + bool(flags & _HAS_METADATA)) * _ENTRY_BYTES
    return sizes


class _Handler(BaseHTTPRequestHandler):
    hub: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Quiet."""

    def _answer(
        self, body: object = None, status: int = 200, headers: dict[str, str] | None = None
    ) -> None:
        data = json.dumps(body if body is not None else {}).encode()
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        if "X-Linked-Size" not in (headers or {}):
            self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = urlsplit(self.path).path
        if path.endswith("/events"):
            self._stream(path)
            return
        with self.hub.lock:
            self.hub.requests.append(f"{self.command} {path}")
            if self.headers.get("Authorization") != f"Bearer {TOKEN}":
                self._answer({"error": "unauthorized"}, 401)
            elif self.hub.refuse:
                self.hub.refuse -= 1
                self._answer({"error": "slow down"}, 429, {"Retry-After": "0"})
            else:
                self._route([unquote(part) for part in path.split("/")[1:]], body)

    def _route(self, parts: list[str], body: bytes) -> None:
        if parts[:2] == ["api", "buckets"] and len(parts) >= 4:
            bucket, rest = "/".join(parts[2:4]), parts[4:]
            if not rest and self.command == "POST":
                self._create(bucket, json.loads(body or b"{}"))
            elif bucket in self.hub.buckets:
                self._bucket(bucket, rest, body)
            else:
                self._answer({"error": "no such bucket"}, 404, {"X-Error-Code": "RepoNotFound"})
        elif parts[0] == "buckets" and parts[3:4] == ["resolve"]:
            self._resolve("/".join(parts[1:3]), "/".join(parts[4:]))
        else:
            self._answer({"error": "no such route"}, 404)

    def _stream(self, path: str) -> None:
        """Server-sent events, until the streams are ended."""
        self.hub.requests.append(f"{self.command} {path}")
        if not self.hub.serves_events or self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self._answer({"error": "not here"}, 404)
            return
        seen = len(self.hub.batches)
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        self._event("ready", {})
        while True:
            with self.hub.changed:
                while len(self.hub.batches) == seen:
                    self.hub.changed.wait()
                paths = self.hub.batches[seen]
            seen += 1
            if not paths:
                self._event("reconnect", {})
                self.close_connection = True
                return
            changes = [{"path": changed, "op": "update"} for changed in paths]
            self._event("changes", {"cursor": str(seen), "changes": changes})

    def _event(self, name: str, payload: dict[str, object]) -> None:
        self.wfile.write(f": ping\n\nevent: {name}\ndata: {json.dumps(payload)}\n\n".encode())
        self.wfile.flush()

    def _create(self, bucket: str, options: dict[str, object]) -> None:
        if bucket in self.hub.buckets:
            self._answer({"error": "exists", "url": f"{self.hub.url}/buckets/{bucket}"}, 409)
            return
        self.hub.buckets[bucket] = {}
        # huggingface_hub 1.x says `private`, 2.x says `visibility`.
        private = options.get("private") or options.get("visibility") == "private"
        self.hub.private[bucket] = bool(private)
        self._answer({"url": f"{self.hub.url}/buckets/{bucket}"})

    def _bucket(self, bucket: str, rest: list[str], body: bytes) -> None:
        files = self.hub.buckets[bucket]
        match rest:
            case [("xet-write-token" | "xet-read-token")]:
                self._token()
            case ["batch"]:
                failed = self.hub.batch(bucket, [json.loads(row) for row in body.splitlines()])
                lost = self.hub.lose > 0
                self.hub.lose -= lost
                self._answer({"success": not failed, "failed": failed}, 500 if lost else 200)
            case ["paths-info"]:
                wanted = json.loads(body)["paths"]
                self._answer([files[path] for path in wanted if path in files])
            case ["tree", *folder]:
                self._tree(files, "/".join(folder))
            case _:
                self._answer({"error": "no such route"}, 404)

    def _tree(self, files: dict[str, dict[str, object]], folder: str) -> None:
        assert parse_qs(urlsplit(self.path).query).get("recursive") in (["True"], ["true"])
        root = f"{folder}/" if folder else ""
        found = [entry for path, entry in sorted(files.items()) if path.startswith(root)]
        if folder and not found:
            self._answer({"error": "no such folder"}, 404, {"X-Error-Code": "EntryNotFound"})
        else:
            self._answer(found)

    def _token(self) -> None:
        url, until = f"local://{self.hub.folder}", int(time.time()) + 3600
        self._answer(
            {"casUrl": url, "accessToken": "cas", "exp": until},
            headers={
                "X-Xet-Cas-Url": url,
                "X-Xet-Access-Token": "cas",
                "X-Xet-Token-Expiration": str(until),
            },
        )

    def _resolve(self, bucket: str, path: str) -> None:
        entry = self.hub.buckets.get(bucket, {}).get(path)
        if entry is None:
            self._answer({"error": "no such file"}, 404, {"X-Error-Code": "EntryNotFound"})
            return
        self._answer(
            headers={
                "X-Xet-Hash": str(entry["xetHash"]),
                "X-Xet-Refresh-Route": f"{self.hub.url}/api/buckets/{bucket}/xet-read-token",
                "X-Linked-Size": str(entry["size"]),
            }
        )

    do_GET = do_POST = do_HEAD = _serve


if __name__ == "__main__":
    hub = FakeHub(Path(sys.argv[1]))
    hub.start()
    sys.stdout.write(f"{hub.url}\n")
    sys.stdout.flush()
    threading.Event().wait()
