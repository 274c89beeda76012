"""Arithmetic with a built-in world and a named reward beside it.

deltawire run jobs/sums.py
"""

from deltawire.job import Env, Job, Model, Transcript, reward


@reward(weight=1.0)
def right(episode: Transcript) -> float:
    """What the world measured: 1.0 for the right number."""
    return episode.metrics["right"]


@reward(weight=0.2)
def lone_number(episode: Transcript) -> float:
    """Nothing but a number: the form comes before the sum."""
    return episode.metrics["lone_number"]


job = Job(
    name="sums",
    model=Model("HuggingFaceTB/SmolLM2-135M-Instruct"),
    env=Env("arithmetic", operations=["+", "-"], largest=10, max_tokens=128),
    rewards=[right, lone_number],
    sampling={"max_new_tokens": 6},
    train={"steps": 40, "groups_per_step": 8, "group_size": 8},
    eval={"every": 10, "episodes": 64},
    show=["right", "lone_number"],
)
