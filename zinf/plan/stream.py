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
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count

from zinf.plan.fence import add_fences
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

BUDGETS = {
    Tier.DEVICE: "memory.device",
    Tier.HOST: "memory.host",
    Tier.NVME: "memory.nvme_capacity",
}


@dataclass(frozen=True, slots=True)
class Shortage:
    """A budget that is too small: what needs the most at once, and how much that is."""

    capacity_bytes: int
    needed_bytes: int
    what: str

    @property
    def missing_bytes(self) -> int:
        return self.needed_bytes - self.capacity_bytes


class InfeasibleError(ValueError):
    """No plan keeps within the budgets.

    Attributes:
        shortages: by tier, the fastest first, what is missing; the tiers that are
            large enough are not in it.
        capacity_bytes: the budgets, by tier.
    """

    def __init__(
        self, shortages: Mapping[Tier, Shortage], capacity_bytes: Mapping[Tier, int]
    ):
        self.capacity_bytes = dict(capacity_bytes)
        self.shortages = {t: shortages[t] for t in Tier if t in shortages}
        found = [
            f"The {tier} budget is {short.capacity_bytes:,} bytes, but {short.what} "
            f"needs {short.needed_bytes:,} bytes at once."
            for tier, short in self.shortages.items()
        ]
        budgets = " and ".join(
            f"{BUDGETS[tier]} to at least {short.needed_bytes:,}"
            for tier, short in self.shortages.items()
        )
        super().__init__(
            f"{' '.join(found)} Raise {budgets}, or lower the microbatch size or "
            "segment.max_bytes."
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
        InfeasibleError: with the budgets that would do, if some job does not fit.
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
        self.asked, self.capacity = capacity_bytes, dict(capacity_bytes)
        self.shortages: dict[Tier, Shortage] = {}
        self.kept = set(kept)
        self.instructions: list[Instruction] = []
        self.writer: dict[Copy, int] = {}
        self.readers: dict[Copy, list[int]] = defaultdict(list)
        self.decided = -1
        self.freed_by: dict[Copy, tuple[int]] = {}
        self.temporary: dict[Copy, int] = {}  # copies away from home, with their bytes
        self.now = 0  # the job that is being planned
        # Copies that may go, by their next use when they were offered, farthest first.
        self.spare: dict[Tier, list[tuple[int, int, Copy]]] = {t: [] for t in Tier}
        self.offers = count()
        self.away: dict[int, list[Copy]] = {}  # reads of each job that are not at home
        self.used = dict.fromkeys(Tier, 0)
        for array, tier in catalog.homes.items():
            self.used[tier] += catalog.nbytes(array)
        self.home_bytes = dict(self.used)
        self.peak = dict(self.used)
        for tier in Tier:
            self.require(tier, self.used[tier], "what is placed there")
        self.uses: dict[Copy, list[int]] = defaultdict(list)
        self.reads: dict[ArrayId, list[int]] = defaultdict(list)
        for number, job in enumerate(jobs):
            for array, tier in {*job.reads, *job.writes}:
                # Who needs rows can take them from a copy of the whole.
                for named in {array, catalog.home(array) or array}:
                    self.uses[named, tier].append(number)
                    if not self.reads[named] or self.reads[named][-1] != number:
                        self.reads[named].append(number)
        self.occupy(initial)
        for tier in Tier:
            self.require(tier, self.used[tier], "what is there when a step starts")
        self.started = dict(self.used)

    def plan(self) -> Plan:
        for number, job in enumerate(self.jobs):
            self.now = number
            self.part(number, job)
            self.fetch_for(self.missing(number), self.touched(job), needed_by=number)
            written = [c for c in job.writes if not self.exists(c)]
            self.claim(job, written)
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
        if self.shortages:
            raise InfeasibleError(self.shortages, self.asked)
        left = [c for c in self.temporary if c not in self.kept]
        assert not left, f"the plan leaves {left[0]} behind"
        return Plan(
            add_fences(self.instructions, self.peak, self.started),
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
        return self.key(copy) in self.temporary or self.is_home(copy)

    def key(self, copy: Copy) -> Copy:
        """The copy that holds `copy`: rows are part of the whole where that is."""
        array, tier = copy
        if copy in self.temporary:
            return copy
        if (array.whole, tier) in self.temporary:
            return array.whole, tier
        if self.is_home(copy):
            home = self.catalog.home(array)
            assert home is not None
            return home, tier
        return copy

    def occupy(self, copies: Iterable[Copy]) -> None:
        for array, tier in copies:
            nbytes = self.catalog.nbytes(array)
            self.temporary[array, tier] = nbytes
            self.use_bytes(tier, nbytes)
            for other in Tier:
                if (array, other) in self.temporary:
                    self.offer((array, other))

    def use_bytes(self, tier: Tier, nbytes: int) -> None:
        self.used[tier] += nbytes
        self.peak[tier] = max(self.peak[tier], self.used[tier])

    def touched(self, job: Job) -> set[Copy]:
        return {self.key(copy) for copy in (*job.reads, *job.writes)}

    def next_use(self, copy: Copy, after: int) -> int:
        """The next job that needs the array on this tier, or on the way to a faster."""
        array, tier = copy
        uses = self.reads[array] if tier != Tier.DEVICE else self.uses[copy]
        position = bisect_right(uses, after)
        return uses[position] if position < len(uses) else NEVER

    # Transfers toward a job.

    def missing(self, number: int) -> list[Copy]:
        """What a job reads and would not find."""
        if number not in self.away:
            reads = dict.fromkeys(self.jobs[number].reads)
            self.away[number] = [c for c in reads if not self.is_home(c)]
        return [c for c in self.away[number] if self.key(c) not in self.temporary]

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

    def on_route(self, array: ArrayId, route: Iterable[Tier]) -> set[Copy]:
        return {self.key((array, tier)) for tier in route}

    def fetch_for(
        self,
        missing: Sequence[Copy],
        protected: set[Copy],
        *,
        needed_by: int,
    ) -> None:
        """Emits the transfers for copies that job `needed_by` lacks.

        A transfer ahead of time takes the room only of copies needed after `needed_by`.
        """
        hops: dict[tuple[Tier, Tier], list[ArrayId]] = defaultdict(list)
        for copy in missing:
            route = self.route(copy)
            for hop in zip(route, route[1:], strict=False):
                hops[hop].append(copy[0])
            protected = protected | self.on_route(copy[0], route)
        for (source, target), arrays in sorted(
            hops.items(), key=lambda item: item[0][0] != Tier.NVME
        ):
            nbytes = sum(map(self.catalog.nbytes, arrays))
            spare_until = needed_by if needed_by > self.now else NEVER
            self.make_room(target, nbytes, protected, spare_until)
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
        end = min(number + MAX_DISTANCE, len(self.jobs))
        for later in range(number + 1, end):
            upcoming = self.jobs[later]
            if isinstance(upcoming.operation, Transfer):
                continue  # it moves what a job just before it made
            missing = [
                c
                for c in self.missing(later)
                if c[0] not in changed and self.is_ready(c)
            ]
            if missing:
                if not self.fits(later, missing, protected, {}):
                    return
                self.fetch_for(missing, protected, needed_by=later)
                ahead += 1
                if ahead == LOOKAHEAD:
                    return
            if isinstance(upcoming.operation, Update):
                changed.update(a for a, _ in upcoming.writes)

    def is_ready(self, copy: Copy) -> bool:
        """True if what a later job reads is there now, to be fetched ahead of time.

        What was made on a faster tier (a gradient) may still change: its own offload
        brings it down when it is complete.
        """
        array, tier = copy
        slower = list(Tier)[list(Tier).index(tier) + 1 :]
        has_home = self.catalog.home(array) is not None
        return has_home or any(self.exists((array, t)) for t in slower)

    def fits(
        self,
        number: int,
        missing: Sequence[Copy],
        protected: set[Copy],
        beside: Mapping[Tier, int],
    ) -> bool:
        """Whether job `number` can have what it misses, with `beside` bytes more."""
        need: dict[Tier, int] = defaultdict(int, beside)
        for copy in missing:
            route = self.route(copy)
            protected = protected | self.on_route(copy[0], route)
            for tier in route[1:]:
                need[tier] += self.catalog.nbytes(copy[0])
        for tier, nbytes in need.items():
            shortage = self.used[tier] + nbytes - self.capacity[tier]
            if shortage > 0:
                spare_until = number if number > self.now else NEVER
                victims = self.victims(tier, shortage, protected, spare_until)
                if sum(self.temporary[copy] for copy in victims) < shortage:
                    return False
        return True

    # Room.

    def offer(self, copy: Copy) -> None:
        """Notes that a copy may go, if its array then exists elsewhere."""
        use = self.next_use(copy, self.now)
        heappush(self.spare[copy[1]], (-use, next(self.offers), copy))

    def victims(
        self, tier: Tier, shortage_bytes: int, protected: set[Copy], spare_until: int
    ) -> list[Copy]:
        """Copies that give `shortage_bytes` or all there is, the last needed first.

        With a number in `spare_until`, only those not needed up to that job. Entries
        may be out of date: they are put right when they come up.
        """
        heap, passed, chosen, freed = self.spare[tier], [], {}, 0
        while heap and freed < shortage_bytes:
            negative, order, copy = heappop(heap)
            if copy not in self.temporary or copy in chosen:
                continue
            use = self.next_use(copy, self.now)
            entry = (-use, order, copy)
            if use != -negative:
                heappush(heap, entry)
            elif spare_until != NEVER and use <= spare_until:
                passed.append(entry)
                break
            elif copy in protected or copy in self.kept:
                passed.append(entry)
            elif self.is_spare(copy):
                chosen[copy] = entry
                freed += self.temporary[copy]
        for entry in (*passed, *chosen.values()):
            heappush(heap, entry)
        return list(chosen)

    def is_spare(self, copy: Copy) -> bool:
        """True if the array rests elsewhere or has a copy on a slower tier.

        A copy on a faster tier does not count: it is the one that goes first there.
        """
        array, tier = copy
        slower = list(Tier)[list(Tier).index(tier) + 1 :]
        home = self.catalog.home_tier(array)
        return home not in (None, tier) or any(self.exists((array, t)) for t in slower)

    def make_room(
        self,
        tier: Tier,
        nbytes: int,
        protected: set[Copy],
        spare_until: int = NEVER,
    ) -> None:
        shortage = self.used[tier] + nbytes - self.capacity[tier]
        if shortage <= 0:
            return
        victims = self.victims(tier, shortage, protected, spare_until)
        freed = sum(self.temporary[copy] for copy in victims)
        what = f"`{self.jobs[self.now].operation}`"
        self.require(tier, self.used[tier] + nbytes - freed, what)
        if victims:
            self.free([array for array, _ in victims], tier)

    def require(self, tier: Tier, nbytes: int, what: str) -> None:
        """Notes a budget that is too small, and goes on with one that is not.

        So the error knows of all that is missing, and not only of the first of it.
        """
        if nbytes > self.capacity[tier]:
            self.shortages[tier] = Shortage(self.asked[tier], nbytes, what)
            self.capacity[tier] = nbytes

    def part(self, number: int, job: Job) -> None:
        """Frees wholes that a job needs only rows of, if they leave it too little room.

        So what a job needs at least does not depend on what happens to be there.
        """
        if isinstance(job.operation, Transfer):
            return  # it moves new rows out of the whole
        wholes: dict[Tier, list[ArrayId]] = defaultdict(list)
        for copy in dict.fromkeys((*job.reads, *job.writes)):
            held, tier = self.key(copy)
            if held != copy[0] and (held, tier) in self.temporary:
                wholes[tier].append(held)
        if not wholes:
            return
        need = dict(job.workspace)
        for array, tier in job.writes:
            if not self.exists((array, tier)):
                need[tier] = need.get(tier, 0) + self.catalog.nbytes(array)
        if not self.fits(number, self.missing(number), self.touched(job), need):
            for tier, arrays in wholes.items():
                self.free(list(dict.fromkeys(arrays)), tier)

    def claim(self, job: Job, written: Sequence[Copy]) -> None:
        """Makes room for what a job writes and works in."""
        need: dict[Tier, int] = defaultdict(int)
        for array, tier in written:
            need[tier] += self.catalog.nbytes(array)
        for tier, nbytes in job.workspace:
            need[tier] += nbytes
        for tier, nbytes in need.items():
            self.make_room(tier, nbytes, self.touched(job))
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
        named = [a for a, _ in (*job.reads, *job.writes)]
        for array in dict.fromkeys((*named, *(a.whole for a in named))):
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
            # A copy that was here before must be gone first: it has the same name, or
            # it is the whole, and would take the rows in.
            after.update(self.freed_by.pop((array, tier), ()))
            after.update(self.freed_by.get((array.whole, tier), ()))
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
