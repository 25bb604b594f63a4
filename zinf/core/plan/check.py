"""Proves the properties of a plan that the executor relies on, from the plan alone.

The check shares no rule with the code that built the plan: it derives the order of
instructions from their dependencies. So a mistake in `stream` is found before a run.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping

from zinf.core.plan.instruction import Copy, Decide, Free, Instruction, Transfer, Update
from zinf.core.plan.plan import Plan
from zinf.core.program import ArrayId, Link, Rows, Tier, covers, overlaps


class PlanError(AssertionError):
    """The plan is wrong; this is always a bug of zinf, never the user's mistake."""


def check(
    plan: Plan,
    initial: Iterable[Copy] = (),
    initial_bytes: Mapping[Tier, int] | None = None,
    final: Iterable[Copy] = (),
) -> None:
    """Checks order, life times and budgets of a plan.

    * dependencies point backward, so the earliest unfinished instruction can run;
    * each copy that an instruction reads exists, is the newest version, was made by an
      instruction that the reader waits for, and is neither overwritten nor freed before
      the reader is done;
    * an instruction says of each copy that it writes whether it makes the copy;
    * an array is not updated on the host while a device reads it, since host and device
      copies may share memory;
    * updates run together only in the memory of arrays that rest on the device, and
      within the workspace of their instruction;
    * at the end the newest versions are at home, and only `final` copies are left;
    * no interleaving of the links exceeds a budget (see [Note: fences]).

    Raises:
        PlanError: a condition fails; the message names the instruction or the copy.
    """
    reach = _Reachability(plan.instructions)
    _check_copies(plan, reach, initial, final)
    check_groups(plan)
    for tier in Tier:
        _check_budget(plan, reach, tier, (initial_bytes or {}).get(tier, 0))


class _Reachability:
    """Which instructions are certainly complete when another starts.

    Links run in order, so one number for each link suffices: the last of its
    instructions that is complete (a vector clock; Fidge and Mattern, 1988).
    """

    def __init__(self, instructions: tuple[Instruction, ...]):
        self.links = [instruction.link for instruction in instructions]
        self.clocks: list[dict[Link, int]] = []
        newest: dict[Link, int] = {}
        for index, instruction in enumerate(instructions):
            before = list(instruction.after)
            if any(i >= index for i in before):
                raise PlanError(
                    f"#{index} {instruction.operation} waits for a later instruction"
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
    """Which copies exist after each instruction, and their versions.

    If a tier has a copy of the whole array, rows on that tier are part of it.
    """

    def __init__(self, plan: Plan, reach: _Reachability, initial: Iterable[Copy]):
        self.plan, self.reach = plan, reach
        # Uses of a holder: (rows, whether they are written, instruction).
        self.uses: dict[Copy, list[tuple[Rows, bool, int]]] = defaultdict(list)
        self.freed: dict[Copy, int] = {}
        # Reads of an array on the devices: (rows, instruction).
        self.read_there: dict[ArrayId, list[tuple[Rows, int]]] = defaultdict(list)
        self.present = set(initial)
        # Versions by rows (None: all rows without an entry of their own).
        self.versions: dict[Copy, dict] = defaultdict(dict)
        self.newest: dict[ArrayId, dict] = defaultdict(dict)

    def is_home(self, copy: Copy) -> bool:
        array, tier = copy
        homes = self.plan.homes
        return tier in (homes.get(array), homes.get(array.whole))

    def holder(self, copy: Copy) -> Copy | None:
        """The copy itself or the whole that has it as rows; None if neither exists."""
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
            raise self.error(index, f"reads {_name(copy)} before it exists")
        if _seen(self.versions[held], copy[0]) != _seen(
            self.newest[copy[0].whole], copy[0]
        ):
            raise self.error(index, f"reads an old version of {_name(copy)}")
        self.uses[held].append((rows, False, index))
        if copy[1] == Tier.DEVICE:
            self.read_there[copy[0].whole].append((rows, index))

    def write(self, index: int, copy: Copy, version: Mapping) -> None:
        held = self.holder(copy)
        if (held is None) != (copy in self.plan.instructions[index].creates):
            what = "does not say that it makes" if held is None else "makes again"
            raise self.error(index, f"{what} {_name(copy)}")
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
        """Raises unless `index` waits for all earlier uses of these rows."""
        for used, _, other in self.uses[held]:
            if overlaps(rows, used) and not self.waits(index, other):
                what = f"{verb} {_name(held)} while #{other} may still use it"
                raise self.error(index, what)
        self.uses[held] = [u for u in self.uses[held] if not covers(rows, u[0])]

    def free(self, index: int, copy: Copy) -> None:
        if copy not in self.present:
            raise self.error(index, f"frees {_name(copy)}, which does not exist")
        self.settle(index, copy, None, "frees")
        self.present.remove(copy)
        self.uses.pop(copy, None)
        self.versions.pop(copy, None)
        self.freed[copy] = index

    def update(self, index: int, array: ArrayId) -> None:
        """Raises unless a host update waits for the devices that read the array."""
        for rows, other in self.read_there[array.whole]:
            if overlaps(rows, array.rows) and not self.waits(index, other):
                what = f"changes {array} while #{other} may still read it"
                raise self.error(index, what)

    def finish(self, final: Iterable[Copy]) -> None:
        """Raises unless only homes and `final` are left, with the newest versions."""
        final = set(final)
        if self.present != final:
            copy = min(self.present ^ final, key=str)
            what = "ends with" if copy in self.present else "ends without"
            raise PlanError(f"the plan {what} {_name(copy)}")
        for copy in final:
            array = copy[0]
            found = _seen(self.versions[copy], array)
            if found != _seen(self.newest[array.whole], array):
                raise PlanError(f"the plan ends with an old version of {_name(copy)}")
        for array, tier in self.plan.homes.items():
            found = _seen(self.versions[array, tier], array)
            if found != _seen(self.newest[array.whole], array):
                raise PlanError(f"the plan does not write the new {array} to {tier}")

    def waits(self, index: int, other: int | None) -> bool:
        if other is None or other == index:
            return True
        return self.reach.precedes(other, index)

    def error(self, index: int, what: str) -> PlanError:
        return PlanError(f"#{index} {self.plan.instructions[index].operation} {what}")


def _name(copy: Copy) -> str:
    return f"{copy[0]} on {copy[1]}"


def _seen(versions: Mapping, array: ArrayId) -> dict:
    """The versions that a reader of `array` sees; `versions` is by rows."""
    if array.rows is None:
        return dict(versions)
    return {array.rows: versions.get(array.rows, versions.get(None))}


def _check_copies(
    plan: Plan, reach: _Reachability, initial: Iterable[Copy], final: Iterable[Copy]
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
    copies.finish(final)


def check_groups(plan: Plan) -> None:
    """Checks the groups of updates that run together.

    Raises:
        PlanError: an executable would overwrite an array that is not its own, or need
            more memory than its instruction reserves.
    """
    for index, instruction in enumerate(plan.instructions):
        operation = instruction.operation
        if not isinstance(operation, Update) or not operation.groups:
            continue
        where = f"#{index} {operation}"
        arrays = [array for group in operation.groups for array in group.arrays]
        left = {array for array, tier in instruction.writes if tier == Tier.DEVICE}
        for array in arrays:
            if array not in left:
                raise PlanError(f"{where} groups {array}, which is not its own")
            if plan.homes.get(array) != Tier.DEVICE:
                raise PlanError(f"{where} groups {array}, which rests elsewhere")
            left.remove(array)
        needed = max(group.workspace_bytes for group in operation.groups)
        reserved = dict(instruction.workspace).get(Tier.DEVICE, 0)
        if needed > reserved:
            raise PlanError(f"{where} needs {needed:,} bytes and has {reserved:,}")


def _check_budget(
    plan: Plan, reach: _Reachability, tier: Tier, initial_bytes: int
) -> None:
    """Checks, at each allocation, the bytes allocated so far less the awaited frees."""
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
