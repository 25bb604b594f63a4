"""Plans prefill and decode: two programs over one cache.

Prefill reads the prompts of some rows and leaves the others as they are, and decode
reads one token of each sequence, or a few. Both run all sequences through a segment
before the next segment starts, in microbatches of `rows`, so weights cross each link
once a token however many sequences there are (FlexGen, arXiv:2303.06865, section 4.1;
ZeRO-Inference, arXiv:2207.00032, section 6).
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from zinf.core.jaxpr.keys import in_words
from zinf.core.plan import InfeasibleError
from zinf.core.program import ArrayId, ArraySpec, Role, Tier, open_tiers
from zinf.core.segment import Function, named_leaves
from zinf.core.sharding import Dim
from zinf.core.step.arrays import array_specs
from zinf.core.step.forward import Cached, Forward, plan_again, plan_forward
from zinf.core.step.on_demand import LEAST_SLOTS, NO_SLOTS
from zinf.core.step.planner import Planner
from zinf.core.step.setup import AtRest
from zinf.inference.decoder import Decoder, checked_all, checked_apply
from zinf.inference.drafts import GuessOnDevice
from zinf.inference.early import each_changed
from zinf.inference.sampling import Sampling
from zinf.inference.scores import Scores

NAME = "the decoder"
NEEDED = "is_finite", "token"  # Results of drawing that are always there.
COUNT = "count"
NO_AXIS = -1
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
        axes: the leaves of the cache in flattened order, as the programs name them,
            each with its dim that has a sequence for each index, or `NO_AXIS`.
        results: what decode returns beside them, in flattened order: what `draw` gives
            at each place, (B, places, ...), and "count" (B,), the first places of a
            sequence that are right. A prefill returns logits, float32 (B, V).
        draw: see `GenerationPlanner.draw`; compiled for the host.
        prefixes: see `GenerationPlanner.prefix`, by the number of microbatches.
    """

    shape: Shape
    prefill: Forward
    decode: Forward
    axes: Mapping[str, int]
    results: tuple[str, ...]
    draw: Callable
    prefixes: dict[int, Forward]

    @property
    def num_microbatches(self) -> int:
        return self.decode.num_microbatches

    @property
    def can_join(self) -> bool:
        """Whether sequences of a microbatch may be at different positions."""
        return NO_AXIS not in self.axes.values()

    @property
    def vocab_size(self) -> int:
        program = self.prefill.segmented.program
        return program.values[program.outputs[0]].shape[-1]

    def leaf_bytes(self) -> int:
        """The bytes of the largest leaf of the cache of a microbatch."""
        values = self.decode.segmented.program.values
        return max(values[name].nbytes for name in self.axes)


def row_axes(specs: Any, of_one_more: Any) -> Any:
    """For each array, the dim along which its sequences lie.

    `NO_AXIS` for arrays that are the same for all sequences.

    Args:
        specs: shapes for some number of sequences.
        of_one_more: shapes for one more.
    """

    def axis(spec: Any, larger: Any) -> int:
        pairs = zip(spec.shape, larger.shape, strict=True)
        differ = [i for i, (a, b) in enumerate(pairs) if a != b]
        return differ[0] if differ else NO_AXIS

    return jax.tree.map(axis, specs, of_one_more)


def along(flags: jax.Array, axis: int, ndim: int) -> jax.Array:
    """A flag of each sequence, (B,), reshaped to broadcast along `axis` of an array."""
    shape = [1] * ndim
    shape[axis] = -1
    return flags.reshape(shape)


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
        guess_on_device: see `Drafts.on_device`; only fused programs use it.
        slot_bytes: bytes of the device for experts that are read on demand, if the
            config does not say; 0: all experts of a layer are read for each pass.

    Raises:
        NotImplementedError: the planner is for devices that divide positions, or the
            decoder cannot check guesses.
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
    guess_on_device: GuessOnDevice | None = None
    slot_bytes: int = LEAST_SLOTS

    def __post_init__(self) -> None:
        if self.num_guesses:
            self.decoder.check_drafts()
        parts = self.planner.rule.size(Dim.SEQUENCE)
        if parts > 1:
            raise NotImplementedError(
                f"mesh.seq = {parts} divides positions, of which generation computes "
                "one at a time. Use mesh.fsdp or mesh.tensor."
            )

    def whole_rows(self, rows: int) -> int:
        """At least so many rows, which devices that divide examples divide evenly."""
        count = self.planner.rule.size(Dim.BATCH)
        return -(-rows // count) * count

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
        axes = self.cache_axes(shape)
        prompts, tokens = self._prompts(shape), self.tokens(shape)
        read = partial(self._read, axes=axes, length=shape.length)
        while True:
            prefill = self._plan(read, prompts, 1, only, tiers)
            caches = set(prefill.segmented.program.caches)
            rest = caches, self._tiers_from(prefill)
            decode = self._plan(self.step, tokens, len(self.results), *rest)
            if decode.cache_homes == prefill.cache_homes:
                names = {
                    CACHE + path: axis for path, axis in named_leaves(axes).items()
                }
                how = names, self.results, jax.jit(self.draw)
                return Generation(shape, prefill, decode, *how, {1: prefill})
            # A leaf that only one of them can overwrite is passed by both.
            only = caches.intersection(decode.segmented.program.caches)
            tiers = self._tiers_from(decode)

    def repeated(self, made: Generation, num_microbatches: int) -> Generation:
        """The same programs for another number of microbatches; compiles nothing.

        Raises:
            InfeasibleError: they do not fit.
        """
        tiers = self.tiers
        while True:
            prefill = self._again(made.prefill, num_microbatches, tiers)
            tiers = self._tiers_from(prefill)
            decode = self._again(made.decode, num_microbatches, tiers)
            if decode.cache_homes == prefill.cache_homes:
                prefixes = {num_microbatches: prefill}
                return replace(made, prefill=prefill, decode=decode, prefixes=prefixes)
            tiers = self._tiers_from(decode)

    def suited(
        self, made: Generation, whole: Callable[[Self], Generation]
    ) -> Generation:
        """The programs with slots for experts in all the room that they leave.

        The tokens of many sequences choose about all experts, which are then better
        read ahead. The tokens of each are the same, to the bit.

        Args:
            made: has the fewest slots.
            whole: plans one microbatch whose programs read all experts.
        """
        count, programs = made.num_microbatches, (made.prefill, made.decode)
        if not any(each.segmented.program.chosen for each in programs):
            return made
        made = self._with_room(made)
        if all(x.is_worthwhile(count) for x in (made.prefill, made.decode)):
            return made
        planner = replace(self, slot_bytes=NO_SLOTS)
        try:
            return planner.repeated(whole(planner), count)
        except InfeasibleError:
            return made

    def _with_room(self, made: Generation) -> Generation:
        """The programs with more slots for experts; caches stay where they are."""
        programs = made.prefill, made.decode
        programs = [each for each in programs if each.segmented.program.chosen]
        slots = max(each.segmented.program.slot_bytes for each in programs)
        room = min(each.room_bytes for each in programs)
        if self.planner.config.expert_bytes is not None or room <= 0:
            return made
        planner = replace(self, slot_bytes=slots + room)
        try:
            found = planner.repeated(planner.plan(made.shape), made.num_microbatches)
        except InfeasibleError:
            return made
        is_same = found.decode.cache_homes == made.decode.cache_homes
        return found if is_same else made

    def prefix(self, made: Generation, num_microbatches: int) -> Forward:
        """The prefill of the first microbatches, while the caches of all rest."""
        if num_microbatches not in made.prefixes:
            homes = set(made.prefill.cache_homes.values())
            made.prefixes[num_microbatches] = plan_again(
                self.planner,
                made.prefill,
                NAME,
                self.at_rest,
                num_microbatches=num_microbatches,
                cache_tiers=tuple(homes) or self.tiers[:1],
                num_cached=made.num_microbatches,
            )
        return made.prefixes[num_microbatches]

    def most(self, made: Generation, wanted: int) -> Generation:
        """The programs for as many microbatches as fit, up to `wanted`."""
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
        num_results: int,
        only: Collection[str] | None,
        tiers: Sequence[Tier],
    ) -> Forward:
        function = Function(NAME, self.bound(step))
        names = [CACHE + path for path in named_leaves(batch["cache"])]
        outputs = {
            name: num_results + i
            for i, name in enumerate(names)
            if only is None or name in only
        }
        return plan_forward(
            self.planner,
            function,
            batch,
            self.at_rest,
            caches=Cached(outputs, tuple(tiers)),
            slot_bytes=self.slot_bytes,
        )

    def _read(self, *arguments: Any, axes: Any, length: int) -> tuple[Any, Any]:
        """`(params[, model_state], batch) -> (logits, new cache)` of prompts.

        Rows that do not join keep their cache; their logits mean nothing.

        Args:
            axes: see `cache_axes`.
            length: slots of the cache.
        """
        *trees, batch = arguments
        tokens_BS, starts_B, joins_B = (batch[n] for n in ("tokens", "starts", "joins"))
        old = batch["cache"]
        fresh = self.decoder.init_cache(starts_B, length)

        def joined(old: Any, axis: int) -> Callable[[Any], Any]:
            def change(new: Any) -> Any:
                if axis == NO_AXIS:
                    return new
                return jnp.where(along(joins_B, axis, old.ndim), new, old)

            return change

        # A leaf of the cache is written by the segment that computes it.
        changes = jax.tree.map(joined, old, axes)
        read = partial(checked_apply, self.decoder)
        given = *trees, tokens_BS, fresh
        logits_BV, model = each_changed(
            read, given, (lambda logits: logits, changes[MODEL])
        )
        new = {MODEL: model}
        if SEEN in old:
            new[SEEN] = changes[SEEN](self.seen(tokens_BS, starts_B))
        return logits_BV, new

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
        cache, tokens = batch["cache"], batch["tokens"]
        logits, model = checked_apply(self.decoder, *trees, tokens, cache[MODEL])
        new = {MODEL: model}
        if SEEN in cache:
            rows = jnp.arange(len(tokens))
            new[SEEN] = cache[SEEN].at[rows, tokens[:, 0]].set(True)
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

    def _prompts(self, shape: Shape) -> Any:
        """Shapes and dtypes of a microbatch of prompts.

        Prompts are padded on the left to slot `starts`; `joins` says whose rows are
        read.
        """
        return {
            "tokens": jax.ShapeDtypeStruct((shape.rows, shape.prompt), np.int32),
            "starts": shape.starts,
            "joins": jax.ShapeDtypeStruct((shape.rows,), np.bool_),
            "cache": self.cache(shape),
        }

    def tokens(self, shape: Shape) -> Any:
        """Shapes and dtypes of a microbatch of tokens after prompts.

        `num_tokens` are the new tokens that each sequence has, and `words` its key.
        """
        rows, words = shape.rows, in_words(self.key).shape[-1]
        return {
            "tokens": jax.ShapeDtypeStruct((rows, 1 + self.num_guesses), np.int32),
            "cache": self.cache(shape),
            "numbers": jax.eval_shape(self.sampling.constants),
            "num_tokens": jax.ShapeDtypeStruct((rows,), np.int32),
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
        flat = self.planner.problem.abstract_arguments()
        return jax.eval_shape(self.bound(logits), flat, batch).shape[-1]
