"""The tutorials' commands: checks are run, runs are resolved, calls go to a real service. And the
tables they point to name what the code has."""

import re
import shlex
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

import pytest
from typer.testing import CliRunner

from deltawire.cli.main import app
from deltawire.job import Env, Job
from deltawire.job.load import load_job
from deltawire.job.registry import WORLD_GROUP
from deltawire.job.rehearsal import rehearse
from deltawire.job.resolve import resolve
from deltawire.job.world import ENV_NAMES
from deltawire.protocol.generation import Sampling

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted((ROOT / "docs/tutorials").glob("*.md"))
ENVIRONMENT = ROOT / "docs/environment.md"


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
    for page in [*PAGES, ENVIRONMENT]:
        for target in re.findall(r"\]\(([^):]+)\)", page.read_text()):
            name, _, anchor = target.partition("#")
            assert (page.parent / name).exists(), (page.name, target)
            assert not anchor or anchor in anchors(page.parent / name), (page.name, target)


def anchors(page: Path) -> list[str]:
    """What GitHub makes of the headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings]


def table_rows(heading: str) -> list[list[str]]:
    """The cells of the tables below a heading of the environment's page."""
    text = ENVIRONMENT.read_text().partition(f"# {heading}\n")[2].partition("\n## ")[0]
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]


@pytest.mark.parametrize("world", sorted(entry_points(group=WORLD_GROUP)), ids=lambda w: w.name)
async def test_the_table_of_worlds_names_every_argument_and_metric(world: EntryPoint) -> None:
    rows = table_rows("Arguments, metrics, facts")
    (row,) = [row for row in rows if re.match(f"`{world.name}[:`]", row[0])]
    for argument in set(world.load().Config.model_fields) - {"variant"}:
        assert f"`{argument}`" in row[1], argument
    if world.name == "reasoning":
        return  # its package need not be here
    resolved = resolve(Job(name="any", env=Env(world.name)))
    try:
        played = (await rehearse(resolved)).transcript
    finally:
        resolved.world.close()
    assert set(re.findall("`(\\w+)`", row[2])) == played.metrics.keys()
    assert set(re.findall("`(\\w+)`", row[3])) == played.info.keys()


def test_the_table_of_settings_names_every_field() -> None:
    named = {name for row in table_rows("Settings of an episode") for name in row[0].split(", ")}
    for field in [*ENV_NAMES, *Sampling.model_fields]:
        assert f"`{field}`" in named, field
