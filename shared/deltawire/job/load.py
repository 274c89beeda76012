"""A job file becomes a Job. The file is the user's code: it runs here, and nowhere else."""

import importlib.util
import re
import sys
from dataclasses import fields, replace
from pathlib import Path
from types import ModuleType

from deltawire.job.fault import describe
from deltawire.job.job import Job, Model
from deltawire.job.suggestion import unknown
from deltawire.protocol.errors import JobError


def load_job(path: Path) -> Job:
    """Run the file and take the Job it defines.

    Raises JobError in one sentence: no such file, an error with its line, or no job in it.
    """
    path = path.expanduser().resolve()
    if path.is_dir():
        files = sorted(file.name for file in path.glob("*.py"))
        such = f", such as {files[0]}" if files else ""
        raise JobError(f"{path} is a folder; name a job file in it{such}")
    if not path.is_file():
        raise JobError(f"no job file {path}; `deltawire new NAME` writes one")
    module = _run(path)
    job = getattr(module, "job", None)
    if isinstance(job, Job):
        return replace(job, folder=path.parent)
    jobs = [value for value in vars(module).values() if isinstance(value, Job)]
    if len(jobs) == 1:
        return replace(jobs[0], folder=path.parent)
    found = "no Job" if not jobs else f"{len(jobs)} Jobs, none of them called `job`"
    raise JobError(f"{path.name} defines {found}; write `job = Job(name=..., env=...)`")


def _run(path: Path) -> ModuleType:
    # Last on the path: a file beside the job can be imported, but never hides a library.
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    name = f"deltawire_job_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise JobError(f"{path.name} is not a Python file; a job file ends in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and type hints of the file look here
    try:
        spec.loader.exec_module(module)
    except JobError:
        raise
    except TypeError as error:
        said = _wrong_argument(error) or describe(error)
        raise JobError(f"{path.name} cannot be run: {said}") from error
    except SyntaxError as error:
        raise JobError(f"{path.name}:{error.lineno}: {error.msg}") from None
    except Exception as error:  # the border to a user's file
        raise JobError(f"{path.name} cannot be run: {describe(error)}") from error
    return module


def _wrong_argument(error: TypeError) -> str | None:
    """A suggestion, when the error is an argument that Job or Model does not take."""
    found = re.search(
        r"(Job|Model)\.__init__\(\) got an unexpected keyword argument '(\w+)'", f"{error}"
    )
    if found is None:
        return None
    kind = {"Job": Job, "Model": Model}[found[1]]
    return unknown(f"argument of {found[1]}", found[2], [field.name for field in fields(kind)])
