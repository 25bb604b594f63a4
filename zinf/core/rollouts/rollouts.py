"""Batches of completions that the engine in training draws, and rewards judge.

`AbstractRollouts` is a dataset that asks an engine, as `zinf.data.Taught` is. Each time
its completions are used up it draws others: prompts in a keyed order, a group of
completions of each, with the log-probabilities that they were drawn with. Tokens are
kept as they were drawn and never made of texts again. Rewards are computed in a thread,
while the engine scores the tokens by the program of training. All that a loss weighs is
in the batch, so no number depends on microbatches or devices. What it is made of
rewards is up to the subclasses: `grpo.py` and `ppo.py`.

Several processes have the same completions, as `engine.generate` gives all of them to
all. Each asks the functions of users about a part, scores and is trained on its own
rows, and writes nothing but for the first.
"""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from io import BytesIO
from pathlib import Path
from time import perf_counter
from typing import Any, Generic, Self, TypeVar

import grain
import jax
import numpy as np

from zinf.core.config.completions import Completions
from zinf.core.engine.engine import Engine
from zinf.core.rl import (
    difference_metrics,
    is_truncated,
    reward_metrics,
    token_rows,
)
from zinf.core.rollouts.asking import Samples
from zinf.core.rollouts.beside import AbstractBeside
from zinf.core.rollouts.calls import AbstractRewardModel, Rewarded, Rewards
from zinf.core.rollouts.environment import Environment
from zinf.core.rollouts.sizes import Prompt, Sizes, batch_spec, check_room
from zinf.core.rollouts.texts import Told
from zinf.core.rollouts.turns import Turns, as_samples, turn_metrics
from zinf.core.trainer import Hook
from zinf.data import AbstractForeseen
from zinf.data.share import own_rows
from zinf.inference import Scored

Arrays = dict[str, np.ndarray]
Score = Callable[[Arrays], np.ndarray]
Settings = TypeVar("Settings", bound=Completions)
IGNORED = -100
# Folded into the key of draws of completions: other draws use the same seed.
SALT = 0x524C


@dataclass(frozen=True)
class Judged:
    """N completions as rows, with what was found of their tokens; all are arrays.

    Attributes:
        is_drawn: 1 for tokens that the model drew, (N, tokens - 1).
        is_cut: whether no end token ended a completion, (N,).
        rewards: float64 (N,); NaN for completions that are left out.
        logps: log-probabilities by the model in training, or if it was not asked those
            that tokens were drawn with, (N, tokens - 1).
        drawn_logps, entropies: of the draws, (N, tokens - 1).
        reference: log-probabilities by the reference, if there is one.
        more: what `AbstractRollouts.ask` found.
    """

    is_drawn: np.ndarray
    is_cut: np.ndarray
    rewards: np.ndarray
    logps: np.ndarray
    drawn_logps: np.ndarray
    entropies: np.ndarray
    reference: np.ndarray | None
    more: Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Weighed:
    """What rewards come to.

    Attributes:
        arrays: leaves of batches: those of `AbstractRollouts.names`, (N, tokens - 1),
            and `denominators` (N,).
        advantages: of the completions, (N,), to be shown.
        metrics: of the step that begins with these completions.
    """

    arrays: Mapping[str, np.ndarray]
    advantages: np.ndarray
    metrics: Mapping[str, float] = field(default_factory=dict)


class AbstractRollouts(grain.IterDataset, Generic[Settings]):
    """Batches of completions, without an end.

    Args:
        prompts: those of an epoch.
        rewards: what judges completions.
        settings: how completions are drawn and weighed.
        length: tokens of a row, of a prompt with its completion.
        batch_size: completions of a step; a multiple of `num_microbatches`.
        num_microbatches: of a step; the engine scores a batch in as many.
        decode: from tokens to the text that reward functions get.
        eos_token_ids: tokens that end a completion.
        padding: the token of rows after the completion.
        seed: of the order of prompts and of what is drawn.
        environment: what replies to the turns of the model; None: a completion is one
            turn. Replies are no part of the loss.
        texts: a file for completions and their rewards, as JSON lines; None: none.
        tokens_name: the leaf of the batch that has tokens, (rows, tokens): "input_ids",
            as models of `transformers` take them, or "tokens" of zinf's own.
        beside: draws and adds what prompts have beside tokens; None: nothing.

    Raises:
        ValueError: a prompt has no room for its completion, a column is missing that a
            reward function takes, or sizes do not divide each other.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        rewards: Rewards,
        settings: Settings,
        *,
        length: int,
        batch_size: int,
        decode: Callable[[list[int]], str],
        num_microbatches: int = 1,
        eos_token_ids: Sequence[int] = (),
        padding: int = 0,
        seed: int = 0,
        environment: Environment | None = None,
        texts: Path | None = None,
        tokens_name: str = "input_ids",
        beside: AbstractBeside | None = None,
    ) -> None:
        super().__init__()
        if not prompts:
            raise ValueError("There is no prompt. Give at least one record.")
        self.prompts, self.rewards, self.settings = prompts, rewards, settings
        self.length, self.num_microbatches = length, num_microbatches
        self.sizes = self.sizes_of(batch_size, num_microbatches)
        self.turns = Turns(settings, decode, tuple(eos_token_ids), length, environment)
        self.padding, self.tokens_name = padding, tokens_name
        self.beside = beside
        self.draw_seed = seed
        for prompt in prompts:
            check_room(prompt, settings, length)
        places = [p.where for p in prompts]
        columns = [p.columns for p in prompts]
        rewards.check(columns, places)
        if environment is not None:
            environment.check(columns, places)
        for model in rewards.models.values():
            model.check(prompts)
        self._engine: Engine | None = None
        self.reference: Score | None = None
        self.told = Told(texts)

    @abstractmethod
    def sizes_of(self, batch_size: int, num_microbatches: int) -> Sizes:
        """How many completions are drawn at once.

        Raises:
            ValueError: sizes do not divide each other.
        """

    @property
    @abstractmethod
    def names(self) -> tuple[str, ...]:
        """The leaves (rows, tokens - 1) of a batch, beside tokens and labels."""

    @property
    @abstractmethod
    def is_scored(self) -> bool:
        """Whether the model in training scores the tokens before the first step."""

    def ask(self, arrays: Arrays) -> Arrays:
        """What else models say of drawn rows, (rows, tokens - 1) each."""
        return {}

    @abstractmethod
    def weighed(self, judged: Judged) -> Weighed:
        """Weights and advantages of tokens, and all else that the loss reads."""

    def of(
        self,
        engine: Engine,
        reference: Score | None = None,
        models: Sequence[AbstractRewardModel] = (),
    ) -> Self:
        """These rollouts, drawn by an engine from now on.

        Args:
            reference: from a batch to log-probabilities of its tokens by the
                reference, float32 (rows, tokens - 1). Needed if the divergence from it
                has a factor.
            models: stand for the reward models among the rewards, in their order.

        Raises:
            ValueError: there is such a factor and no reference.
        """
        settings = self.settings
        if settings.penalty and reference is None:
            key = f"{settings.KEY}.{settings.PENALTY}"
            raise ValueError(
                f"{key} is {settings.penalty}, and there is no reference to diverge "
                f"from. Give reference=, or set {key} to 0."
            )
        self._engine, self.reference = engine, reference
        if not engine.planner.group.is_first:
            self.told = Told(None)
        self.rewards = self.rewards.asking(models)
        return self

    @property
    def engine(self) -> Engine:
        assert self._engine is not None, "call `of` with an engine first"
        return self._engine

    def sample(
        self, prompts: Sequence[Prompt], tokens: Sequence[np.ndarray], **how: Any
    ) -> list[list[Scored]]:
        """Completions after tokens, which begin with prompts; see `Engine.sample`."""
        if self.beside is not None:
            return self.beside.sample(self.engine, prompts, tokens, **how)
        return self.engine.sample(tokens, **how)

    @property
    def share(self) -> tuple[int, int]:
        """(index, count): which part of a batch this process has."""
        return (0, 1) if self._engine is None else self._engine.planner.batch_share

    @property
    def hook(self) -> Hook:
        """For `zinf.Trainer`: adds metrics of rewards and texts to those of a step."""
        return Hook(self.told.after_step)

    def brief(self) -> str:
        """How much is drawn, in a line."""
        sizes, group = self.sizes, self.sizes.group
        return (
            f"{len(self.prompts):,} prompts; {sizes.drawn} completions are drawn at "
            f"once, {group} of each of {sizes.num_prompts} prompts, for "
            f"{sizes.num_steps * self.settings.num_uses} steps"
        )

    def spec(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes and dtypes of this process's part of the batch of a step."""
        rows = self.sizes.batch // self.share[1]
        found = batch_spec(self.names, rows, self.length, self.tokens_name)
        more = {} if self.beside is None else self.beside.spec(rows, self.length)
        return found | dict(more)

    def __iter__(self) -> "RolloutsIterator":
        return RolloutsIterator(self)


class RolloutsIterator(AbstractForeseen):
    """Iterates over `AbstractRollouts`.

    Its state is the number of times that completions were drawn, and the batches of the
    last ones while some are to be used, which the engine could not draw again.
    """

    def __init__(self, rollouts: AbstractRollouts) -> None:
        super().__init__()
        self._rollouts = rollouts
        self._num_drawn = self._num_used = 0
        self._arrays: Arrays = {}

    @property
    def _num_uses(self) -> int:
        own = self._rollouts
        return own.sizes.num_steps * own.settings.num_uses

    def __next__(self) -> Arrays:
        own = self._rollouts
        told = own.told
        if not self._arrays or self._num_used == self._num_uses:
            drawn = _drawn(own, self._num_drawn)
            self._arrays, self._num_used = drawn.arrays, 0
            self._num_drawn += 1
            told.of_rollout(drawn.metrics, drawn.lines)
        rows = own.sizes.batch
        start = self._num_used % own.sizes.num_steps * rows
        self._num_used += 1
        batch = {n: x[start : start + rows] for n, x in self._arrays.items()}
        return own_rows(batch, own.share, own.num_microbatches)

    def get_state(self) -> dict[str, Any]:
        """The position, as JSON that may contain bytes."""
        state: dict[str, Any] = {"num_drawn": self._num_drawn}
        if self._arrays and self._num_used < self._num_uses:
            packed = BytesIO()
            np.savez_compressed(packed, allow_pickle=False, **self._arrays)
            state |= {"num_used": self._num_used, "arrays": packed.getvalue()}
        return state

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue at a position that `get_state` returned."""
        self._num_drawn = state["num_drawn"]
        self._num_used, self._arrays = state.get("num_used", 0), {}
        if "arrays" in state:
            with np.load(BytesIO(state["arrays"]), allow_pickle=False) as packed:
                self._arrays = {name: packed[name] for name in packed.files}

    def first(self) -> Any:
        """Shapes of the first batch, for which nothing is drawn."""
        return self._rollouts.spec()

    def whole(self) -> Any:
        return self._rollouts.spec()

    def coming(self, num_steps: int) -> list[Any]:
        return []


@dataclass(frozen=True)
class _Drawn:
    """Completions drawn at once: arrays of N rows, metrics, and a line of JSON each."""

    arrays: Arrays
    metrics: dict[str, float]
    lines: list[dict[str, Any]]


def prompt_numbers(
    count: int, sizes: Sizes, *, time: int, seed: int | None
) -> list[int]:
    """The numbers of the prompts that are drawn from at a time, from 0.

    Epochs follow each other without a gap, each in an order of its own.

    Args:
        seed: of the orders; None: prompts are taken as they stand.
    """
    places = range(time * sizes.num_prompts, (time + 1) * sizes.num_prompts)
    numbered = (divmod(place, count) for place in places)
    if seed is None:
        return [number for _, number in numbered]
    return [int(_order(count, seed, epoch)[number]) for epoch, number in numbered]


@lru_cache(maxsize=2)
def _order(count: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(count)


def _drawn(own: AbstractRollouts, time: int) -> _Drawn:
    settings, sizes, began = own.settings, own.sizes, perf_counter()
    seed = own.draw_seed if settings.shuffle_dataset else None
    numbers = prompt_numbers(len(own.prompts), sizes, time=time, seed=seed)
    prompts = [own.prompts[n] for n in numbers]
    key = jax.random.fold_in(jax.random.key(own.draw_seed), SALT)
    key, salted = jax.random.fold_in(key, time), [own.draw_seed, SALT, time]
    group = own.engine.planner.group
    rest = {"num_samples": sizes.group, "group": group}
    written = own.turns.draw(own.sample, prompts, key=key, seed=salted, **rest)
    generated = perf_counter()
    ids, samples = [one.tokens for one in written], as_samples(written)
    failed = [n for n, one in enumerate(written) if one.why_failed is not None]
    call = own.rewards.start(samples, failed, group)

    is_cut = is_truncated(ids, own.turns.ends)
    tokens, is_drawn = token_rows(
        [one.prompt.tokens.tolist() for one in written],
        ids,
        own.length,
        padding=own.padding,
        own=[one.is_own for one in written],
    )
    arrays: Arrays = {own.tokens_name: tokens}
    if own.tokens_name == "input_ids":
        shifted = np.pad(is_drawn, ((0, 0), (1, 0)))
        arrays["labels"] = np.where(shifted != 0, tokens, IGNORED).astype(np.int32)
    if own.beside is not None:
        arrays |= own.beside.leaves([one.prompt for one in written], tokens)
    drawn_logps = _placed([one.log_probabilities for one in written], is_drawn)
    logps, reference = drawn_logps, None
    if own.is_scored:
        logps = in_steps(own, _scores(own), arrays)
    if own.reference is not None and settings.penalty:
        reference = in_steps(own, own.reference, arrays)
    more = own.ask(arrays)
    rewarded: Rewarded = call.result()

    entropies = _placed([one.entropies for one in written], is_drawn)
    rows = is_drawn, is_cut, rewarded.total, logps, drawn_logps, entropies
    weighed = own.weighed(Judged(*rows, reference=reference, more=more))
    names = (*own.names, "denominators")
    arrays |= {name: weighed.arrays[name].astype(np.float32) for name in names}
    metrics = reward_metrics(rewarded.values, rewarded.total, sizes.group)
    if own.is_scored:
        metrics |= difference_metrics(logps, drawn_logps, is_drawn)
    metrics["entropy"] = float(entropies.sum() / max(1, is_drawn.sum()))
    metrics |= weighed.metrics
    if sizes.num_steps > 1:
        order = np.random.default_rng(salted).permutation(sizes.drawn)
        arrays = {name: x[order] for name, x in arrays.items()}
    metrics["generation_seconds"] = generated - began
    metrics["rollout_seconds"] = perf_counter() - began
    metrics |= _length_metrics(np.array([one.num_own for one in written]), is_cut)
    lines = _lines(samples, rewarded, weighed.advantages, is_cut)
    if own.turns.environment is not None:
        metrics |= turn_metrics(written)
        for line, one in zip(lines, written, strict=True):
            line |= {"num_turns": len(one.turns), "num_own_tokens": one.num_own}
    return _Drawn(arrays, metrics, lines)


def _scores(own: AbstractRollouts) -> Score:
    """Log-probabilities by the program of training, with its temperature."""

    def scores(batch: Arrays) -> np.ndarray:
        return own.engine.log_probabilities(
            batch,
            temperature=own.settings.temperature,
            num_microbatches=own.num_microbatches,
        )

    return scores


def in_steps(own: AbstractRollouts, score: Score, arrays: Arrays) -> np.ndarray:
    """Apply `score` to all drawn rows, as many at a time as a step has.

    Each process gives its part of the rows to `score`, which returns all.
    """
    rows = own.sizes.batch
    parts = (
        {name: x[start : start + rows] for name, x in arrays.items()}
        for start in range(0, own.sizes.drawn, rows)
    )
    found = (score(own_rows(part, own.share)) for part in parts)
    return np.concatenate([np.asarray(x, np.float32) for x in found])


def _placed(values: Sequence[np.ndarray], is_drawn: np.ndarray) -> np.ndarray:
    """Values of drawn tokens at their places in the rows, zero elsewhere; float32."""
    found = np.zeros(is_drawn.shape, np.float32)
    found[is_drawn != 0] = np.concatenate(values)
    return found


def _length_metrics(lengths: np.ndarray, is_cut: np.ndarray) -> dict[str, float]:
    found = {
        f"completions/{name}_length": float(pick(lengths))
        for name, pick in (("mean", np.mean), ("min", np.min), ("max", np.max))
    }
    found["completions/clipped_ratio"] = float(is_cut.mean())
    ended = lengths[~is_cut]
    if len(ended):
        found["completions/mean_terminated_length"] = float(ended.mean())
    return found


def _lines(
    samples: Samples, rewarded: Rewarded, advantages: np.ndarray, is_cut: np.ndarray
) -> list[dict[str, Any]]:
    def number(value: float) -> float | None:
        return None if np.isnan(value) else float(value)

    return [
        {
            "prompt": samples.prompts[i],
            "completion": samples.completions[i],
            "num_tokens": len(samples.completion_ids[i]),
            "is_truncated": bool(is_cut[i]),
            "rewards": {n: number(x[i]) for n, x in rewarded.values.items()},
            "reward": number(rewarded.total[i]),
            "advantage": float(advantages[i]),
        }
        for i in range(len(samples))
    ]
