"""Completions of one turn or several, with replies of an environment between them."""

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from zinf.core.config.completions import Completions
from zinf.core.rollouts.asking import Samples
from zinf.core.rollouts.environment import Environment, Reply, UnreadableReply
from zinf.core.rollouts.sizes import Prompt
from zinf.distributed import AbstractGroup
from zinf.inference import Scored

# `(prompts, tokens that begin with theirs, **how) -> completions`; see `Engine.sample`.
Sample = Callable[..., list[list[Scored]]]
logger = logging.getLogger(__name__)
# Folded into the key of a rollout for turns behind the first one.
TURNS = 0x5455
# Tokens of a further turn are drawn at least so many at once, if a row has room.
LEAST = 16


@dataclass
class Conversation:
    """What follows a prompt: turns of the model, and replies between them.

    Attributes:
        completion: a text, or messages, which begin with one of the assistant.
        tokens: of all turns and replies, as they were drawn and read.
        is_own: for each token, whether the model drew it.
        turns: with the scores of the tokens that the model drew.
        why_failed: why it is left out; None: it is not.
        is_stopped: whether it had no room for a reply, or the limit of turns ended it.
    """

    prompt: Prompt
    completion: Reply
    tokens: list[int] = field(default_factory=list)
    is_own: list[bool] = field(default_factory=list)
    turns: list[Scored] = field(default_factory=list)
    why_failed: str | None = None
    is_stopped: bool = False

    @classmethod
    def of(cls, prompt: Prompt) -> "Conversation":
        return cls(prompt, "" if isinstance(prompt.shown, str) else [])

    @property
    def log_probabilities(self) -> np.ndarray:
        """Those of the tokens that the model drew, float32 (T,)."""
        return np.concatenate([one.log_probabilities for one in self.turns])

    @property
    def entropies(self) -> np.ndarray:
        """As `log_probabilities`, of what the tokens were drawn from."""
        return np.concatenate([one.entropies for one in self.turns])

    @property
    def num_own(self) -> int:
        return sum(self.is_own)

    @property
    def history(self) -> np.ndarray:
        """The tokens that the next turn is drawn after, int32 (T,)."""
        return np.concatenate([self.prompt.tokens, np.array(self.tokens, np.int32)])

    def add_turn(self, drawn: Scored, text: str) -> None:
        self._add([{"role": "assistant", "content": text}], text)
        self.tokens += drawn.tokens
        self.is_own += [True] * len(drawn.tokens)
        self.turns.append(drawn)

    def add_reply(self, reply: Reply, tokens: Sequence[int]) -> None:
        self._add(reply, reply)
        self.tokens += tokens
        self.is_own += [False] * len(tokens)

    def _add(self, messages: Any, text: Any) -> None:
        """Append what has the form of the prompt; lists that were shown stay so."""
        is_text = isinstance(self.completion, str)
        self.completion = self.completion + (text if is_text else messages)


def as_samples(conversations: Sequence[Conversation]) -> Samples:
    """Conversations as functions of users get them."""
    prompts = [one.prompt for one in conversations]
    names = dict.fromkeys(name for p in prompts for name in p.columns)
    columns = {name: [p.columns.get(name) for p in prompts] for name in names}
    shown = [p.shown for p in prompts]
    completions = [one.completion for one in conversations]
    ids = [[*one.tokens] for one in conversations]
    return Samples(shown, completions, ids, columns, [p.beside for p in prompts])


@dataclass(frozen=True)
class Turns:
    """Draws conversations with an environment, or completions without one.

    All conversations take a turn together. Tokens depend on the seed, the number of the
    rollout, the place in it and the turn. They are never made of texts again: only what
    is new, the reply, is tokenized.

    Attributes:
        decode: from tokens of a turn to its text.
        ends: tokens that end a turn.
        length: tokens of a row.

    Raises:
        ValueError: there is an environment, and no token ends a turn.
    """

    settings: Completions
    decode: Callable[[list[int]], str]
    ends: tuple[int, ...]
    length: int
    environment: Environment | None = None

    def __post_init__(self) -> None:
        if self.environment is not None and not self.ends:
            raise ValueError(
                f"The environment {self.environment.name} replies when a turn ends, "
                "and no token ends one. Give eos_token_ids."
            )

    def draw(
        self,
        sample: Sample,
        prompts: Sequence[Prompt],
        *,
        key: jax.Array,
        seed: list[int],
        num_samples: int,
        group: AbstractGroup,
    ) -> list[Conversation]:
        """Several conversations for each prompt; those of one are adjacent.

        Args:
            sample: draws completions.
            key: of this rollout.
            seed: of this rollout, for the environment.
            group: the processes that draw together.

        Raises:
            WrongAnswers, RuntimeError: see `Environment.replies`.
        """
        groups = sample(
            prompts,
            [p.tokens for p in prompts],
            num_samples=num_samples,
            max_new_tokens=self.settings.max_new_tokens,
            key=key,
            **self._how(),
        )
        found = [Conversation.of(p) for p in prompts for _ in range(num_samples)]
        for one, drawn in zip(found, sum(groups, []), strict=True):
            one.add_turn(drawn, self.decode(drawn.tokens))
        if self.environment is None:
            return found
        turn, going = 1, self._ended(found, range(len(found)))
        while going := self._replied(found, going, turn, seed, group):
            turn += 1
            base = jax.random.fold_in(jax.random.fold_in(key, TURNS), turn)
            self._take_turn(sample, found, going, base)
            going = self._ended(found, going)
        if group.is_first:
            self._warn(found)
        return found

    def _how(self) -> dict[str, Any]:
        settings = self.settings
        return {
            "temperature": settings.temperature,
            "top_p": settings.top_p,
            "top_k": settings.top_k,
            "min_p": settings.min_p or 0.0,
            "repetition_penalty": settings.repetition_penalty,
            "eos_token_ids": self.ends,
        }

    def _ended(
        self, found: Sequence[Conversation], numbers: Iterable[int]
    ) -> list[int]:
        """Those whose turn ended by itself, and not for its length."""
        return [n for n in numbers if found[n].tokens[-1] in self.ends]

    def _replied(
        self,
        found: Sequence[Conversation],
        going: list[int],
        turn: int,
        seed: list[int],
        group: AbstractGroup,
    ) -> list[int]:
        """Have the environment reply; the numbers of conversations that go on."""
        assert self.environment is not None
        limit = self.environment.max_replies
        if limit is not None and turn > limit:
            for number in going:
                found[number].is_stopped = True
            return []
        if not going:
            return []
        replies, failures = self.environment.replies(
            as_samples([found[n] for n in going]),
            turn=turn,
            seeds=[_seed_of([*seed, turn, n]) for n in going],
            group=group,
        )
        pairs = zip(going, replies, strict=True)
        answered = {n: reply for n, reply in pairs if reply is not None}
        for place, why in failures.items():
            found[going[place]].why_failed = why
        return [n for n, reply in answered.items() if self._takes(found[n], reply)]

    def _takes(self, one: Conversation, reply: Reply) -> bool:
        """Add a reply if a row has room for it and for a token of the model."""
        assert self.environment is not None
        try:
            tokens = self.environment.tokens(reply)
        except UnreadableReply as error:
            one.why_failed = str(error)
            return False
        if self._room(one) <= len(tokens):
            one.is_stopped = True
            return False
        one.add_reply(reply, tokens)
        return True

    def _room(self, one: Conversation) -> int:
        """Tokens that a conversation may still get."""
        return self.settings.max_new_tokens - len(one.tokens)

    def _take_turn(
        self,
        sample: Sample,
        found: Sequence[Conversation],
        going: Sequence[int],
        base: jax.Array,
    ) -> None:
        """Draw another turn of conversations.

        At most LEAST tokens, or a power of two, are drawn, for each number may have
        programs of its own. It depends on the conversation alone, and what is beyond
        the room of this one is cut.
        """
        by_size: dict[int, list[int]] = defaultdict(list)
        for number in going:
            one = found[number]
            size = min(
                max(LEAST, 1 << (self._room(one) - 1).bit_length()),
                self.settings.max_new_tokens,
                self.length - len(one.prompt.tokens) - len(one.tokens),
            )
            by_size[size].append(number)
        for size, numbers in by_size.items():
            keys = jax.vmap(jax.random.fold_in, (None, 0))(base, np.array(numbers))
            groups = sample(
                [found[n].prompt for n in numbers],
                [found[n].history for n in numbers],
                max_new_tokens=size,
                key=keys,
                **self._how(),
            )
            for number, (drawn,) in zip(numbers, groups, strict=True):
                one = found[number]
                cut = _cut(drawn, self._room(one))
                one.add_turn(cut, self.decode(cut.tokens))

    def _warn(self, found: Sequence[Conversation]) -> None:
        failed = [n for n, one in enumerate(found) if one.why_failed is not None]
        if failed:
            assert self.environment is not None
            first = failed[0]
            logger.warning(
                f"The environment {self.environment.name}: {len(failed)} of "
                f"{len(found)} completions are left out. The first: "
                f"{found[first].why_failed} for {as_samples(found).named(first)}."
            )


def turn_metrics(found: Sequence[Conversation]) -> dict[str, float]:
    """Replies a conversation and those that failed, under TRL's names of tools."""
    failed = sum(one.why_failed is not None for one in found)
    calls = sum(len(one.turns) - 1 for one in found) + failed
    return {
        "tools/call_frequency": calls / len(found),
        "tools/failure_frequency": failed / max(1, calls),
        "environment/stopped_ratio": sum(x.is_stopped for x in found) / len(found),
    }


def _cut(drawn: Scored, room: int) -> Scored:
    """The first tokens of a turn."""
    return Scored(
        drawn.tokens[:room],
        drawn.log_probabilities[:room],
        drawn.entropies[:room],
        drawn.top_tokens[:room],
        drawn.top_log_probabilities[:room],
    )


def _seed_of(numbers: list[int]) -> int:
    return int(np.random.SeedSequence(numbers).generate_state(1)[0])
