"""Fused generation: prefill, and a loop over tokens, as executables on the device.

All weights and the cache are on the device: weights that rest elsewhere because steps
need the room are copied there for the time of a call. The loop is one executable
(`jax.lax.while_loop`) that overwrites its donated state; it ends early when every
sequence has ended. It computes what the streamed programs compute, and draws with the
same keys, so the tokens are the same unless two logits differ by less than the rounding
of XLA's fusions.

One microbatch of `rows` sequences runs after the other. A prompt that several sequences
have is read once: prompts are read in blocks, and each sequence copies its row of a
block. The suffixes are

  B  sequences of a microbatch    P  prompts of a block     T  tokens of a prompt
  V  words                        W  words of a key         M  most new tokens
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
from zinf.core.topology import compile_for, memory
from zinf.inference.decoder import checked_apply
from zinf.inference.plan import (
    NAME,
    NO_AXIS,
    GenerationPlanner,
    Shape,
    along,
    row_axes,
)

# Prompts are read in blocks of about so many tokens, however many sequences share them.
BLOCK_TOKENS = 256
# Errors of planning and of the compiler, for lack of memory or for another reason.
CANNOT = (InfeasibleError, jax.errors.JaxRuntimeError)
Arrays = Mapping[str, Any]


@dataclass(frozen=True)
class FusedPrograms:
    """The executables for one shape. Arguments and results are on the device.

    The arrays of a microbatch are {"cache", "logits" (B, V)} after its prompts were
    read. Its state while tokens are drawn is {"cache", "token" (B,), "written"} and
    "seen" (B, V) if earlier tokens matter; "written" has what `GenerationPlanner.draw`
    returns, with places as the second dim: (B, M, ...). For `given` see `Functions`.

    Attributes:
        weights: the arrays that `prefill` and `decode` get first, in order, and their
            bytes.
        prefill: `(weights, tokens (P, T), starts (P,)) -> arrays of a block`.
        empty: `() -> arrays of a microbatch`, of zeros.
        spread: `(arrays of a microbatch, donated, arrays of a block, rows (B,), is_of
            (B,)) -> arrays of a microbatch`: sequences with `is_of` get that row.
        begin: `(logits, seen or None, is_open (B,), given) -> state without its cache,
            is_open`, with the first token.
        decode: `(weights, state, donated, is_open, given, place, end) -> (state,
            is_open, place)`: draws tokens `place` to `end` of each sequence, or fewer
            if none is open any more.
        plan: of a token of all sequences of a microbatch.
        workspace_bytes: device memory beside the arrays at rest.
    """

    weights: dict[ArrayId, int]
    prefill: Callable
    empty: Callable
    spread: Callable
    begin: Callable
    decode: Callable
    plan: Plan
    workspace_bytes: int


def block_rows(shape: Shape) -> int:
    """Number of prompts that one prefill reads.

    It depends on the rows and the prompt length of the shape, not on the number of
    prompts, so that number changes no token.
    """
    return max(1, min(shape.rows, BLOCK_TOKENS // shape.prompt))


def why_not_fused(planner: GenerationPlanner) -> str | None:
    """Why generation streams, as a sentence; None if it might be fused."""
    if planner.execution == "streamed":
        return "Streamed, because execution is 'streamed'."
    if planner.num_guesses:
        return "Streamed, because drafts are checked by streamed programs."
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

    @cached_property
    def weights(self) -> tuple[ArrayId, ...]:
        reads = self.planner.decoder.reads
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
        """Shapes and dtypes of the arrays that sampling reads.

        `words` (B, W) are keys as words, `ends` the tokens that end a sequence, filled
        with -1, and `numbers` what `Sampling.constants` has. Token 0 is number `first`
        of its sequence.
        """
        sampling = self.planner.sampling
        words = in_words(self.planner.key).shape[-1]
        return {
            "words": jax.ShapeDtypeStruct((self.shape.rows, words), np.uint32),
            "numbers": jax.eval_shape(sampling.constants),
            "ends": jax.ShapeDtypeStruct(sampling.ends().shape, np.int32),
            "first": jax.ShapeDtypeStruct((), np.int32),
        }

    # What the programs compute.

    def prefill(self, weights: Sequence[Any], tokens_PT: Any, starts_P: Any) -> Arrays:
        cache = self.planner.decoder.init_cache(starts_P, self.shape.length)
        logits_PV, cache = self._read(self._whole(weights), tokens_PT, cache)
        return {"cache": cache, "logits": logits_PV}

    def spread(self, arrays: Arrays, block: Arrays, rows_B: Any, is_of_B: Any) -> Any:
        def put(old: Any, new: Any, axis: int) -> Any:
            if axis == NO_AXIS:
                return new
            taken = jnp.take(new, rows_B, axis=axis)
            return jnp.where(along(is_of_B, axis, old.ndim), taken, old)

        return jax.tree.map(put, arrays, block, self.axes)

    def begin(
        self, logits_BV: Any, seen_BV: Any, is_open_B: Any, given: Arrays
    ) -> tuple[Arrays, Any]:
        place = jnp.int32(0)
        results, _ = jax.eval_shape(self._results, logits_BV, seen_BV, given, place)
        written = {
            name: jnp.zeros((x.shape[0], self.num_places, *x.shape[1:]), x.dtype)
            for name, x in results.items()
        }
        state = {"written": written}
        if seen_BV is not None:
            state["seen"] = seen_BV
        return self._draw(state, logits_BV, is_open_B, given, place)

    def decode(
        self,
        weights: Sequence[Any],
        state: Arrays,
        is_open_B: Any,
        given: Arrays,
        place: Any,
        end: Any,
    ) -> tuple[Arrays, Any, Any]:
        flat = self._whole(weights)

        def goes_on(carried: Any) -> Any:
            _, is_open_B, place = carried
            return (place < end) & is_open_B.any()

        def next_token(carried: Any) -> Any:
            state, is_open_B, place = carried
            tokens_B1 = state["token"][:, None]
            logits_BV, cache = self._read(flat, tokens_B1, state["cache"])
            state, is_open_B = self._draw(state, logits_BV, is_open_B, given, place)
            return {**state, "cache": cache}, is_open_B, place + 1

        return jax.lax.while_loop(goes_on, next_token, (state, is_open_B, place))

    def _draw(
        self, state: Arrays, logits_BV: Any, is_open_B: Any, given: Arrays, place: Any
    ) -> tuple[Arrays, Any]:
        """The state with one more token, and the sequences that go on after it."""
        seen_BV = state.get("seen")
        results, seen_BV = self._results(logits_BV, seen_BV, given, place)
        written = {
            name: jax.lax.dynamic_update_slice_in_dim(
                state["written"][name], result[:, None], place, axis=1
            )
            for name, result in results.items()
        }
        token_B = results["token"]
        new = {**state, "token": token_B, "written": written}
        if seen_BV is not None:
            new["seen"] = seen_BV
        ends_B = (token_B[:, None] == given["ends"][None]).any(axis=1)
        return new, is_open_B & results["is_finite"] & ~ends_B

    def _results(
        self, logits_BV: Any, seen_BV: Any, given: Arrays, place: Any
    ) -> tuple[Arrays, Any]:
        """See `GenerationPlanner.draw`."""
        number_B = jnp.broadcast_to(given["first"] + place, logits_BV.shape[:1])
        rest = given["words"], seen_BV
        return self.planner.draw(logits_BV, given["numbers"], number_B, *rest)

    def _read(self, flat: Arrays, tokens: Any, cache: Any) -> tuple[Any, Any]:
        def read(*arguments: Any) -> tuple[Any, Any]:
            *trees, batch = arguments
            return checked_apply(
                self.planner.decoder, *trees, batch["tokens"], batch["cache"]
            )

        batch = {"tokens": tokens, "cache": cache}
        return self.planner.bound(read)(flat, batch)

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
        """For each array of a microbatch, the dim along which its sequences lie.

        `NO_AXIS` for those that are the same for all sequences.
        """
        larger = replace(self.shape, rows=self.shape.rows + 1)
        return row_axes(self._arrays(self.shape), self._arrays(larger))

    def compiled(self) -> FusedPrograms:
        weights = [self._weight_spec(array) for array in self.weights]
        arrays, block = self._arrays(self.shape), self._arrays(self.block)
        self._check_room(arrays)
        rows = (self.shape.rows,)
        flags = jax.ShapeDtypeStruct(rows, np.bool_)
        number = jax.ShapeDtypeStruct((), np.int32)
        seen, given = None, self.given
        if self.planner.sampling.penalizes:
            seen = jax.ShapeDtypeStruct(arrays["logits"].shape, np.bool_)
        begin = arrays["logits"], seen, flags, given
        state, _ = jax.eval_shape(self.begin, *begin)
        state = {**state, "cache": arrays["cache"]}
        of_block = self.batch["tokens"], self.batch["starts"]
        of_rows = jax.ShapeDtypeStruct(rows, np.int32), flags
        prefill = self._compile(self.prefill, weights, *of_block)
        programs = {
            "prefill": prefill,
            "empty": self._compile(partial(_zeros, arrays)),
            "spread": self._compile(self.spread, arrays, block, *of_rows, donates=0),
            "begin": self._compile(self.begin, *begin),
            "decode": self._compile(
                self.decode, weights, state, flags, given, number, number, donates=1
            ),
        }
        workspace = self._workspace_bytes(programs, weights, arrays, block)
        flops = int((programs["decode"].cost_analysis() or {}).get("flops", 0))
        plan = self._plan(workspace, flops)
        return FusedPrograms(
            {array: self.planner.spec(array).nbytes for array in self.weights},
            **programs,
            plan=plan,
            workspace_bytes=workspace,
        )

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

    def _arrays(self, shape: Shape) -> Any:
        """Shapes and dtypes of a microbatch's arrays: its cache and last logits."""
        logits = jax.ShapeDtypeStruct((shape.rows, self._num_words), np.float32)
        return {"cache": self._cache(shape), "logits": logits}

    def _cache(self, shape: Shape) -> Any:
        init_cache = self.planner.decoder.init_cache
        return jax.eval_shape(lambda x: init_cache(x, shape.length), shape.starts)

    @cached_property
    def _num_words(self) -> int:
        tokens = jax.ShapeDtypeStruct((self.shape.rows, 1), np.int32)
        with noted(NAME, self._flat, self.batch):
            read = self._flat, tokens, self._cache(self.shape)
            return jax.eval_shape(self._read, *read)[0].shape[-1]

    def _weight_spec(self, array: ArrayId) -> jax.ShapeDtypeStruct:
        spec = self.planner.spec(array)
        return jax.ShapeDtypeStruct(spec.shape, jnp.dtype(spec.dtype))

    def _workspace_bytes(
        self, programs: Mapping[str, Any], weights: Any, arrays: Any, block: Any
    ) -> int:
        """Device memory beside the arrays at rest, at the worst time.

        A block that a later microbatch needs stays while another one is decoded.
        """
        own = {name: memory(x).device_bytes for name, x in programs.items()}
        for name in ("prefill", "decode"):
            own[name] -= _nbytes(weights)
        return self._copied_bytes + max(
            own["prefill"] + _nbytes(arrays),
            own["spread"],
            own["begin"] + _nbytes(arrays["cache"]) + _nbytes(block),
            own["decode"] + _nbytes(block),
        )

    def _check_room(self, arrays: Any) -> None:
        """Raise if weights and cache alone are too large, before compiling anything."""
        self._plan(self._copied_bytes + _nbytes(arrays), 0)

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
