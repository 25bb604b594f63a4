"""Any program within any budget: the plan is right however its links are timed."""

from collections.abc import Callable, Mapping
from random import Random

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.toy.machine import Machine, run_jobs
from tests.toy.strategies import Case, cases
from zinf.plan import (
    InfeasibleError,
    Plan,
    build,
)
from zinf.plan.catalog import Catalog
from zinf.plan.passage import (
    Passage,
    first_passage,
    flush_passage,
    step_passage,
    streamed,
)
from zinf.program import Tier

UNLIMITED = dict.fromkeys(Tier, 1 << 40)

repeatable = settings(derandomize=True, deadline=None, database=None, max_examples=50)
budgets = st.fixed_dictionaries(
    {tier: st.integers(0, 12_000) for tier in (Tier.DEVICE, Tier.HOST)}
)


def plan_of(case: Case, capacity: Mapping[Tier, int]) -> tuple[Plan, Catalog]:
    microbatches = case.options.num_microbatches
    catalog = case.toy.catalog(case.homes, num_microbatches=microbatches)
    units = case.toy.units(case.homes)
    # `build` checks what it makes.
    return build(catalog, units, capacity, case.options), catalog


def raised(capacity: Mapping[Tier, int], error: InfeasibleError) -> dict[Tier, int]:
    needed = {tier: short.needed_bytes for tier, short in error.shortages.items()}
    return {**capacity, **needed}


@repeatable
@given(cases(), budgets)
def test_a_plan_fits_or_says_what_would(case: Case, budget: dict[Tier, int]) -> None:
    capacity = {**UNLIMITED, **budget}
    try:
        plan, _ = plan_of(case, capacity)
    except InfeasibleError as error:
        assert all(s.needed_bytes > capacity[t] for t, s in error.shortages.items())
        capacity = raised(capacity, error)
        plan, _ = plan_of(case, capacity)
    assert all(plan.peak_bytes[tier] <= capacity[tier] for tier in Tier)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("of", [step_passage, first_passage, flush_passage])
@repeatable
@given(cases(), st.randoms(use_true_random=False), st.booleans())
def test_no_timing_of_the_links_changes_a_result_or_exceeds_the_peak(
    of: Callable[..., Passage], case: Case, choose: Random, is_tight: bool
) -> None:
    capacity = dict(UNLIMITED)
    if is_tight:
        with pytest.raises(InfeasibleError) as caught:
            plan_of(case, {**UNLIMITED, Tier.DEVICE: 0, Tier.HOST: 0})
        capacity = raised(capacity, caught.value)
    _, catalog = plan_of(case, capacity)
    passage = of(catalog, case.toy.units(case.homes), case.options)
    assume(passage.jobs)  # there may be nothing to flush
    # What the step fits in, so do the two that are parts of it.
    plan = streamed(passage, catalog, capacity)
    expected = run_jobs(passage.jobs, catalog, passage.initial)
    result = Machine(plan, catalog, passage.initial).run(choose)
    for tier in Tier:
        assert result.peak_bytes[tier] <= plan.peak_bytes[tier]
    left = {(a, t) for t, store in result.stores.items() for a in store.arrays}
    assert left == {*catalog.homes.items(), *passage.final}
    for array, tier in left:
        assert result.stores[tier].arrays[array] == expected[array]
