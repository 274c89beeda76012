"""Tickets: which orders go out, how many, and how fresh they must start. Pure."""

from dataclasses import dataclass

from deltawire.job.spec import JobSpec
from deltawire.protocol.generation import Sampling
from deltawire.protocol.rollouts import Task, Ticket
from deltawire.protocol.versions import PolicyVersion

_SEED_STRIDE = 1_000_003
"""A prime, so that the tasks of two jobs' seeds do not run in step."""
_SEED_SPACE = 2**31
EVAL_SEED = 7_919
"""Held-out tasks start here, the same ones at every evaluation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TicketBook:
    """Makes the tickets of a job, by number."""

    job: JobSpec
    run_id: str
    lineage: str = ""
    """Distinguishes the tickets of a trainer that took the run over without its journal."""
    deadline_s: float = 600.0

    def train_id(self, number: int) -> str:
        """``r1-000017``: unique in the run, and the same for the same number."""
        return f"{self.run_id or 'run'}{self.lineage}-{number:06d}"

    def train(self, number: int, *, min_version: int, now_s: float) -> Ticket:
        """The order for one training group. Its task follows from the job's seed and the number."""
        spec = self.job.train
        seed = (spec.seed * _SEED_STRIDE + number) % _SEED_SPACE
        return Ticket(
            ticket_id=self.train_id(number),
            run_id=self.run_id,
            task=Task(environment=self.job.env.name, seed=seed, split="train", index=number),
            group_size=spec.group_size,
            sampling=self.job.sampling,
            max_turns=self.job.env.max_turns,
            max_tokens=self.job.env.max_tokens,
            min_version=PolicyVersion(min_version),
            deadline_s=self.deadline_s,
            issued_at=now_s,
        )

    def evaluation(self, version: int, *, now_s: float) -> list[Ticket]:
        """One held-out episode a ticket, all pinned to one version."""
        spec = self.job.eval
        if spec is None:
            return []
        sampling: Sampling = self.job.sampling.model_copy(
            update={"temperature": spec.temperature, "top_p": 1.0, "top_k": 0}
        )
        return [
            Ticket(
                ticket_id=f"{self.run_id or 'run'}{self.lineage}-eval-{version:06d}-{number:04d}",
                run_id=self.run_id,
                task=Task(
                    environment=self.job.env.name,
                    seed=(EVAL_SEED + number) % _SEED_SPACE,
                    split=spec.split,
                    index=number,
                ),
                group_size=1,
                sampling=sampling,
                max_turns=self.job.env.max_turns,
                max_tokens=self.job.env.max_tokens,
                min_version=PolicyVersion(version),
                policy_version=PolicyVersion(version),
                deadline_s=self.deadline_s,
                purpose="eval",
                issued_at=now_s,
            )
            for number in range(spec.episodes)
        ]


def room(
    *, open_groups: int, groups_per_step: int, depth: int, steps_left: int, oversample: int = 0
) -> int:
    """How many tickets may go out now.

    Open tickets and unconsumed groups together stay within (depth + 1) steps' worth, where depth
    is at most max_staleness, and within what the run still needs; `oversample` groups more than
    either may be lost on the way, or be slow.
    ``room(open_groups=6, groups_per_step=4, depth=1, steps_left=10) == 2``
    """
    needed = min(depth + 1, steps_left) * groups_per_step
    return max(0, needed + (oversample if needed else 0) - open_groups)


def oldest_start(
    *,
    live_version: int,
    steps_since_sync: int,
    ahead: int,
    groups_per_step: int,
    sync_every: int,
    max_staleness: int,
    oversample: int = 0,
) -> int:
    """The oldest version an episode may start on and still be fresh when its turn comes.

    With `ahead` groups before it, a group is trained on `ahead // groups_per_step` steps from now;
    the version will have moved on by then, and may be at most `max_staleness` newer. Of those
    before it, `oversample` are taken not to come in time.
    With max_staleness 0 that may be a version that is still being made: then a producer waits.
    ``live_version=5, ahead=4, groups_per_step=4, sync_every=1, max_staleness=1 -> 5``
    """
    steps_before = max(0, ahead - oversample) // groups_per_step
    moved = (steps_since_sync + steps_before) // sync_every
    return max(0, live_version + moved - max_staleness)
