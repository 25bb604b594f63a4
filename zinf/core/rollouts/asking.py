"""Functions of users, called as TRL calls reward functions, in threads within a limit.

A function gets `prompts`, `completions`, `completion_ids` and the other columns of the
data by name, a list each, and returns a list with an answer for each completion. If it
raises or takes too long, it is called for each completion alone, so that those that
fail are known.
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from inspect import Parameter, iscoroutine, iscoroutinefunction, signature
from threading import Event, Thread
from typing import Any

from zinf.core.config.nearest import did_you_mean
from zinf.distributed import AbstractGroup, Alone

Function = Callable[..., Any]
Failures = dict[int, str]
ALONE = Alone()
OWN = ("prompts", "completions", "completion_ids")
# A function that hangs more often in a step ends the run: each time takes the limit.
MAX_HANGS = 3


@dataclass(frozen=True)
class Samples:
    """Completions that a function is asked about: an entry of each list is of one.

    Attributes:
        prompts: texts or conversations.
        completions: texts, or conversations that begin with a message of the assistant.
        completion_ids: tokens, with the one that ended the completion.
        columns: the other fields of the prompts' records.
        beside: what models read beside the prompts; see `Prompt`. Functions get none.
    """

    prompts: Sequence[Any]
    completions: Sequence[Any]
    completion_ids: Sequence[list[int]]
    columns: Mapping[str, Sequence[Any]]
    beside: Sequence[Any] = ()

    def __len__(self) -> int:
        return len(self.prompts)

    def only(self, number: int) -> "Samples":
        return self.part(slice(number, number + 1))

    def part(self, some: slice) -> "Samples":
        columns = {name: values[some] for name, values in self.columns.items()}
        own = self.prompts[some], self.completions[some], self.completion_ids[some]
        return Samples(*own, columns, self.beside[some])

    def arguments(self, function: Function) -> dict[str, Any]:
        """The arguments of a function: all columns, or those that it names."""
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


def own_part(count: int, group: AbstractGroup) -> slice:
    """Which of so many samples a process asks the functions about."""
    first, end = (count * n // group.count for n in (group.index, group.index + 1))
    return slice(first, end)


def of_all(
    name: str, own: tuple[Sequence[Any], Failures], group: AbstractGroup
) -> tuple[list[Any], Failures]:
    """The answers about all samples, and why some have none, by number.

    Args:
        own: those about this process's part; JSON values.
    """
    answers: list[Any] = []
    failures: Failures = {}
    # A function may take as long as its limit, for each sample.
    for values, failed in group.gather(name, [[*own[0]], [*own[1].items()]], None):
        failures |= {len(answers) + n: why for n, why in failed}
        answers += values
    return answers, failures


class WrongAnswers(ValueError):
    """A function returned something that no run can go on with."""


Read = Callable[[Any, Samples], tuple[Iterable[Any], Failures]]


@dataclass(frozen=True)
class Asked:
    """A function of a user, and what its calls come to.

    Attributes:
        title: what messages call it, such as "The reward function correct".
        seconds: the most that a call may take.
        key: of the config, that sets `seconds`.
        read: from what was returned to an answer for each sample, and the failures.
            Raises `WrongAnswers` for what ends the run.
        missing: the answer for a sample whose call failed.
    """

    title: str
    function: Function
    seconds: float
    key: str
    read: Read
    missing: Any

    def check(
        self,
        columns: Sequence[Mapping[str, Any]],
        where: Sequence[str],
        own: Sequence[str] = OWN,
    ) -> None:
        """Refuse records without a column that the function cannot do without.

        Args:
            columns: of each record.
            where: the place of each record, for the message.
            own: arguments that are no columns.

        Raises:
            ValueError: see above; or an argument of the function is not given by name.
        """
        for needed in self._needed(own):
            for record, place in zip(columns, where, strict=True):
                if needed not in record:
                    raise ValueError(
                        f"{self.title} takes {needed!r}, and {place} has no such "
                        f"column; it has {', '.join(record) or 'no other'}."
                        f"{did_you_mean(needed, record)} Add the column, or give the "
                        "argument a default."
                    )

    def _needed(self, own: Sequence[str]) -> Iterator[str]:
        """The columns that the function has no default for."""
        for name, parameter in signature(self.function).parameters.items():
            if parameter.kind is Parameter.POSITIONAL_ONLY:
                raise ValueError(
                    f"{self.title} is called by the names of its arguments, and "
                    f"{name!r} has none (it stands before a /)."
                )
            is_named = parameter.kind in (
                Parameter.POSITIONAL_OR_KEYWORD,
                Parameter.KEYWORD_ONLY,
            )
            if is_named and parameter.default is Parameter.empty and name not in own:
                yield name

    @property
    def is_async(self) -> bool:
        function = self.function
        call = type(function).__call__
        return iscoroutinefunction(function) or iscoroutinefunction(call)

    def start(self, samples: Samples) -> "Call":
        """Begin a call for all samples."""
        return Call(_called, self.function, samples.arguments(self.function))

    def answers(
        self, samples: Samples, call: "Call | None" = None
    ) -> tuple[list[Any], Failures]:
        """The answer for each sample, and why some have none.

        Args:
            call: of `start` with these samples; None: it is begun here.

        Raises:
            WrongAnswers: see `read`.
            RuntimeError: the function takes too long again and again.
        """
        if not len(samples):
            return [], {}
        values, failures, is_whole = self._result(call or self.start(samples), samples)
        if is_whole or len(samples) == 1:
            return values, failures
        num_hangs = 0
        for number in range(len(samples)):
            one = samples.only(number)
            value, why, _ = self._result(self.start(one), one)
            values[number] = value[0]
            failures |= {number: reason} if (reason := why.get(0)) else {}
            num_hangs += why.get(0) == self._hanging
            if num_hangs > MAX_HANGS:
                raise RuntimeError(
                    f"{self.title} takes more than {self.seconds:g} seconds again and "
                    f"again, at last for {samples.named(number)}. Raise {self.key}, or "
                    "let the function give up earlier."
                )
        return values, failures

    def _result(
        self, call: "Call", samples: Samples
    ) -> tuple[list[Any], Failures, bool]:
        """Answers, failures by sample, and whether the call returned.

        If it did not, all answers are missing, and the failure of several samples is
        not yet known.
        """
        try:
            values, failures = self.read(call.result(self.seconds), samples)
            return [*values], failures, True
        except WrongAnswers:
            raise
        except TimeoutError:
            reason = self._hanging
        except Exception as error:
            reason = f"it raised {type(error).__name__}: {error}"
        failures = {0: reason} if len(samples) == 1 else {}
        return [self.missing] * len(samples), failures, False

    @property
    def _hanging(self) -> str:
        return f"it took more than {self.seconds:g} seconds ({self.key})"


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


def name_of(function: Function) -> str:
    return getattr(function, "__name__", type(function).__name__)


def _called(function: Function, arguments: Mapping[str, Any]) -> Any:
    found = function(**arguments)
    return asyncio.run(found) if iscoroutine(found) else found
