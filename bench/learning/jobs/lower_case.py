"""Lower-case letters, please: a task that a random model of two layers learns in a minute."""

from deltawire.job import Env, Job, Transcript, reward


@reward
def lower_case(episode: Transcript) -> float:
    """Share of lower-case letters in what the policy said."""
    said = episode.last
    return sum(character.islower() for character in said) / max(1, len(said))


job = Job(
    name="lower_case",
    env=Env("letters", max_tokens=128),
    rewards=[lower_case],
    sampling={"temperature": 1.0, "max_new_tokens": 12},
    train={
        "steps": 30,
        "groups_per_step": 4,
        "group_size": 8,
        "lr": 1e-2,
        "warmup_steps": 3,
        "checkpoint_every": 1000,
    },
)
