"""Rewards: functions, called as TRL calls them in threads within a limit, and models.

A function gets `prompts`, `completions`, `completion_ids` and the other columns of the
data by name, a list each, and returns a number or None for each completion. None says
that the function has no opinion. A completion whose reward fails (it is NaN, or the
call raises or hangs) is left out of the step, with a warning that names its prompt.
Reward models run in the caller's thread: programs that are divided among devices must
start in one order.
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from zinf.core.rl import as_rewards, combined
from zinf.core.rollouts.asking import (
    ALONE,
    Asked,
    Call,
    Failures,
    Function,
    Samples,
    WrongAnswers,
    name_of,
    of_all,
    own_part,
)
from zinf.core.rollouts.sizes import Prompt
from zinf.distributed import AbstractGroup

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Rewarded:
    """The rewards of N completions by all reward functions.

    Attributes:
        values: float64 (N,) of each function by its name; NaN where it has no opinion.
        total: float64 (N,), their weighted sum; NaN for a completion that is left out.
    """

    values: Mapping[str, np.ndarray]
    total: np.ndarray


Outcome = tuple[np.ndarray, Failures]


class AbstractRewardModel(ABC):
    """A model that rewards completions. No limit of time is set to it."""

    @property
    @abstractmethod
    def name(self) -> str: ...

    @abstractmethod
    def check(self, prompts: Sequence[Prompt]) -> None:
        """Refuse prompts that the model cannot read.

        Raises:
            ValueError: there is one.
        """

    @abstractmethod
    def scores(self, samples: Samples) -> Outcome:
        """The reward of each completion, float64 (N,), and why it failed, by number."""


Reward = Function | AbstractRewardModel


class Rewards:
    """Some reward functions and models: a reward is the weighted sum of what they say.

    Args:
        functions: see above; one that is `async` runs beside the others.
        weights: a factor a function; None: 1 each.
        timeout: seconds that a call of a function may take. If a call for all
            completions takes longer or raises, the function is called for each
            completion alone.

    Raises:
        ValueError: there is no function, or another number of weights.
    """

    def __init__(
        self,
        functions: Sequence[Reward],
        weights: Sequence[float] | None = None,
        *,
        timeout: float = 60.0,
    ) -> None:
        if not functions:
            raise ValueError(
                "There is no reward function. Name one: --reward FILE.py:FUNCTION of "
                "zinf grpo and zinf ppo, grpo.rewards or ppo.rewards in a config, or "
                "reward_funcs= in Python."
            )
        if weights is not None and len(weights) != len(functions):
            raise ValueError(
                f"reward_weights has {len(weights)} numbers, and there are "
                f"{len(functions)} reward functions. Give one a function."
            )
        self.functions = tuple(functions)
        self.weights = weights
        self.timeout = timeout

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the functions; equal ones get a number."""
        found: list[str] = []
        for function in self.functions:
            is_model = isinstance(function, AbstractRewardModel)
            name = function.name if is_model else name_of(function)
            same = sum(x == name or x.startswith(f"{name}_") for x in found)
            found.append(f"{name}_{same + 1}" if same else name)
        return tuple(found)

    @property
    def models(self) -> dict[int, AbstractRewardModel]:
        """The reward models, by their places among the functions."""
        return {
            number: function
            for number, function in enumerate(self.functions)
            if isinstance(function, AbstractRewardModel)
        }

    def asking(self, models: Sequence[AbstractRewardModel]) -> "Rewards":
        """The same rewards by these models, which stand for its own in their order."""
        found = [*self.functions]
        for number, model in zip(self.models, models, strict=True):
            found[number] = model
        return Rewards(found, self.weights, timeout=self.timeout)

    def check(self, columns: Sequence[Mapping[str, Any]], where: Sequence[str]) -> None:
        """Refuse records without a column that a function cannot do without.

        Args:
            columns: of each record.
            where: the place of each record, for the message.

        Raises:
            ValueError: see above; or an argument of a function is not given by name.
        """
        for asked in self._asked.values():
            asked.check(columns, where)

    @property
    def _asked(self) -> dict[int, Asked]:
        """The functions, by their places."""
        return {
            number: Asked(
                f"The reward function {self.names[number]}",
                function,
                self.timeout,
                "reward_timeout",
                partial(_checked, self.names[number]),
                np.nan,
            )
            for number, function in enumerate(self.functions)
            if not isinstance(function, AbstractRewardModel)
        }

    def start(
        self,
        samples: Samples,
        failed: Collection[int] = (),
        group: AbstractGroup = ALONE,
    ) -> "Judging":
        """Begin to reward completions: functions do so in a thread, beside the caller.

        `result` has models reward them too, and returns a `Rewarded`.

        Args:
            failed: numbers of completions that are left out in any case.
            group: processes with the same completions, which each ask the functions
                about a part of them.

        Raises (from `result`):
            WrongAnswers: a function returned another number of rewards, or one that is
                no number.
            RuntimeError: a function hangs again and again.
            ValueError: no completion has a reward.
        """
        own = samples.part(own_part(len(samples), group))
        return Judging(self, samples, failed, group, Call(self._by_functions, own))

    def _by_functions(self, samples: Samples) -> dict[int, Outcome]:
        """What the functions say, by their places."""
        asked = self._asked
        together = asked.items() if len(samples) else ()
        calls = {n: x.start(samples) for n, x in together if x.is_async}
        found = {}
        for number, function in asked.items():
            values, failures = function.answers(samples, calls.get(number))
            found[number] = np.array(values, np.float64), failures
        return found

    def together(
        self,
        samples: Samples,
        outcomes: Mapping[int, Outcome],
        failed: Collection[int] = (),
        warn: Callable[[str], None] = logger.warning,
    ) -> Rewarded:
        """The sum of all that was said of completions.

        Args:
            warn: told of what failed.

        Raises:
            ValueError: no completion has a reward.
        """
        values: dict[str, np.ndarray] = {}
        has_failed = np.zeros(len(samples), np.bool_)
        has_failed[list(failed)] = True
        for number, name in enumerate(self.names):
            values[name], failures = outcomes[number]
            has_failed[list(failures)] = True
            if failures:
                first = next(iter(failures))
                warn(
                    f"The reward {name}: {len(failures)} of {len(samples)} "
                    f"completions are left out. The first: {failures[first]} for "
                    f"{samples.named(first)}."
                )
        try:
            total = combined(values, self.weights)
        except ValueError as error:
            raise ValueError(f"{error} The first is {samples.named(0)}.") from None
        silent = np.flatnonzero(np.isnan(total) & ~has_failed)
        if len(silent):
            warn(
                f"{len(silent)} of {len(samples)} completions are left out: every "
                f"reward function returned None. The first: {samples.named(silent[0])}."
            )
        total[has_failed] = np.nan
        if np.isnan(total).all():
            raise ValueError(
                f"None of {len(samples)} completions has a reward: all were left out, "
                "as the warnings say. Mend the reward functions."
            )
        return Rewarded(values, total)


@dataclass(frozen=True)
class Judging:
    """Completions that functions reward now, and models when `result` is called."""

    rewards: Rewards
    samples: Samples
    failed: Collection[int]
    group: AbstractGroup
    call: Call

    def result(self) -> Rewarded:
        """See `Rewards.start`."""
        models = self.rewards.models.items()
        scored = {number: model.scores(self.samples) for number, model in models}
        outcomes: dict[int, Outcome] = {}
        for number, (own, failures) in self.call.result().items():
            name = f"rewards of {self.rewards.names[number]}"
            values, why = of_all(name, (own.tolist(), failures), self.group)
            outcomes[number] = np.array(values, np.float64), why
        outcomes |= scored
        warn = logger.warning if self.group.is_first else logger.debug
        return self.rewards.together(self.samples, outcomes, self.failed, warn)


def _checked(name: str, found: Any, samples: Samples) -> tuple[np.ndarray, Failures]:
    """Returned rewards as float64, None as NaN; and those that are not finite."""
    try:
        values, wrong = as_rewards(name, found, len(samples))
    except ValueError as error:
        text = f"{error} The first completion is {samples.named(0)}."
        raise WrongAnswers(text) from None
    return values, dict.fromkeys(wrong, "it returned a number that is not finite")
