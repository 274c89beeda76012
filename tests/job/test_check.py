"""`deltawire check` and `deltawire new`, and every example job."""

import subprocess
import sys
from pathlib import Path

import pytest
from typer import Typer
from typer.testing import CliRunner

from deltawire.cli.job_commands import mount
from deltawire.job.chat_template import find_chat_template, role_problem, template_problem
from deltawire.job.check import check_job
from deltawire.job.estimate import estimate, readable_bytes
from deltawire.job.spec import JobSpec, ModelSpec
from deltawire.job.starter import write_starter
from deltawire.job.transcript import Message
from deltawire.protocol.errors import JobError

ROOT = Path(__file__).resolve().parents[2]
JOBS = sorted((ROOT / "jobs").glob("*.py"))


def runner(*arguments: str):
    app = Typer()
    mount(app)
    return CliRunner().invoke(app, list(arguments))


@pytest.mark.parametrize("path", JOBS, ids=lambda path: path.stem)
def test_every_example_job_is_short_and_passes_its_check(path: Path) -> None:
    assert len(path.read_text().splitlines()) < 100
    report = check_job(path)
    assert report.passed, [f for f in report.findings if f.verdict == "fault"]
    subjects = {finding.subject.split()[0] for finding in report.findings}
    assert {"job", "episode", "reward", "chat", "memory", "bandwidth"} <= subjects


def test_check_shows_where_values_come_from(tmp_path: Path) -> None:
    result = runner("check", str(ROOT / "jobs/guess.py"), "train.lr=2e-6")
    assert result.exit_code == 0
    assert "command line" in result.output
    assert "job file" in result.output
    shown = runner("check", str(ROOT / "jobs/guess.py"), "--changed").output
    assert "train.lr" in shown
    assert "train.seed" not in shown


def test_check_shows_every_setting_with_its_origin_defaults_last(tmp_path: Path) -> None:
    path = tmp_path / "plain.py"
    path.write_text(
        "from deltawire.job import Job\njob = Job(name='p', env='letters', train={'steps': 3})\n"
    )
    lines = runner("check", str(path)).output.splitlines()
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if "│" in line]
    rows = {name: (value, origin) for name, value, origin in cells if name}
    assert rows["train.steps"] == ("3", "job file")
    assert rows["train.groups_per_step"] == ("4", "default")
    assert rows["train.group_size"] == ("8", "default")
    assert rows["sampling.temperature"] == ("1.0", "default")
    assert rows.keys() == {name for name, *_ in check_job(path).settings}
    origins = [origin for *_, origin in cells if origin]
    assert origins == sorted(origins, key=lambda origin: origin == "default")


def test_check_shows_the_recorded_episode() -> None:
    output = runner("check", str(ROOT / "jobs/own_world.py")).output
    assert "user: I hide a number from 1 to 20." in output
    assert "assistant: I think the answer is 42.\n     user: Lower.\n" in output


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("1 / 0\n", "ZeroDivisionError"),
        (
            "from deltawire.job import Job\n"
            "class W:\n  def reset(self): return 'go'\n  def step(self, message): return 1 / 0\n"
            "job = Job(name='w', env=W)\n",
            r"w failed: ZeroDivisionError: division by zero (some_job.py:4)",
        ),
        (
            "from deltawire.job import Job\n"
            "class W:\n  def reset(self): return ''\n"
            "  def step(self, message): return 'x', 1.0, True\n"
            "job = Job(name='w', env=W)\n",
            "the policy has nothing to read",
        ),
        (
            "from deltawire.job import Job, reward\n@reward\ndef bad(episode): return 'x' + 1\n"
            "job = Job(name='w', env='letters', rewards=[bad])\n",
            "reward bad: TypeError",
        ),
        (
            "from deltawire.job import Job\n"
            "job = Job(name='w', env='letters', train={'agents': ['solver']})\n",
            "names solver, but only policy spoke",
        ),
    ],
)
def test_a_fault_is_named_with_its_line_and_the_exit_code_is_one(
    tmp_path: Path, text: str, said: str
) -> None:
    path = tmp_path / "some_job.py"
    path.write_text(text)
    result = runner("check", str(path))
    assert result.exit_code == 1
    assert said in result.output.replace("\n", " ")


QUESTIONS = (
    "from deltawire.job import Env, Job\n"
    "rows = [{{'prompt': str(n), 'answer': '4', 'split': {split!r}}} for n in range(12)]\n"
    "job = Job(name='q', env=Env(dataset=rows, answer='answer'), "
    "eval={{'every': 1, 'episodes': 20}})\n"
)


@pytest.mark.parametrize(
    ("split", "said"),
    [
        ("train", ["12 in train, 0 in eval", "no task is in split 'eval'"]),
        ("eval", ["12 in eval", "eval.episodes=20, but 12 tasks"]),
    ],
)
def test_the_tasks_are_counted_and_an_evaluation_without_any_is_noted(
    tmp_path: Path, split: str, said: list[str]
) -> None:
    path = tmp_path / "q.py"
    path.write_text(QUESTIONS.format(split=split))
    details = [f"{f.subject}: {f.detail}" for f in check_job(path).findings]
    for phrase in said:
        assert any(phrase in detail for detail in details), details


@pytest.mark.parametrize(
    ("source", "verdict", "said"),
    [
        ("./no/such/folder", "fault", "no folder ./no/such/folder"),
        ("some/model", "note", "the run will look for it on the Hub"),
    ],
)
def test_a_model_that_is_not_here_is_told(source: str, verdict: str, said: str) -> None:
    findings = check_job(ROOT / "jobs/guess.py", [f"model.source={source}"]).findings
    (found,) = [finding for finding in findings if finding.subject == "model"]
    assert found.verdict == verdict
    assert said in found.detail


def test_a_folder_in_the_place_of_a_job_says_which_file_to_name() -> None:
    (found,) = check_job(ROOT / "jobs").findings
    assert "is a folder; name a job file in it, such as " in found.detail


def test_the_starter_checks_out_and_its_test_passes(tmp_path: Path) -> None:
    result = runner("new", "my_sums", "--folder", str(tmp_path))
    assert result.exit_code == 0
    assert check_job(tmp_path / "my_sums.py").passed
    assert f"deltawire run {tmp_path}/my_sums.py\n" in (tmp_path / "my_sums.py").read_text()
    test = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)]
    assert subprocess.run(test, cwd=tmp_path, timeout=280, check=False).returncode == 0


def test_the_starters_test_passes_inside_a_project_that_imports_tests_its_own_way(
    tmp_path: Path,
) -> None:
    write_starter("my_sums", tmp_path)
    mode = ("--import-mode=importlib", "-c", "/dev/null", "--rootdir", str(tmp_path))
    test = [sys.executable, "-m", "pytest", "-q", *mode, str(tmp_path / "test_my_sums.py")]
    assert subprocess.run(test, cwd=tmp_path.parent, timeout=280, check=False).returncode == 0


def test_a_starter_never_overwrites_and_wants_a_plain_name(tmp_path: Path) -> None:
    write_starter("mine", tmp_path)
    with pytest.raises(JobError, match="is there already"):
        write_starter("mine", tmp_path)
    with pytest.raises(JobError, match="cannot name a job"):
        write_starter("../mine", tmp_path)


CHAT = [
    Message(role="system", content="s"),
    Message(role="user", content="u"),
    Message(role="assistant", content="a"),
    Message(role="user", content="v"),
]
FAITHFUL = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>\n{% endfor %}"
FORGETFUL = (
    "{% for m in messages %}{% if loop.last or m.role != 'assistant' %}"
    "{{ m.role }}: {{ m.content }}\n{% endif %}{% endfor %}"
)
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"


def test_a_template_that_keeps_earlier_turns_is_fine() -> None:
    assert template_problem(FAITHFUL, CHAT) == ""


@pytest.mark.parametrize(
    "known",
    [
        "{% generation %}x{% endgeneration %}",
        "{% for m in messages %}{% break %}{% endfor %}",
        "{% if strftime_now('%Y') and tools is none %}x{% endif %}",
        "{{ {'é': '<'} | tojson }}",
    ],
)
def test_what_a_replica_renders_is_no_fault(known: str) -> None:
    assert template_problem(known + FAITHFUL, CHAT) == ""


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (FORGETFUL, "rewrites earlier turns"),
        (NO_SYSTEM, "no system"),
        ("{% if %}", "cannot be read"),
    ],
)
def test_a_template_that_cannot_carry_the_conversation_is_told(template: str, said: str) -> None:
    assert said in template_problem(template, CHAT)


def test_a_template_is_found_in_a_model_folder(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "old"}')
    assert find_chat_template(str(tmp_path)) == "old"
    (tmp_path / "chat_template.jinja").write_text("new")
    assert find_chat_template(str(tmp_path)) == "new"
    assert find_chat_template(str(tmp_path / "none")) is None


@pytest.mark.parametrize(
    ("roles", "said"),
    [
        ("system user assistant user", ""),
        ("user assistant tool tool assistant", ""),
        ("user user", "two user messages"),
        ("user system", "after the first place"),
        ("robot", "none of"),
    ],
)
def test_roles_that_templates_refuse_are_told(roles: str, said: str) -> None:
    problem = role_problem([Message(role=role, content="") for role in roles.split()])
    assert (said in problem) if said else problem == ""


def test_an_estimate_is_made_of_the_models_size() -> None:
    needs = estimate(JobSpec(name="a", model=ModelSpec(source="x/y-1B")))
    assert needs is not None
    assert needs.trainer_bytes == 18e9
    assert needs.rollouts_per_step == 32
    assert estimate(JobSpec(name="a", model=ModelSpec(source="x/y"))) is None
    assert readable_bytes(1.5e9) == "1.5 GB"
