"""A data set and reward functions, one of them written as TRL takes them.

deltawire run jobs/questions.py
"""

from deltawire.job import Env, Job, Model, Transcript, reward


@reward(weight=1.0)
def correct(completions: list[str], answer: list[str], **columns: object) -> list[float]:
    """TRL's signature works unchanged: columns of the data set come as keyword arguments."""
    return [
        float(right.lower() in said.lower())
        for said, right in zip(completions, answer, strict=True)
    ]


@reward(weight=0.2)
def brief(episode: Transcript) -> float:
    """Ours: the whole episode. One word is what was asked for."""
    return 1.0 / max(1, len(episode.last.split()))


job = Job(
    name="questions",
    model=Model("HuggingFaceTB/SmolLM2-135M-Instruct"),
    # JSON lines beside this file; a list of dicts or a `datasets.Dataset` works as well. Rows with
    # a column `split` choose for themselves; else a tenth is held out for evaluation.
    env=Env(dataset="data/capitals.jsonl", prompt="prompt", max_tokens=128),
    rewards=[correct, brief],
    sampling={"max_new_tokens": 12},
    train={"steps": 30},
    eval={"every": 10, "episodes": 16},
)
