"""The default job: a 135M model learns a five-letter guessing game on a laptop, in minutes.

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
        # One worked turn, and the first letter as a hint: every secret asks for other words, so
        # the policy cannot win by saying one word everywhere.
        style="hint",
        # Pays for the form of a guess, the hint, each letter that still spells a word, a real word,
        # right letters: every step towards a word is one that some guess of a group has taken.
        reward="graded",
        invalid_budget=None,
    ),
    sampling={"temperature": 1.0, "max_new_tokens": 10},
    train={
        "steps": 44,
        "groups_per_step": 8,
        "group_size": 4,
        # Enough to learn in minutes, low enough to stay sparse; Adam's first steps move most.
        "lr": 3e-5,
        "warmup_steps": 12,
        "max_staleness": 1,
    },
    show=["valid", "first_letter", "distinct_words"],
)
