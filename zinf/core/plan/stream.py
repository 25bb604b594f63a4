"""Adds transfers and frees between the jobs of a step, within hard byte budgets.

Memory is accounted in list order: an instruction counts every earlier allocation as
held and starts only after enough earlier frees are done for its bytes to fit. So no
interleaving of the links exceeds a budget, and the earliest unfinished instruction can
always run ([Note: fences]).

A copy whose array also exists elsewhere stays until its room is needed; then the copy
with the farthest next use is evicted first (Belady, 1966). Next uses are exact because
the whole step is known. Copies are prefetched some jobs ahead if they fit beside those
in use.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

from zinf.core.plan.catalog import Catalog
from zinf.core.plan.copies import NEVER, Copies
from zinf.core.plan.fence import add_fences
from zinf.core.plan.infeasible import InfeasibleError, Shortage
from zinf.core.plan.instruction import Copy, Transfer
from zinf.core.plan.job import Job, hop
from zinf.core.plan.listing import Listing
from zinf.core.plan.plan import Plan
from zinf.core.program import ArrayId, Tier

# Prefetch for this many of the next jobs that miss copies, at most MAX_DISTANCE ahead.
# ZeRO-Infinity (arXiv:2104.07857, section 6.2) reads three modules ahead.
LOOKAHEAD = 3
MAX_DISTANCE = 64


def stream(
    jobs: Sequence[Job],
    catalog: Catalog,
    capacity_bytes: Mapping[Tier, int],
    *,
    initial: Iterable[Copy] = (),
    final: Iterable[Copy] = (),
) -> Plan:
    """The plan that runs `jobs` in order within the budgets.

    Args:
        initial: copies that exist when the step starts (the batch).
        final: copies that the step leaves behind for its caller (loss, aux).

    Raises:
        InfeasibleError: some job does not fit; the error has the bytes needed.
    """
    return _Streamer(jobs, catalog, capacity_bytes, initial, final).plan()


class _Streamer:
    def __init__(
        self,
        jobs: Sequence[Job],
        catalog: Catalog,
        capacity_bytes: Mapping[Tier, int],
        initial: Iterable[Copy],
        final: Iterable[Copy],
    ):
        self.jobs, self.catalog = jobs, catalog
        self.asked, self.capacity = capacity_bytes, dict(capacity_bytes)
        self.shortages: dict[Tier, Shortage] = {}
        self.copies = Copies(jobs, catalog, final)
        self.listing = Listing(catalog, self.copies)
        self.home_bytes = dict(self.copies.used)
        for tier in Tier:
            self.require(tier, self.home_bytes[tier], "the state placed there")
        self.copies.occupy(initial)
        self.started = dict(self.copies.used)
        self.claims = [self.claim_of(job, job.writes) for job in jobs]
        # A transfer moves arrays that a job just before it makes.
        self.prefetches = [not isinstance(job.operation, Transfer) for job in jobs]
        for tier in Tier:
            self.require(tier, self.started[tier], "the data at the start of a step")

    def plan(self) -> Plan:
        copies = self.copies
        for number, job in enumerate(self.jobs):
            copies.begin(number)
            self.part(number, job)
            missing = copies.missing(number)
            if missing:
                self.fetch_for(missing, copies.touched(job), needed_by=number)
            created = [c for c in job.writes if not copies.exists(c)]
            self.claim(job, created)
            if not self.shortages:
                self.prefetch(number, job)
            self.drop_stale(job)
            for tier, nbytes in job.workspace:
                copies.used[tier] -= nbytes
            self.listing.add(job, created)
            for tier, arrays in copies.dead(job).items():
                self.free(arrays, tier)
        if self.shortages:
            raise InfeasibleError(self.shortages, self.asked)
        assert not copies.left(), f"the plan leaves {copies.left()[0]} behind"
        fenced, peak = add_fences(
            self.listing.instructions, copies.peak, self.started, self.catalog.rates
        )
        return Plan(
            fenced,
            dict(self.catalog.homes),
            self.home_bytes,
            peak,
            self.capacity,
            self.catalog.rates,
        )

    def fetch_for(
        self,
        missing: Sequence[Copy],
        protected: set[Copy],
        *,
        needed_by: int,
    ) -> None:
        """Lists the transfers of the copies that job `needed_by` misses.

        A prefetch evicts only copies whose next use is after `needed_by`.
        """
        hops: dict[tuple[Tier, Tier], list[ArrayId]] = defaultdict(list)
        for copy in missing:
            route = self.copies.route(copy)
            for ends in pairwise(route):
                hops[ends].append(copy[0])
            protected = protected | self.copies.on_route(copy[0], route)
        for (source, target), arrays in sorted(
            hops.items(), key=lambda item: -max(item[0][0].order, Tier.HOST.order)
        ):
            nbytes = sum(self.catalog.nbytes(array, target) for array in arrays)
            spare_until = needed_by if needed_by > self.copies.now else NEVER
            self.make_room(target, nbytes, protected, spare_until)
            self.fetch(arrays, source, target)

    def fetch(self, arrays: Sequence[ArrayId], source: Tier, target: Tier) -> None:
        transfer = hop(arrays, source, target)
        self.copies.occupy(transfer.writes)
        self.listing.add(transfer, transfer.writes)

    def prefetch(self, number: int, job: Job) -> None:
        """Prefetches for the next jobs while nothing that is needed sooner is evicted.

        A prefetch must also leave the room that the jobs before its use claim, or they
        would evict it again. (For 350M parameters in 1 GiB, this saves a quarter of the
        bytes read from nvme.)
        """
        copies, ahead = self.copies, 0
        protected: set[Copy] | None = None
        claimed: dict[Tier, int] = {}
        end = min(number + MAX_DISTANCE, len(self.jobs))
        counted = later = number + 1
        while (later := copies.next_missing(later, end)) < end:
            if self.prefetches[later] and (missing := copies.early(later)):
                for claims in self.claims[counted : later + 1]:
                    for tier, nbytes in claims.items():
                        if nbytes > claimed.get(tier, 0):
                            claimed[tier] = nbytes
                counted = later + 1
                if protected is None:
                    protected = copies.touched(job)
                if not self.fits(later, missing, protected, claimed):
                    return
                self.fetch_for(missing, protected, needed_by=later)
                ahead += 1
                if ahead == LOOKAHEAD:
                    return
            later += 1

    def fits(
        self,
        number: int,
        missing: Sequence[Copy],
        protected: set[Copy],
        beside: Mapping[Tier, int],
    ) -> bool:
        """Whether the copies that job `number` misses fit, with `beside` more bytes."""
        need: dict[Tier, int] = defaultdict(int, beside)
        for copy in missing:
            route = self.copies.route(copy)
            protected = protected | self.copies.on_route(copy[0], route)
            for tier in route[1:]:
                need[tier] += self.catalog.nbytes(copy[0], tier)
        for tier, nbytes in need.items():
            shortage = self.copies.used[tier] + nbytes - self.capacity[tier]
            if shortage > 0:
                spare_until = number if number > self.copies.now else NEVER
                found = self.copies.victims(tier, shortage, protected, spare_until)
                if found[1] < shortage:
                    return False
        return True

    def make_room(
        self,
        tier: Tier,
        nbytes: int,
        protected: set[Copy],
        spare_until: int = NEVER,
    ) -> None:
        shortage = self.copies.used[tier] + nbytes - self.capacity[tier]
        if shortage <= 0:
            return
        victims, freed = self.copies.victims(tier, shortage, protected, spare_until)
        what = f"`{self.jobs[self.copies.now].operation}`"
        self.require(tier, self.copies.used[tier] + nbytes - freed, what)
        if victims:
            self.free([array for array, _ in victims], tier)

    def require(self, tier: Tier, nbytes: int, what: str) -> None:
        """Records a budget that is too small, and raises it to go on planning.

        So the error has the largest need of every tier, not only the first shortage.
        After a shortage nothing is prefetched: prefetched copies are evicted first, so
        they do not change what a job needs.
        """
        if nbytes > self.capacity[tier]:
            self.shortages[tier] = Shortage(self.asked[tier], nbytes, what)
            self.capacity[tier] = nbytes

    def part(self, number: int, job: Job) -> None:
        """Frees whole arrays of which the job needs only rows, if it does not fit.

        So the least room that a job needs does not depend on the copies that exist.
        """
        if isinstance(job.operation, Transfer):
            return  # It moves new rows out of the whole.
        wholes: dict[Tier, list[ArrayId]] = defaultdict(list)
        copies = (*job.reads, *job.writes)
        for copy in dict.fromkeys([c for c in copies if c[0].rows is not None]):
            held, tier = self.copies.key(copy)
            if held != copy[0] and (held, tier) in self.copies.temporary:
                wholes[tier].append(held)
        if not wholes:
            return
        created = [c for c in job.writes if not self.copies.exists(c)]
        need = self.claim_of(job, created)
        if not self.fits(
            number, self.copies.missing(number), self.copies.touched(job), need
        ):
            for tier, arrays in wholes.items():
                self.free(list(dict.fromkeys(arrays)), tier)

    def claim_of(self, job: Job, created: Sequence[Copy]) -> dict[Tier, int]:
        """Bytes of each tier that a job takes for new copies and as workspace."""
        need: dict[Tier, int] = defaultdict(int)
        for array, tier in created:
            if not self.copies.is_home((array, tier)):
                need[tier] += self.catalog.nbytes(array, tier)
        for tier, nbytes in job.workspace:
            need[tier] += nbytes
        return need

    def claim(self, job: Job, created: Sequence[Copy]) -> None:
        """Makes room for the new copies and the workspace of a job."""
        for tier, nbytes in self.claim_of(job, created).items():
            if self.copies.used[tier] + nbytes > self.capacity[tier]:
                self.make_room(tier, nbytes, self.copies.touched(job))
        self.copies.occupy(created)
        for tier, nbytes in job.workspace:
            self.copies.use_bytes(tier, nbytes)

    def free(self, arrays: Sequence[ArrayId], tier: Tier) -> None:
        nbytes = self.copies.vacate((a, tier) for a in arrays)
        self.listing.free(arrays, tier, nbytes)

    def drop_stale(self, job: Job) -> None:
        """Frees the copies on other tiers of arrays that the job changes."""
        if isinstance(job.operation, Transfer):
            return
        temporary = self.copies.temporary
        for array, tier in job.writes:
            for other in Tier:
                if other != tier and (array, other) in temporary:
                    self.free([array], other)
