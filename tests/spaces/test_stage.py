"""A Space is laid out whole: all its Dockerfile copies is there, its front matter is valid."""

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
SERVICES = ("trainer", "inference", "environment")


@pytest.fixture(scope="module")
def staging() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "deltawire_spaces_stage", ROOT / "spaces/stage.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", SERVICES)
def test_everything_the_dockerfile_copies_is_staged(
    name: str, staging: ModuleType, tmp_path: Path
) -> None:
    staging.stage(name, tmp_path / "space", root=ROOT)
    dockerfile = (tmp_path / "space/Dockerfile").read_text()
    copies = re.findall(r"^COPY --chown=user (.+)$", dockerfile, flags=re.M)
    assert copies
    for line in copies:
        for source in line.split()[:-1]:
            assert (tmp_path / "space" / source).exists(), source


@pytest.mark.parametrize("name", SERVICES)
def test_a_space_holds_no_other_service_and_no_tests(
    name: str, staging: ModuleType, tmp_path: Path
) -> None:
    files = staging.stage(name, tmp_path / "space", root=ROOT)
    services = {file.parts[1] for file in files if file.parts[0] == "services"}
    assert services == {name}
    assert not any(file.parts[0] in ("tests", "bench", "docs") for file in files)


@pytest.mark.parametrize("name", SERVICES)
def test_front_matter_names_the_port_the_image_listens_on(name: str) -> None:
    text = (ROOT / "spaces" / name / "README.md").read_text()
    front = yaml.safe_load(text.split("---")[1])
    dockerfile = (ROOT / "spaces" / name / "Dockerfile").read_text()
    assert front["sdk"] == "docker"
    assert f"EXPOSE {front['app_port']}" in dockerfile
    assert f"{name.upper()}_PORT={front['app_port']}" in dockerfile
    assert len(front["short_description"]) <= 60
    assert "--uid 1000 user" in dockerfile


def test_a_target_with_something_in_it_is_refused(staging: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("mine")
    with pytest.raises(ValueError, match="not empty"):
        staging.stage("trainer", tmp_path, root=ROOT)
    assert (tmp_path / "kept").read_text() == "mine"
