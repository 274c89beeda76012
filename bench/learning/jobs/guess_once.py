"""One guess at a five-letter word whose first letter is told: the 135M model's comparison task."""

from deltawire.job import Env, Job

job = Job(
    name="guess_once",
    env=Env(
        "guess",
        max_turns=1,
        max_tokens=128,
        style="hint",
        reward="graded",
        invalid_budget=None,
        # A short prompt: TRL forwards it once for every rollout.
        texts={"system": "Answer with one five-letter word in square brackets."},
    ),
    sampling={"temperature": 1.0, "max_new_tokens": 8},
    train={
        "steps": 24,
        "groups_per_step": 4,
        "group_size": 4,
        "lr": 5e-5,
        "warmup_steps": 2,
        "checkpoint_every": 1000,
    },
    show=["valid", "first_letter"],
)
