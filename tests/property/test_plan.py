"""Any program within any budget: the plan is right however its links are timed.

And the checker finds what would go wrong, whatever is done to a plan.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from random import Random

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.toy.machine import Machine, run_jobs
from tests.toy.strategies import Case, cases
from zinf.core.plan import (
    Copy,
    Free,
    InfeasibleError,
    Link,
    Plan,
    PlanError,
    Transfer,
    bound_seconds,
    build,
)
from zinf.core.plan.catalog import Catalog
from zinf.core.plan.passage import (
    Passage,
    checked,
    first_passage,
    flush_passage,
    step_passage,
    streamed,
)
from zinf.core.program import Tier

UNLIMITED = dict.fromkeys(Tier, 1 << 40)

repeatable = settings(derandomize=True, deadline=None, database=None)
choices = st.randoms(use_true_random=False)
budgets = st.fixed_dictionaries(
    {tier: st.integers(0, 12_000) for tier in (Tier.DEVICE, Tier.HOST)}
)


def catalog_of(case: Case) -> Catalog:
    microbatches = case.options.num_microbatches
    return case.toy.catalog(case.homes, num_microbatches=microbatches)


def plan_of(case: Case, capacity: Mapping[Tier, int]) -> Plan:
    # `build` checks what it makes.
    units = case.toy.units(case.homes)
    return build(catalog_of(case), units, capacity, case.options)


def raised(capacity: Mapping[Tier, int], error: InfeasibleError) -> dict[Tier, int]:
    needed = {tier: short.needed_bytes for tier, short in error.shortages.items()}
    return {**capacity, **needed}


@dataclass(frozen=True)
class Expected:
    """What a plan of a passage has to do."""

    catalog: Catalog
    passage: Passage

    def check(self, plan: Plan) -> None:
        checked(plan, self.passage, self.catalog)

    def run(self, plan: Plan, choose: Random) -> None:
        """Runs the plan with its links in an order by chance."""
        passage = self.passage
        expected = run_jobs(passage.jobs, self.catalog, passage.initial)
        result = Machine(plan, self.catalog, passage.initial).run(choose)
        for tier in Tier:
            assert result.peak_bytes[tier] <= plan.peak_bytes[tier]
            assert result.peak_bytes[tier] <= plan.capacity_bytes[tier]
        left = {(a, t) for t, store in result.stores.items() for a in store.arrays}
        assert left == {*self.catalog.homes.items(), *passage.final}
        for array, tier in left:
            assert result.stores[tier].arrays[array] == expected[array]


def expected_of(case: Case, of: Callable[..., Passage] = step_passage) -> Expected:
    catalog = catalog_of(case)
    return Expected(catalog, of(catalog, case.toy.units(case.homes), case.options))


@settings(repeatable, max_examples=50)
@given(cases(), budgets)
def test_a_plan_fits_or_says_what_would(case: Case, budget: dict[Tier, int]) -> None:
    capacity = {**UNLIMITED, **budget}
    try:
        plan = plan_of(case, capacity)
    except InfeasibleError as error:
        assert all(s.needed_bytes > capacity[t] for t, s in error.shortages.items())
        capacity = raised(capacity, error)
        plan = plan_of(case, capacity)
    assert all(plan.peak_bytes[tier] <= capacity[tier] for tier in Tier)
    assert bound_seconds(plan.instructions, plan.rates) <= plan.timeline.seconds + 1e-9


PASSAGES = [step_passage, first_passage, flush_passage]


@settings(repeatable, max_examples=80)
@given(cases(), st.sampled_from(PASSAGES), choices, st.booleans())
def test_no_timing_of_the_links_changes_a_result_or_exceeds_the_peak(
    case: Case, of: Callable[..., Passage], choose: Random, is_tight: bool
) -> None:
    capacity = dict(UNLIMITED)
    if is_tight:
        with pytest.raises(InfeasibleError) as caught:
            plan_of(case, {**UNLIMITED, Tier.DEVICE: 0, Tier.HOST: 0})
        capacity = raised(capacity, caught.value)
    expected = expected_of(case, of)
    assume(expected.passage.jobs)  # there may be nothing to flush
    # What the step fits in, so do the two that are parts of it.
    expected.run(streamed(expected.passage, expected.catalog, capacity), choose)


def changed(plan: Plan, index: int, **fields: object) -> Plan:
    instructions = list(plan.instructions)
    instructions[index] = replace(instructions[index], **fields)
    return replace(plan, instructions=tuple(instructions))


def without_dependency(plan: Plan, choose: Random) -> Plan:
    index = choose.choice([i for i, x in enumerate(plan.instructions) if x.after])
    after = list(plan.instructions[index].after)
    after.remove(choose.choice(after))
    return changed(plan, index, after=tuple(after))


def relinked(plan: Plan, choose: Random) -> Plan:
    """An instruction on another link, where others come before and after it."""
    index = choose.randrange(len(plan.instructions))
    return changed(plan, index, link=choose.choice(list(Link)))


def swapped(plan: Plan, choose: Random) -> Plan:
    """Two neighbours change places, and everyone waits for whom they waited for."""
    assume(len(plan.instructions) > 1)
    first = choose.randrange(len(plan.instructions) - 1)
    places = {first: first + 1, first + 1: first}
    instructions = list(plan.instructions)
    instructions[first : first + 2] = instructions[first + 1], instructions[first]
    moved = tuple(
        replace(x, after=tuple(sorted(places.get(i, i) for i in x.after)))
        for x in instructions
    )
    return replace(plan, instructions=moved)


def tightened(plan: Plan, choose: Random) -> Plan:
    """No budget is larger than the plan says that it needs."""
    return replace(plan, capacity_bytes=plan.peak_bytes)


MUTATIONS = [without_dependency, relinked, swapped, tightened]


@settings(repeatable, max_examples=120)
@given(cases(), st.sampled_from(MUTATIONS), choices)
def test_what_passes_the_check_runs_right(
    case: Case, mutate: Callable[[Plan, Random], Plan], choose: Random
) -> None:
    expected = expected_of(case)
    plan = mutate(tightened(plan_of(case, UNLIMITED), choose), choose)
    try:
        expected.check(plan)
    except PlanError:
        return
    for _ in range(3):
        expected.run(plan, choose)


def frees(plan: Plan, expected: Expected) -> list[int]:
    """The frees whose copies nothing makes again or keeps."""
    found, made = [], set[Copy](expected.passage.final)
    for i, x in reversed(list(enumerate(plan.instructions))):
        if isinstance(x.operation, Free):
            gone = {(a, x.operation.tier) for a in x.operation.arrays}
            if made.isdisjoint(gone):
                found.append(i)
        made.update(x.writes)
    return found


def transfers(plan: Plan, expected: Expected) -> list[int]:
    operations = [x.operation for x in plan.instructions]
    return [i for i, x in enumerate(operations) if isinstance(x, Transfer)]


@settings(repeatable, max_examples=80)
@given(cases(), st.sampled_from([frees, transfers]), choices)
def test_a_missing_free_or_transfer_is_found(
    case: Case, of: Callable[[Plan, Expected], list[int]], choose: Random
) -> None:
    plan, expected = plan_of(case, UNLIMITED), expected_of(case)
    found = of(plan, expected)
    assume(found)
    none = {"reads": (), "writes": (), "creates": (), "allocates": (), "nbytes": 0}
    plan = changed(plan, choose.choice(found), operation=Free((), Tier.HOST), **none)
    with pytest.raises(PlanError):
        expected.check(plan)


@settings(repeatable, max_examples=60)
@given(cases(), st.sampled_from([Tier.DEVICE, Tier.HOST]))
def test_a_budget_below_the_peak_is_found(case: Case, tier: Tier) -> None:
    plan = plan_of(case, UNLIMITED)
    assume(plan.peak_bytes[tier] > plan.home_bytes[tier])
    less = {**UNLIMITED, tier: plan.peak_bytes[tier] - 1}
    with pytest.raises(PlanError, match=f"on {tier}, more than"):
        expected_of(case).check(replace(plan, capacity_bytes=less))
