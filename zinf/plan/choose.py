"""Searches for the fastest arrangement of a step that fits, with homes given.

The search first finds a plain arrangement that fits. Then it predicts the time of other
arrangements with `cost` and takes the fastest. No arrangement changes a result.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, product
from typing import Any

from zinf.plan.catalog import Catalog, Keeping, StepOptions, UpdateUnit
from zinf.plan.infeasible import InfeasibleError
from zinf.plan.instruction import Copy, Link
from zinf.plan.passage import (
    Passage,
    checked,
    first_passage,
    flush_passage,
    proven,
    step_passage,
    streamed,
)
from zinf.plan.pending import home_last, not_read_first, pending_copies, spread
from zinf.plan.plan import Plan
from zinf.program import ArrayId, Tier

# Take another arrangement only if its predicted time is below 98% of the best so far: a
# smaller gain may be an error of the prediction.
WORTHWHILE = 0.98
# Plans that differ only in update order share the model's error: 0.2% is significant.
FINER = 0.998
# Resolution of the search over the number of segments that save residuals: 1/16 of the
# segments that can.
KEPT_STEPS = 16
# Stop after this many deferrals in a row without a gain.
PATIENCE = 8
# With more instructions, building one plan takes seconds and a search takes dozens of
# plans, while deferring single updates gains only a small part of the step.
MAX_INSTRUCTIONS = 4096
# Try saving residuals only if compute is at least half of the predicted step.
COMPUTE_BOUND = 0.5

Homes = Mapping[ArrayId, Tier]
UnitsFor = Callable[[Homes, Tier], Sequence[UpdateUnit]]
KeepingIn = Callable[[int], Mapping[int, Keeping]]
# Yields homes to try, one after another. The argument has the bytes that each tier must
# keep free; `Search.plain` raises them between two placements.
Placements = Callable[[dict[Tier, int]], Iterator[Homes]]


@dataclass(frozen=True, slots=True)
class Choices:
    """The alternatives that the search tries, best first.

    Attributes:
        value_tiers, gradient_tiers, update_tiers, leading_shares: values to try for
            these `StepOptions`.
        persistence_bytes: the size under which an array never goes to nvme.
        keepings: functions from the device bytes free of resident arrays to the
            residuals that each segment can save. The first saves most; later ones save
            less and recompute more. A function is called only if it may gain time.
        deferred_shares: fractions of the bytes that updates change, to be deferred.
        defers_last: whether to try deferring the units whose results get home last.
        defers_all: whether to try deferring all units, and all but those whose results
            the first segment reads.
        slack: largest slack tried; 1.0 allows no more bytes away from home than a run
            in list order.
        by_row: whether gradients may wait on the device and come to the host by row.
    """

    value_tiers: tuple[Tier, ...]
    gradient_tiers: tuple[Tier, ...]
    persistence_bytes: int
    update_tiers: tuple[Tier, ...] = ()
    keepings: tuple[KeepingIn, ...] = ()
    deferred_shares: tuple[float, ...] = ()
    defers_last: bool = False
    defers_all: bool = False
    leading_shares: tuple[float, ...] = ()
    slack: float = 1.0
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


def build_at_home(
    catalog: Catalog,
    units_for: UnitsFor,
    capacity_bytes: Mapping[Tier, int],
    options: StepOptions,
    choices: Choices,
) -> Arrangement:
    """The fastest step that fits, with arrays at the homes of the catalog.

    Args:
        units_for: returns the update units for homes and an `update_tier`.

    Raises:
        InfeasibleError: the step does not fit, even with activations and gradients on
            the slowest tier allowed. The error names the budgets that suffice for the
            arrangement with the fewest missing bytes.
    """
    search = Search(catalog, units_for, capacity_bytes, options, choices)
    plain = search.plain(lambda reserve: iter([catalog.homes]))
    return search.checked(search.fastest(plain))


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
        # Here gradients come by row only if the host has no room for whole gradients;
        # `fastest` tries them for speed.
        may_wait = (False, True) if self.may_wait else (False,)
        places = self.choices.value_tiers, self.choices.gradient_tiers, may_wait
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
                units = tuple(self.units_for(homes, options.update_tier))
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

    def checked(self, best: Arrangement) -> Arrangement:
        """The arrangement, after its plans were proved.

        Plans that are only compared are not checked, which saves a tenth of the time of
        planning 13B parameters.
        """
        passages = {
            step_passage: best.plan,
            first_passage: best.first,
            flush_passage: best.flush,
        }
        for passage_of, plan in passages.items():
            if plan is not None:
                passage = passage_of(best.catalog, best.units, best.options)
                checked(plan, passage, best.catalog)
        return best

    @property
    def may_wait(self) -> bool:
        return self.choices.by_row and self.options.updates_in_backward

    @property
    def num_able(self) -> int:
        """How many segments could save residuals if memory were unlimited."""
        segments = self.catalog.program.segments[:-1]
        able = [s for s in segments if s.has_backward and not s.row_sums]
        return len(able) if self.choices.keepings else 0

    def set_aside(self, error: InfeasibleError, reserve: dict[Tier, int]) -> bool:
        """Raises `reserve` by the missing bytes; False if all of a tier is reserved."""
        capacity = self.capacity_bytes
        if all(reserve[t] >= capacity[t] for t in error.shortages):
            return False
        for tier, short in error.shortages.items():
            reserve[tier] += max(short.missing_bytes, capacity[tier] // 16 + 1)
        return True

    def fastest(self, best: Arrangement) -> Arrangement:
        """The fastest arrangement with these homes; of equally fast ones, the plainest.

        Times within `WORTHWHILE` count as equal.
        """
        for tier in self.choices.update_tiers:
            best = self.better(best, update_tier=tier)
        best = self.with_residuals(best)
        if self.may_wait:
            best = self.better(best, gradients_by_row=True)
        if _is_bound(best.plan):
            return best
        # Search late updates with most slack: links wait less for each other there, so
        # gains show. Then return to the old slack unless most slack is faster.
        found = self.with_late_updates(self.slackened(best, self.choices.slack))
        plainer = self.slackened(found, best.options.slack)
        return better_of(best, better_of(plainer, found))

    def slackened(self, best: Arrangement, slack: float) -> Arrangement:
        """The arrangement with another slack; `best` if that does not fit."""
        if slack == best.options.slack:
            return best
        options = replace(best.options, slack=slack)
        return self.attempt(best.catalog, options) or best

    def with_late_updates(self, best: Arrangement) -> Arrangement:
        """The arrangement with the deferred units that make it fastest."""
        units, late = best.units, best
        is_short = len(best.plan.instructions) < MAX_INSTRUCTIONS
        for share in self.choices.deferred_shares:
            late = self.finer(late, deferred=spread(units, share, best.catalog))
        if self.choices.defers_last and is_short:
            late = self.deferring_last(late)
        if self.choices.defers_all:
            late = self.finer(late, deferred=frozenset(range(len(units))))
            late = self.finer(late, deferred=not_read_first(units, best.catalog))
        if late.options.deferred and is_short:
            for share in self.choices.leading_shares:
                late = self.finer(late, leading_share=share)
        return late

    def deferring_last(self, best: Arrangement) -> Arrangement:
        """Defers the units whose results get home last, until that gains no more."""
        latest, in_vain = best, 0
        while in_vain < PATIENCE and not _is_bound(best.plan):
            last = home_last(latest.plan, best.units, len(best.units) // 64 + 1)
            deferred = latest.options.deferred | last
            options = replace(latest.options, deferred=deferred)
            attempt = self.attempt(best.catalog, options) if last else None
            if attempt is None:
                break
            latest, before = attempt, best
            best = better_of(best, latest, FINER)
            in_vain = in_vain + 1 if best is before else 0
        return best

    def with_residuals(self, best: Arrangement) -> Arrangement:
        """The arrangement with the number of saved residuals that makes it fastest."""
        plan = best.plan
        busy_seconds = plan.timeline.busy_seconds(plan.instructions)
        if busy_seconds[Link.DEVICE] < COMPUTE_BOUND * plan.timeline.seconds:
            return best
        room_bytes = plan.capacity_bytes[Tier.DEVICE] - plan.home_bytes[Tier.DEVICE]
        for keeping_in in self.choices.keepings:
            if best.options.num_kept < self.num_able:
                keeping = keeping_in(room_bytes)
                catalog = replace(best.catalog, keeping=keeping)
                most = self.keeping_most(best, catalog, room_bytes)
                best = better_of(best, most)
        return best

    def keeping_most(
        self, best: Arrangement, catalog: Catalog, room_bytes: int
    ) -> Arrangement | None:
        """The arrangement with saved residuals of nearly as many segments as fit.

        If that is no faster than `best`, half as many segments save residuals, which
        leaves room for prefetched arrays.

        Args:
            room_bytes: device bytes that resident arrays leave.
        """
        num_able = len(catalog.keeping)
        count = self.most_kept(catalog, room_bytes)
        most, fits, too_many = None, 0, count + 1
        while too_many - fits > max(1, num_able // KEPT_STEPS):
            found = self.attempt(catalog, replace(best.options, num_kept=count))
            if found is None:
                too_many = count
            else:
                most, fits = found, count
            count = (fits + too_many) // 2
        if fits > 1 and better_of(best, most) is best:
            most = self.attempt(catalog, replace(best.options, num_kept=fits // 2))
        return most

    def most_kept(self, catalog: Catalog, room_bytes: int) -> int:
        """How many of the last segments' residuals fit, if nothing else needs room."""
        residuals = [catalog.residuals(k, 0) for k in sorted(catalog.keeping)]
        sizes = [
            sum(catalog.nbytes(a, Tier.DEVICE) for a in arrays) for arrays in residuals
        ]
        room_bytes //= self.options.num_microbatches
        return bisect_right(list(accumulate(reversed(sizes))), room_bytes)

    def better(
        self, best: Arrangement, limit: float | None = None, **changes: Any
    ) -> Arrangement:
        """The arrangement with some options changed, if it is faster than `best`."""
        options = replace(best.options, **changes)
        if options == best.options:
            return best
        return better_of(best, self.attempt(best.catalog, options), limit)

    def finer(self, best: Arrangement, **changes: Any) -> Arrangement:
        """`better` with the limit `FINER`; `best` if a link already binds it."""
        return best if _is_bound(best.plan) else self.better(best, FINER, **changes)

    def attempt(self, catalog: Catalog, options: StepOptions) -> Arrangement | None:
        """The arrangement with these options; None if it does not fit."""
        try:
            return self.arrange(catalog, options)
        except InfeasibleError:
            return None

    def arrange(self, catalog: Catalog, options: StepOptions) -> Arrangement:
        units = tuple(self.units_for(catalog.homes, options.update_tier))

        def plan(of: Callable[..., Passage]) -> Plan:
            return streamed(of(catalog, units, options), catalog, self.capacity_bytes)

        step = plan(step_passage)
        if not options.deferred:
            return Arrangement(step, catalog, units, options)
        pending = tuple(pending_copies(units, options.deferred, catalog, options))
        first, flush = plan(first_passage), plan(flush_passage)
        return Arrangement(step, catalog, units, options, first, flush, pending)


def better_of(
    best: Arrangement, other: Arrangement | None, limit: float | None = None
) -> Arrangement:
    """`other` if it takes less than `limit` (`WORTHWHILE`) of the time of `best`."""
    if other is None:
        return best
    limit = WORTHWHILE if limit is None else limit
    seconds = limit * best.plan.timeline.seconds
    return other if other.plan.timeline.seconds < seconds else best


def _is_bound(plan: Plan) -> bool:
    """Whether one link is busy for 98% of the step, so a better order gains nothing."""
    busy_seconds = plan.timeline.busy_seconds(plan.instructions)
    return max(busy_seconds.values()) > WORTHWHILE * plan.timeline.seconds
