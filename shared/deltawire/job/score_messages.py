"""What travels at `POST /score`: episodes to judge, and what a judge says of them."""

from pydantic import Field, JsonValue

from deltawire.job.reward import Score
from deltawire.job.transcript import Message, Transcript
from deltawire.protocol.rollouts import Task
from deltawire.protocol.wire_model import OpenWireModel


class SpokenMessage(OpenWireModel):
    """One message of an episode."""

    role: str = Field(max_length=64)
    content: str


class ScoredEpisode(OpenWireModel):
    """An episode to judge."""

    messages: list[SpokenMessage] = Field(max_length=1024)
    prompt_length: int = Field(0, ge=0)
    task: Task = Task()
    metrics: dict[str, float] = Field(default_factory=dict)
    info: dict[str, JsonValue] = Field(default_factory=dict)

    @classmethod
    def of(cls, episode: Transcript) -> "ScoredEpisode":
        """The message for a transcript."""
        return cls(
            messages=[SpokenMessage(**message) for message in episode.messages],
            prompt_length=episode.prompt_length,
            task=episode.task,
            metrics=episode.metrics,
            info=episode.info,
        )

    def transcript(self) -> Transcript:
        """The transcript a reward function reads."""
        return Transcript(
            task=self.task,
            messages=[Message(role=m.role, content=m.content) for m in self.messages],
            prompt_length=self.prompt_length,
            metrics=dict(self.metrics),
            info=dict(self.info),
            done=True,
        )


class ScoreRequest(OpenWireModel):
    """Episodes to judge in one call."""

    episodes: list[ScoredEpisode] = Field(min_length=1, max_length=256)


class ScoreAnswer(OpenWireModel):
    """What a judge says of one episode."""

    reward: float | None
    """None when it could not be judged; `errors` says why."""
    parts: dict[str, float] = Field(default_factory=dict)
    turns: list[float] | None = None
    """One score a turn."""
    spans: list[tuple[int, int, float]] | None = None
    """(start, end, score) over characters of the policy's last message."""
    errors: dict[str, str] = Field(default_factory=dict)

    def score(self) -> Score:
        """As a reward function gives it. Raises ValueError when there is no reward."""
        if self.reward is None:
            raise ValueError(f"the episode could not be judged: {self.errors}")
        return Score(value=self.reward, turns=self.turns, spans=self.spans)


class ScoreReply(OpenWireModel):
    """One answer an episode, in order."""

    scores: list[ScoreAnswer]
