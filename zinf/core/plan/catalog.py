"""The input of planning: arrays with sizes and homes, update units, and options."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from math import prod

from zinf.core.plan.cost import Rates
from zinf.core.plan.instruction import NO_EXCHANGE, Exchange, RowSumIds
from zinf.core.program import FLOAT32_BYTES, ArrayId, ArraySpec, Program, Role, Tier


@dataclass(frozen=True, slots=True)
class ArrayUpdate:
    """The update of one array, or of a `block` of its rows.

    `gradient` is the whole gradient array; the update reads its `gradient_block`.
    `master`, `states` and `compute` name the block. `compute` is the copy in the
    compute dtype; it is None if the master is that copy.
    """

    gradient: ArrayId
    block: tuple[int, int] | None
    master: ArrayId
    states: tuple[ArrayId, ...]
    compute: ArrayId | None

    @property
    def gradient_block(self) -> ArrayId:
        """The rows of the gradient that this update reads."""
        return self.gradient.piece(self.block) if self.block else self.gradient

    @property
    def operands(self) -> tuple[ArrayId, ...]:
        return (self.master, *self.states)

    @property
    def results(self) -> tuple[ArrayId, ...]:
        return (*self.operands, *([self.compute] if self.compute else []))


@dataclass(frozen=True, slots=True)
class UpdateUnit:
    """Leaf updates that run as one instruction on `tier`, once gradients are complete.

    `workspace_bytes` is the workspace of the largest leaf update: temporaries, and, if
    arrays are not updated in place, results before they replace the old arrays.
    """

    name: str
    tier: Tier
    arrays: tuple[ArrayUpdate, ...]
    workspace_bytes: int
    exchange: Exchange = NO_EXCHANGE


@dataclass(frozen=True, slots=True)
class StepOptions:
    """How a step is arranged; no option changes a result.

    Attributes:
        updates_in_backward: update a unit as soon as its gradient is complete; not
            possible if the update needs the norm of the whole gradient.
        update_tier: where updates run whose arrays do not all rest on the device; if it
            is the device, their state is streamed through the device.
        turns: every so many segments have their updates on the other of host and
            device, so that both work at once; 0: none.
        deferred: numbers of the units that are updated in the next step instead.
        num_kept: how many of the last segments that can save residuals do so, instead
            of recomputing in the backward pass.
        gradients_by_row: a gradient that several units on the host read waits on the
            device, and each unit fetches its rows. This takes less of the host at once
            and more of the device for longer.
        value_tier: where activations wait for the backward pass.
        gradient_tier: where complete gradients wait for an update after the backward
            pass or in the next step.
    """

    num_microbatches: int
    updates_in_backward: bool
    value_tier: Tier
    gradient_tier: Tier
    update_tier: Tier = Tier.HOST
    turns: int = 0
    num_kept: int = 0
    deferred: frozenset[int] = frozenset()
    gradients_by_row: bool = False


@dataclass(frozen=True, slots=True)
class PartSum:
    """What summing the parts of one gradient over devices needs.

    Attributes:
        workspace_bytes: device bytes beside arguments and results.
        exchange: what a device sends.
        errors: the errors of the exchange, which it reads and replaces.
    """

    workspace_bytes: int
    exchange: Exchange
    errors: tuple[ArrayId, ...] = ()


@dataclass(frozen=True, slots=True)
class Keeping:
    """The residuals that a segment may save for its backward pass, and their cost.

    Attributes:
        residuals: the saved arrays.
        workspace: device bytes that the forward pass that saves them and the backward
            pass that reads them take beside arguments and results.
        is_selective: matmuls that are cheap for their size are recomputed, not saved.
        flops_again: floating-point operations of the matmuls that are recomputed.
    """

    residuals: tuple[ArraySpec, ...]
    workspace: tuple[int, int]
    is_selective: bool = False
    flops_again: int = 0

    @property
    def nbytes(self) -> int:
        return sum(spec.nbytes for spec in self.residuals)


@dataclass(frozen=True)
class Catalog:
    """Sizes of everything a plan may name.

    With several devices or processes, specs are those of one process's share, which
    its host and drive hold.

    Attributes:
        specs: specs of persistent arrays, by the id that they have in `homes`.
        homes: the tier where each persistent array rests between steps.
        workspace: `(forward, backward)` device bytes of each segment.
        num_contributions: see `count_contributions`.
        keeping: residuals of the segments that can save some, by number.
        device_parts: bytes of one device's part over those of the process's share, by
            `ArrayId.layout_array`, for arrays where this fraction is not 1.
        exchange: `(forward, backward)` bytes that each segment sends between devices;
            empty on one device.
        part_sums: what summing the parts of a gradient needs, by the gradient.
        norm_classes: classes of leaves by path, from 1, if norms are taken of some
            leaves alone; all others are of class 0.
    """

    program: Program
    specs: Mapping[ArrayId, ArraySpec]
    homes: Mapping[ArrayId, Tier]
    workspace: Sequence[tuple[int, int]]
    num_contributions: Counter = field(default_factory=Counter)
    rates: Rates = field(default_factory=Rates)
    keeping: Mapping[int, Keeping] = field(default_factory=dict)
    device_parts: Mapping[ArrayId, Fraction] = field(default_factory=dict)
    exchange: Sequence[tuple[Exchange, Exchange]] = ()
    part_sums: Mapping[ArrayId, PartSum] = field(default_factory=dict)
    norm_classes: Mapping[str, int] = field(default_factory=dict)

    def exchange_of(self, k: int) -> tuple[Exchange, Exchange]:
        """Bytes that the passes of segment `k` send between devices: its exchange."""
        return self.exchange[k] if self.exchange else (NO_EXCHANGE, NO_EXCHANGE)

    def kept_segments(self, num_kept: int) -> frozenset[int]:
        """The segments that save residuals: the last ones, which need them soonest."""
        numbers = sorted(self.keeping)
        return frozenset(numbers[len(numbers) - num_kept :] if num_kept else ())

    def residuals(self, k: int, microbatch: int) -> tuple[ArrayId, ...]:
        """The names of the residuals that segment `k` saves for a microbatch."""
        name = self.program.segments[k].name
        return tuple(
            ArrayId(Role.RESIDUAL, f"{name}/{i}", None, microbatch)
            for i in range(len(self.keeping[k].residuals))
        )

    def row_sum(self, k: int, i: int, microbatch: int) -> RowSumIds:
        """The ids of the rows and row numbers of the `i`-th row sum of segment `k`."""
        path = f"{self.program.segments[k].name}/{i}"
        rest = path, None, microbatch
        return ArrayId(Role.GRADIENT_ROWS, *rest), ArrayId(Role.ROW_NUMBERS, *rest)

    @cached_property
    def _temporary_bytes(self) -> dict[tuple[Role, str], int]:
        """The table of arrays that a step makes, but gradients: bytes by role, path."""
        found = {}
        for name, spec in self.program.values.items():
            for role in (Role.VALUE, Role.COTANGENT, Role.COTANGENT_PART):
                found[role, name] = spec.nbytes
        specs: dict[ArrayId, ArraySpec] = {}
        for k, segment in enumerate(self.program.segments):
            found[Role.NORM, segment.name] = FLOAT32_BYTES
            for i, row_sum in enumerate(segment.row_sums):
                rows, numbers = self.row_sum(k, i, 0)
                specs |= {rows: row_sum.rows, numbers: row_sum.numbers}
        for k, keeping in self.keeping.items():
            specs |= zip(self.residuals(k, 0), keeping.residuals, strict=True)
        return found | {(a.role, a.path): spec.nbytes for a, spec in specs.items()}

    def wide_row_bytes(self, rows: ArrayId) -> int:
        """Bytes of the rows of a row sum if they were float32."""
        return self._wide_row_bytes[rows.path]

    @cached_property
    def _wide_row_bytes(self) -> dict[str, int]:
        return {
            self.row_sum(k, i, 0)[0].path: FLOAT32_BYTES * prod(row_sum.rows.shape)
            for k, segment in enumerate(self.program.segments)
            for i, row_sum in enumerate(segment.row_sums)
        }

    def nbytes(self, array: ArrayId, tier: Tier = Tier.HOST) -> int:
        """Bytes of a copy: of one device's part, elsewhere of the process's share."""
        found = self._found_bytes.get((array, tier))
        if found is None:
            found = self._share_bytes(array)
            if tier == Tier.DEVICE and self.device_parts:
                found = int(found * self.device_parts.get(array.layout_array, 1))
            self._found_bytes[array, tier] = found
        return found

    def _share_bytes(self, array: ArrayId) -> int:
        found = self._temporary_bytes.get((array.role, array.path))
        if found is not None:
            return found
        if array.role.layout_role in (Role.GRADIENT, Role.PARTS):
            spec = self.param_spec(array)
            counted = {(array.path, rows) for rows in (array.rows, None)}
            accumulates = any(self.num_contributions[key] > 1 for key in counted)
            wide = array.role in (Role.GRADIENT, Role.PARTS) and accumulates
            itemsize = max(FLOAT32_BYTES, spec.itemsize) if wide else spec.itemsize
            return spec.nbytes // spec.itemsize * itemsize
        return self.spec(array).nbytes

    def spec(self, array: ArrayId) -> ArraySpec:
        """The spec of a persistent array, or of rows of one."""
        found = self.specs.get(array)
        return self.specs[array.whole].piece(array.rows) if found is None else found

    def param_spec(self, gradient: ArrayId) -> ArraySpec:
        """The spec of the parameter of a gradient."""
        return self.spec(ArrayId(Role.PARAM, gradient.path, gradient.rows))

    def by_norm_class(self, gradients: Iterable[ArrayId]) -> dict[int, list[ArrayId]]:
        """Gradients by the class of their leaf."""
        found: dict[int, list[ArrayId]] = {}
        for gradient in gradients:
            number = self.norm_classes.get(gradient.path, 0)
            found.setdefault(number, []).append(gradient)
        return found

    def home(self, array: ArrayId) -> ArrayId | None:
        """The persistent array that is `array` or has it as rows; None if none does."""
        home = array if array in self.homes else array.whole
        return home if home in self.homes else None

    def home_tier(self, array: ArrayId) -> Tier | None:
        return self.home_tiers[array]

    # Cached: planning looks up each array hundreds of times.
    @cached_property
    def home_tiers(self) -> Mapping[ArrayId, Tier | None]:
        """The result of `home_tier` for any array."""
        return _HomeTiers(self.homes)

    @cached_property
    def _found_bytes(self) -> dict[tuple[ArrayId, Tier], int]:
        return {}


class _HomeTiers(dict[ArrayId, Tier | None]):
    """A cache of home tiers; rows have the tier of their whole array."""

    def __missing__(self, array: ArrayId) -> Tier | None:
        tier = self[array] = None if array.rows is None else self[array.whole]
        return tier


def count_contributions(program: Program, num_microbatches: int) -> Counter:
    """How many backward runs add to the gradient of each parameter array."""
    counts: Counter = Counter()
    for segment in program.segments:
        if segment is program.segments[-1] or segment.has_backward:
            for array in segment.trained_params:
                counts[array.path, array.rows] += num_microbatches
    return counts


def gradient_of(array: ArrayId) -> ArrayId:
    return array.of_role(Role.GRADIENT)


def value(name: str, microbatch: int) -> ArrayId:
    return ArrayId(Role.VALUE, name, None, microbatch)


def cache(name: str, microbatch: int) -> ArrayId:
    return ArrayId(Role.CACHE, name, None, microbatch)


def norm_of(segment: str, number: int = 0) -> ArrayId:
    """The sum of squares of a segment's gradients whose leaves have a class."""
    return ArrayId(Role.NORM, segment, slot=number or None)
