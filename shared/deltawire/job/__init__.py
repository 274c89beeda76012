"""The job definition a user writes: one Python file, under a hundred lines."""

from deltawire.job.http_scorer import HttpScorer
from deltawire.job.job import Env, Job, Model
from deltawire.job.reward import Score, reward
from deltawire.job.transcript import Message, Transcript
from deltawire.job.world import Episode, Reply, World, WorldConfig

__all__ = [
    "Env",
    "Episode",
    "HttpScorer",
    "Job",
    "Message",
    "Model",
    "Reply",
    "Score",
    "Transcript",
    "World",
    "WorldConfig",
    "reward",
]
