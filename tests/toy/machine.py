"""A machine that runs plans in the worst order there is.

Arrays hold names of what computed them, so that a plan that reads too early, too late,
or from the wrong place ends with other names than its jobs done one by one.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from random import Random

from zinf.core.plan import Accumulate, Copy, Free, Instruction, Link, Plan, Transfer
from zinf.core.plan.catalog import Catalog
from zinf.core.plan.job import Job
from zinf.core.program import ArrayId, Tier, overlaps

Content = list[int]


class Store:
    """Arrays by exact name; rows of an array that is there are part of it."""

    def __init__(self, num_rows: Mapping[ArrayId, int]):
        self.num_rows = num_rows
        self.arrays: dict[ArrayId, Content] = {}

    def holder(self, array: ArrayId) -> ArrayId | None:
        for held in (array, array.whole):
            if held in self.arrays:
                return held
        return None

    def span(self, array: ArrayId, held: ArrayId) -> slice:
        if array == held:
            return slice(None)
        assert array.rows is not None
        return slice(*array.rows)

    def read(self, array: ArrayId) -> Content:
        held = self.holder(array)
        assert held is not None, f"{array} is read and is not there"
        return self.arrays[held][self.span(array, held)]

    def write(self, array: ArrayId, content: Content) -> None:
        held = self.holder(array)
        if held is None:
            self.arrays[array] = list(content)
        else:
            self.arrays[held][self.span(array, held)] = content


@dataclass(frozen=True)
class Result:
    """What is where at the end, and the most that any tier held."""

    stores: Mapping[Tier, Store]
    peak_bytes: Mapping[Tier, int]


def run_jobs(
    jobs: Sequence[Job], catalog: Catalog, initial: Iterable[Copy]
) -> dict[ArrayId, Content]:
    """The contents after the jobs, done one by one where memory has no bounds."""
    store = Store(_row_counts(catalog))
    for array in (*catalog.homes, *(a for a, _ in initial)):
        store.write(array, _first(array, catalog))
    for job in jobs:
        if isinstance(job.operation, Transfer):
            continue
        for (array, _), content in _results(job, catalog, lambda c: store.read(c[0])):
            store.write(array, content)
    return store.arrays


class Machine:
    """Runs a plan, one link at a time making progress by chance.

    An instruction holds its bytes from its start, and gives some back only at its end;
    what it reads must be there, and nobody may write it, from start to end. Host and
    device share the memory of arrays that the plan says may.
    """

    def __init__(self, plan: Plan, catalog: Catalog, initial: Iterable[Copy]):
        self.plan, self.catalog = plan, catalog
        counts = _row_counts(catalog)
        self.stores = {tier: Store(counts) for tier in Tier}
        self.used = dict.fromkeys(Tier, 0)
        self.peak = dict.fromkeys(Tier, 0)
        self.in_use: dict[Copy, list[tuple[int, bool, ArrayId]]] = {}
        for array, tier in (*catalog.homes.items(), *initial):
            self.stores[tier].write(array, _first(array, catalog))
            self.hold(tier, catalog.nbytes(array))

    def run(self, choose: Random) -> Result:
        waiting: dict[Link, list[int]] = {}
        for index, instruction in enumerate(self.plan.instructions):
            waiting.setdefault(instruction.link, []).append(index)
        done: set[int] = set()
        running: dict[Link, int] = {}
        while any(waiting.values()) or running:
            ready = [
                link
                for link, queue in waiting.items()
                if queue
                and link not in running
                and done.issuperset(self.plan.instructions[queue[0]].after)
            ]
            moves = [*((link, True) for link in ready)]
            moves += [(link, False) for link in running]
            assert moves, "every link waits for another"
            link, starts = choose.choice(sorted(moves))
            if starts:
                running[link] = waiting[link].pop(0)
                self.start(running[link])
            else:
                index = running.pop(link)
                self.finish(index)
                done.add(index)
        return Result(self.stores, self.peak)

    def start(self, index: int) -> None:
        instruction = self.plan.instructions[index]
        for tier, nbytes in (*instruction.allocates, *instruction.workspace):
            self.hold(tier, nbytes)
        for copy in instruction.reads:
            self.stores[copy[1]].read(copy[0])
            self.claim(index, copy, writes=False)
        for copy in instruction.writes:
            self.claim(index, copy, writes=True)
        if isinstance(instruction.operation, Free):
            tier = instruction.operation.tier
            for array in instruction.operation.arrays:
                self.claim(index, (array, tier), writes=True)

    def finish(self, index: int) -> None:
        instruction = self.plan.instructions[index]
        for uses in self.in_use.values():
            uses[:] = [use for use in uses if use[0] != index]

        def read(copy: Copy) -> Content:
            return self.stores[copy[1]].read(copy[0])

        for (array, tier), content in _results(instruction, self.catalog, read):
            if not self.share(instruction.operation, array):
                self.stores[tier].write(array, content)
        for tier, nbytes in instruction.workspace:
            self.used[tier] -= nbytes
        if isinstance(instruction.operation, Free):
            tier = instruction.operation.tier
            for array in instruction.operation.arrays:
                del self.stores[tier].arrays[array]
                self.used[tier] -= self.catalog.nbytes(array)

    def share(self, operation: object, array: ArrayId) -> bool:
        if not isinstance(operation, Transfer):
            return False
        shared = self.plan.shared
        arrays = {
            (Tier.HOST, Tier.DEVICE): shared.up,
            (Tier.DEVICE, Tier.HOST): shared.down,
        }.get((operation.source, operation.target), ())
        source = self.stores[operation.source].arrays
        target = self.stores[operation.target].arrays
        if array not in arrays or array not in source or array in target:
            return False
        target[array] = source[array]
        return True

    def claim(self, index: int, copy: Copy, *, writes: bool) -> None:
        array, tier = copy
        held = self.stores[tier].holder(array) or array
        uses = self.in_use.setdefault((held, tier), [])
        clash = [
            i
            for i, other, used in uses
            if i != index and (writes or other) and overlaps(array.rows, used.rows)
        ]
        assert not clash, f"#{index} and #{clash[0]} both use {held} on {tier}"
        uses.append((index, writes, array))

    def hold(self, tier: Tier, nbytes: int) -> None:
        self.used[tier] += nbytes
        self.peak[tier] = max(self.peak[tier], self.used[tier])


def _results(
    step: Job | Instruction, catalog: Catalog, read: object
) -> list[tuple[Copy, Content]]:
    """What an operation writes, named by what it is and all that it read."""
    operation = step.operation
    if isinstance(operation, Free):
        return []
    if isinstance(operation, Transfer):
        hops = zip(step.reads, step.writes, strict=True)
        return [(target, read(source)) for source, target in hops]
    if isinstance(operation, Accumulate):
        existing = {array for array, _ in step.reads}
        results = []
        for target, source in zip(operation.targets, operation.sources, strict=True):
            terms = [target] * (target in existing) + [source]
            total = hash(tuple(tuple(read((a, Tier.DEVICE))) for a in terms))
            results.append(((target, Tier.DEVICE), [total]))
        return results
    inputs = sorted((str(a), tuple(read((a, t)))) for a, t in step.reads)
    seed = (str(operation), tuple(inputs))
    return [
        (copy, [hash((seed, str(copy[0]), i)) for i in range(_count(copy[0], catalog))])
        for copy in step.writes
    ]


def _first(array: ArrayId, catalog: Catalog) -> Content:
    return [hash((str(array), i)) for i in range(_count(array, catalog))]


def _row_counts(catalog: Catalog) -> dict[ArrayId, int]:
    return {a: s.shape[0] if s.shape else 1 for a, s in catalog.specs.items()}


def _count(array: ArrayId, catalog: Catalog) -> int:
    """Content of an array; whatever is not kept between steps counts as one."""
    if array in catalog.specs:
        return catalog.specs[array].shape[0] if catalog.specs[array].shape else 1
    is_rows = array.rows is not None and array.whole in catalog.specs
    return array.rows[1] - array.rows[0] if is_rows else 1
