"""The list of instructions of a plan while it is written, and their hazards.

From the instructions listed before, `Listing` finds those that a new one must wait for:
the writers of what it reads, the readers of what it changes (also on the devices, which
may share memory with the host), and the frees of the copies that it makes again.
"""

from collections import defaultdict
from collections.abc import Sequence

from zinf.core.plan.catalog import Catalog
from zinf.core.plan.copies import Copies
from zinf.core.plan.instruction import (
    Copy,
    Decide,
    FetchChosen,
    Free,
    Instruction,
    Transfer,
    Update,
)
from zinf.core.plan.job import Job
from zinf.core.plan.uses import Uses
from zinf.core.program import ArrayId, Link, Tier


class Listing:
    def __init__(self, catalog: Catalog, copies: Copies):
        self.instructions: list[Instruction] = []
        self._catalog, self._copies = catalog, copies
        self._uses: dict[Copy, Uses] = defaultdict(Uses)
        self._freed_by: dict[Copy, tuple[int]] = {}
        # Readers of an array on the devices, kept after that copy is freed.
        self._read_there: dict[ArrayId, Uses] = defaultdict(Uses)
        self._decided = -1

    def add(self, job: Job, created: Sequence[Copy]) -> None:
        """Lists a job; `created` are those of its writes that did not exist before."""
        allocates: dict[Tier, int] = defaultdict(int)
        for array, tier in created:
            allocates[tier] += self._catalog.nbytes(array, tier)
        self.instructions.append(
            Instruction(
                job.operation,
                job.link,
                self._hazards(job, created),
                job.reads,
                job.writes,
                tuple(created),
                tuple(allocates.items()),
                tuple((t, n) for t, n in job.workspace if n),
                self._moved_bytes(job),
                job.flops,
                job.exchange,
            )
        )

    def free(self, arrays: Sequence[ArrayId], tier: Tier, nbytes: int) -> None:
        """Lists the free of some copies, which waits for all their uses."""
        index = len(self.instructions)
        after = set()
        for array in arrays:
            copy = (array, tier)
            uses = self._uses.pop(copy, None)
            if uses is not None:
                after.update(uses.all())
            self._freed_by[copy] = (index,)
        operation = Free(tuple(arrays), tier)
        link = Link.FREE_AT_ONCE
        if after:
            link = self.instructions[max(after)].link.frees_after
        self.instructions.append(
            Instruction(operation, link, tuple(sorted(after)), nbytes=nbytes)
        )

    def _hazards(self, job: Job, created: Sequence[Copy]) -> tuple[int, ...]:
        operation, reads, writes = job.operation, job.reads, job.writes
        index = len(self.instructions)
        after: set[int] = set()
        freed_by, all_uses, key = self._freed_by, self._uses, self._copies.key
        for copy in created:
            # Wait for the free of an earlier copy of the same name, or of the whole:
            # while a whole exists, rows are written into it.
            after.update(freed_by.pop(copy, ()))
            if copy[0].rows is not None:
                after.update(freed_by.get((copy[0].whole, copy[1]), ()))
        for copy in reads:
            rows = copy[0].rows
            held = copy if rows is None else key(copy)
            after.update(all_uses[held].read(rows, index))
            if copy[1] == Tier.DEVICE:
                self._read_there[copy[0].whole].note_read(rows, index)
        for copy in writes:
            rows = copy[0].rows
            held = copy if rows is None else key(copy)
            after.update(all_uses[held].write(rows, index))
        if isinstance(operation, Update) and operation.tier == Tier.HOST:
            # A host update changes arrays in place, perhaps in memory that devices read
            # ([Note: shared memory]).
            for array, _ in writes:
                readers = self._read_there[array.whole]
                after.update(readers.write(array.rows, index))
        if isinstance(operation, Update) and not operation.is_pending:
            after.add(self._decided)
        elif isinstance(operation, Decide):
            self._decided = index
        return tuple(sorted(after - {index}))

    def _moved_bytes(self, job: Job) -> int:
        if isinstance(job.operation, Transfer):
            return sum(map(self._catalog.nbytes, job.operation.arrays))
        if isinstance(job.operation, Update):
            return sum(self._catalog.nbytes(array, tier) for array, tier in job.writes)
        if isinstance(job.operation, FetchChosen):
            return job.operation.expected_bytes
        return 0
