"""What is compared: a job, a model, and the ways to learn it."""

from dataclasses import dataclass
from pathlib import Path

_JOBS = Path(__file__).parent / "jobs"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One task for all ways. Everything the ways share stands in the job file."""

    name: str
    job: Path
    model: str
    """Folder or name; empty for the tiny random model, which is made when it is needed."""
    title: str
    results: str
    """Stem of the files under bench/results."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way to learn a task."""

    name: str
    title: str
    overrides: tuple[str, ...] = ()
    """On top of the job file."""


TRL = Way(name="trl", title="TRL's GRPOTrainer")
WAYS = (
    Way(
        name="asynchronous",
        title="deltawire, up to 2 versions behind",
        overrides=("train.max_staleness=2",),
    ),
    Way(name="in_step", title="deltawire, max_staleness=0", overrides=("train.max_staleness=0",)),
    TRL,
)

SETTINGS = {
    "tiny": Setting(
        name="tiny",
        job=_JOBS / "lower_case.py",
        model="",
        title="two layers from random weights: lower-case letters",
        results="learning",
    ),
    "smollm2": Setting(
        name="smollm2",
        job=_JOBS / "guess_once.py",
        model="HuggingFaceTB/SmolLM2-135M-Instruct",
        title="SmolLM2-135M-Instruct: one guess at a word whose first letter is told",
        results="learning-smollm2",
    ),
}
