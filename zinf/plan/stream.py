"""Puts transfers and frees between the jobs of a step, within hard byte budgets.

The plan is a list, and its memory is accounted in list order: an instruction may start
only when enough of the frees listed before it are done for its bytes to fit, counting
everything listed before it as allocated. So no interleaving of the links ever exceeds a
budget, and the earliest unfinished instruction can always run.

A copy whose array also rests elsewhere stays until the room is needed; then the copy
that is needed last goes first (Belady, 1966). That is exact, because the whole step is
known. Copies are fetched some jobs ahead, as long as they fit beside what is in use.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from zinf.plan.fence import Fence
from zinf.plan.instruction import (
    TRANSFER_LINKS,
    Copy,
    Decide,
    Free,
    Instruction,
    Link,
    Operation,
    Transfer,
    Update,
)
from zinf.plan.plan import Plan
from zinf.plan.schedule import Catalog, Job
from zinf.program import ArrayId, Tier

# How many of the next jobs that need a transfer are fetched for ahead of time.
# ZeRO-Infinity (arXiv:2104.07857, section 6.2) reads three modules ahead.
LOOKAHEAD = 3
MAX_DISTANCE = 64
NEVER = 1 << 60


class InfeasibleError(ValueError):
    """No plan keeps within the budgets; `shortage` holds what is missing by tier."""

    def __init__(self, tier: Tier, needed_bytes: int, capacity_bytes: int, what: str):
        self.tier = tier
        self.needed_bytes = needed_bytes
        self.shortage_bytes = needed_bytes - capacity_bytes
        super().__init__(
            f"The {tier} budget is {capacity_bytes:,} bytes, but {what} needs "
            f"{needed_bytes:,} bytes at once. Raise memory.{tier} to at least "
            f"{needed_bytes:,}, or lower the microbatch size or segment.max_bytes."
        )


def stream(
    jobs: Sequence[Job],
    catalog: Catalog,
    capacity_bytes: Mapping[Tier, int],
    *,
    initial: Iterable[Copy] = (),
    kept: Iterable[Copy] = (),
) -> Plan:
    """The plan that runs `jobs` in order within the budgets.

    Args:
        initial: copies that exist when the step starts (the batch).
        kept: copies that the step leaves behind for its caller (loss, aux).

    Raises:
        InfeasibleError: one job alone does not fit.
    """
    return _Streamer(jobs, catalog, capacity_bytes, initial, kept).plan()


class _Streamer:
    def __init__(
        self,
        jobs: Sequence[Job],
        catalog: Catalog,
        capacity_bytes: Mapping[Tier, int],
        initial: Iterable[Copy],
        kept: Iterable[Copy],
    ):
        self.jobs, self.catalog = jobs, catalog
        self.capacity = dict(capacity_bytes)
        self.kept = set(kept)
        self.instructions: list[Instruction] = []
        self.writer: dict[Copy, int] = {}
        self.readers: dict[Copy, list[int]] = defaultdict(list)
        self.decided = -1
        self.freed_by: dict[Copy, tuple[int]] = {}
        self.temporary: dict[Copy, int] = {}  # copies away from home, with their bytes
        self.on_tier: dict[Tier, set[ArrayId]] = {tier: set() for tier in Tier}
        self.used = dict.fromkeys(Tier, 0)
        for array, tier in catalog.homes.items():
            self.used[tier] += catalog.nbytes(array)
        self.home_bytes = dict(self.used)
        self.peak = dict(self.used)
        for tier in Tier:
            if self.used[tier] > self.capacity[tier]:
                what = "what is placed there"
                raise InfeasibleError(tier, self.used[tier], self.capacity[tier], what)
        self.fence = Fence(self.capacity, self.home_bytes)
        self.uses: dict[Copy, list[int]] = defaultdict(list)
        self.reads: dict[ArrayId, list[int]] = defaultdict(list)
        for number, job in enumerate(jobs):
            for copy in {*job.reads, *job.writes}:
                self.uses[copy].append(number)
                if not self.reads[copy[0]] or self.reads[copy[0]][-1] != number:
                    self.reads[copy[0]].append(number)
        for copy in initial:
            self.occupy([copy])
            self.fence.start(copy[1], catalog.nbytes(copy[0]))

    def plan(self) -> Plan:
        for number, job in enumerate(self.jobs):
            self.fetch_for(
                self.missing(job), self.touched(job), now=number, needed_by=number
            )
            written = [c for c in job.writes if not self.exists(c)]
            self.claim(number, job, written)
            self.prefetch(number, job)
            self.drop_stale(job)
            self.release_workspace(job)
            self.emit(
                job.operation,
                job.link,
                reads=job.reads,
                writes=job.writes,
                created=written,
                job=job,
            )
            self.drop_dead(number, job)
        left = [c for c in self.temporary if c not in self.kept]
        assert not left, f"the plan leaves {left[0]} behind"
        return Plan(
            tuple(self.instructions),
            dict(self.catalog.homes),
            self.home_bytes,
            self.peak,
            self.capacity,
            self.catalog.rates,
        )

    # What exists where.

    def is_home(self, copy: Copy) -> bool:
        return self.catalog.home_tier(copy[0]) == copy[1]

    def exists(self, copy: Copy) -> bool:
        return copy in self.temporary or self.is_home(copy)

    def key(self, copy: Copy) -> Copy:
        """The copy that hazards are tracked on: rows at home are part of the whole."""
        if copy not in self.temporary and self.is_home(copy):
            home = self.catalog.home(copy[0])
            assert home is not None
            return home, copy[1]
        return copy

    def occupy(self, copies: Iterable[Copy]) -> None:
        for array, tier in copies:
            nbytes = self.catalog.nbytes(array)
            self.temporary[array, tier] = nbytes
            self.on_tier[tier].add(array)
            self.use_bytes(tier, nbytes)

    def use_bytes(self, tier: Tier, nbytes: int) -> None:
        self.used[tier] += nbytes
        self.peak[tier] = max(self.peak[tier], self.used[tier])

    def touched(self, job: Job) -> set[Copy]:
        return {*job.reads, *job.writes}

    def next_use(self, copy: Copy, after: int) -> int:
        """The next job that needs the array on this tier, or on the way to a faster."""
        array, tier = copy
        uses = self.reads[array] if tier != Tier.DEVICE else self.uses[copy]
        position = bisect_right(uses, after)
        return uses[position] if position < len(uses) else NEVER

    # Transfers toward a job.

    def missing(self, job: Job) -> list[Copy]:
        return [c for c in dict.fromkeys(job.reads) if not self.exists(c)]

    def route(self, copy: Copy) -> list[Tier]:
        """The tiers to go through from the nearest copy that exists, slower first."""
        array, tier = copy
        tiers = list(Tier)
        here = tiers.index(tier)
        for source in [*tiers[here + 1 :], *reversed(tiers[:here])]:
            if self.exists((array, source)):
                there = tiers.index(source)
                step = -1 if there > here else 1
                return [tiers[i] for i in range(there, here + step, step)]
        raise AssertionError(f"{array} is needed on {tier} but exists nowhere")

    def fetch_for(
        self,
        missing: Sequence[Copy],
        protected: set[Copy],
        *,
        now: int,
        needed_by: int,
    ) -> None:
        """Emits the transfers for copies that job `needed_by` lacks, before job `now`.

        A transfer ahead of time takes the room only of copies needed after `needed_by`.
        """
        hops: dict[tuple[Tier, Tier], list[ArrayId]] = defaultdict(list)
        for copy in missing:
            route = self.route(copy)
            for hop in zip(route, route[1:], strict=False):
                hops[hop].append(copy[0])
            protected = protected | {(copy[0], tier) for tier in route}
        for (source, target), arrays in sorted(
            hops.items(), key=lambda item: item[0][0] != Tier.NVME
        ):
            nbytes = sum(map(self.catalog.nbytes, arrays))
            spare_until = needed_by if needed_by > now else NEVER
            self.make_room(target, nbytes, now, protected, spare_until)
            self.fetch(arrays, source, target)

    def fetch(self, arrays: Sequence[ArrayId], source: Tier, target: Tier) -> None:
        copies = [(a, target) for a in arrays]
        self.occupy(copies)
        self.emit(
            Transfer(tuple(arrays), source, target),
            TRANSFER_LINKS[source, target],
            reads=[(a, source) for a in arrays],
            writes=copies,
            created=copies,
        )

    def prefetch(self, number: int, job: Job) -> None:
        """Fetches for the next jobs what fits without taking anything needed sooner."""
        ahead, protected = 0, self.touched(job)
        changed = {a for a, _ in job.writes}
        for later in range(number + 1, min(number + MAX_DISTANCE, len(self.jobs))):
            upcoming = self.jobs[later]
            missing = [
                c
                for c in self.missing(upcoming)
                if c[0] not in changed and any(self.exists((c[0], t)) for t in Tier)
            ]
            if missing:
                if not self.fits_ahead(number, later, missing, protected):
                    return
                self.fetch_for(missing, protected, now=number, needed_by=later)
                ahead += 1
                if ahead == LOOKAHEAD:
                    return
            protected = protected | self.touched(upcoming)
            changed.update(a for a, _ in upcoming.writes)

    def fits_ahead(
        self, now: int, later: int, missing: Sequence[Copy], protected: set[Copy]
    ) -> bool:
        need: dict[Tier, int] = defaultdict(int)
        for copy in missing:
            route = self.route(copy)
            protected = protected | {(copy[0], tier) for tier in route}
            for tier in route[1:]:
                need[tier] += self.catalog.nbytes(copy[0])
        for tier, nbytes in need.items():
            spare = self.candidates(tier, protected, later, now)
            evictable = sum(self.temporary[copy] for _, copy in spare)
            if self.used[tier] + nbytes - evictable > self.capacity[tier]:
                return False
        return True

    # Room.

    def candidates(
        self, tier: Tier, protected: set[Copy], spare_until: int, now: int
    ) -> list[tuple[int, Copy]]:
        """Copies that may go, with their next use after job `now`, last needed first.

        With a number in `spare_until`, only those not needed up to that job.
        """
        found = []
        for array in self.on_tier[tier]:
            copy = (array, tier)
            if copy in protected or copy in self.kept or not self.is_spare(copy):
                continue
            use = self.next_use(copy, now)
            if spare_until == NEVER or use > spare_until:
                found.append((use, copy))
        return sorted(found, key=lambda item: (-item[0], str(item[1][0])))

    def is_spare(self, copy: Copy) -> bool:
        """True if the array also exists on another tier."""
        array, tier = copy
        return any(t != tier and self.exists((array, t)) for t in Tier)

    def make_room(
        self,
        tier: Tier,
        nbytes: int,
        now: int,
        protected: set[Copy],
        spare_until: int = NEVER,
    ) -> None:
        if self.used[tier] + nbytes <= self.capacity[tier]:
            return
        victims, freed = [], 0
        for _, copy in self.candidates(tier, protected, spare_until, now):
            victims.append(copy[0])
            freed += self.temporary[copy]
            if self.used[tier] + nbytes - freed <= self.capacity[tier]:
                self.free(victims, tier)
                return
        needed = self.used[tier] + nbytes - freed
        what = f"`{self.jobs[now].operation}`"
        raise InfeasibleError(tier, needed, self.capacity[tier], what)

    def claim(self, number: int, job: Job, written: Sequence[Copy]) -> None:
        """Makes room for what a job writes and works in."""
        need: dict[Tier, int] = defaultdict(int)
        for array, tier in written:
            need[tier] += self.catalog.nbytes(array)
        for tier, nbytes in job.workspace:
            need[tier] += nbytes
        for tier, nbytes in need.items():
            self.make_room(tier, nbytes, number, self.touched(job))
        self.occupy(written)
        for tier, nbytes in job.workspace:
            self.use_bytes(tier, nbytes)

    def release_workspace(self, job: Job) -> None:
        for tier, nbytes in job.workspace:
            self.used[tier] -= nbytes

    # Ends of copies.

    def free(self, arrays: Sequence[ArrayId], tier: Tier) -> None:
        copies = [(a, tier) for a in arrays]
        nbytes = 0
        for copy in copies:
            nbytes += self.temporary.pop(copy)
            self.on_tier[tier].remove(copy[0])
        self.used[tier] -= nbytes
        after = {self.writer.get(c, -1) for c in copies}
        after.update(i for c in copies for i in self.readers.pop(c, ()))
        index = len(self.instructions)
        for copy in copies:
            self.writer.pop(copy, None)
            self.freed_by[copy] = (index,)
        operation = Free(tuple(arrays), tier)
        ordered = tuple(sorted(after - {-1}))
        self.instructions.append(
            Instruction(operation, Link.FREE, ordered, nbytes=nbytes)
        )
        self.fence.freed(tier, nbytes, index, Link.FREE)

    def drop_stale(self, job: Job) -> None:
        """Frees other copies of what a job is about to change."""
        for array, tier in job.writes:
            for other in Tier:
                copy = (array, other)
                moved = isinstance(job.operation, Transfer)
                if other != tier and copy in self.temporary and not moved:
                    self.free([array], other)

    def drop_dead(self, number: int, job: Job) -> None:
        """Frees copies that no later job needs."""
        dead: dict[Tier, list[ArrayId]] = defaultdict(list)
        for array in dict.fromkeys(a for a, _ in (*job.reads, *job.writes)):
            for tier in Tier:
                copy = (array, tier)
                if copy not in self.temporary or copy in self.kept:
                    continue
                if self.next_use(copy, number) == NEVER:
                    dead[tier].append(array)
        for tier, arrays in dead.items():
            self.free(arrays, tier)

    # Instructions.

    def emit(
        self,
        operation: Operation,
        link: Link,
        *,
        reads: Sequence[Copy],
        writes: Sequence[Copy],
        created: Sequence[Copy],
        job: Job | None = None,
    ) -> None:
        index = len(self.instructions)
        allocates: dict[Tier, int] = defaultdict(int)
        after: set[int] = set()
        for array, tier in created:
            allocates[tier] += self.catalog.nbytes(array)
            # A copy that was here before must be gone first: it has the same name.
            after.update(self.freed_by.pop((array, tier), ()))
        workspace = tuple((t, n) for t, n in (job.workspace if job else ()) if n)
        for copy in reads:
            copy = self.key(copy)
            if copy in self.writer:
                after.add(self.writer[copy])
            self.readers[copy].append(index)
        for copy in writes:
            copy = self.key(copy)
            after.update(self.readers.pop(copy, ()))
            if copy in self.writer:
                after.add(self.writer[copy])
            self.writer[copy] = index
        if isinstance(operation, Update):
            after.add(self.decided)
        elif isinstance(operation, Decide):
            self.decided = index
        after.update(self.fence.admit(allocates, workspace))
        for tier, nbytes in workspace:
            self.fence.freed(tier, nbytes, index, link)
        moved = 0
        if isinstance(operation, Transfer):
            moved = sum(map(self.catalog.nbytes, operation.arrays))
        elif isinstance(operation, Update):
            moved = sum(self.catalog.nbytes(array) for array, _ in writes)
        self.instructions.append(
            Instruction(
                operation,
                link,
                tuple(sorted(after - {index})),
                tuple(reads),
                tuple(writes),
                tuple(allocates.items()),
                workspace,
                moved,
                job.flops if job else 0,
            )
        )
