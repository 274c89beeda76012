"""What runs in a child: confine, read the program, run it, answer the calls, die.

The program shares this process and may lie about results; it cannot know what was expected.
"""

import importlib
import json
import os
import sys
import traceback

from deltawire_environment.sandbox.confine import confine

UNCONFINED = 71
"""Exit code when the kernel refused to confine us: nothing was run."""

_RESULT_BYTES = 16 * 1024
_TRACEBACK_LINES = 2

_PRELOADED = (
    "abc array base64 bisect calendar cmath collections colorsys copy dataclasses datetime decimal "
    "difflib enum fractions functools hashlib heapq inspect io itertools json keyword math numbers "
    "operator pprint queue random re secrets statistics string struct textwrap time traceback "
    "types typing unicodedata uuid zlib encodings.ascii encodings.latin_1 encodings.utf_16"
)
"""Imported once before any fork: quick to start, and there where no file may be opened."""


def preload() -> None:
    """Import what programs usually import."""
    for name in _PRELOADED.split():
        importlib.import_module(name)


def main(
    *, talk_fd: int, output_fd: int, private: bool, address_space_bytes: int, cpu_s: int
) -> None:
    """Never returns. `talk_fd` brings the program as JSON and takes the results, one a line."""
    try:
        os.dup2(talk_fd, 3)
        os.dup2(output_fd, 1)
        os.dup2(output_fd, 2)
        os.closerange(4, os.sysconf("SC_OPEN_MAX"))
        os.environ.clear()
        confine(private=private, address_space_bytes=address_space_bytes, cpu_s=cpu_s)
    except OSError as error:
        os.write(2, f"{error}\n".encode())
        os._exit(UNCONFINED)
    program = json.loads(_read_all(3))
    os.dup2(3, 0)  # at its end: reading stdin finds nothing
    sys.argv = ["program"]
    code = 1
    try:
        code = _run(program["code"], program["calls"])
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException as error:  # noqa: BLE001 - a program may raise anything
        _report(error)
    finally:
        _flush()
        os._exit(code & 0xFF)


def _run(source: str, calls: list[dict[str, object]]) -> int:
    scope: dict[str, object] = {"__name__": "__main__"}
    exec(compile(source, "<program>", "exec"), scope)
    for call in calls:
        _answer(_result(scope, call))
    return 0


def _result(scope: dict[str, object], call: dict[str, object]) -> dict[str, object]:
    function = scope.get(str(call["function"]))
    if not callable(function):
        return {"error": f"no function {call['function']!r} was defined"}
    try:
        arguments = call["arguments"]
        assert isinstance(arguments, list)
        return {"value": function(*arguments)}
    except Exception as error:  # noqa: BLE001 - a program may raise anything
        return {"error": f"{type(error).__name__}: {error}"[:500]}


def _answer(result: dict[str, object]) -> None:
    try:
        line = json.dumps(result)
    except (TypeError, ValueError) as error:
        line = json.dumps({"error": f"the result is not plain data: {error}"})
    if len(line) > _RESULT_BYTES:
        line = json.dumps({"error": "the result is too large"})
    os.write(3, line.encode() + b"\n")


def _report(error: BaseException) -> None:
    lines = traceback.format_exception(error)[-_TRACEBACK_LINES:]
    os.write(2, "".join(lines)[:2000].encode(errors="replace"))


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            continue  # the program closed it, or nobody reads any more


def _read_all(fd: int) -> bytes:
    chunks = []
    while chunk := os.read(fd, 1 << 16):
        chunks.append(chunk)
    return b"".join(chunks)
