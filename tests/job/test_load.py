"""A file becomes a Job, or one clear sentence."""

from pathlib import Path

import pytest

from deltawire.job.load import load_job
from deltawire.protocol.errors import JobError

GOOD = "from deltawire.job import Job\njob = Job(name='a', env='letters')\n"


def written(folder: Path, text: str, name: str = "some_job.py") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_a_job_knows_the_folder_it_came_from(tmp_path: Path) -> None:
    assert load_job(written(tmp_path, GOOD)).folder == tmp_path.resolve()


def test_a_lone_job_may_have_any_name(tmp_path: Path) -> None:
    assert load_job(written(tmp_path, GOOD.replace("job =", "mine ="))).name == "a"


def test_a_file_beside_the_job_can_be_imported_but_never_hides_a_library(tmp_path: Path) -> None:
    written(tmp_path, "VALUE = 'beside'\n", "beside_the_job.py")
    written(tmp_path, "raise RuntimeError('the wrong json')\n", "json.py")
    text = "import json\nfrom beside_the_job import VALUE\n" + GOOD.replace("'a'", "VALUE")
    assert load_job(written(tmp_path, text)).name == "beside"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x = 3\n", "defines no Job"),
        (GOOD + GOOD.replace("job =", "b =") + "del job\na = b\n", "defines 2 Jobs"),
        ("def broken(:\n", r"some_job.py:1: "),
        ("import json\n1 / 0\n", r"ZeroDivisionError: division by zero \(some_job.py:2\)"),
        ("import no_such_package\n", "ModuleNotFoundError"),
        ("from deltawire.job import Job\njob = Job(nam='a')\n", "did you mean 'name'"),
        (
            "from deltawire.job import Job\nJob(name='a', env='letters', reward_funcs=[])\n",
            "'rewards'",
        ),
    ],
)
def test_a_bad_file_is_one_sentence_with_its_line(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(JobError, match=said):
        load_job(written(tmp_path, text))


def test_a_missing_file_says_how_to_begin(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="deltawire new"):
        load_job(tmp_path / "none.py")
