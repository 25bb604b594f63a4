"""Tracks which copies exist while a plan is written, in list order.

`Copies` counts the bytes of copies away from home and chooses which to evict when a
tier needs room: the copy whose next use is farthest (Belady, 1966), among those whose
array exists elsewhere too.
"""

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from heapq import heappop, heappush
from itertools import count

from zinf.core.plan.catalog import Catalog
from zinf.core.plan.instruction import Copy
from zinf.core.plan.job import Job
from zinf.core.program import ROUTES, ArrayId, Rows, Tier, overlaps

NEVER = 1 << 60
TIERS = tuple(Tier)
FAR = Tier.HOST.slower
# Where a copy is looked for if a tier needs it, and of those the slower ones.
SLOWER = {tier: tier.slower for tier in Tier}
SOURCES = {t: (*t.slower, *reversed(TIERS[: t.order])) for t in Tier}


class Copies:
    """The copies that exist before the next instruction of a plan.

    Attributes:
        now: the job that is being planned.
        temporary: copies away from home, with their bytes.
        used, peak: bytes of each tier, now and at most so far.
    """

    def __init__(self, jobs: Sequence[Job], catalog: Catalog, final: Iterable[Copy]):
        self.jobs, self.catalog = jobs, catalog
        self._home_tiers = catalog.home_tiers
        self.now = 0
        self._named: list[ArrayId] = []  # Of the present job.
        self.temporary: dict[Copy, int] = {}
        self.used = dict.fromkeys(Tier, 0)
        for array, tier in catalog.homes.items():
            self.used[tier] += catalog.nbytes(array, tier)
        self.peak = dict(self.used)
        self._final = set(final)
        # Heaps of copies that may be evicted, farthest next use first. A copy has one
        # valid entry and may have stale ones.
        self._spare: dict[Tier, list[tuple[int, int, Copy]]] = {t: [] for t in Tier}
        self._offers = count()
        # By job; a cache. None: not known.
        self._missing: list[list[Copy] | None] = [None] * len(jobs)
        self._uses: dict[Copy, list[int]] = defaultdict(list)
        self._reads: dict[ArrayId, list[int]] = defaultdict(list)
        # `_away`: the copies away from home that each job reads, with the last job
        # that writes any of their rows (-1: none). `_wanted_by`: the jobs that read a
        # copy away from home.
        self._away: list[dict[Copy, int]] = []
        self._wanted_by: dict[Copy, list[int]] = defaultdict(list)
        homes, wanted_by = self._home_tiers, self._wanted_by
        # Only arrays whose rows are written have several writers.
        writers: dict[ArrayId, dict[Rows, int]] = defaultdict(dict)
        for number, job in enumerate(jobs):
            away = dict.fromkeys([c for c in job.reads if homes[c[0]] != c[1]], -1)
            self._away.append(away)
            for copy in away:
                array, tier = copy
                wanted_by[copy].append(number)
                if array.rows is not None:
                    wanted_by[array.whole, tier].append(number)
                written = writers.get(array.whole)
                if written:
                    away[copy] = _last_writer(written, array.rows)
            for array, _ in job.writes:
                written = writers[array.whole]
                if array.rows is None:
                    written.clear()
                written[array.rows] = number
            for copy in {*job.reads, *job.writes}:
                self._note_use(number, copy)
                array = copy[0]
                if array.rows is not None:
                    # A job that needs rows can also use a copy of the whole.
                    whole = catalog.home(array) or array.whole
                    if whole is not array:
                        self._note_use(number, (whole, copy[1]))

    def _note_use(self, number: int, copy: Copy) -> None:
        self._uses[copy].append(number)
        reads = self._reads[copy[0]]
        if not reads or reads[-1] != number:
            reads.append(number)

    def begin(self, number: int) -> None:
        """Makes job `number` the present one and renews the entries of its copies."""
        self.now = number
        self._named = _named(self.jobs[number])
        temporary, offer = self.temporary, self._offer
        for array in self._named:
            for tier in TIERS:
                copy = array, tier
                if copy in temporary:
                    offer(copy)

    def is_home(self, copy: Copy) -> bool:
        return self._home_tiers[copy[0]] == copy[1]

    def exists(self, copy: Copy) -> bool:
        return self.key(copy) in self.temporary or self.is_home(copy)

    def key(self, copy: Copy) -> Copy:
        """The copy that holds `copy`: rows are part of a whole on the same tier."""
        array, tier = copy
        temporary = self.temporary
        if array.rows is None or copy in temporary:
            return copy
        whole = array.whole, tier
        if whole in temporary:
            return whole
        if self._home_tiers[array] == tier:
            return copy if array in self.catalog.homes else whole
        return copy

    def touched(self, job: Job) -> set[Copy]:
        copies = (*job.reads, *job.writes)
        return {copy if copy[0].rows is None else self.key(copy) for copy in copies}

    def missing(self, number: int) -> list[Copy]:
        """The copies that a job reads and that do not exist now."""
        found = self._missing[number]
        if found is None:
            temporary, key = self.temporary, self.key
            found = [
                c
                for c in self._away[number]
                if c not in temporary and (c[0].rows is None or key(c) not in temporary)
            ]
            self._missing[number] = found
        return found

    def next_missing(self, number: int, end: int) -> int:
        """The first job in `number:end` that misses copies; `end` if none does."""
        known, missing = self._missing, self.missing
        for later in range(number, end):
            found = known[later]
            if found or (found is None and missing(later)):
                return later
        return end

    def next_use(self, copy: Copy, after: int) -> int:
        """The next job that reads or writes the copy, or fetches the array from it."""
        is_source = copy[1] != Tier.DEVICE or self._is_source(copy)
        uses = self._reads[copy[0]] if is_source else self._uses[copy]
        position = bisect_right(uses, after)
        return uses[position] if position < len(uses) else NEVER

    def route(self, copy: Copy) -> tuple[Tier, ...]:
        """The tiers on the way from the nearest existing copy, both ends included.

        A slower tier is preferred as the source, with one exception: the host copies
        from the device rather than from a slower tier.
        """
        array, tier = copy
        on_device = self.key((array, Tier.DEVICE))
        is_copy = tier == Tier.HOST and on_device in self.temporary
        if is_copy and self._is_source(on_device):
            return ROUTES[Tier.DEVICE, Tier.HOST]
        for source in SOURCES[tier]:
            if self.exists((array, source)):
                return ROUTES[source, tier]
        raise AssertionError(f"{array} is needed on {tier} but exists nowhere")

    def on_route(self, array: ArrayId, route: Iterable[Tier]) -> set[Copy]:
        return {self.key((array, tier)) for tier in route}

    def early(self, number: int) -> list[Copy]:
        """The copies that a later job misses and that can be prefetched now.

        Excluded are copies that a job before it will write, and arrays that exist only
        on a faster tier: those (gradients) may still change, and a transfer of their
        own offloads them when they are complete.
        """
        missing = self.missing(number)
        if not missing:
            return missing
        made_by = self._away[number]
        return [c for c in missing if made_by[c] < self.now and self._is_there(c)]

    def _is_there(self, copy: Copy) -> bool:
        has_home = self._home_tiers[copy[0]] is not None
        return has_home or self._is_on_slower(copy)

    def occupy(self, copies: Iterable[Copy]) -> None:
        """Counts new copies away from home."""
        temporary = self.temporary
        for copy in copies:
            array, tier = copy
            nbytes = self.catalog.nbytes(array, tier)
            temporary[copy] = nbytes
            self._change(copy)
            self.use_bytes(tier, nbytes)
            for other in TIERS:
                there = array, other
                if there in temporary:
                    self._offer(there)

    def vacate(self, copies: Iterable[Copy]) -> int:
        """Removes copies from the account; returns their bytes."""
        total = 0
        for copy in copies:
            nbytes = self.temporary.pop(copy)
            self._change(copy)
            self.used[copy[1]] -= nbytes
            total += nbytes
        return total

    def use_bytes(self, tier: Tier, nbytes: int) -> None:
        self.used[tier] += nbytes
        self.peak[tier] = max(self.peak[tier], self.used[tier])

    def dead(self, job: Job) -> dict[Tier, list[ArrayId]]:
        """Copies of the present job's arrays that no later job needs, by tier."""
        found: dict[Tier, list[ArrayId]] = defaultdict(list)
        temporary = self.temporary
        for array in self._named:
            for tier in TIERS:
                copy = (array, tier)
                if copy not in temporary:
                    continue
                is_last = self.next_use(copy, self.now) == NEVER
                if array in job.consumes or (is_last and copy not in self._final):
                    found[tier].append(array)
        return found

    def left(self) -> list[Copy]:
        """Copies away from home that are not in `final`."""
        return [copy for copy in self.temporary if copy not in self._final]

    def victims(
        self, tier: Tier, shortage_bytes: int, protected: set[Copy], spare_until: int
    ) -> tuple[list[Copy], int]:
        """Copies to evict for `shortage_bytes`, and their bytes, which may be fewer.

        The copies with the farthest next use come first. If `spare_until` is not
        `NEVER`, only copies whose next use is after that job are chosen.
        """
        heap, chosen, freed = self._spare[tier], [], 0
        seen: dict[Copy, tuple[int, int, Copy]] = {}
        while heap and freed < shortage_bytes:
            entry = heappop(heap)
            negative, _, copy = entry
            if copy not in self.temporary or copy in seen:
                continue
            if -negative != self.next_use(copy, self.now):
                self._offer(copy)  # The entry was stale.
                continue
            seen[copy] = entry
            if spare_until != NEVER and -negative <= spare_until:
                break
            if not self._is_spare(copy):
                # Drop the entry: `occupy` offers the copy again when its array gets
                # another copy. Rows keep theirs: a copy of their whole also makes them
                # spare, and `occupy` then offers only the whole.
                if copy[0].rows is None:
                    del seen[copy]
                continue
            if copy not in protected and copy not in self._final:
                chosen.append(copy)
                freed += self.temporary[copy]
        for entry in seen.values():
            heappush(heap, entry)
        return chosen, freed

    def _change(self, copy: Copy) -> None:
        """Clears the cached `missing` of the jobs that read a copy made or freed."""
        missing = self._missing
        wanted_by = self._wanted_by.get(copy, ())
        # `missing` of jobs before the present one is not read again.
        for number in wanted_by[bisect_left(wanted_by, self.now) :]:
            missing[number] = None

    def _offer(self, copy: Copy) -> None:
        """Adds a copy to the heap of its tier; `victims` checks whether it is spare."""
        use = self.next_use(copy, self.now)
        heappush(self._spare[copy[1]], (-use, next(self._offers), copy))

    def _is_spare(self, copy: Copy) -> bool:
        """Whether the array rests elsewhere or has a copy on a slower tier.

        A copy on a faster tier does not count: that copy is evicted first.
        """
        home = self._home_tiers[copy[0]]
        return home not in (None, copy[1]) or self._is_on_slower(copy)

    def _is_source(self, copy: Copy) -> bool:
        """Whether other tiers would fetch the array from this copy.

        The host copies from the device if the only other source is slower than it.
        """
        array, tier = copy
        if tier != Tier.DEVICE:
            return True
        is_far = self._home_tiers[array] in FAR
        return is_far and self.key((array, Tier.HOST)) not in self.temporary

    def _is_on_slower(self, copy: Copy) -> bool:
        array, tier = copy
        return any(self.exists((array, t)) for t in SLOWER[tier])


def _named(job: Job) -> list[ArrayId]:
    """The arrays of a job, and the whole arrays that they are rows of."""
    arrays = [a for a, _ in (*job.reads, *job.writes)]
    wholes = [a.whole for a in arrays if a.rows is not None]
    return list(dict.fromkeys(arrays + wholes))


def _last_writer(written: Mapping[Rows, int], rows: Rows) -> int:
    """The last job that writes any of these rows; -1 if none does."""
    return max((n for other, n in written.items() if overlaps(rows, other)), default=-1)
