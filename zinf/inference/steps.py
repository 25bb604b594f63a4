"""What the passes of generation compute: functions of parameters and a batch.

A prefill reads parts of prompts, and a decode one token of each sequence, or a few. The
suffixes are

  B  sequences of a microbatch    P  parts of prompts     S  tokens of each
  V  words
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zinf.core.jaxpr.keys import in_words
from zinf.core.problem.problem import Problem
from zinf.inference.decoder import Decoder, checked_all, checked_apply
from zinf.inference.drafts import GuessOnDevice
from zinf.inference.early import each_changed
from zinf.inference.rows import NO_AXIS, Parts, Shape, along, row_axes
from zinf.inference.sampling import Sampling
from zinf.inference.scores import Scores

NEEDED = "is_finite", "token"  # Results of drawing that are always there.
COUNT = "count"
MODEL, SEEN = "model", "seen"


@dataclass(frozen=True)
class Steps:
    """What programs of generation compute, whatever runs them.

    Attributes:
        problem: whose parameters the functions read.
        bound: turns `(params[, model_state], batch) -> outputs` into a function of flat
            arrays and a batch.
        key: a random key of the kind of those of the sequences.
        scores: what is told of drawn tokens; None for nothing.
        num_guesses: guesses of each sequence that a decode checks. See `Drafts`.
        guess_on_device: see `Drafts.on_device`; only fused programs use it.

    Raises:
        NotImplementedError: the decoder cannot check guesses.
    """

    problem: Problem
    decoder: Decoder
    sampling: Sampling
    bound: Callable[[Callable], Callable]
    key: jax.Array
    scores: Scores | None = None
    num_guesses: int = 0
    guess_on_device: GuessOnDevice | None = None

    def __post_init__(self) -> None:
        if self.num_guesses:
            self.decoder.check_drafts()

    def read(
        self, *arguments: Any, axes: Any, shape: Shape, read: Parts
    ) -> tuple[Any, Any]:
        """`(params[, model_state], batch) -> (logits, new cache)` of parts of prompts.

        The cache of rows that no part is of stays as it is. Logits (P, V) mean
        something after the last part of a prompt.

        Args:
            arguments: the batch is as `prompts` says.
            axes: see `cache_axes`.
        """
        *trees, batch = arguments
        tokens_PS, starts_P, rows_P = (batch[n] for n in ("tokens", "starts", "rows"))
        old, is_first_P = batch["cache"], batch["is_first"]
        is_every = read.rows == shape.rows  # Then part p is of row p, if of any.

        def before(old: Any, fresh: Any, axis: int) -> Any:
            """A leaf of the rows that parts are of."""
            if read.length == shape.prompt or axis == NO_AXIS:
                return fresh
            own = old if is_every else jnp.take(old, rows_P, axis, mode="clip")
            return jnp.where(along(is_first_P, axis, own.ndim), fresh, own)

        def joined(old: Any, axis: int) -> Callable[[Any], Any]:
            def change(new: Any) -> Any:
                if axis == NO_AXIS:
                    return new
                if is_every:
                    is_read = along(rows_P < shape.rows, axis, old.ndim)
                    return jnp.where(is_read, new, old)
                place = (*(slice(None),) * axis, rows_P)
                return old.at[place].set(new, mode="drop")

            return change

        fresh = self.decoder.init_cache(starts_P, shape.length)
        model = jax.tree.map(before, old[MODEL], fresh, axes[MODEL])
        # A leaf of the cache is written by the segment that computes it.
        changes = jax.tree.map(joined, old, axes)
        logits_PV, model = each_changed(
            partial(checked_apply, self.decoder),
            (*trees, tokens_PS, model),
            (lambda logits: logits, changes[MODEL]),
        )
        new = {MODEL: model}
        if SEEN in old:
            seen_PV = self.seen(tokens_PS, starts_P)
            none_PV = jnp.zeros_like(seen_PV)
            seen_PV |= before(old[SEEN], none_PV, axes[SEEN])
            new[SEEN] = changes[SEEN](seen_PV)
        return logits_PV, new

    def seen(self, tokens_BS: jax.Array, starts_B: jax.Array) -> jax.Array:
        """Whether each word is among the tokens of each prompt, bool (B, V)."""
        is_token = jnp.arange(tokens_BS.shape[1])[None] >= starts_B[:, None]
        rows = jnp.arange(len(tokens_BS))[:, None]
        none = jnp.zeros((len(tokens_BS), self.num_words), np.bool_)
        return none.at[rows, tokens_BS].max(is_token)

    def step(self, *arguments: Any) -> tuple[Any, Any]:
        """`(params[, model_state], batch) -> (results, new cache)` of a decode.

        Args:
            arguments: the batch is as `tokens` says.

        Returns:
            what `draw` gives at each place, (B, places, ...), with "count" (B,), the
            first places of a sequence that are right.
        """
        return (self._check if self.num_guesses else self._step)(*arguments)

    def _step(self, *arguments: Any) -> tuple[Any, Any]:
        """`step` without guesses."""
        *trees, batch = arguments
        cache, tokens, goes_on = batch["cache"], batch["tokens"], batch["goes_on"]
        logits, model = checked_apply(self.decoder, *trees, tokens, cache[MODEL])
        if self.decoder.take_back is not None:
            model = self.decoder.take_back(model, 1 - goes_on.astype(jnp.int32))
        new = {MODEL: model}
        if SEEN in cache:
            rows = jnp.arange(len(tokens))
            new[SEEN] = cache[SEEN].at[rows, tokens[:, 0]].max(goes_on)
        found, _ = self.draw(
            logits,
            batch["numbers"],
            batch["num_tokens"],
            batch["words"],
            new.get(SEEN),
        )
        found = {name: x[:, None] for name, x in found.items()}
        found[COUNT] = jnp.ones(len(tokens), jnp.int32)
        return found, new

    def _check(self, *arguments: Any) -> tuple[Any, Any]:
        """`step`, for the last token of each sequence and the guesses after it.

        A token is drawn after each of them. Those are right that come after right
        guesses alone; the cache is that after the last right one.
        """
        *trees, batch = arguments
        cache, tokens_BS = batch["cache"], batch["tokens"]
        logits_BSV, model = checked_all(self.decoder, *trees, tokens_BS, cache[MODEL])
        num_places = tokens_BS.shape[1]
        numbers_BS = batch["num_tokens"][:, None] + jnp.arange(num_places)[None]
        seen = cache.get(SEEN)
        if seen is not None:
            # At each place, the tokens up to it.
            is_read = jax.nn.one_hot(tokens_BS, seen.shape[1], dtype=jnp.int32)
            is_read = jnp.cumsum(is_read, axis=1) > 0
            seen = jnp.logical_or(seen[:, None], is_read)

        def draw(logits: Any, numbers: Any, seen: Any) -> Any:
            rest = batch["words"], seen
            return self.draw(logits, batch["numbers"], numbers, *rest)[0]

        axes = 1, 1, None if seen is None else 1
        found = jax.vmap(draw, axes, 1)(logits_BSV, numbers_BS, seen)
        is_right = found["token"][:, :-1] == tokens_BS[:, 1:]
        count = 1 + jnp.cumprod(is_right.astype(jnp.int32), axis=1).sum(axis=1)
        count = jnp.where(batch["goes_on"], count, 0)
        found[COUNT] = count
        assert self.decoder.take_back is not None
        new = {MODEL: self.decoder.take_back(model, num_places - count)}
        if seen is not None:
            last = jnp.maximum(count - 1, 0)[:, None, None]
            read = jnp.take_along_axis(seen, last, axis=1)[:, 0]
            new[SEEN] = jnp.where(batch["goes_on"][:, None], read, cache[SEEN])
        return found, new

    def draw(
        self,
        logits: jax.Array,
        numbers: Mapping[str, jax.Array],
        num_tokens: jax.Array,
        words: jax.Array,
        seen: jax.Array | None,
    ) -> tuple[dict[str, jax.Array], jax.Array | None]:
        """The next token of each sequence, and the tokens that each then has.

        Args:
            logits, ...: see `Sampling.choose`.

        Returns:
            `token` and `is_finite`, (B,), with what `Scores.of` gives; and bool (B, V),
            None if that does not matter.
        """
        token = self.sampling.choose(logits, numbers, num_tokens, words, self.key, seen)
        found = {"is_finite": jnp.isfinite(logits.max(axis=-1)), "token": token}
        if self.scores is not None:
            found |= self.scores.of(logits, token, numbers["temperature"])
        if seen is not None:
            seen = seen.at[jnp.arange(len(token)), token].set(True)
        return found, seen

    @property
    def results(self) -> tuple[str, ...]:
        """Names of the results of decode, in the order of `jax.tree`."""
        scores = () if self.scores is None else self.scores.names
        return tuple(sorted((*NEEDED, COUNT, *scores)))

    def prompts(self, shape: Shape, read: Parts) -> Any:
        """Shapes and dtypes of parts of prompts of a microbatch.

        Each is of the prompt in one of `rows`, or of none, which is `shape.rows`. The
        tokens of a part begin at `starts`, as those of the padded prompt do, if it
        `is_first`; all other parts are full.
        """
        numbers = jax.ShapeDtypeStruct((read.rows,), np.int32)
        return {
            "tokens": jax.ShapeDtypeStruct((read.rows, read.length), np.int32),
            "starts": numbers,
            "rows": numbers,
            "is_first": jax.ShapeDtypeStruct((read.rows,), np.bool_),
            "cache": self.cache(shape),
        }

    def tokens(self, shape: Shape) -> Any:
        """Shapes and dtypes of a microbatch of tokens after prompts.

        `num_tokens` are the new tokens that each sequence has, and `words` its key. The
        cache of those that do not go on counts no token of this pass, so their prompts
        may be read meanwhile.
        """
        rows, words = shape.rows, in_words(self.key).shape[-1]
        return {
            "tokens": jax.ShapeDtypeStruct((rows, 1 + self.num_guesses), np.int32),
            "cache": self.cache(shape),
            "numbers": jax.eval_shape(self.sampling.constants),
            "num_tokens": jax.ShapeDtypeStruct((rows,), np.int32),
            "goes_on": jax.ShapeDtypeStruct((rows,), np.bool_),
            "words": jax.ShapeDtypeStruct((rows, words), np.uint32),
        }

    def cache_axes(self, shape: Shape) -> Any:
        """For each leaf of the cache, the dim along which its sequences lie."""
        larger = replace(shape, rows=shape.rows + 1)
        return row_axes(self.cache(shape), self.cache(larger))

    def cache(self, shape: Shape) -> Any:
        """The model's cache, and the tokens read so far if sampling needs them."""
        cache = {
            MODEL: jax.eval_shape(
                lambda s: self.decoder.init_cache(s, shape.length), shape.starts
            )
        }
        if self.sampling.penalizes:
            cache[SEEN] = jax.ShapeDtypeStruct((shape.rows, self.num_words), np.bool_)
        return cache

    @cached_property
    def num_words(self) -> int:
        """The size of the vocabulary of the logits."""

        def logits(*arguments: Any) -> jax.Array:
            *trees, batch = arguments
            cache = self.decoder.init_cache(batch["starts"], 1)
            return checked_apply(self.decoder, *trees, batch["tokens"], cache)[0]

        shape = Shape(1, 1, 1)
        batch = {
            "tokens": jax.ShapeDtypeStruct((1, 1), np.int32),
            "starts": shape.starts,
        }
        flat = self.problem.abstract_arguments()
        return jax.eval_shape(self.bound(logits), flat, batch).shape[-1]
