"""The checker finds what would go wrong, whatever is done to a plan."""

from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.toy.machine import Machine, run_jobs
from tests.toy.strategies import Case, cases
from zinf.plan import (
    Copy,
    Free,
    Link,
    Plan,
    PlanError,
    Transfer,
    build,
    check,
)
from zinf.plan.catalog import Catalog
from zinf.plan.passage import step_passage
from zinf.program import ArrayId, Tier

UNLIMITED = dict.fromkeys(Tier, 1 << 40)

repeatable = settings(derandomize=True, deadline=None, database=None, max_examples=80)
choices = st.randoms(use_true_random=False)


class Checked:
    """A right plan, and the question whether another one is as good."""

    def __init__(self, case: Case):
        microbatches = case.options.num_microbatches
        self.catalog: Catalog = case.toy.catalog(
            case.homes, num_microbatches=microbatches
        )
        units = case.toy.units(case.homes)
        self.plan = build(self.catalog, units, UNLIMITED, case.options)
        passage = step_passage(self.catalog, units, case.options)
        self.initial, self.final = passage.initial, set(passage.final)
        self.expected = run_jobs(passage.jobs, self.catalog, self.initial)

    def check(self, plan: Plan) -> None:
        held = dict.fromkeys(Tier, 0)
        for array, tier in self.initial:
            held[tier] += self.catalog.nbytes(array)
        check(plan, self.initial, held, self.final)

    def run(self, plan: Plan, choose: Random) -> None:
        result = Machine(plan, self.catalog, self.initial).run(choose)
        for tier in Tier:
            assert result.peak_bytes[tier] <= plan.capacity_bytes[tier]
        found: dict[tuple[ArrayId, Tier], list[int]] = {
            (array, tier): content
            for tier, store in result.stores.items()
            for array, content in store.arrays.items()
        }
        assert found.keys() == {*self.catalog.homes.items(), *self.final}
        for (array, _), content in found.items():
            assert content == self.expected[array]


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


@pytest.mark.sampled(2)
@pytest.mark.parametrize("mutate", MUTATIONS)
@repeatable
@given(cases(), choices)
def test_what_passes_the_check_runs_right(
    mutate: Callable[[Plan, Random], Plan], case: Case, choose: Random
) -> None:
    checked = Checked(case)
    plan = mutate(tightened(checked.plan, choose), choose)
    try:
        checked.check(plan)
    except PlanError:
        return
    for _ in range(3):
        checked.run(plan, choose)


def copies_made_after(plan: Plan) -> list[set[Copy]]:
    """The copies that instructions after each one of a plan write."""
    found: list[set[Copy]] = []
    later: set[Copy] = set()
    for instruction in reversed(plan.instructions):
        found.append(set(later))
        later.update(instruction.writes)
    return found[::-1]


@repeatable
@given(cases(), choices)
def test_a_missing_free_is_found(case: Case, choose: Random) -> None:
    checked = Checked(case)
    made = copies_made_after(checked.plan)
    frees = [
        i
        for i, x in enumerate(checked.plan.instructions)
        if isinstance(x.operation, Free)
        # A copy that is made again, or the gradient of a pending update, takes the
        # place of the one that was not freed.
        and not any(
            (a, x.operation.tier) in checked.final | made[i] for a in x.operation.arrays
        )
    ]
    assume(frees)
    index = choose.choice(frees)
    old = checked.plan.instructions[index].operation
    plan = changed(checked.plan, index, operation=Free((), old.tier), nbytes=0)
    with pytest.raises(PlanError):
        checked.check(plan)


@repeatable
@given(cases(), choices)
def test_a_missing_transfer_is_found(case: Case, choose: Random) -> None:
    checked = Checked(case)
    moves = [
        i
        for i, x in enumerate(checked.plan.instructions)
        if isinstance(x.operation, Transfer)
    ]
    index = choose.choice(moves)
    none = {"reads": (), "writes": (), "allocates": ()}
    plan = changed(checked.plan, index, operation=Free((), Tier.HOST), **none)
    with pytest.raises(PlanError):
        checked.check(plan)


@repeatable
@given(cases(), st.sampled_from([Tier.DEVICE, Tier.HOST]))
def test_a_budget_below_the_peak_is_found(case: Case, tier: Tier) -> None:
    checked = Checked(case)
    assume(checked.plan.peak_bytes[tier] > checked.plan.home_bytes[tier])
    less = {**UNLIMITED, tier: checked.plan.peak_bytes[tier] - 1}
    with pytest.raises(PlanError, match=f"on {tier}, more than"):
        checked.check(replace(checked.plan, capacity_bytes=less))
