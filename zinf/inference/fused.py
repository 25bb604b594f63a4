"""Fused generation: prefill, and a loop over tokens, as executables on the device.

All weights and the cache are on the device: weights that rest elsewhere because steps
need the room are copied there for the time of a call. The loop is one executable
(`jax.lax.while_loop`) that overwrites its donated state; it ends early when every
sequence has ended. It computes what the streamed programs compute, and draws with the
same keys, so the tokens are the same unless two logits differ by less than the rounding
of XLA's fusions.

A microbatch of `rows` sequences runs at once, each at a place of its own. As soon as
one ends, the loop does, and a waiting sequence takes its row. A prompt that several
sequences have is read once: prompts are read in blocks, and each sequence copies its
row of a block. With drafts, a pass of the loop checks guesses, as streamed programs do.
The suffixes are

  B  sequences of a microbatch    P  prompts of a block     T  tokens of a prompt
  V  words                        W  words of a key         M  most new tokens
  S  tokens of a pass             L  slots of a text
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zinf.core.jaxpr.keys import in_words
from zinf.core.plan import InfeasibleError, Plan, Shortage, fused_plan, show_bytes
from zinf.core.problem.source import noted
from zinf.core.program import ArrayId, Role, Tier
from zinf.core.sharding.mesh import replicated
from zinf.core.step.choice import FUSED, in_short
from zinf.core.topology import compile_for, flops_of, memory
from zinf.inference.decoder import checked_apply
from zinf.inference.plan import NAME, GenerationPlanner
from zinf.inference.rows import NO_AXIS, Shape, along, parts
from zinf.inference.steps import COUNT, MODEL, SEEN, Steps

# Errors of planning and of the compiler, for lack of memory or for another reason.
CANNOT = (InfeasibleError, jax.errors.JaxRuntimeError)
Arrays = Mapping[str, Any]


@dataclass(frozen=True)
class FusedPrograms:
    """The executables for one shape. Arguments and results are on the device.

    The arrays of a block are {"cache": see `Steps.cache`, "logits" (P, V)}
    after its prompts were read. The state of a microbatch while tokens are drawn is
    {"cache", "token" (B,), "place" (B,), "written"}: the last token of each sequence,
    how many are new, and what `Steps.draw` returns for each, with places as
    the second dim: (B, M, ...). If guesses are made on the device, both also have
    "text" (B, L) and "start" (B,): prompts padded on the left to T, and what was
    written after them. For `given` see `Functions`.

    Attributes:
        weights: the arrays that `prefill` and `decode` get first, in order, and their
            bytes.
        prefill: `(weights, tokens (P, T), starts (P,)) -> arrays of a block`.
        empty: `() -> state`, of zeros.
        join: `(state, donated, arrays of a block, rows (B,), joins (B,), given) ->
            state`: the sequences that join get that row of the block, and their first
            token.
        decode: `(weights, state, donated, is_open (B,), given, guesses (B, K),
            num_passes, num_open) -> (state, passes)`: draws more tokens of the open
            sequences, in so many passes at most, while at least `num_open` of them are
            open. K is 0 unless the host makes guesses.
        can_join: whether sequences of a microbatch may be at different places.
        vocab_size: V.
        guesses_on_device: whether `decode` makes guesses itself.
        plan: of a token of all sequences of a microbatch.
        workspace_bytes: device memory beside the arrays at rest.
    """

    weights: dict[ArrayId, int]
    prefill: Callable
    empty: Callable
    join: Callable
    decode: Callable
    can_join: bool
    vocab_size: int
    guesses_on_device: bool
    plan: Plan
    workspace_bytes: int


def block_rows(shape: Shape) -> int:
    """Number of prompts that one prefill reads.

    It depends on the rows and the prompt length of the shape, not on the number of
    prompts, so that number changes no token.
    """
    return parts(shape).rows


def why_not_fused(planner: GenerationPlanner) -> str | None:
    """Why generation streams, as a sentence; None if it might be fused."""
    if planner.execution == "streamed":
        return "Streamed, because execution is 'streamed'."
    count = planner.planner.rule.mesh.size
    if count > 1:
        return f"Streamed, because {count} devices divide weights and sequences."
    asked = planner.planner.config.param_tier
    if asked not in (None, Tier.DEVICE):
        return f"Streamed, because offload_param asks for weights on {asked}."
    return None


def fuse(planner: GenerationPlanner, shape: Shape) -> FusedPrograms:
    """Compile the programs for one shape.

    Raises:
        InfeasibleError: they do not fit the device beside the arrays at rest.
        ValueError: the decoder returned something else than a decoder must.
    """
    with planner.planner.planning():
        return Functions(planner, shape).compiled()


def why_refused(error: Exception) -> str:
    """Why generation streams, as a sentence, given what `fuse` raised."""
    return f"Streamed; not fused, because {in_short(error)}."


@dataclass(frozen=True)
class Functions:
    """The functions behind `FusedPrograms`."""

    planner: GenerationPlanner
    shape: Shape

    @property
    def steps(self) -> Steps:
        return self.planner.steps

    @cached_property
    def weights(self) -> tuple[ArrayId, ...]:
        reads = self.steps.decoder.reads
        return tuple(
            array
            for array in self.planner.at_rest.homes
            if array.role == Role.PARAM and (reads is None or reads(array.path))
        )

    @cached_property
    def _flat(self) -> Arrays:
        """Shapes and dtypes of the parameters by path."""
        return self.planner.planner.problem.abstract_arguments()

    @cached_property
    def elsewhere(self) -> dict[ArrayId, Tier]:
        """The weights that are copied to the device, and where they rest."""
        homes = self.planner.at_rest.homes
        return {a: homes[a] for a in self.weights if homes[a] != Tier.DEVICE}

    @property
    def num_places(self) -> int:
        """The most new tokens of a sequence."""
        return self.shape.length - self.shape.prompt + 1

    @property
    def block(self) -> Shape:
        return replace(self.shape, rows=block_rows(self.shape))

    @property
    def batch(self) -> Any:
        """Shapes and dtypes of a block of prompts."""
        spec, tokens = self.block, jnp.int32
        shape = spec.rows, spec.prompt
        return {"tokens": jax.ShapeDtypeStruct(shape, tokens), "starts": spec.starts}

    @property
    def given(self) -> Any:
        """Shapes and dtypes of what the host says about the sequences of a microbatch.

        `words` (B, W) are keys as words, `ends` the tokens that end a sequence, filled
        with -1, and `numbers` what `Sampling.constants` has. Token 0 is number `first`
        of its sequence, and each gets `count` of them.
        """
        steps, rows = self.steps, self.shape.rows
        number = jax.ShapeDtypeStruct((), np.int32)
        words = in_words(steps.key).shape[-1]
        return {
            "words": jax.ShapeDtypeStruct((rows, words), np.uint32),
            "numbers": jax.eval_shape(steps.sampling.constants),
            "ends": jax.ShapeDtypeStruct(steps.sampling.ends().shape, np.int32),
            "first": number,
            "count": number,
        }

    @property
    def _guesses(self) -> jax.ShapeDtypeStruct:
        """Shape and dtype of the guesses that the host makes."""
        steps = self.steps
        count = 0 if steps.guess_on_device is not None else steps.num_guesses
        return jax.ShapeDtypeStruct((self.shape.rows, count), np.int32)

    # What the programs compute.

    def prefill(self, weights: Sequence[Any], tokens_PT: Any, starts_P: Any) -> Arrays:
        def read(*arguments: Any) -> tuple[Any, Any]:
            *trees, batch = arguments
            rest = batch["tokens"], batch["cache"]
            return checked_apply(self.steps.decoder, *trees, *rest)

        cache = self.steps.decoder.init_cache(starts_P, self.shape.length)
        batch = {"tokens": tokens_PT, "cache": cache}
        logits_PV, model = self.steps.bound(read)(self._whole(weights), batch)
        arrays = {"cache": {MODEL: model}, "logits": logits_PV}
        if self.steps.sampling.penalizes:
            arrays["cache"][SEEN] = self.steps.seen(tokens_PT, starts_P)
        if self.steps.guess_on_device is not None:
            room = (0, 0), (0, self.num_places + self.steps.num_guesses)
            arrays |= {"text": jnp.pad(tokens_PT, room), "start": starts_P}
        return arrays

    def join(
        self, state: Arrays, block: Arrays, rows_B: Any, joins_B: Any, given: Arrays
    ) -> Arrays:
        def put(old: Any, new: Any, axis: int) -> Any:
            if axis == NO_AXIS:
                return new
            taken = jnp.take(new, rows_B, axis=axis)
            return jnp.where(along(joins_B, axis, old.ndim), taken, old)

        logits_BV = jnp.take(block["logits"], rows_B, axis=0)
        read = {name: block[name] for name in self.axes}
        before = {name: state[name] for name in self.axes}
        new = {**state, **jax.tree.map(put, before, read, self.axes)}
        new["place"] = jnp.where(joins_B, 0, state["place"])
        results = self._first(logits_BV, new["cache"], given)
        return self._advanced(new, results, joins_B, given)[0]

    def _first(self, logits_BV: Any, cache: Arrays, given: Arrays) -> Arrays:
        """The first new token of each sequence, as `Steps.step` has it."""
        number_B = jnp.broadcast_to(given["first"], logits_BV.shape[:1])
        rest = number_B, given["words"], cache.get(SEEN)
        results, _ = self.steps.draw(logits_BV, given["numbers"], *rest)
        results = {name: x[:, None] for name, x in results.items()}
        return results | {COUNT: jnp.ones_like(number_B)}

    def decode(
        self,
        weights: Sequence[Any],
        state: Arrays,
        is_open_B: Any,
        given: Arrays,
        guesses_BK: Any,
        num_passes: Any,
        num_open: Any,
    ) -> tuple[Arrays, Any]:
        flat = self._whole(weights)

        def goes_on(carried: Any) -> Any:
            _, is_open_B, passes = carried
            return (passes < num_passes) & (is_open_B.sum() >= num_open)

        def next_tokens(carried: Any) -> Any:
            state, is_open_B, passes = carried
            batch = {
                "tokens": self._known(state, guesses_BK),
                "cache": state["cache"],
                "numbers": given["numbers"],
                "num_tokens": given["first"] + state["place"],
                "words": given["words"],
                "goes_on": is_open_B,
            }
            results, cache = self.steps.bound(self.steps.step)(flat, batch)
            new = {**state, "cache": cache}
            return *self._advanced(new, results, is_open_B, given), passes + 1

        begin = state, is_open_B, jnp.int32(0)
        state, _, passes = jax.lax.while_loop(goes_on, next_tokens, begin)
        return state, passes

    def _known(self, state: Arrays, guesses_BK: Any) -> Any:
        """The last token of each sequence and the guesses after it, (B, S)."""
        if (guess := self.steps.guess_on_device) is not None:
            ends_B = self.shape.prompt + state["place"]
            guesses_BK = guess(state["text"], state["start"], ends_B)
        return jnp.concatenate([state["token"][:, None], guesses_BK], axis=1)

    def _advanced(
        self, state: Arrays, results: Arrays, is_open_B: Any, given: Arrays
    ) -> tuple[Arrays, Any]:
        """The state with more tokens of the open sequences, and those that go on.

        Args:
            results: see `Steps.step`.
        """
        results = dict(results)
        count_B, token_BS = results.pop(COUNT), results["token"]
        is_end_BS = (token_BS[..., None] == given["ends"][None, None]).any(axis=-1)
        is_end_BS |= ~results["is_finite"]
        # Nothing is written after the first end, nor beyond the asked number.
        left_B = given["count"] - state["place"]
        ends_before_BS = jnp.cumsum(is_end_BS, axis=1) - is_end_BS
        step_S = jnp.arange(token_BS.shape[1])[None]
        is_new_BS = (step_S < jnp.minimum(count_B, left_B)[:, None]) & is_open_B[
            :, None
        ]
        is_new_BS &= ends_before_BS == 0
        place_BS = state["place"][:, None] + step_S
        place_B = state["place"] + is_new_BS.sum(axis=1)

        def put(old: Any, values: Any, places_BS: Any) -> Any:
            # Places outside are dropped.
            places_BS = jnp.where(is_new_BS, places_BS, old.shape[1])
            rows_B1 = jnp.arange(len(old))[:, None]
            return old.at[rows_B1, places_BS].set(values, mode="drop")

        last_B1 = jnp.maximum(is_new_BS.sum(axis=1, keepdims=True) - 1, 0)
        token_B = jnp.take_along_axis(token_BS, last_B1, axis=1)[:, 0]
        new = {
            **state,
            "token": jnp.where(is_new_BS.any(axis=1), token_B, state["token"]),
            "place": place_B,
            "written": {
                name: put(state["written"][name], values, place_BS)
                for name, values in results.items()
            },
        }
        if "text" in state:
            slots_BS = self.shape.prompt + place_BS
            new["text"] = put(state["text"], token_BS, slots_BS)
        is_over_B = (is_end_BS & is_new_BS).any(axis=1) | (place_B >= given["count"])
        return new, is_open_B & ~is_over_B

    def _whole(self, weights: Sequence[Any]) -> Arrays:
        """The parameters by path, joined from arrays that may hold only some rows."""
        parts: dict[str, list[tuple[int, Any]]] = {}
        for array, content in zip(self.weights, weights, strict=True):
            first = array.rows[0] if array.rows else 0
            parts.setdefault(array.path, []).append((first, content))
        return OrderedDict(
            (path, _joined([x for _, x in sorted(parts[path], key=lambda p: p[0])]))
            if path in parts
            # The decoder says that it does not read it.
            else (path, jnp.zeros(self._flat[path].shape, self._flat[path].dtype))
            for path in self.planner.planner.problem.params
        )

    # Their executables.

    @cached_property
    def axes(self) -> Any:
        """For each array that joins from a block, the dim along which sequences lie.

        `NO_AXIS` for those that are the same for all sequences.
        """
        axes = {"cache": self.steps.cache_axes(self.shape)}
        if self.steps.guess_on_device is not None:
            axes |= {"text": 0, "start": 0}
        return axes

    def compiled(self) -> FusedPrograms:
        weights = [self._weight_spec(array) for array in self.weights]
        of_block = self.batch["tokens"], self.batch["starts"]
        with noted(NAME, self._flat, self.batch):
            block = jax.eval_shape(self.prefill, weights, *of_block)
            state = self._state(block)
        self._check_room(state)
        rows = (self.shape.rows,)
        flags = jax.ShapeDtypeStruct(rows, np.bool_)
        number = jax.ShapeDtypeStruct((), np.int32)
        of_rows = jax.ShapeDtypeStruct(rows, np.int32), flags, self.given
        asked = state, flags, self.given, self._guesses, number, number
        programs = {
            "prefill": self._compile(self.prefill, weights, *of_block),
            "empty": self._compile(partial(_zeros, state)),
            "join": self._compile(self.join, state, block, *of_rows, donates=0),
            "decode": self._compile(self.decode, weights, *asked, donates=1),
        }
        workspace = self._workspace_bytes(programs, weights, state, block)
        flops = flops_of(programs["decode"])
        return FusedPrograms(
            {array: self.planner.spec(array).nbytes for array in self.weights},
            **programs,
            can_join=NO_AXIS not in jax.tree.leaves(self.axes),
            vocab_size=block["logits"].shape[1],
            guesses_on_device=self.steps.guess_on_device is not None,
            plan=self._plan(workspace, flops),
            workspace_bytes=workspace,
        )

    def _state(self, block: Arrays) -> Arrays:
        """Shapes and dtypes of the state of a microbatch, given those of a block."""
        rows = self.shape.rows
        cache = self.steps.cache(self.shape)
        logits = jax.ShapeDtypeStruct((rows, *block["logits"].shape[1:]), np.float32)
        results = dict(jax.eval_shape(self._first, logits, cache, self.given))
        del results[COUNT]
        number = jax.ShapeDtypeStruct((rows,), np.int32)
        written = {
            name: jax.ShapeDtypeStruct((rows, self.num_places, *x.shape[2:]), x.dtype)
            for name, x in results.items()
        }
        state = {"token": number, "place": number, "written": written, "cache": cache}
        for name in self.axes.keys() - state.keys():
            kind = block[name]
            state[name] = jax.ShapeDtypeStruct((rows, *kind.shape[1:]), kind.dtype)
        return state

    def _compile(
        self, function: Callable, *arguments: Any, donates: int | None = None
    ) -> jax.stages.Compiled:
        mesh = self.planner.planner.rule.mesh
        everywhere = replicated(mesh)
        placed = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere),
            arguments,
        )
        donated = () if donates is None else (donates,)
        jitted = jax.jit(function, donate_argnums=donated, out_shardings=everywhere)
        with noted(NAME, self._flat, self.batch):
            lowered = jitted.lower(*placed)
        return compile_for(mesh, lowered)

    def _weight_spec(self, array: ArrayId) -> jax.ShapeDtypeStruct:
        spec = self.planner.spec(array)
        return jax.ShapeDtypeStruct(spec.shape, jnp.dtype(spec.dtype))

    def _workspace_bytes(
        self, programs: Mapping[str, Any], weights: Any, state: Arrays, block: Arrays
    ) -> int:
        """Device memory beside the arrays at rest, at the worst time.

        A block stays as long as one of its prompts waits for a row.
        """
        own = {name: memory(x).device_bytes for name, x in programs.items()}
        for name in ("prefill", "decode"):
            own[name] -= _nbytes(weights)
        return self._copied_bytes + max(
            own["prefill"] + _nbytes(state),
            own["join"],
            own["decode"] + _nbytes(block),
        )

    def _check_room(self, state: Arrays) -> None:
        """Raise if weights and state alone are too large, before compiling anything."""
        self._plan(self._copied_bytes + _nbytes(state), 0)

    @cached_property
    def _copied_bytes(self) -> int:
        return sum(self.planner.spec(array).nbytes for array in self.elsewhere)

    def _plan(self, workspace_bytes: int, flops: int) -> Plan:
        planner = self.planner
        capacity, resting = planner.planner.capacity(), planner.resting
        peaks = dict(resting)
        peaks[Tier.DEVICE] += workspace_bytes
        # Through the host, one at a time.
        read = [a for a, tier in self.elsewhere.items() if not tier.row.is_memory]
        peaks[Tier.HOST] += max((planner.spec(a).nbytes for a in read), default=0)
        what = "what rests there with the fused programs of generation"
        lacking = {
            tier: Shortage(capacity[tier], needed, what)
            for tier, needed in peaks.items()
            if tier.row.is_memory and needed > capacity[tier]
        }
        if lacking:
            raise InfeasibleError(lacking, capacity)
        plan = fused_plan(
            planner.at_rest.homes,
            resting[Tier.DEVICE],
            workspace_bytes,
            capacity,
            flops,
            planner.planner.rates(),
        )
        why = FUSED
        if self.elsewhere:
            tiers = " and ".join(sorted(set(self.elsewhere.values())))
            nbytes = show_bytes(self._copied_bytes)
            why += f" {nbytes} of weights that rest on {tiers} are copied there first."
        return replace(plan, home_bytes=resting, peak_bytes=peaks, why=why)


def _joined(parts: Sequence[Any]) -> Any:
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts)


def _zeros(specs: Any) -> Any:
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), specs)


def _nbytes(specs: Any) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(specs))
