"""How a step is arranged with arrays at given homes: of what fits, the fastest.

First a plain arrangement is found that fits; then others are timed on the clock of
`cost`, and the fastest is taken. None of it changes a number.
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
    first_passage,
    flush_passage,
    proven,
    step_passage,
    streamed,
)
from zinf.plan.pending import home_last, not_read_first, pending_copies, spread
from zinf.plan.plan import Plan
from zinf.program import ArrayId, Tier

# Another arrangement has to be predicted to take less than so much of the time: what
# it gains beyond that may be the prediction's error.
WORTHWHILE = 0.98
# Less will do among those that differ only in when updates run: they err alike.
FINER = 0.998
# How many segments keep residuals is found to such a share of those that can.
KEPT_STEPS = 16
# What is home last is deferred again and again, until it was so often in vain.
PATIENCE = 8
# Of more, each plan takes seconds, and a search dozens; and what single updates gain is
# a small part of the step.
MAX_INSTRUCTIONS = 4096
# It is asked what they can keep if computing takes so much of the time.
COMPUTE_BOUND = 0.5

Homes = Mapping[ArrayId, Tier]
UnitsFor = Callable[[Homes, Tier], Sequence[UpdateUnit]]
KeepingIn = Callable[[int], Mapping[int, Keeping]]
# Homes to try, one after another, given what each tier is to keep free: that grows
# while they are tried.
Placements = Callable[[dict[Tier, int]], Iterator[Homes]]


@dataclass(frozen=True, slots=True)
class Choices:
    """What may be chosen from, best first.

    Attributes:
        persistence_bytes: the size under which an array never goes to nvme.
        update_tiers, leading_shares: see `StepOptions`.
        deferred_shares: of the bytes that updates change, how many may be `deferred`.
        defers_last: also what is home last in a step may be.
        defers_all: also all may be, and all but what the first segment reads.
        slack: the most of it.
        by_row: whether gradients may wait on the device and come to the host by row.
        keepings: what segments may keep, given the device bytes that are not taken by
            what rests there: most first, then less with more to compute again. Each is
            asked only if it may gain something.
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
    """A step as it was chosen.

    Attributes:
        plan: of a step that follows another.
        first, flush: of a step before which nothing is pending, and of the pending
            updates alone; None if nothing is ever pending.
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
        units_for: the update units for a placement and an `update_tier`.

    Raises:
        InfeasibleError: it does not fit, even with activations and gradients on the
            slowest tier allowed; with the budgets of the arrangement that misses least.
    """
    search = Search(catalog, units_for, capacity_bytes, options, choices)
    return search.fastest(search.plain(lambda reserve: iter([catalog.homes])))


@dataclass
class Search:
    """The arrangements of one step within budgets.

    Attributes:
        options: what a step begins with that is not chosen here.
    """

    catalog: Catalog
    units_for: UnitsFor
    capacity_bytes: Mapping[Tier, int]
    options: StepOptions
    choices: Choices

    def plain(self, placements: Placements) -> Arrangement:
        """The plainest arrangement that fits, at the first homes with which one does.

        Tries the fastest place for activations and gradients first.

        Raises:
            InfeasibleError: none does; with budgets that will do.
        """
        failures: list[tuple[InfeasibleError, Passage, Catalog]] = []
        # Gradients come to the host by row only if that is faster, or has no room else.
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

    @property
    def may_wait(self) -> bool:
        return self.choices.by_row and self.options.updates_in_backward

    @property
    def num_able(self) -> int:
        """How many segments could keep residuals, with room."""
        segments = self.catalog.program.segments[:-1]
        able = [s for s in segments if s.has_backward and not s.row_sums]
        return len(able) if self.choices.keepings else 0

    def set_aside(self, error: InfeasibleError, reserve: dict[Tier, int]) -> bool:
        """Keeps what was missing free; false if nothing more can be."""
        capacity = self.capacity_bytes
        if all(reserve[t] >= capacity[t] for t in error.shortages):
            return False
        for tier, short in error.shortages.items():
            reserve[tier] += max(short.missing_bytes, capacity[tier] // 16 + 1)
        return True

    def fastest(self, best: Arrangement) -> Arrangement:
        """The best arrangement with the same homes; of equal ones, the plainest."""
        for tier in self.choices.update_tiers:
            best = self.better(best, update_tier=tier)
        best = self.with_residuals(best)
        if self.may_wait:
            best = self.better(best, gradients_by_row=True)
        if _is_bound(best.plan):
            return best
        # With more slack links wait less for each other, and what else gains shows.
        found = self.with_late_updates(self.slackened(best, self.choices.slack))
        plainer = self.slackened(found, best.options.slack)
        return better_of(best, better_of(plainer, found))

    def slackened(self, best: Arrangement, slack: float) -> Arrangement:
        """The same with other slack, if it fits."""
        if slack == best.options.slack:
            return best
        options = replace(best.options, slack=slack)
        return self.attempt(best.catalog, options) or best

    def with_late_updates(self, best: Arrangement) -> Arrangement:
        """The same with updates left to the next step, as many as pays."""
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
        """The same with what is home last deferred too, as long as it gains by that."""
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
        """The same with residuals of as many segments as pays."""
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
        """The same with residuals of about as many segments as there is room for.

        Where what they take would rather hold what is fetched ahead, of half of them.

        Args:
            room_bytes: of the device, for all that does not rest there.
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
        """Of how many segments, the last ones, the residuals alone have room."""
        residuals = [catalog.residuals(k, 0) for k in sorted(catalog.keeping)]
        sizes = [
            sum(catalog.nbytes(a, Tier.DEVICE) for a in arrays) for arrays in residuals
        ]
        room_bytes //= self.options.num_microbatches
        return bisect_right(list(accumulate(reversed(sizes))), room_bytes)

    def better(
        self, best: Arrangement, limit: float | None = None, **changes: Any
    ) -> Arrangement:
        """The best so far, or the same with other options if that is faster."""
        options = replace(best.options, **changes)
        if options == best.options:
            return best
        return better_of(best, self.attempt(best.catalog, options), limit)

    def finer(self, best: Arrangement, **changes: Any) -> Arrangement:
        """The same among such as are alike, unless the best can be no faster."""
        return best if _is_bound(best.plan) else self.better(best, FINER, **changes)

    def attempt(self, catalog: Catalog, options: StepOptions) -> Arrangement | None:
        """A step with these options, if it fits."""
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
    """The first, unless the other takes less than so much of its time."""
    if other is None:
        return best
    limit = WORTHWHILE if limit is None else limit
    seconds = limit * best.plan.timeline.seconds
    return other if other.plan.timeline.seconds < seconds else best


def _is_bound(plan: Plan) -> bool:
    """Whether the links already overlap so well that a better order gains nothing."""
    busy_seconds = plan.timeline.busy_seconds(plan.instructions)
    return max(busy_seconds.values()) > WORTHWHILE * plan.timeline.seconds
