"""How a difficulty grows while training: DeepSpeed's schedules of curricula.

The formulas are those of `deepspeed/runtime/data_pipeline/curriculum_scheduler.py`
(0.19.6), whose values are the fixture of `tests/unit/config/test_pacing.py`.
"""

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Annotated, Any, Literal

from pydantic import Field

from zinf.core.config.scalar import Count, Integer, Text, Whole
from zinf.core.config.section import Section, Violation

GROWING = ("fixed_linear", "fixed_root")
NEEDS = {
    "fixed_linear": ("difficulty_step",),
    "fixed_root": ("difficulty_step", "root_degree"),
    "fixed_discrete": ("difficulty",),
    "custom": ("function",),
}
LISTED = {"fixed_discrete": ("max_step", "max_tokens")}
TOTALS = ("total_curriculum_step", "total_curriculum_tokens")


class PacingConfig(Section):
    """The parameters of a schedule."""

    total_curriculum_step: Count | None = None
    """Step at which fixed_linear and fixed_root reach max_difficulty."""

    total_curriculum_tokens: Count | None = None
    """In place of total_curriculum_step: tokens after which they reach it."""

    difficulty_step: Count | None = None
    """Difficulties are multiples of this; max_difficulty is one always."""

    root_degree: Annotated[Count, Field(le=64)] | None = None
    """fixed_root: 2 is the square root of the progress, 1 is linear."""

    difficulty: tuple[Integer, ...] | None = None
    """fixed_discrete: the difficulties, one after another. custom: those that the
    function's value is rounded down to."""

    max_step: tuple[Whole, ...] | None = None
    """fixed_discrete: the last step of each difficulty but the last."""

    max_tokens: tuple[Whole, ...] | None = None
    """In place of max_step: a difficulty is left after so many tokens."""

    function: Text | None = None
    """custom: "module:function", from the step (the first is 1) to a difficulty."""


class Pacing(Section):
    """A difficulty as a function of the number of steps, or of tokens.

    Called with a count, it returns the difficulty. Steps count from 1: the difficulty
    of the first step is that of 1. Tokens are those of all steps before.
    """

    min_difficulty: Integer | None = None
    """Difficulty at the beginning."""

    max_difficulty: Integer | None = None
    """Difficulty at the end, which is never exceeded."""

    schedule_type: (
        Literal["fixed_linear", "fixed_root", "fixed_discrete", "custom"] | None
    ) = None
    """How the difficulty grows."""

    schedule_config: PacingConfig | None = None
    """The parameters of the schedule."""

    @property
    def is_complete(self) -> bool:
        """Whether the difficulty can be computed."""
        return not list(pacing_violations(self))

    @property
    def counts_tokens(self) -> bool:
        """Whether the count is the tokens of all steps before, not the step."""
        config = self._config
        return bool(config.total_curriculum_tokens or config.max_tokens)

    @property
    def first_count(self) -> int:
        """The count of the first step."""
        return 0 if self.counts_tokens else 1

    def __call__(self, count: int) -> int:
        config = self._config
        if self.schedule_type == "fixed_discrete":
            return self._discrete(count)
        assert self.min_difficulty is not None and self.max_difficulty is not None
        if self.schedule_type == "custom":
            assert config.function is not None
            return min(int(load_function(config.function)(count)), self.max_difficulty)
        total = config.total_curriculum_step or config.total_curriculum_tokens
        assert total is not None and config.difficulty_step is not None
        degree = config.root_degree if self.schedule_type == "fixed_root" else 1
        assert degree is not None
        # In DeepSpeed's order of operations: another one rounds differently.
        progress = (float(count) / total) ** (1.0 / degree)
        grown = math.floor(
            progress * (self.max_difficulty - self.min_difficulty) + self.min_difficulty
        )
        return min(grown - grown % config.difficulty_step, self.max_difficulty)

    def levels(self, first_count: int | None = None) -> tuple[int, ...]:
        """All difficulties that may occur, ascending.

        Args:
            first_count: the count of the first step, if it is not `self.first_count`.
        """
        config = self._config
        if self.schedule_type in ("fixed_discrete", "custom"):
            return tuple(sorted({*(config.difficulty or ())}))
        assert config.difficulty_step is not None and self.max_difficulty is not None
        count = self.first_count if first_count is None else first_count
        first, step = self(count), config.difficulty_step
        between = range(first - first % step + step, self.max_difficulty, step)
        return tuple(sorted({first, *between, self.max_difficulty}))

    @property
    def _config(self) -> PacingConfig:
        return self.schedule_config or PacingConfig()

    def _discrete(self, count: int) -> int:
        config = self._config
        assert config.difficulty is not None and self.max_difficulty is not None
        ends = config.max_step if config.max_step is not None else config.max_tokens
        assert ends is not None
        # DeepSpeed stays at a difficulty that reaches the maximum.
        for difficulty, end in zip(config.difficulty, ends, strict=False):
            # Step `end` is the last one of its difficulty. Tokens are those before the
            # step, so `end` tokens are enough to leave it.
            is_left = count >= end if self.counts_tokens else count > end
            if not is_left or difficulty >= self.max_difficulty:
                return difficulty
        return config.difficulty[-1]


def pacing_violations(pacing: Pacing) -> Iterator[Violation]:
    """What is missing or contradicts itself in a schedule that is to be used."""
    config = pacing.schedule_config or PacingConfig()
    for key in ("min_difficulty", "max_difficulty", "schedule_type"):
        if getattr(pacing, key) is None:
            yield (key,), "is missing."
    low, high = pacing.min_difficulty, pacing.max_difficulty
    if low is not None and high is not None and low > high:
        yield ("min_difficulty",), f"{low} is above max_difficulty, which is {high}."
    kind = pacing.schedule_type
    if kind is None:
        return
    for key in NEEDS[kind]:
        if getattr(config, key) is None:
            yield ("schedule_config", key), f"is missing, and {kind} needs it."
    if kind in GROWING:
        yield from _one_of(config, TOTALS, kind)
    if kind == "fixed_discrete":
        yield from _one_of(config, LISTED[kind], kind)
        yield from _unequal_lists(config)
    if kind == "custom" and config.function is not None:
        if ":" not in config.function:
            text = f"{config.function!r} is no function: write it as module:function."
            yield ("schedule_config", "function"), text
        if not config.difficulty:
            text = "is missing: list the difficulties that the function may return."
            yield ("schedule_config", "difficulty"), text


def _one_of(
    config: PacingConfig, names: Sequence[str], kind: str
) -> Iterator[Violation]:
    given = [name for name in names if getattr(config, name) is not None]
    if len(given) != 1:
        text = f"{kind} needs either {names[0]} or {names[1]}"
        found = "both are given" if given else "none is given"
        yield ("schedule_config", names[0]), f"{text}, and {found}."


def _unequal_lists(config: PacingConfig) -> Iterator[Violation]:
    for key in ("max_step", "max_tokens"):
        ends = getattr(config, key)
        if ends is None or config.difficulty is None:
            continue
        if not ends or len(config.difficulty) != len(ends) + 1:
            text = f"has {len(config.difficulty)} entries and {key} has {len(ends)}"
            rest = "The last difficulty has no end, so it must be one more"
            yield ("schedule_config", "difficulty"), f"{text}. {rest} than {key}."
        if list(ends) != sorted(ends):
            yield ("schedule_config", key), "must be ascending."


def load_function(name: str) -> Any:
    """The function that "module:function" names.

    Raises:
        ValueError: there is no such module, or no such function in it.
    """
    module, _, function = name.partition(":")
    try:
        return getattr(import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{name!r} is not found: {error}.") from error


def buckets(levels: Sequence[int], max_buckets: int) -> tuple[int, ...]:
    """At most `max_buckets` of ascending levels, evenly, with the first and the last.

    >>> buckets([64, 96, 128, 160, 192, 224, 256], 3)
    (64, 160, 256)
    """
    last = len(levels) - 1
    if last < max_buckets:
        return tuple(levels)
    if max_buckets == 1:
        return (levels[last],)
    places = {round(i * last / (max_buckets - 1)) for i in range(max_buckets)}
    return tuple(levels[place] for place in sorted(places))


def round_down(value: int, to: Sequence[int]) -> int:
    """The largest entry of ascending `to` that is at most `value`, or the first."""
    return to[max(0, bisect_right(to, value) - 1)]
