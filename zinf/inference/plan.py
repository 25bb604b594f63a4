"""Plans prefill and decode: two programs over one cache.

Prefill reads the prompts, and decode one token of each sequence. Both run all sequences
through a segment before the next segment starts, in microbatches of `rows`, so weights
cross each link once a token however many sequences there are (FlexGen,
arXiv:2303.06865, section 4.1; ZeRO-Inference, arXiv:2207.00032, section 6).
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zinf.core.jaxpr.keys import in_words
from zinf.core.plan import InfeasibleError
from zinf.core.problem.leafwise import Leafwise
from zinf.core.program import ArrayId, ArraySpec, Role, Tier, open_tiers
from zinf.core.segment import Function, named_leaves
from zinf.core.sharding.mesh import first_cpu
from zinf.core.step.arrays import array_specs
from zinf.core.step.forward import Cached, Forward, plan_again, plan_forward
from zinf.core.step.planner import Planner
from zinf.core.step.setup import AtRest
from zinf.inference.decoder import Decoder, checked_all, checked_apply
from zinf.inference.sampling import Sampling
from zinf.inference.scores import Scores

NAME = "the decoder"
NEEDED = "is_finite", "token"  # Results of drawing that are always there.
COUNT = "count"
CACHE = "batch/cache/"
MODEL, SEEN = "model", "seen"


@dataclass(frozen=True)
class Shape:
    """Sizes of one microbatch: sequences, tokens of a prompt, slots of the cache."""

    rows: int
    prompt: int
    length: int

    @property
    def starts(self) -> jax.ShapeDtypeStruct:
        """Shape and dtype of the first slots of the sequences."""
        return jax.ShapeDtypeStruct((self.rows,), np.int32)


@dataclass(frozen=True)
class Generation:
    """The two programs for one shape.

    Attributes:
        names: the leaves of the cache in flattened order, as the programs name them.
        results: what the programs return beside them, in flattened order: what `draw`
            gives at each place, (B, places, ...), and "count" (B,), the first places of
            a sequence that are right. A prefill has one place.
        vocab_size: the words of the model; None if nobody asks.
        first: makes the cache before the first token, leaf by leaf on the host, given
            the first slot of each sequence.
    """

    shape: Shape
    prefill: Forward
    decode: Forward
    names: tuple[str, ...]
    results: tuple[str, ...]
    vocab_size: int | None
    first: Leafwise


@dataclass(frozen=True)
class GenerationPlanner:
    """Plans generation for the arrays at rest of an engine.

    Attributes:
        bound: turns `(params[, model_state], batch) -> outputs` into a function of flat
            arrays and a batch.
        key: a random key of the kind of those of the sequences.
        execution: as in a config; "streamed" never fuses.
        scores: what is told of drawn tokens; None for nothing.
        num_guesses: guesses of each sequence that a decode checks. See `Drafts`.

    Raises:
        NotImplementedError: the planner is for several devices, or the decoder cannot
            check guesses.
    """

    planner: Planner
    at_rest: AtRest
    decoder: Decoder
    sampling: Sampling
    bound: Callable[[Callable], Callable]
    key: jax.Array
    execution: str = "auto"
    scores: Scores | None = None
    num_guesses: int = 0

    def __post_init__(self) -> None:
        if self.num_guesses:
            self.decoder.check_drafts()
        count = self.planner.rule.mesh.size
        if count > 1:
            raise NotImplementedError(
                f"Generation runs on one device, and there are {count}. Use one."
            )

    def spec(self, array: ArrayId) -> ArraySpec:
        """The spec of an array at rest, or of rows of one."""
        whole = self._wholes[array.whole]
        return whole.piece(array.rows) if array.rows else whole

    @cached_property
    def _wholes(self) -> dict[ArrayId, ArraySpec]:
        return array_specs(self.planner.problem, self.planner.separated)

    @property
    def resting(self) -> dict[Tier, int]:
        """Bytes of the arrays at rest on each tier."""
        found = dict.fromkeys(Tier, 0)
        for array, tier in self.at_rest.homes.items():
            if array.role != Role.CONST:
                found[tier] += self.spec(array).nbytes
        return found

    @property
    def tiers(self) -> tuple[Tier, ...]:
        """Where a cache may rest, fastest first."""
        return open_tiers(self.planner.capacity())

    def plan(self, shape: Shape) -> Generation:
        """Both programs for one microbatch, compiled.

        Raises:
            InfeasibleError: they do not fit beside the arrays at rest.
            ValueError: the decoder returned something else than a decoder must.
        """
        only, tiers = None, self.tiers
        prompts = self._batch(shape, shape.prompt)
        tokens = self._batch(shape, 1 + self.num_guesses)
        step = self._check if self.num_guesses else self._step
        while True:
            prefill, names = self._plan(self._step, prompts, only, tiers)
            caches = set(prefill.segmented.program.caches)
            rest = caches, self._tiers_from(prefill)
            decode, _ = self._plan(step, tokens, *rest)
            if decode.cache_homes == prefill.cache_homes:
                first = self._first_cache(shape)
                words = self._vocab_size(tokens) if self.num_guesses else None
                how = names, self.results, words, first
                return Generation(shape, prefill, decode, *how)
            # A leaf that only one of them can overwrite is passed by both.
            only = caches.intersection(decode.segmented.program.caches)
            tiers = self._tiers_from(decode)

    def repeated(self, made: Generation, num_microbatches: int) -> Generation:
        """The same programs for so many microbatches; nothing is compiled.

        Raises:
            InfeasibleError: they do not fit.
        """
        tiers = self.tiers
        while True:
            prefill = self._again(made.prefill, num_microbatches, tiers)
            tiers = self._tiers_from(prefill)
            decode = self._again(made.decode, num_microbatches, tiers)
            if decode.cache_homes == prefill.cache_homes:
                return replace(made, prefill=prefill, decode=decode)
            tiers = self._tiers_from(decode)

    def most(self, made: Generation, wanted: int) -> Generation:
        """As many microbatches as fit, up to `wanted`."""
        while wanted > 1:
            try:
                return self.repeated(made, wanted)
            except InfeasibleError:
                wanted = -(-wanted // 2)
        return made

    def _tiers_from(self, forward: Forward) -> tuple[Tier, ...]:
        """The tiers no faster than those where the caches of a program rest."""
        found = {self.tiers.index(tier) for tier in forward.cache_homes.values()}
        return self.tiers[max(found, default=0) :]

    def _again(
        self, forward: Forward, num_microbatches: int, tiers: Sequence[Tier]
    ) -> Forward:
        return plan_again(
            self.planner,
            forward,
            NAME,
            self.at_rest,
            num_microbatches=num_microbatches,
            cache_tiers=tiers,
        )

    def _plan(
        self,
        step: Callable,
        batch: Any,
        only: Collection[str] | None,
        tiers: Sequence[Tier],
    ) -> tuple[Forward, tuple[str, ...]]:
        function = Function(NAME, self.bound(step))
        names = [CACHE + path for path in named_leaves(batch["cache"])]
        num_results = len(self.results)
        outputs = {
            name: num_results + i
            for i, name in enumerate(names)
            if only is None or name in only
        }
        forward = plan_forward(
            self.planner,
            function,
            batch,
            self.at_rest,
            caches=Cached(outputs, tuple(tiers)),
        )
        return forward, tuple(names)

    def _step(self, *arguments: Any) -> tuple[Any, Any]:
        """`(params[, model_state], batch) -> (results, new cache)`; see `draw`."""
        *trees, batch = arguments
        cache, tokens = batch["cache"], batch["tokens"]
        logits, model = checked_apply(self.decoder, *trees, tokens, cache[MODEL])
        found, seen = self.draw(
            logits,
            batch["numbers"],
            batch["num_tokens"],
            batch["words"],
            cache.get(SEEN),
        )
        found = {name: x[:, None] for name, x in found.items()}
        found[COUNT] = jnp.ones(len(tokens), jnp.int32)
        return found, {MODEL: model} | ({} if seen is None else {SEEN: seen})

    def _check(self, *arguments: Any) -> tuple[Any, Any]:
        """As `_step`, for the last token of each sequence and the guesses after it.

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
            # At each place, those of the guesses before it too.
            is_guess = jax.nn.one_hot(tokens_BS, seen.shape[1], dtype=jnp.int32)
            is_before = jnp.cumsum(is_guess.at[:, 0].set(0), axis=1) > 0
            seen = jnp.logical_or(seen[:, None], is_before)

        def draw(logits: Any, numbers: Any, seen: Any) -> Any:
            rest = batch["words"], seen
            return self.draw(logits, batch["numbers"], numbers, *rest)

        axes = 1, 1, None if seen is None else 1
        found, seen = jax.vmap(draw, axes, 1)(logits_BSV, numbers_BS, seen)
        is_right = found["token"][:, :-1] == tokens_BS[:, 1:]
        count = 1 + jnp.cumprod(is_right.astype(jnp.int32), axis=1).sum(axis=1)
        found[COUNT] = count
        assert self.decoder.take_back is not None
        new = {MODEL: self.decoder.take_back(model, num_places - count)}
        if seen is not None:
            last = (count - 1)[:, None, None]
            new[SEEN] = jnp.take_along_axis(seen, last, axis=1)[:, 0]
        return found, new

    def draw(
        self,
        logits: jax.Array,
        numbers: Mapping[str, jax.Array],
        num_tokens: jax.Array,
        words: jax.Array,
        seen: jax.Array | None,
    ) -> tuple[dict[str, jax.Array], jax.Array | None]:
        """The next token of each sequence, and which tokens each has then.

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
        """The results of both programs, as `jax.tree` sorts them."""
        scores = () if self.scores is None else self.scores.names
        return tuple(sorted((*NEEDED, COUNT, *scores)))

    def _batch(self, shape: Shape, num_tokens: int) -> Any:
        """Shapes and dtypes of one microbatch."""
        words = in_words(self.key).shape[-1]
        tokens = jax.ShapeDtypeStruct((shape.rows, num_tokens), np.int32)
        cache = {MODEL: self._cache(shape)}
        batch = {
            "tokens": tokens,
            "cache": cache,
            "numbers": jax.eval_shape(self.sampling.constants),
            "num_tokens": jax.ShapeDtypeStruct((shape.rows,), np.int32),
            "words": jax.ShapeDtypeStruct((shape.rows, words), np.uint32),
        }
        if self.sampling.penalizes:
            cache[SEEN] = jax.ShapeDtypeStruct(
                (shape.rows, self._vocab_size(batch)), np.bool_
            )
        return batch

    def _cache(self, shape: Shape) -> Any:
        return jax.eval_shape(
            lambda s: self.decoder.init_cache(s, shape.length), shape.starts
        )

    def _first_cache(self, shape: Shape) -> Leafwise:
        return Leafwise(
            lambda starts: {MODEL: self.decoder.init_cache(starts, shape.length)},
            shape.starts,
            device=first_cpu(),
        )

    def _vocab_size(self, batch: Mapping[str, Any]) -> int:
        def logits(*arguments: Any) -> jax.Array:
            *trees, given = arguments
            model = given["cache"][MODEL]
            return checked_apply(self.decoder, *trees, given["tokens"], model)[0]

        flat = self.planner.problem.abstract_arguments()
        return jax.eval_shape(self.bound(logits), flat, batch).shape[-1]
