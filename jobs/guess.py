"""The default job: a 135M model learns to play the five-letter guessing game on a laptop.

    deltawire run jobs/guess.py
"""

from deltawire.job import Env, Job, Model

job = Job(
    name="guess",
    model=Model("HuggingFaceTB/SmolLM2-135M-Instruct"),
    env=Env(
        "guess",
        max_turns=2,
        max_tokens=192,
        # A system line and one worked turn: without them the model hardly ever finds the form.
        style="shot",
        # Pays for form first, then for real words, then for being close to the secret.
        reward="graded",
        invalid_budget=None,
    ),
    sampling={"temperature": 1.0, "max_new_tokens": 12},
    train={"steps": 30, "groups_per_step": 4, "group_size": 8, "lr": 2e-5, "warmup_steps": 5},
    show=["valid", "solved", "closeness"],
)
