"""A world of your own: any class with `reset` and `step`. Here, a number is hidden behind hints.

deltawire check jobs/own_world.py
deltawire run jobs/own_world.py
"""

import random
import re

from deltawire.job import Env, Job, Model, Reply


class HotAndCold:
    """One object plays one episode; it may keep whatever it likes."""

    def __init__(self, largest: int = 20, tries: int = 3) -> None:
        self.largest, self.tries = largest, tries  # from Env(...) below
        self.said: list[int] = []

    def reset(self, *, rng: random.Random) -> str:
        """Every choice is drawn from `rng`: the episodes of a group then hide the same number."""
        self.number = rng.randint(1, self.largest)
        return f"I hide a number from 1 to {self.largest}. Answer with a number only."

    def step(self, message: str) -> Reply:
        """Judge a guess: the text is what the policy reads next."""
        found = re.search(r"\d{1,6}", message)
        if found is None:
            return self.answer("That was no number.", valid=False)
        self.said.append(int(found.group()))
        if self.said[-1] == self.number:
            return Reply(text="Yes!", reward=1.0, done=True, metrics={"found": 1.0, "valid": 1.0})
        return self.answer("Higher." if self.said[-1] < self.number else "Lower.", valid=True)

    def answer(self, text: str, *, valid: bool) -> Reply:
        """Go on, or end with a little for having come close."""
        self.tries -= 1
        near = max((1 - abs(n - self.number) / self.largest for n in self.said), default=0.0)
        return Reply(
            text=text,
            reward=0.3 * max(0.0, near) if self.tries == 0 else None,
            done=self.tries == 0,
            metrics={"found": 0.0, "valid": float(valid)},
        )


job = Job(
    name="own-world",
    model=Model("HuggingFaceTB/SmolLM2-135M-Instruct"),
    env=Env(HotAndCold, largest=20, tries=3, max_turns=3, max_tokens=192),
    sampling={"max_new_tokens": 6},
    train={"steps": 40},
    show=["found", "valid"],
)
