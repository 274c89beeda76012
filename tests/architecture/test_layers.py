"""Boundaries that matter, each with a test that breaks it."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("shared/deltawire", "services", "spaces", "jobs", "bench")

_HEAVY = ("torch", "redis", "fastapi", "huggingface_hub", "numpy", "httpx", "safetensors")


def _sources() -> list[Path]:
    return [
        path
        for folder in PACKAGES
        for path in sorted((ROOT / folder).rglob("*.py"))
        if "build" not in path.parts
    ]


def _loaded_by(statement: str) -> set[str]:
    code = f"{statement}\nimport sys\nprint(' '.join(sorted(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    return {name.split(".")[0] for name in done.stdout.split()}


def test_the_base_distribution_loads_nothing_heavy() -> None:
    modules = [
        f"deltawire.protocol.{path.stem}"
        for path in (ROOT / "shared/deltawire/protocol").glob("*.py")
        if path.stem != "__init__"
    ]
    loaded = _loaded_by("import deltawire, " + ", ".join(modules))
    assert not loaded & set(_HEAVY)


@pytest.mark.parametrize(
    ("module", "forbidden"),
    [
        ("deltawire.cli.main", {"torch", "transformers", "matplotlib", "fastapi", "redis"}),
        ("deltawire_environment.app", {"torch", "transformers", "openenv"}),
        ("deltawire.rollout.producer", {"torch"}),
        ("deltawire.store.base", {"torch", "huggingface_hub", "boto3"}),
    ],
)
def test_a_module_loads_only_what_its_room_needs(module: str, forbidden: set[str]) -> None:
    assert not _loaded_by(f"import {module}") & forbidden


def test_nothing_is_pickled_or_evaluated() -> None:
    banned = {"pickle", "cloudpickle", "dill", "marshal", "shelve"}
    for path in _sources():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                assert not banned & {name.name.split(".")[0] for name in node.names}, path
            elif isinstance(node, ast.ImportFrom):
                assert (node.module or "").split(".")[0] not in banned, path
            elif isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
                raise AssertionError(f"{path}:{node.lineno} loads a pickle")


def test_there_is_no_room_without_a_noun() -> None:
    homeless = {"utils", "util", "helpers", "helper", "common", "misc"}
    assert not [path for path in _sources() if path.stem in homeless or homeless & set(path.parts)]


def test_every_package_says_that_it_is_typed() -> None:
    for package in ("shared/deltawire", *(f"services/{s}/deltawire_{s}" for s in _SERVICES)):
        assert (ROOT / package / "py.typed").exists()


_SERVICES = ("trainer", "inference", "environment")
