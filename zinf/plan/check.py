"""Proves of a finished plan what the executor relies on, from the plan alone.

The rules that built the plan are not used here: orderings are derived again from the
dependencies, so that a mistake in `stream` is found before anything runs.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping

from zinf.plan.instruction import (
    Copy,
    Decide,
    Free,
    Instruction,
    Link,
    Transfer,
    Update,
)
from zinf.plan.plan import Plan
from zinf.program import ArrayId, Rows, Tier, covers, overlaps


class PlanError(AssertionError):
    """The plan is wrong; always a bug of zinf, never of its user."""


def check(
    plan: Plan,
    initial: Iterable[Copy] = (),
    initial_bytes: Mapping[Tier, int] | None = None,
    kept: Iterable[Copy] = (),
) -> None:
    """Checks order, life times and budgets of a plan.

    * dependencies point backward, so the earliest unfinished instruction can run;
    * what an instruction reads is there, in its newest version, made by one that it
      waits for, and neither overwritten nor freed before it is done;
    * what a device reads is not updated on the host before that is done, since the two
      may be in one memory;
    * at the end the newest versions are at home, and only `kept` copies are left;
    * no interleaving of the links exceeds a budget (see [Note: fences]).

    Raises:
        PlanError: naming the instruction.
    """
    if plan.is_fused:
        return
    reach = _Reachability(plan.instructions)
    _check_copies(plan, reach, initial, kept)
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


class _Copies:
    """What is where as the plan goes on, and which version of it.

    Rows of a copy that is there as a whole are part of that, wherever it is.
    """

    def __init__(self, plan: Plan, reach: _Reachability, initial: Iterable[Copy]):
        self.plan, self.reach = plan, reach
        # By holder: which rows, whether written, and by which instruction.
        self.uses: dict[Copy, list[tuple[Rows, bool, int]]] = defaultdict(list)
        self.freed: dict[Copy, int] = {}
        # By array: which rows of it devices read, and in which instruction.
        self.read_there: dict[ArrayId, list[tuple[Rows, int]]] = defaultdict(list)
        self.present = set(initial)
        # Versions by rows (None: those rows that have no entry of their own).
        self.versions: dict[Copy, dict] = defaultdict(dict)
        self.newest: dict[ArrayId, dict] = defaultdict(dict)

    def is_home(self, copy: Copy) -> bool:
        array, tier = copy
        homes = self.plan.homes
        return tier in (homes.get(array), homes.get(array.whole))

    def holder(self, copy: Copy) -> Copy | None:
        """The copy, or the whole, that holds `copy`; None if nothing does."""
        array, tier = copy
        whole = (array.whole, tier)
        for held in (copy, whole):
            if held in self.present:
                return held
        if self.is_home(copy):
            return copy if array in self.plan.homes else whole
        return None

    def read(self, index: int, copy: Copy) -> None:
        held = self.holder(copy)
        rows = copy[0].rows
        if held is None or not all(
            self.waits(index, other)
            for used, is_written, other in self.uses[held]
            if is_written and overlaps(rows, used)
        ):
            raise self.error(index, f"reads {_name(copy)} before it is there")
        if _seen(self.versions[held], copy[0]) != _seen(
            self.newest[copy[0].whole], copy[0]
        ):
            raise self.error(index, f"reads an old version of {_name(copy)}")
        self.uses[held].append((rows, False, index))
        if copy[1] == Tier.DEVICE:
            self.read_there[copy[0].whole].append((rows, index))

    def write(self, index: int, copy: Copy, version: Mapping) -> None:
        held = self.holder(copy)
        if held is None:
            held = copy
            for gone in (copy, (copy[0].whole, copy[1])):
                if not self.waits(index, self.freed.get(gone)):
                    raise self.error(index, f"makes {_name(copy)} before it is freed")
            self.present.add(copy)
        rows = copy[0].rows
        self.settle(index, held, rows, "overwrites")
        self.uses[held].append((rows, True, index))
        if copy[0] == held[0]:
            self.versions[held].clear()
        self.versions[held].update(version)

    def settle(self, index: int, held: Copy, rows: Rows, verb: str) -> None:
        """Everything that used these rows of the copy so far must be done."""
        for used, _, other in self.uses[held]:
            if overlaps(rows, used) and not self.waits(index, other):
                raise self.error(index, f"{verb} {_name(held)} under #{other}")
        self.uses[held] = [u for u in self.uses[held] if not covers(rows, u[0])]

    def free(self, index: int, copy: Copy) -> None:
        if copy not in self.present:
            raise self.error(index, f"frees {_name(copy)}, which is not there")
        self.settle(index, copy, None, "frees")
        self.present.remove(copy)
        self.uses.pop(copy, None)
        self.versions.pop(copy, None)
        self.freed[copy] = index

    def update(self, index: int, array: ArrayId) -> None:
        """Whoever reads an array on a device must be done before it changes here."""
        for rows, other in self.read_there[array.whole]:
            if overlaps(rows, array.rows) and not self.waits(index, other):
                raise self.error(index, f"changes {array} under #{other}")

    def finish(self, kept: Iterable[Copy]) -> None:
        """At the end homes and `kept` hold the newest versions; all else is gone."""
        kept = set(kept)
        if self.present != kept:
            copy = min(self.present ^ kept, key=str)
            what = "leaves" if copy in self.present else "does not leave"
            raise PlanError(f"the plan {what} {_name(copy)} behind")
        for copy in kept:
            array = copy[0]
            found = _seen(self.versions[copy], array)
            if found != _seen(self.newest[array.whole], array):
                raise PlanError(f"the plan leaves an old version of {_name(copy)}")
        for array, tier in self.plan.homes.items():
            found = _seen(self.versions[array, tier], array)
            if found != _seen(self.newest[array.whole], array):
                raise PlanError(f"the new {array} never gets home to {tier}")

    def waits(self, index: int, other: int | None) -> bool:
        if other is None or other == index:
            return True
        return self.reach.precedes(other, index)

    def error(self, index: int, what: str) -> PlanError:
        return PlanError(f"#{index} {self.plan.instructions[index].operation} {what}")


def _name(copy: Copy) -> str:
    return f"{copy[0]} on {copy[1]}"


def _seen(versions: Mapping, array: ArrayId) -> dict:
    """The versions, of those by rows, that a reader of `array` sees."""
    if array.rows is None:
        return dict(versions)
    return {array.rows: versions.get(array.rows, versions.get(None))}


def _check_copies(
    plan: Plan, reach: _Reachability, initial: Iterable[Copy], kept: Iterable[Copy]
) -> None:
    copies = _Copies(plan, reach, initial)
    decisions: list[int] = []
    for index, instruction in enumerate(plan.instructions):
        operation = instruction.operation
        if isinstance(operation, Decide):
            decisions.append(index)
        elif isinstance(operation, Update) and not operation.is_pending:
            if not any(reach.precedes(i, index) for i in decisions):
                raise PlanError(f"#{index} {operation} does not wait for the decision")
        for copy in instruction.reads:
            copies.read(index, copy)
        for copy in instruction.writes:
            array = copy[0]
            if isinstance(operation, Update) and operation.tier == Tier.HOST:
                copies.update(index, array)
            newest = copies.newest[array.whole]
            if not isinstance(operation, Transfer):
                if array.rows is None:
                    newest.clear()
                newest[array.rows] = index
            copies.write(index, copy, _seen(newest, array))
        if isinstance(operation, Free):
            for array in operation.arrays:
                copies.free(index, (array, operation.tier))
    copies.finish(kept)


def _check_budget(
    plan: Plan, reach: _Reachability, tier: Tier, initial_bytes: int
) -> None:
    """At each allocation: all allocated up to it, less the frees that it waits for."""
    allocated = plan.home_bytes[tier] + initial_bytes
    if allocated > plan.capacity_bytes[tier]:
        raise PlanError(
            f"the step starts with {allocated:,} bytes on {tier}, more than "
            f"{plan.capacity_bytes[tier]:,}"
        )
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
            limit = min(plan.peak_bytes[tier], plan.capacity_bytes[tier])
            if held > limit:
                raise PlanError(
                    f"#{index} {instruction.operation} may hold {held:,} bytes on "
                    f"{tier}, more than {limit:,}"
                )
        operation = instruction.operation
        is_free = isinstance(operation, Free) and operation.tier == tier
        returned = instruction.nbytes if is_free else working
        if returned:
            frees[instruction.link].append(index)
            freed[instruction.link].append(freed[instruction.link][-1] + returned)
