"""What `zinf score` and `zinf embed` do with lines: read all, then answer them."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from zinf.hf.model import Model
from zinf.hf.prefill import Prefill
from zinf.hf.samples import TooLong

# How many of the lines that are too long are named.
SHOWN = 5


@dataclass
class Limit:
    """The most tokens of a line, and the lines that have more.

    Attributes:
        max_length: None: any number.
        too_long: error refuses such lines, truncate cuts them, drop gives them no
            answer.
    """

    max_length: int | None
    too_long: TooLong
    _found: list[str] = field(default_factory=list, init=False)

    @classmethod
    def of(cls, model: Model, asked: int | None, too_long: TooLong) -> Self:
        """The limit that is asked for, or that of the model and its tokenizer.

        Raises:
            ValueError: more is asked for than the model was made for.
        """
        known = [model.max_length, model.tokenizer.model_max_length]
        # A tokenizer that knows no length has a huge one.
        most = min((x for x in known if x is not None and x < 10**9), default=None)
        if asked is not None and asked < 2:
            raise ValueError(f"max_length must be at least 2; found {asked}.")
        if asked is not None and most is not None and asked > most:
            raise ValueError(
                f"max_length (--max-length) is {asked:,}, and {model.name} was made "
                f"for {most:,} tokens. Lower it."
            )
        return cls(most if asked is None else asked, too_long)

    def exceeds(self, length: int, where: str) -> bool:
        """Whether a line has more tokens than the limit; it is then noted."""
        if self.max_length is None or length <= self.max_length:
            return False
        self._found.append(f"{where} ({length:,} tokens)")
        return True

    def check(self) -> None:
        """Refuse lines that are too long, when all were read, if they are errors.

        Raises:
            ValueError: there are such lines; the message counts them and names some.
        """
        if self._found and self.too_long == "error":
            raise ValueError(
                f"{self._counted()} Raise it if the model allows, shorten the lines, "
                "or set too_long (--too-long): truncate cuts them, drop leaves them "
                "without an answer."
            )

    @property
    def note(self) -> str:
        """A sentence on lines that are too long; empty if there are none."""
        done = {"truncate": "They are cut.", "drop": "They get no answer."}
        return f"{self._counted()} {done[self.too_long]}" if self._found else ""

    def _counted(self) -> str:
        count, shown = len(self._found), ", ".join(self._found[:SHOWN])
        more = f" and {count - SHOWN:,} more" if count > SHOWN else ""
        has = "line has" if count == 1 else "lines have"
        return (
            f"{count:,} {has} more tokens than max_length = {self.max_length:,}: "
            f"{shown}{more}."
        )


class AbstractReader(ABC):
    """A model that answers lines, each by itself.

    Attributes:
        prefill: what runs the model.
        limit: how long a line may be.
    """

    prefill: Prefill
    limit: Limit

    @abstractmethod
    def read(self, line: Any, where: str) -> Any:
        """A line as tokens, for `answers`.

        Args:
            where: file and number of the line, for messages.

        Raises:
            ValueError: the line has not the columns that are needed, or a wrong value.
        """

    @abstractmethod
    def length(self, asked: Any) -> int:
        """The tokens of the longest row of what `read` returned."""

    @abstractmethod
    def columns(self, asked: Any) -> tuple[str, ...]:
        """The names that `answers` gives for what `read` returned, in order."""

    @abstractmethod
    def answers(self, asked: Sequence[Any]) -> list[dict[str, Any]]:
        """The answer to each line; None for each column of one that was dropped."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.prefill.close()


def as_object(line: Any, where: str, needed: str) -> Mapping[str, Any]:
    """The line, checked to be a JSON object.

    Raises:
        ValueError: it is none.
    """
    if not isinstance(line, Mapping):
        raise ValueError(
            f"{where}: a line must be a JSON object with {needed}; found a "
            f"{type(line).__name__}."
        )
    return line


def check_text(value: Any, name: str, where: str) -> str:
    """The value, checked to be a text.

    Raises:
        ValueError: it is none, or an empty one.
    """
    if not isinstance(value, str) or not value:
        raise ValueError(
            f"{where}: {name} must be a text that is not empty; found {value!r:.40}."
        )
    return value


def missing(line: Mapping[str, Any], where: str, needed: str) -> ValueError:
    """The error of a line without the columns that are needed."""
    found = ", ".join(map(str, line)) or "nothing"
    return ValueError(f"{where}: a line must have {needed}; found {found}.")
