"""The tutorials' commands: checks are run, runs are resolved, calls go to a real service."""

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from deltawire.cli.main import app
from deltawire.job.load import load_job
from deltawire.job.resolve import resolve

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted((ROOT / "docs/tutorials").glob("*.md"))


def commands(page: Path) -> list[list[str]]:
    blocks = re.findall(r"```bash\n(.*?)```", page.read_text(), re.DOTALL)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [shlex.split(line) for line in lines if line.strip()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_command_of_a_page_works(
    page: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Training itself is tested elsewhere: of a `run`, the job and its overrides are resolved."""
    (tmp_path / "jobs").symlink_to(ROOT / "jobs")
    monkeypatch.chdir(tmp_path)
    shown = commands(page)
    assert shown
    for words in shown:
        match words:
            case ["deltawire", "run", job, *overrides]:
                assert resolve(load_job(Path(job)), overrides).spec.name
            case ["deltawire", *arguments]:
                result = CliRunner().invoke(app, arguments)
                assert result.exit_code == 0, result.output
            case ["curl", *_] | [*_, "python", "-m", "deltawire_environment"]:
                continue  # needs a running service: see tests/environment
            case _:
                raise AssertionError(f"nobody tests {words}")


def test_every_example_job_has_a_page_that_names_it() -> None:
    text = "".join(page.read_text() for page in PAGES)
    for job in (ROOT / "jobs").glob("*.py"):
        assert f"jobs/{job.name}" in text, job.name


def test_links_between_pages_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), (page.name, target)
