"""Searches for the fastest arrangement of a step that fits, with homes given.

The search first finds a plain arrangement that fits. Then it predicts the time of other
arrangements with `cost` and takes the fastest. No arrangement changes a result.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, product
from typing import Any

from zinf.core.plan.catalog import Catalog, Keeping, StepOptions, UpdateUnit
from zinf.core.plan.cost import Rates
from zinf.core.plan.infeasible import InfeasibleError
from zinf.core.plan.instruction import Copy
from zinf.core.plan.passage import (
    Passage,
    checked,
    first_passage,
    flush_passage,
    proven,
    step_passage,
    streamed,
)
from zinf.core.plan.pending import not_read_first, pending_copies
from zinf.core.plan.plan import Plan
from zinf.core.program import ArrayId, Link, Tier

# Take another arrangement only if its predicted time is below this part of the best so
# far: a smaller gain may be an error of the prediction.
WORTHWHILE = 0.99

Homes = Mapping[ArrayId, Tier]
# From `homes`, an `update_tier` and `turns`.
UnitsFor = Callable[[Homes, Tier, int], Sequence[UpdateUnit]]
KeepingIn = Callable[[int], Mapping[int, Keeping]]
# Yields homes to try, one after another. The argument has the bytes that each tier must
# keep free; `Search.plain` raises them between two placements.
Placements = Callable[[dict[Tier, int]], Iterator[Homes]]


@dataclass(frozen=True, slots=True)
class Choices:
    """The alternatives that the search tries, best first.

    Attributes:
        value_tiers, gradient_tiers, update_tiers, turns: values to try for these
            `StepOptions`.
        persistence_bytes: the size under which an array never goes to nvme.
        keepings: functions from the device bytes that a segment's residuals of one
            microbatch may take to the residuals that each segment can save. The first
            saves most; later ones save less and recompute more. A function is called
            only if it may gain time.
        defers: whether to try deferring all units, and all but those whose results the
            first segment reads.
        by_row: whether gradients may wait on the device and come to the host by row, if
            the host has no room for whole gradients.
    """

    value_tiers: tuple[Tier, ...]
    gradient_tiers: tuple[Tier, ...]
    persistence_bytes: int
    update_tiers: tuple[Tier, ...] = ()
    turns: tuple[int, ...] = ()
    keepings: tuple[KeepingIn, ...] = ()
    defers: bool = False
    by_row: bool = False


@dataclass(frozen=True, slots=True)
class Arrangement:
    """The plans of a step and the choices that they are built from.

    Attributes:
        plan: the plan of a step that follows another.
        first: the plan of a step before which no update is pending; None if no unit is
            deferred.
        flush: the plan of the pending updates alone; None if no unit is deferred.
        pending: the gradients that are at rest between steps.
    """

    plan: Plan
    catalog: Catalog
    units: tuple[UpdateUnit, ...]
    options: StepOptions
    first: Plan | None = None
    flush: Plan | None = None
    pending: tuple[Copy, ...] = ()

    @property
    def seconds(self) -> float:
        """The predicted time of a step."""
        return self.plan.timeline.seconds


def arrange(
    catalog: Catalog,
    units_for: UnitsFor,
    capacity_bytes: Mapping[Tier, int],
    options: StepOptions,
) -> Arrangement:
    """The step with exactly these homes, residuals and options; nothing is searched.

    Args:
        catalog: `homes` and `keeping` say where arrays rest and what segments may save.
        units_for: see `UnitsFor`.

    Raises:
        InfeasibleError: the step does not fit.
    """
    return whole(step(catalog, units_for, capacity_bytes, options))


def step(
    catalog: Catalog,
    units_for: UnitsFor,
    capacity_bytes: Mapping[Tier, int],
    options: StepOptions,
) -> Arrangement:
    """An arrangement to compare with others: `first` and `flush` are not built."""
    units = tuple(units_for(catalog.homes, options.update_tier, options.turns))
    passage = step_passage(catalog, units, options)
    plan = streamed(passage, catalog, capacity_bytes)
    return Arrangement(plan, catalog, units, options)


def whole(arranged: Arrangement) -> Arrangement:
    """An arrangement made by `step`, with the plans `first` and `flush` added.

    Raises:
        InfeasibleError: one of them does not fit.
    """
    catalog, units, options = arranged.catalog, arranged.units, arranged.options
    if not options.deferred or arranged.first is not None:
        return arranged

    def plan(of: Callable[..., Passage]) -> Plan:
        passage = of(catalog, units, options)
        return streamed(passage, catalog, arranged.plan.capacity_bytes)

    pending = tuple(pending_copies(units, options.deferred, catalog, options))
    first, flush = plan(first_passage), plan(flush_passage)
    return replace(arranged, first=first, flush=flush, pending=pending)


def whole_or(best: Arrangement, found: Arrangement) -> Arrangement:
    """`whole(found)`; `best` if that does not fit, or if `found` is `best`."""
    if found is best:
        return best
    try:
        return whole(found)
    except InfeasibleError:
        return best


def prove(arranged: Arrangement) -> None:
    """Raise PlanError unless `check` proves the plans of an arrangement.

    A search does not do that: plans that are only compared are not checked, which saves
    a tenth of the time of planning 13B parameters.
    """
    passages = {
        step_passage: arranged.plan,
        first_passage: arranged.first,
        flush_passage: arranged.flush,
    }
    for passage_of, plan in passages.items():
        if plan is not None:
            passage = passage_of(arranged.catalog, arranged.units, arranged.options)
            checked(plan, passage, arranged.catalog)


def build_at_home(
    catalog: Catalog,
    units_for: UnitsFor,
    capacity_bytes: Mapping[Tier, int],
    options: StepOptions,
    choices: Choices,
) -> Arrangement:
    """The fastest step that fits, with arrays at the homes of the catalog.

    Args:
        units_for: see `UnitsFor`.

    Raises:
        InfeasibleError: the step does not fit, even with activations and gradients on
            the slowest tier allowed. The error names the budgets that suffice for the
            arrangement with the fewest missing bytes.
    """
    search = Search(catalog, units_for, capacity_bytes, options, choices)
    plain = search.plain(lambda reserve: iter([catalog.homes]))
    return search.fastest(plain)


def retimed(
    arranged: Arrangement, units_for: UnitsFor, rates: Rates, choices: Choices
) -> Arrangement:
    """The step with the same homes and residuals that is fastest by other rates."""
    catalog = replace(arranged.catalog, rates=rates)
    plain = {"update_tier": Tier.HOST, "turns": 0, "deferred": frozenset()}
    options = replace(arranged.options, **plain)
    capacity_bytes = arranged.plan.capacity_bytes
    search = Search(catalog, units_for, capacity_bytes, options, choices)
    found = search.attempt(replace(arranged, catalog=catalog, options=options))
    if found is None:
        # It fits only with updates on the device, or with deferred ones.
        return arrange(catalog, units_for, capacity_bytes, arranged.options)
    return search.with_turns(search.with_deferred(search.with_updates(found)))


@dataclass
class Search:
    """A search over the arrangements of one step within budgets.

    Attributes:
        options: the options that the search starts from.
    """

    catalog: Catalog
    units_for: UnitsFor
    capacity_bytes: Mapping[Tier, int]
    options: StepOptions
    choices: Choices

    def plain(self, placements: Placements) -> Arrangement:
        """The first arrangement that fits, with no option that only gains time.

        Tries the fastest tiers for activations and gradients first.

        Raises:
            InfeasibleError: none fits; the error names budgets that suffice.
        """
        failures: list[tuple[InfeasibleError, Passage, Catalog]] = []
        may_wait = self.choices.by_row and self.options.updates_in_backward
        by_rows = (False, True) if may_wait else (False,)
        places = self.choices.value_tiers, self.choices.gradient_tiers, by_rows
        for value_tier, gradient_tier, by_row in product(*places):
            if by_row and Tier.HOST not in failures[-1][0].shortages:
                continue
            options = replace(
                self.options,
                value_tier=value_tier,
                gradient_tier=gradient_tier,
                gradients_by_row=by_row,
            )
            reserve = dict.fromkeys(Tier, 0)
            for homes in placements(reserve):
                catalog = replace(self.catalog, homes=homes)
                units = tuple(self.units_for(homes, options.update_tier, options.turns))
                passage = step_passage(catalog, units, options)
                try:
                    plan = streamed(passage, catalog, self.capacity_bytes)
                except InfeasibleError as error:
                    failure = error, passage, catalog
                else:
                    return Arrangement(plan, catalog, units, options)
                if not self.set_aside(failure[0], reserve):
                    break
            failures.append(failure)
        raise proven(*min(failures, key=lambda failed: failed[0].missing_bytes))

    @property
    def may_keep(self) -> tuple[int, ...]:
        """The segments that could save residuals if memory were unlimited."""
        segments = self.catalog.program.segments[:-1]
        found = [k for k, s in enumerate(segments) if s.has_backward and not s.row_sums]
        return tuple(found) if self.choices.keepings else ()

    def recomputing_seconds(self, arranged: Arrangement) -> float:
        """Device seconds in which segments that could save residuals compute again.

        Saving more residuals gains no more than this: it makes passes shorter, and
        leaves less room for copies.
        """
        kept = arranged.catalog.kept_segments(arranged.options.num_kept)
        segments = self.catalog.program.segments
        flops = sum(segments[k].flops for k in self.may_keep if k not in kept)
        flops *= self.options.num_microbatches
        return flops / arranged.catalog.rates.flops_per_second

    def set_aside(self, error: InfeasibleError, reserve: dict[Tier, int]) -> bool:
        """Add at least the missing bytes to `reserve`; False if all is reserved."""
        capacity = self.capacity_bytes
        if all(reserve[t] >= capacity[t] for t in error.shortages):
            return False
        for tier, short in error.shortages.items():
            reserve[tier] += max(short.missing_bytes, capacity[tier] // 16 + 1)
        return True

    def fastest(self, best: Arrangement) -> Arrangement:
        """The fastest arrangement with these homes.

        An option is changed only if the time falls below `WORTHWHILE` of the best so
        far.
        """
        placed = self.with_residuals(self.with_updates(best))
        return self.with_turns(self.with_deferred(placed))

    def with_updates(self, best: Arrangement) -> Arrangement:
        """The arrangement with updates on the tier that makes it fastest."""
        for tier in self.choices.update_tiers:
            best = faster(best, self.attempt(best, update_tier=tier))
        return best

    def with_deferred(self, best: Arrangement) -> Arrangement:
        """The arrangement with all units deferred, or all but those read first."""
        if not self.choices.defers or self.binds(best, *Link):
            return best
        every = frozenset(range(len(best.units)))
        for deferred in (every, not_read_first(best.units, best.catalog)):
            best = whole_or(best, faster(best, self.attempt(best, deferred=deferred)))
        return best

    def with_turns(self, best: Arrangement) -> Arrangement:
        """The arrangement with some updates on the host and others on the device.

        Updates on the device have the links to the host as their limit, others the
        host's processor. They may take longer than a forward pass each way alone.
        """
        before = best.options
        for turns in self.choices.turns:
            if self.binds(best, *Link):
                break
            homes = best.catalog.homes
            units = tuple(self.units_for(homes, before.update_tier, turns))
            deferred = frozenset(range(len(units))) if before.deferred else frozenset()
            if 0 < len(before.deferred) < len(best.units):
                deferred = not_read_first(units, best.catalog)
            attempt = self.attempt(best, turns=turns, deferred=deferred)
            best = whole_or(best, faster(best, attempt))
        return best

    def with_residuals(self, best: Arrangement) -> Arrangement:
        """The arrangement with the residuals that make it fastest."""
        plan = best.plan
        if self.binds(best, *(link for link in Link if link != Link.DEVICE)):
            return best
        room_bytes = plan.capacity_bytes[Tier.DEVICE] - plan.home_bytes[Tier.DEVICE]
        for keeping_in in self.choices.keepings:
            # To find what may be kept, XLA compiles two passes of each kind of segment.
            most_gained = self.recomputing_seconds(best)
            if best.seconds - most_gained < WORTHWHILE * best.seconds:
                keeping = keeping_in(room_bytes // self.options.num_microbatches)
                catalog = replace(best.catalog, keeping=keeping)
                kept = self.keeping_most(replace(best, catalog=catalog), room_bytes)
                best = faster(best, kept)
        return best

    def keeping_most(self, best: Arrangement, room_bytes: int) -> Arrangement | None:
        """The arrangement in which about as many segments save residuals as fit.

        Args:
            room_bytes: device bytes that resident arrays leave.
        """
        catalog, count = best.catalog, len(best.catalog.keeping)
        while count := min(count, self.most_kept(catalog, room_bytes)):
            options = replace(best.options, num_kept=count)
            try:
                return step(catalog, self.units_for, self.capacity_bytes, options)
            except InfeasibleError as error:
                count -= 1
                if Tier.DEVICE in error.shortages:
                    room_bytes -= error.shortages[Tier.DEVICE].missing_bytes
        return None

    def most_kept(self, catalog: Catalog, room_bytes: int) -> int:
        """How many of the last segments' residuals fit in `room_bytes`."""
        residuals = [catalog.residuals(k, 0) for k in sorted(catalog.keeping)]
        sizes = [
            sum(catalog.nbytes(a, Tier.DEVICE) for a in arrays) for arrays in residuals
        ]
        room_bytes //= self.options.num_microbatches
        return bisect_right(list(accumulate(reversed(sizes))), room_bytes)

    def binds(self, arranged: Arrangement, *links: Link) -> bool:
        """Whether one of the links is busy so long that no other order gains time."""
        plan = arranged.plan
        busy_seconds = plan.timeline.busy_seconds(plan.instructions)
        most = max(busy_seconds.get(link, 0.0) for link in links)
        return most > WORTHWHILE * arranged.seconds

    def attempt(self, best: Arrangement, **changes: Any) -> Arrangement | None:
        """The `step` with some options changed; None if it does not fit."""
        options = replace(best.options, **changes)
        try:
            return step(best.catalog, self.units_for, self.capacity_bytes, options)
        except InfeasibleError:
            return None


def faster(best: Arrangement, other: Arrangement | None) -> Arrangement:
    """`other` if it takes less than `WORTHWHILE` of the time of `best`."""
    is_faster = other is not None and other.seconds < WORTHWHILE * best.seconds
    return other if is_faster else best
