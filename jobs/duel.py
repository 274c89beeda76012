"""Two agents in one episode: one sets a sum, the other solves it; both are the policy.

Each agent's tokens are a sequence with a reward of its own. `train.agents` chooses who learns.

    deltawire run jobs/duel.py
"""

import random
import re

from deltawire.job import Env, Job, Message, Model, Reply


class Duel:
    """The proposer wants sums that are fair: solvable, but not always."""

    def reset(self, *, rng: random.Random) -> Reply:
        """The proposer speaks first. A spare sum is drawn too, the same for the whole group."""
        self.limit = rng.randint(10, 30)
        self.spare = (rng.randrange(self.limit), rng.randrange(self.limit))
        self.sum: tuple[int, int] | None = None
        ask = f"Write one sum of two numbers below {self.limit}, like 3 + 4, and nothing else."
        return Reply(agent="proposer", chat=[Message(role="user", content=ask)])

    def step(self, message: str) -> Reply:
        """First the proposer's sum, then the solver's answer."""
        return self.solved(message) if self.sum else self.proposed(message)

    def proposed(self, message: str) -> Reply:
        """A sum we cannot read is replaced: a solver must have something to learn from."""
        found = re.fullmatch(r"(\d{1,3}) ?\+ ?(\d{1,3})", message.strip())
        self.fair = found is not None and max(int(n) for n in found.groups()) < self.limit
        self.sum = (int(found[1]), int(found[2])) if found and self.fair else self.spare
        ask = f"{self.sum[0]} + {self.sum[1]} = ? Answer with the number only."
        return Reply(agent="solver", chat=[Message(role="user", content=ask)])

    def solved(self, message: str) -> Reply:
        """The solver is paid for the right number, the proposer for large ones that it solves."""
        assert self.sum is not None
        right = float(message.strip() == str(sum(self.sum)))
        size = sum(self.sum) / (2 * self.limit)
        return Reply(
            done=True,
            reward=right,
            agent_rewards={"solver": right, "proposer": self.fair * (0.2 + 0.8 * right * size)},
            metrics={"fair": float(self.fair), "right": right},
        )


job = Job(
    name="duel",
    model=Model("HuggingFaceTB/SmolLM2-135M-Instruct"),
    env=Env(Duel, max_turns=2, max_tokens=128),
    sampling={"max_new_tokens": 8},
    train={"steps": 30, "agents": ["solver"]},
    show=["fair", "right"],
)
