"""Proves of a finished plan what the executor relies on, from the plan alone.

The rules that built the plan are not used here: orderings are derived again from the
dependencies, so that a mistake in `stream` is found before anything runs.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping

from zinf.plan.instruction import Decide, Free, Instruction, Link, Update
from zinf.plan.plan import Plan
from zinf.program import Tier


class PlanError(AssertionError):
    """The plan is wrong; always a bug of zinf, never of its user."""


def check(
    plan: Plan, initial: Iterable = (), initial_bytes: Mapping[Tier, int] | None = None
) -> None:
    """Checks order, life times and budgets of a plan.

    * dependencies point backward, so the earliest unfinished instruction can run;
    * what an instruction reads was written before, by one that it waits for, and is
      not freed before it is done;
    * no interleaving of the links exceeds a budget (see [Note: fences]).

    Raises:
        PlanError: naming the instruction.
    """
    if plan.is_fused:
        return
    reach = _Reachability(plan.instructions)
    _check_copies(plan, reach, set(initial))
    for tier in Tier:
        _check_budget(plan, reach, tier, (initial_bytes or {}).get(tier, 0))


class _Reachability:
    """Which instructions are certainly complete when another starts.

    Links run in order, so one number a link says it all: the last of its instructions
    that is complete (a vector clock; Fidge and Mattern, 1988).
    """

    def __init__(self, instructions: tuple[Instruction, ...]):
        self.links = [instruction.link for instruction in instructions]
        self.clocks: list[dict[Link, int]] = []
        newest: dict[Link, int] = {}
        for index, instruction in enumerate(instructions):
            before = list(instruction.after)
            if any(i >= index for i in before):
                raise PlanError(
                    f"#{index} {instruction.operation} waits for a later one"
                )
            if instruction.link in newest:
                before.append(newest[instruction.link])
            newest[instruction.link] = index
            clock: dict[Link, int] = {}
            for i in before:
                for link, position in self.clocks[i].items():
                    clock[link] = max(clock.get(link, -1), position)
                clock[self.links[i]] = max(clock.get(self.links[i], -1), i)
            self.clocks.append(clock)

    def precedes(self, first: int, second: int) -> bool:
        return self.clocks[second].get(self.links[first], -1) >= first


def _check_copies(plan: Plan, reach: _Reachability, initial: set) -> None:
    made: dict[tuple, int] = {}
    readers: dict[tuple, list[int]] = defaultdict(list)
    decisions: list[int] = []

    def is_home(copy: tuple) -> bool:
        array, tier = copy
        return tier in (plan.homes.get(array), plan.homes.get(array.whole))

    for index, instruction in enumerate(plan.instructions):
        operation = instruction.operation
        if isinstance(operation, Decide):
            decisions.append(index)
        if isinstance(operation, Update):
            if not any(reach.precedes(i, index) for i in decisions):
                raise PlanError(f"#{index} {operation} does not wait for the decision")
        for copy in instruction.reads:
            if is_home(copy) or (copy in initial and copy not in made):
                continue
            if copy not in made or not reach.precedes(made[copy], index):
                raise PlanError(f"#{index} {operation} reads {copy} before it is there")
            readers[copy].append(index)
        for copy in instruction.writes:
            if not is_home(copy):
                made[copy] = index
        if isinstance(operation, Free):
            for array in operation.arrays:
                copy = (array, operation.tier)
                for reader in readers.pop(copy, []):
                    if not reach.precedes(reader, index):
                        raise PlanError(f"#{index} frees {copy} under #{reader}")
                made.pop(copy, None)
                initial.discard(copy)


def _check_budget(
    plan: Plan, reach: _Reachability, tier: Tier, initial_bytes: int
) -> None:
    """At each allocation: all allocated up to it, less the frees that it waits for."""
    allocated = plan.home_bytes[tier] + initial_bytes
    frees: dict[Link, list[int]] = defaultdict(list)
    freed: dict[Link, list[int]] = defaultdict(lambda: [0])
    for index, instruction in enumerate(plan.instructions):
        working = dict(instruction.workspace).get(tier, 0)
        added = dict(instruction.allocates).get(tier, 0) + working
        if added:
            allocated += added
            held = allocated
            for link, position in reach.clocks[index].items():
                held -= freed[link][bisect_right(frees[link], position)]
            if held > plan.capacity_bytes[tier]:
                raise PlanError(
                    f"#{index} {instruction.operation} may hold {held:,} bytes on "
                    f"{tier}, more than {plan.capacity_bytes[tier]:,}"
                )
        operation = instruction.operation
        is_free = isinstance(operation, Free) and operation.tier == tier
        returned = instruction.nbytes if is_free else working
        if returned:
            frees[instruction.link].append(index)
            freed[instruction.link].append(freed[instruction.link][-1] + returned)
