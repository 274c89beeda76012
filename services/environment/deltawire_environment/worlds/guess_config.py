"""How the guessing game is played and paid."""

from pydantic import Field, JsonValue, model_validator

from deltawire.job.world import WorldConfig
from deltawire_environment.worlds.guess_reward import GradeWeights, RewardKind
from deltawire_environment.worlds.guess_text import TEXTS, GuessTexts, Style


class GuessConfig(WorldConfig):
    """The world's arguments."""

    max_turns: int = Field(6, ge=1)
    """Guesses."""
    reward: RewardKind = "binary"
    style: Style = "plain"
    """Whose words the game speaks; `textarena` also takes that game's rules for faults."""
    texts: dict[str, JsonValue] = Field(default_factory=dict)
    """Lines to replace in the style: system, opening, worked, feedback, ..."""
    invalid_budget: int | None = Field(1, ge=0)
    """Invalid guesses that are forgiven; one more ends the game. None forgives all."""
    grades: GradeWeights = GradeWeights()
    """Weights of the `graded` reward."""

    @model_validator(mode="after")
    def _texts_are_known(self) -> "GuessConfig":
        self.spoken()
        return self

    def spoken(self) -> GuessTexts:
        """The style's lines with the job's own in their place."""
        return GuessTexts.model_validate({**TEXTS[self.style].model_dump(), **self.texts})
