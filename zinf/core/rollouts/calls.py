"""Rewards: functions, called as TRL calls them in threads within a limit, and models.

A function gets `prompts`, `completions`, `completion_ids` and the other columns of the
data by name, a list each, and returns a number or None for each completion. None says
that the function has no opinion. A completion whose reward fails (it is NaN, or the
call raises or hangs) is left out of the step, with a warning that names its prompt.
Reward models run in the caller's thread: programs that are divided among devices must
start in one order.
"""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from inspect import Parameter, iscoroutine, iscoroutinefunction, signature
from threading import Event, Thread
from typing import Any

import numpy as np

from zinf.core.config.nearest import did_you_mean
from zinf.core.rl import as_rewards, combined

logger = logging.getLogger(__name__)
Function = Callable[..., Any]
OWN = ("prompts", "completions", "completion_ids")
# A function that hangs more often in a step ends the run: each time takes the limit.
MAX_HANGS = 3


@dataclass(frozen=True)
class Samples:
    """Completions that are rewarded together: an entry of each list is of one.

    Attributes:
        prompts: texts or conversations.
        completions: texts, or conversations of one message of the assistant.
        completion_ids: tokens, with the one that ended the completion.
        columns: the other fields of the prompts' records.
    """

    prompts: Sequence[Any]
    completions: Sequence[Any]
    completion_ids: Sequence[list[int]]
    columns: Mapping[str, Sequence[Any]]

    def __len__(self) -> int:
        return len(self.prompts)

    def only(self, number: int) -> "Samples":
        one = slice(number, number + 1)
        columns = {name: values[one] for name, values in self.columns.items()}
        own = self.prompts[one], self.completions[one], self.completion_ids[one]
        return Samples(*own, columns)

    def arguments(self, function: Function) -> dict[str, Any]:
        """The arguments of a reward function: all columns, or those that it names."""
        own = self.prompts, self.completions, self.completion_ids
        lists = {**self.columns, **dict(zip(OWN, own, strict=True))}
        given = {name: list(x) for name, x in lists.items()}
        named = signature(function).parameters
        if any(p.kind is Parameter.VAR_KEYWORD for p in named.values()):
            return given
        return {name: x for name, x in given.items() if name in named}

    def named(self, number: int) -> str:
        """A completion, for messages."""
        prompt, completion = self.prompts[number], self.completions[number]
        return f"the completion {completion!r:.80} of the prompt {prompt!r:.80}"


@dataclass(frozen=True)
class Rewarded:
    """The rewards of N completions by all reward functions.

    Attributes:
        values: float64 (N,) of each function by its name; NaN where it has no opinion.
        total: float64 (N,), their weighted sum; NaN for a completion that is left out.
    """

    values: Mapping[str, np.ndarray]
    total: np.ndarray


class WrongRewards(ValueError):
    """A reward function returned something else than a number a completion."""


Failures = dict[int, str]
Outcome = tuple[np.ndarray, Failures]


class AbstractRewardModel(ABC):
    """A model that rewards completions. No limit of time is set to it."""

    @property
    @abstractmethod
    def name(self) -> str: ...

    @abstractmethod
    def check(self, prompts: Sequence[Any], where: Sequence[str]) -> None:
        """Refuse prompts that the model cannot read.

        Args:
            prompts: texts or conversations.
            where: the place of each record, for the message.

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
            if isinstance(function, AbstractRewardModel):
                name = function.name
            else:
                name = getattr(function, "__name__", type(function).__name__)
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
        for name, function in zip(self.names, self.functions, strict=True):
            if isinstance(function, AbstractRewardModel):
                continue
            for needed in _needed(function):
                for record, place in zip(columns, where, strict=True):
                    if needed not in record:
                        raise ValueError(
                            f"The reward function {name} takes {needed!r}, and "
                            f"{place} has no such column; it has "
                            f"{', '.join(record) or 'no other'}."
                            f"{did_you_mean(needed, record)} Add the column, or give "
                            "the argument a default."
                        )

    def start(self, samples: Samples) -> "Judging":
        """Begin to reward completions: functions do so in a thread, beside the caller.

        `result` has models reward them too, and returns a `Rewarded`.

        Raises (from `result`):
            WrongRewards: a function returned another number of rewards, or one that is
                no number.
            RuntimeError: a function hangs again and again.
            ValueError: no completion has a reward.
        """
        return Judging(self, samples, Call(self._by_functions, samples))

    def _by_functions(self, samples: Samples) -> dict[int, Outcome]:
        """What the functions say, by their places."""
        functions = {
            number: function
            for number, function in enumerate(self.functions)
            if not isinstance(function, AbstractRewardModel)
        }
        calls = {
            number: self._call(function, samples)
            for number, function in functions.items()
            if _is_async(function)
        }
        found = {}
        for number, function in functions.items():
            call = calls.get(number) or self._call(function, samples)
            found[number] = self._of(self.names[number], function, call, samples)
        return found

    def together(self, samples: Samples, outcomes: Mapping[int, Outcome]) -> Rewarded:
        """The sum of all that was said of completions, with warnings of what failed.

        Raises:
            ValueError: no completion has a reward.
        """
        values: dict[str, np.ndarray] = {}
        has_failed = np.zeros(len(samples), np.bool_)
        for number, name in enumerate(self.names):
            values[name], failures = outcomes[number]
            has_failed[list(failures)] = True
            if failures:
                first = next(iter(failures))
                logger.warning(
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
            logger.warning(
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

    def _call(self, function: Function, samples: Samples) -> "Call":
        return Call(_called, function, samples.arguments(function))

    def _of(
        self, name: str, function: Function, call: "Call", samples: Samples
    ) -> tuple[np.ndarray, Failures]:
        """The rewards of completions by a function, and the reasons of failed ones."""
        values, failures, is_whole = self._result(name, call, samples)
        if is_whole or len(samples) == 1:
            return values, failures
        num_hangs = 0
        for number in range(len(samples)):
            one = samples.only(number)
            value, why, _ = self._result(name, self._call(function, one), one)
            values[number] = value[0]
            failures |= {number: reason} if (reason := why.get(0)) else {}
            num_hangs += why.get(0) == self._hanging
            if num_hangs > MAX_HANGS:
                raise RuntimeError(
                    f"The reward function {name} takes more than {self.timeout:g} "
                    f"seconds again and again, at last for {samples.named(number)}. "
                    "Raise reward_timeout, or let the function give up earlier."
                )
        return values, failures

    def _result(
        self, name: str, call: "Call", samples: Samples
    ) -> tuple[np.ndarray, Failures, bool]:
        """Rewards, failures by completion, and whether the call returned.

        If it did not, the rewards are NaN, and the failure of several completions is
        not yet known.
        """
        try:
            return *_checked(name, call.result(self.timeout), samples), True
        except WrongRewards:
            raise
        except TimeoutError:
            reason = self._hanging
        except Exception as error:
            reason = f"it raised {type(error).__name__}: {error}"
        failures = {0: reason} if len(samples) == 1 else {}
        return np.full(len(samples), np.nan), failures, False

    @property
    def _hanging(self) -> str:
        return f"it took more than {self.timeout:g} seconds (reward_timeout)"


@dataclass(frozen=True)
class Judging:
    """Completions that functions reward now, and models when `result` is called."""

    rewards: Rewards
    samples: Samples
    call: "Call"

    def result(self) -> Rewarded:
        """See `Rewards.start`."""
        models = self.rewards.models.items()
        scored = {number: model.scores(self.samples) for number, model in models}
        return self.rewards.together(self.samples, scored | self.call.result())


class Call:
    """A call in a thread of its own, which the end of the process does not wait for."""

    def __init__(self, function: Callable, *arguments: Any) -> None:
        self._is_over = Event()
        self._value: Any = None
        self._error: BaseException | None = None
        Thread(target=self._run, args=(function, arguments), daemon=True).start()

    def _run(self, function: Callable, arguments: tuple[Any, ...]) -> None:
        try:
            self._value = function(*arguments)
        except BaseException as error:
            self._error = error
        finally:
            self._is_over.set()

    def result(self, seconds: float | None = None) -> Any:
        """The function's result; its error is raised.

        Raises:
            TimeoutError: it is not over yet.
        """
        if not self._is_over.wait(seconds):
            raise TimeoutError
        error = self._error
        if error is None:
            return self._value
        if not isinstance(error, Exception):  # such as sys.exit in a reward function
            raise RuntimeError(f"{type(error).__name__}: {error}") from error
        raise error


def _called(function: Function, arguments: Mapping[str, Any]) -> Any:
    found = function(**arguments)
    return asyncio.run(found) if iscoroutine(found) else found


def _is_async(function: Function) -> bool:
    return iscoroutinefunction(function) or iscoroutinefunction(type(function).__call__)


def _needed(function: Function) -> Iterator[str]:
    """The columns that a function has no default for."""
    for name, parameter in signature(function).parameters.items():
        if parameter.kind is Parameter.POSITIONAL_ONLY:
            raise ValueError(
                f"A reward function is called by the names of its arguments, and "
                f"{name!r} of {function} has none (it stands before a /)."
            )
        is_named = parameter.kind in (
            Parameter.POSITIONAL_OR_KEYWORD,
            Parameter.KEYWORD_ONLY,
        )
        if is_named and parameter.default is Parameter.empty and name not in OWN:
            yield name


def _checked(name: str, found: Any, samples: Samples) -> tuple[np.ndarray, Failures]:
    """Returned rewards as float64, None as NaN; and those that are not finite."""
    try:
        values, wrong = as_rewards(name, found, len(samples))
    except ValueError as error:
        text = f"{error} The first completion is {samples.named(0)}."
        raise WrongRewards(text) from None
    return values, dict.fromkeys(wrong, "it returned a number that is not finite")
