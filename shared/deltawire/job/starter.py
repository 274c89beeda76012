"""`deltawire new NAME`: a commented job file and its test."""

import re
from pathlib import Path

from deltawire.protocol.errors import JobError

_JOB = '''"""{title}: a job. Try it with

    deltawire check {path}
    deltawire run {path}

A game of several turns, with `Reply` and `max_turns`: jobs/own_world.py and the page
docs/tutorials/own-world.md of deltawire.
"""

from deltawire.job import Env, Job, Model, Transcript, reward


class {kind}:
    """The world. One object plays one episode; it may keep whatever it likes."""

    def __init__(self, largest: int = 20) -> None:
        self.largest = largest  # arguments come from Env(...) below

    def reset(self, *, rng) -> str:
        """Begin. Draw every choice from `rng`: episodes of one group share its seed."""
        self.left, self.right = rng.randint(1, self.largest), rng.randint(1, self.largest)
        return f"What is {{self.left}} + {{self.right}}? Answer with the number only."

    def step(self, message: str) -> dict:
        """Answer the policy. `text` is what it reads next; `done` ends the episode."""
        right = message.strip() == str(self.left + self.right)
        return {{"done": True, "metrics": {{"right": float(right)}}}}


@reward(weight=1.0)
def right(episode: Transcript) -> float:
    """1.0 for the right number. May be async; an error here drops the sample, it is no 0."""
    return episode.metrics["right"]


@reward(weight=0.1)
def short(episode: Transcript) -> float:
    """A little for saying nothing but digits."""
    return float(episode.last.strip().isdigit())


job = Job(
    name="{name}",
    model=Model("HuggingFaceTB/SmolLM2-135M-Instruct"),  # its size picks a preset
    env=Env({kind}, largest=20),
    rewards=[right, short],
    sampling={{"max_new_tokens": 8}},
    train={{"steps": 40}},  # any field of TrainSpec; the command line overrides: train.lr=2e-6
    show=["right"],
)
'''

_TEST = '''"""The world and the rewards of {name}.py, without a model."""

import random
import sys
from pathlib import Path

from deltawire.job import Message, Transcript
from deltawire.protocol.rollouts import Task

sys.path.insert(0, str(Path(__file__).parent))  # the job lies beside its test, in no package

from {name} import {kind}, right, short  # noqa: E402


def play(answer: str, seed: int = 0) -> Transcript:
    world = {kind}(largest=9)
    question = world.reset(rng=random.Random(seed))
    end = world.step(answer)
    messages = [Message(role="user", content=question), Message(role="assistant", content=answer)]
    return Transcript(task=Task(), messages=messages, prompt_length=1, metrics=end["metrics"])


def test_the_right_number_is_rewarded() -> None:
    world = {kind}(largest=9)
    world.reset(rng=random.Random(0))
    episode = play(str(world.left + world.right))
    assert right(episode) == 1.0
    assert short(episode) == 1.0


def test_a_wrong_answer_is_not() -> None:
    assert right(play("no idea")) == 0.0
'''


def write_starter(name: str, folder: Path) -> list[Path]:
    """Write NAME.py and test_NAME.py. Raises JobError for a bad name or a file that is there."""
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise JobError(f"{name!r} cannot name a job: use lower-case letters, digits and _")
    words = {
        "name": name,
        "path": (folder / f"{name}.py").as_posix(),
        "kind": "".join(part.title() for part in name.split("_")),
        "title": name.replace("_", " ").capitalize(),
    }
    files = {
        folder / f"{name}.py": _JOB.format(**words),
        folder / f"test_{name}.py": _TEST.format(**words),
    }
    for path in files:
        if path.exists():
            raise JobError(f"{path} is there already; choose another name")
    folder.mkdir(parents=True, exist_ok=True)
    for path, text in files.items():
        path.write_text(text, encoding="utf-8")
    return list(files)
