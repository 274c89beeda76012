"""A job a random byte model learns from at once: more lower-case letters, more reward."""

from deltawire.job import Env, Job, reward


@reward
def letters(episode) -> float:
    """Share of lower-case letters in what the policy said last."""
    said = episode.last
    return sum(c.islower() for c in said) / max(1, len(said))


job = Job(name="letters", env=Env("guess", max_turns=2), rewards=[letters])
