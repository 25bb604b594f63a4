"""An environment: a function of a user that replies to what the model wrote.

It is called as reward functions are (`asking`), after each turn of the model, with the
conversations that have not ended. Beside the columns of the data it gets

* `completions`: all turns so far and the replies between them, as texts or messages;
* `completion_ids`: the same as tokens;
* `turns`: how many turns of the model each has, and
* `seeds`: a whole number of each, for environments that draw.

It returns for each conversation None, which ends it, or a reply: a text, or for prompts
that are conversations a message or several, such as results of tools. All that it knows
of a conversation is in its arguments, so a run that goes on in the middle of one asks
the same and gets the same.

TRL's `rollout_func` draws by itself, in whatever order, and its `environment_factory`
needs a chat template that says how calls of tools are read. Neither leaves the draws to
keys of samples and turns, so this is TRL's signature of reward functions.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from zinf.core.rollouts.asking import (
    ALONE,
    OWN,
    Asked,
    Failures,
    Function,
    Samples,
    WrongAnswers,
    name_of,
    of_all,
    own_part,
)
from zinf.distributed import AbstractGroup

Message = Mapping[str, Any]
Reply = str | list[Message]
GIVEN = ("turns", "seeds")
KINDS = {
    str: "None, which ends it, or a text that is not empty",
    list: "None, which ends it, or a text, a message or several",
}


class UnreadableReply(ValueError):
    """The tokenizer or the chat template has no tokens for a reply."""


@dataclass(frozen=True)
class Environment:
    """What replies to the turns of the model.

    Attributes:
        function: see above.
        tokens: the tokens of a reply to a text or to a conversation, which follow the
            token that ended the turn. Raises `UnreadableReply`.
        timeout: seconds that a call may take; see `Asked`.
        max_replies: the most to one prompt; None: as many as there is room for.
    """

    function: Function
    tokens: Callable[[Reply], list[int]]
    timeout: float = 60.0
    max_replies: int | None = None

    @property
    def name(self) -> str:
        return name_of(self.function)

    @property
    def _asked(self) -> Asked:
        title = f"The environment {self.name}"
        key = "grpo.environment_timeout"
        return Asked(title, self.function, self.timeout, key, self._read, None)

    def check(self, columns: Sequence[Mapping[str, Any]], where: Sequence[str]) -> None:
        """Refuse records without a column that the function takes; see `Asked`."""
        self._asked.check(columns, where, (*OWN, *GIVEN))

    def replies(
        self,
        samples: Samples,
        *,
        turn: int,
        seeds: Sequence[int],
        group: AbstractGroup = ALONE,
    ) -> tuple[list[Reply | None], Failures]:
        """The reply to each conversation, and why some have none.

        Args:
            turn: how many turns of the model there are.
            seeds: of each conversation.
            group: processes with the same samples, which each ask about a part.

        Raises:
            WrongAnswers: there are fewer or more replies, or one is no reply.
            RuntimeError: the function takes too long again and again.
        """
        given = {"turns": [turn] * len(samples), "seeds": [*seeds]}
        own = samples.prompts, samples.completions, samples.completion_ids
        asked = Samples(*own, {**samples.columns, **given})
        found = self._asked.answers(asked.part(own_part(len(samples), group)))
        return of_all("replies of the environment", found, group)

    def _read(self, found: Any, samples: Samples) -> tuple[list[Any], Failures]:
        if not isinstance(found, list | tuple):
            raise WrongAnswers(
                f"The environment {self.name} returned a {type(found).__name__}; it "
                "returns a list with None or a reply for each completion. The first is "
                f"{samples.named(0)}."
            )
        if len(found) != len(samples):
            raise WrongAnswers(
                f"The environment {self.name} returned {len(found)} replies for "
                f"{len(samples)} completions. Return None or a reply for each. The "
                f"first is {samples.named(0)}."
            )
        return [self._reply(x, samples, n) for n, x in enumerate(found)], {}

    def _reply(self, found: Any, samples: Samples, number: int) -> Reply | None:
        """A reply in the form of its prompt."""
        kind = str if isinstance(samples.prompts[number], str) else list
        messages = [found] if isinstance(found, Mapping) else found
        if kind is list and isinstance(found, str):
            messages = [{"role": "user", "content": found}] if found else []
        is_text = kind is str and isinstance(found, str) and bool(found)
        is_messages = kind is list and isinstance(messages, list) and bool(messages)
        if is_messages and all(map(_is_message, messages)):
            return [dict(x) for x in messages]
        if found is None or is_text:
            return found
        raise WrongAnswers(
            f"The environment {self.name} replied {found!r:.80} to "
            f"{samples.named(number)}. A reply is {KINDS[kind]}."
        )


def _is_message(found: Any) -> bool:
    return isinstance(found, Mapping) and isinstance(found.get("role"), str)
