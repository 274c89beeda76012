"""An error of somebody's own code, in one line: what, and where in their file."""

import traceback
from pathlib import Path

_LONGEST = 300


def describe(error: BaseException) -> str:
    """`ZeroDivisionError: division by zero (my_job.py:14)`, shortened. Timeouts say so."""
    if isinstance(error, TimeoutError) and not str(error):
        return "gave no answer in time"
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {str(error)[:_LONGEST]}{place}"
