"""Write Python functions; hidden tests score them in a sandbox, a second try sees what failed.

deltawire run jobs/python_code.py model=Qwen/Qwen2.5-Coder-0.5B-Instruct
"""

from deltawire.job import Env, Job, Model, Transcript, reward


@reward(weight=1.0)
def passes(episode: Transcript) -> float:
    """Share of the hidden tests that pass."""
    return episode.metrics["passed"]


@reward(weight=0.1)
def runs(episode: Transcript) -> float:
    """The program ran to its end."""
    return episode.metrics["ran"]


@reward(weight=-0.05)
def second_try(episode: Transcript) -> float:
    """Getting it right at once is better."""
    return float(episode.turns > 1)


job = Job(
    name="python-code",
    model=Model("Qwen/Qwen2.5-Coder-0.5B-Instruct"),
    env=Env("code", max_turns=2, max_tokens=1024, tests=6, wall_s=4.0, sessions=64),
    rewards=[passes, runs, second_try],
    sampling={"max_new_tokens": 256, "temperature": 0.9},
    train={"steps": 200, "groups_per_step": 8, "group_size": 8, "lr": 2e-6},
    eval={"every": 20, "episodes": 64},
    show=["solved", "passed", "ran"],
)
