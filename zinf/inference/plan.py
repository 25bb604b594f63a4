"""Plans prefill and decode: two programs over one cache.

Prefill reads parts of the prompts of some rows and leaves the others as they are, and
decode reads one token of each sequence, or a few. Both run all sequences through a
segment before the next segment starts, in microbatches of `rows`, so weights cross each
link once a token however many sequences there are (FlexGen, arXiv:2303.06865, section
4.1; ZeRO-Inference, arXiv:2207.00032, section 6). One pass may do both: running
sequences go on while prompts are read (Dynamic SplitFuse, arXiv:2401.08671, section 3).
"""

from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, Self

import jax

from zinf.core.plan import InfeasibleError, Link
from zinf.core.program import ArrayId, ArraySpec, Role, Tier, open_tiers
from zinf.core.segment import Function, Segmented, named_leaves
from zinf.core.sharding import Dim
from zinf.core.step.arrays import array_specs
from zinf.core.step.beside import alone, together
from zinf.core.step.caches import Cached, Rooms
from zinf.core.step.forward import Forward, plan_again, plan_forward
from zinf.core.step.on_demand import LEAST_SLOTS, NO_SLOTS
from zinf.core.step.planner import Planner
from zinf.core.step.setup import AtRest
from zinf.core.step.shrink import Compiled, Limits, largest_segment_bytes
from zinf.inference.rows import (
    BLOCK_TOKENS,
    NO_AXIS,
    Parts,
    Shape,
    parts,
)
from zinf.inference.steps import Steps

NAME = "the decoder"
CACHE = "batch/cache/"
PROMPTS = "prompts/"
MOST_PASSES = 64  # Plans of passes of some microbatches that are kept.


@dataclass(frozen=True)
class Generation:
    """The two programs for one shape.

    Attributes:
        axes: the leaves of the cache in flattened order, as the programs name them,
            each with its dim that has a sequence for each index, or `NO_AXIS`.
        results: what decode returns beside them, in flattened order: what `draw` gives
            at each place, (B, places, ...), and "count" (B,), the first places of a
            sequence that are right. A prefill returns logits, float32 (B, V).
        draw: see `Steps.draw`; compiled for the host.
        parts: what a prefill reads of each microbatch.
        passes: what `GenerationPlanner.reading` and `decoding` returned last.
    """

    shape: Shape
    prefill: Forward
    decode: Forward
    axes: Mapping[str, int]
    results: tuple[str, ...]
    draw: Callable
    parts: Parts
    passes: dict[Hashable, Forward | None] = field(default_factory=dict)

    @property
    def num_microbatches(self) -> int:
        return self.decode.num_microbatches

    @property
    def can_join(self) -> bool:
        """Whether sequences of a microbatch may be at different positions."""
        return NO_AXIS not in self.axes.values()

    @property
    def can_read_beside(self) -> bool:
        """Whether prompts may be read while other sequences go on.

        Slots of experts that are read on demand belong to one program.
        """
        programs = self.prefill.segmented.program, self.decode.segmented.program
        return self.can_join and not any(each.chosen for each in programs)

    @property
    def vocab_size(self) -> int:
        program = self.prefill.segmented.program
        return program.values[program.outputs[0]].shape[-1]

    def kept(self, key: Hashable, make: Callable[[], Forward | None]) -> Forward | None:
        """What is in `passes` for a key, or new; the oldest of too many go."""
        if key not in self.passes:
            while len(self.passes) >= MOST_PASSES:
                del self.passes[next(iter(self.passes))]
            self.passes[key] = make()
        return self.passes[key]

    def of_microbatch(self, m: int) -> range:
        """The rows of a microbatch, counted over all."""
        return range(m * self.shape.rows, (m + 1) * self.shape.rows)

    def leaf_bytes(self) -> int:
        """The bytes of the largest leaf of the cache of a microbatch."""
        values = self.decode.segmented.program.values
        return max(values[name].nbytes for name in self.axes)


@dataclass(frozen=True)
class GenerationPlanner:
    """Plans generation for the arrays at rest of an engine.

    Attributes:
        steps: what the programs compute.
        execution: as in a config; "streamed" never fuses.
        slot_bytes: bytes of the device for experts that are read on demand, if the
            config does not say; 0: all experts of a layer are read for each pass.

    Raises:
        NotImplementedError: the planner is for devices that divide positions.
    """

    planner: Planner
    at_rest: AtRest
    steps: Steps
    execution: str = "auto"
    slot_bytes: int = LEAST_SLOTS

    def __post_init__(self) -> None:
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

    @property
    def rooms(self) -> Rooms:
        """The bytes of the tiers where caches may rest."""
        capacity = self.planner.capacity()
        return {tier: capacity[tier] for tier in self.tiers}

    def plan(self, shape: Shape) -> Generation:
        """Both programs for one microbatch, compiled.

        Raises:
            InfeasibleError: they do not fit beside the arrays at rest.
            ValueError: the decoder returned something else than a decoder must.
        """
        axes = self.steps.cache_axes(shape)
        tokens, num_results = self.steps.tokens(shape), len(self.steps.results)
        given = None, Cached(rooms=self.rooms)
        decode = self._plan(self.steps.step, tokens, num_results, *given)
        read = self._parts(shape, decode)
        while True:
            prefill, read = self._prefill(shape, read, axes, decode)
            if decode.cache_tiers == prefill.cache_tiers:
                names = {
                    CACHE + path: axis for path, axis in named_leaves(axes).items()
                }
                how = names, self.steps.results, jax.jit(self.steps.draw), read
                return Generation(shape, prefill, decode, *how)
            # A leaf that only one of them can overwrite is passed by both.
            caches = set(decode.segmented.program.caches)
            rest = caches.intersection(prefill.segmented.program.caches)
            given = rest, Cached(rooms=prefill.cache_rooms)
            decode = self._plan(self.steps.step, tokens, num_results, *given)

    def _parts(self, shape: Shape, decode: Forward) -> Parts:
        """What a pass reads of prompts while it reads weights for a decode anyway."""
        num_tokens = self.tokens_beside(decode, shape.rows)
        return parts(shape, num_tokens, **self._how_to_read(shape))

    def _how_to_read(self, shape: Shape) -> dict[str, bool]:
        """See `rows.parts`."""
        has_rows = NO_AXIS not in jax.tree.leaves(self.steps.cache_axes(shape))
        can_wait = has_rows and self.steps.decoder.take_back is not None
        return {
            # Devices divide the rows of a cache, and each reads its own.
            "all_rows": not has_rows or self.planner.rule.mesh.size > 1,
            "whole": self.steps.decoder.reads_whole_prompts or not can_wait,
        }

    def tokens_beside(self, decode: Forward, rows: int) -> int:
        """Tokens of prompts that take no longer to compute than weights to fetch.

        A power of two, so that rates that differ by little change no executable.

        Args:
            decode: the program whose weights are fetched for the prompts too.
            rows: sequences of a microbatch of it.
        """
        rates, plan = decode.plan.rates, decode.plan
        busy = plan.timeline.busy_seconds(plan.instructions)
        computing = busy.pop(Link.DEVICE, 0.0)
        flops = sum(segment.spec.flops for segment in decode.segments)
        free = max(0.0, max(busy.values(), default=0.0) - computing)
        # A decode computes some tokens of each row.
        rows *= 1 + self.steps.num_guesses
        num_tokens = int(free * rates.flops_per_second * rows / max(1, flops))
        return max(BLOCK_TOKENS, 1 << max(0, num_tokens.bit_length() - 1))

    def _prefill(
        self, shape: Shape, read: Parts, axes: Any, decode: Forward
    ) -> tuple[Forward, Parts]:
        """The program that reads prompts, and what it reads.

        That is less than `read` if else segments or caches had to make room.

        Raises:
            InfeasibleError: the least does not fit.
        """
        tiers, rooms = decode.cache_tiers, decode.cache_rooms
        caches = set(decode.segmented.program.caches)
        largest = largest_segment_bytes(decode.segmented.program)
        while True:
            function = partial(self.steps.read, axes=axes, shape=shape, read=read)
            given = function, self.steps.prompts(shape, read), 1, caches
            smaller = read.smaller(**self._how_to_read(shape))
            if smaller is None:
                return self._plan(*given, Cached(rooms=rooms)), read
            try:
                there = Cached(rooms=rooms, tiers=tiers)
                return self._plan(*given, there, least_param_bytes=largest), read
            except InfeasibleError:
                read = smaller

    def repeated(self, made: Generation, num_microbatches: int) -> Generation:
        """The same programs for another number of microbatches; compiles nothing.

        Raises:
            InfeasibleError: they do not fit.
        """
        rooms = self.rooms
        while True:
            caches = Cached(rooms=rooms)
            prefill = self._again(made.prefill, num_microbatches, caches)
            caches = Cached(rooms=prefill.cache_rooms)
            decode = self._again(made.decode, num_microbatches, caches)
            if decode.cache_tiers == prefill.cache_tiers:
                return replace(made, prefill=prefill, decode=decode, passes={})
            rooms = decode.cache_rooms

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
        is_same = found.decode.cache_tiers == made.decode.cache_tiers
        return found if is_same else made

    def reading(
        self, made: Generation, microbatches: range, *, is_beside: bool
    ) -> Forward | None:
        """The pass that reads parts of prompts of some microbatches.

        Args:
            is_beside: it also decodes all microbatches; None is returned if both do not
                fit together. Names of what prompts need then begin with `PROMPTS`.
        """
        make = partial(self._reading, made, microbatches, is_beside)
        return made.kept((microbatches, is_beside), make)

    def decoding(self, made: Generation, num_microbatches: int) -> Forward:
        """The pass that decodes so many microbatches: the first ones."""
        if num_microbatches == made.num_microbatches:
            return made.decode
        first = alone(made.decode, "", range(num_microbatches))
        forward = made.kept(num_microbatches, partial(self._replanned, made, *first))
        assert forward is not None
        return forward

    def _reading(
        self, made: Generation, microbatches: range, is_beside: bool
    ) -> Forward | None:
        if not is_beside:
            if len(microbatches) == made.num_microbatches:
                return made.prefill
            return self._replanned(made, *alone(made.prefill, "", microbatches))
        rest = made.decode, made.prefill, PROMPTS, microbatches
        try:
            return self._replanned(made, *together(*rest))
        except InfeasibleError:
            return None

    def _replanned(
        self, made: Generation, segmented: Segmented, compiled: Compiled
    ) -> Forward:
        return plan_again(
            self.planner,
            segmented,
            compiled,
            NAME,
            self.at_rest,
            num_microbatches=made.num_microbatches,
            caches=Cached(tiers=made.prefill.cache_tiers),
        )

    def seconds_beside(self, made: Generation) -> float:
        """What reading a part of prompts adds to a decode, over the time of a decode.

        At most 1: else running sequences wait for a pass of its own.
        """
        found = None
        if made.can_read_beside:
            found = self.reading(made, range(1), is_beside=True)
        if found is None:
            return 1.0
        added = found.plan.timeline.seconds / made.decode.plan.timeline.seconds - 1
        return min(1.0, max(0.0, added))

    def most(self, made: Generation, wanted: int) -> Generation:
        """The programs for as many microbatches as fit, up to `wanted`."""
        while wanted > 1:
            try:
                return self.repeated(made, wanted)
            except InfeasibleError:
                wanted = -(-wanted // 2)
        return made

    def _again(
        self, forward: Forward, num_microbatches: int, caches: Cached
    ) -> Forward:
        return plan_again(
            self.planner,
            forward.segmented,
            forward.compiled,
            NAME,
            self.at_rest,
            num_microbatches=num_microbatches,
            caches=caches,
        )

    def _plan(
        self,
        step: Callable,
        batch: Any,
        num_results: int,
        only: Collection[str] | None,
        caches: Cached,
        least_param_bytes: int = 1,
    ) -> Forward:
        limit = self.planner.config.segment_max_bytes
        function = Function(NAME, self.steps.bound(step))
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
            limits=Limits(limit, least_param_bytes=least_param_bytes),
            caches=replace(caches, outputs=outputs),
            slot_bytes=self.slot_bytes,
        )
