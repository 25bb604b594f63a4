"""How completions are drawn and rewarded: keys that `grpo` and `ppo` have in common."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field

from zinf.core.config.scalar import (
    Flag,
    Number,
    Positive,
    Seconds,
    Text,
    Whole,
)
from zinf.core.config.section import Section, Violation

Share = Annotated[Number, Field(gt=0, le=1)]


def _many(value: object) -> object:
    if isinstance(value, list):
        return tuple(value)
    return (value,) if isinstance(value, str) else value


Many = BeforeValidator(_many)


@dataclass(frozen=True)
class Reader:
    """What reads some keys, which have no effect without it.

    Attributes:
        keys: their names, with spaces between.
        name: in words.
        is_used: `section -> whether` it is.
    """

    keys: str
    name: str
    is_used: Callable[[Any], bool]


class Completions(Section):
    """The completions of prompts that a model is trained on.

    Subclasses name their own keys of three settings, as TRL has others in each trainer.
    """

    KEY: ClassVar[str]
    """The section in a config."""
    LENGTH: ClassVar[str]
    """The field with the most tokens of a completion."""
    TIMES: ClassVar[str]
    """The field with how often each completion is trained on."""
    PENALTY: ClassVar[str]
    """The field with the factor of the divergence from the reference."""

    READERS: ClassVar[tuple[Reader, ...]] = ()
    """Of keys that not every setting of the others reads."""

    rewards: Annotated[tuple[Text, ...], Many] = ()
    """Rewards, each a function as FILE.py:FUNCTION, or a reward model: its folder, or
    its name on the hub."""

    reward_weights: Annotated[tuple[Number, ...] | None, Many] = None
    """A factor for each reward; null: 1 each."""

    reward_timeout: Seconds = 60.0
    """Seconds that a call of a reward function may take; what takes longer is left
    out."""

    shuffle_dataset: Flag = True
    """Take prompts in another order in each epoch; false: in the order of the file."""

    temperature: Positive = 1.0
    """Logits are divided by it, in drawing and in the loss."""

    top_p: Share = 1.0
    """Draw from the likeliest tokens that have this probability together."""

    top_k: Whole = 0
    """Draw from so many of the likeliest tokens; 0: from all."""

    min_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    """Draw from tokens with this share of the likeliest one's probability; null:
    all."""

    repetition_penalty: Positive = 1.0
    """Of tokens that the text has already; 1: none."""

    @property
    def max_new_tokens(self) -> int:
        """Most tokens of a completion."""
        return getattr(self, self.LENGTH)

    @property
    def group_size(self) -> int:
        """Completions of a prompt."""
        return 1

    @property
    def num_uses(self) -> int:
        """How often each completion is trained on."""
        return getattr(self, self.TIMES)

    @property
    def penalty(self) -> float:
        """Factor of the divergence from the reference; 0: there is no reference."""
        return getattr(self, self.PENALTY)

    def violations(self) -> Iterator[Violation]:
        weights, rewards = self.reward_weights, self.rewards
        if weights is not None and rewards and len(weights) != len(rewards):
            text = f"has {len(weights)} numbers, and there are {len(rewards)} rewards."
            yield ("reward_weights",), text
        for reader in self.READERS:
            for key in reader.keys.split():
                if self.asks(key) and not reader.is_used(self):
                    text = f"has no effect: it is for {reader.name}. Leave it out."
                    yield (key,), text
