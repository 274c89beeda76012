"""No field of a log line is called as something that Python's log records hold already: `logging`
raises KeyError for such a line, mostly where something has just gone wrong."""

import ast
import logging
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TAKEN = {"message", "asctime", *vars(logging.LogRecord("", 0, "", 0, "", (), None))}


def _fields(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.keyword)
            and node.arg == "extra"
            and isinstance(node.value, ast.Dict)
        ):
            for key in node.value.keys:
                if isinstance(key, ast.Constant) and isinstance(key.value, str):
                    yield key.value


def test_no_log_line_uses_a_name_of_pythons_own() -> None:
    found = {
        path.relative_to(ROOT).as_posix(): taken
        for folder in ("shared", "services")
        for path in (ROOT / folder).rglob("*.py")
        if (taken := TAKEN.intersection(_fields(ast.parse(path.read_text(encoding="utf-8")))))
    }
    assert found == {}
