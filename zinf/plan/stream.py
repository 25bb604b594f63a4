"""Puts transfers and frees between the jobs of a step, within hard byte budgets.

The plan is a list, and its memory is accounted in list order: an instruction may start
only when enough of the frees listed before it are done for its bytes to fit, counting
everything listed before it as allocated. So no interleaving of the links ever exceeds a
budget, and the earliest unfinished instruction can always run.

A copy whose array also rests elsewhere stays until the room is needed; then the copy
that is needed last goes first (Belady, 1966). That is exact, because the whole step is
known. Copies are fetched some jobs ahead, as long as they fit beside what is in use.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from zinf.plan.catalog import Catalog
from zinf.plan.copies import NEVER, Copies
from zinf.plan.fence import add_fences
from zinf.plan.infeasible import InfeasibleError, Shortage
from zinf.plan.instruction import TRANSFER_LINKS, Copy, Transfer
from zinf.plan.listing import Listing
from zinf.plan.plan import Plan
from zinf.plan.schedule import Job
from zinf.program import ArrayId, Tier

# How many of the next jobs that need a transfer are fetched for ahead of time.
# ZeRO-Infinity (arXiv:2104.07857, section 6.2) reads three modules ahead.
LOOKAHEAD = 3
MAX_DISTANCE = 64


def stream(
    jobs: Sequence[Job],
    catalog: Catalog,
    capacity_bytes: Mapping[Tier, int],
    *,
    initial: Iterable[Copy] = (),
    kept: Iterable[Copy] = (),
    slack: float = 1.0,
) -> Plan:
    """The plan that runs `jobs` in order within the budgets.

    Args:
        initial: copies that exist when the step starts (the batch).
        kept: copies that the step leaves behind for its caller (loss, aux).
        slack: see `StepOptions`.

    Raises:
        InfeasibleError: with the budgets that would do, if some job does not fit.
    """
    return _Streamer(jobs, catalog, capacity_bytes, initial, kept).plan(slack)


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
        self.copies = Copies(jobs, catalog, kept)
        self.listing = Listing(catalog, self.copies)
        self.home_bytes = dict(self.copies.used)
        for tier in Tier:
            self.require(tier, self.home_bytes[tier], "what is placed there")
        self.copies.occupy(initial)
        self.started = dict(self.copies.used)
        self.claims = [self.claim_of(job, job.writes) for job in jobs]
        for tier in Tier:
            self.require(tier, self.started[tier], "what is there when a step starts")

    def plan(self, slack: float) -> Plan:
        copies = self.copies
        for number, job in enumerate(self.jobs):
            copies.begin(number)
            self.part(number, job)
            missing = copies.missing(number)
            self.fetch_for(missing, copies.touched(job), needed_by=number)
            created = [c for c in job.writes if not copies.exists(c)]
            self.claim(job, created)
            if not self.shortages:
                self.prefetch(number, job)
            self.drop_stale(job)
            for tier, nbytes in job.workspace:
                copies.used[tier] -= nbytes
            self.listing.add_job(job, created)
            for tier, arrays in copies.dead(job).items():
                self.free(arrays, tier)
        if self.shortages:
            raise InfeasibleError(self.shortages, self.asked)
        assert not copies.left(), f"the plan leaves {copies.left()[0]} behind"
        limit = {}
        for tier, peak_bytes in copies.peak.items():
            moving_bytes = peak_bytes - self.home_bytes[tier]
            wished = self.home_bytes[tier] + int(slack * moving_bytes)
            limit[tier] = min(wished, self.capacity[tier])
        fenced, peak = add_fences(
            self.listing.instructions, limit, self.started, self.catalog.rates
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
        """Emits the transfers for copies that job `needed_by` lacks.

        A transfer ahead of time takes the room only of copies needed after `needed_by`.
        """
        hops: dict[tuple[Tier, Tier], list[ArrayId]] = defaultdict(list)
        for copy in missing:
            route = self.copies.route(copy)
            for hop in zip(route, route[1:], strict=False):
                hops[hop].append(copy[0])
            protected = protected | self.copies.on_route(copy[0], route)
        for (source, target), arrays in sorted(
            hops.items(), key=lambda item: item[0][0] != Tier.NVME
        ):
            nbytes = sum(self.catalog.nbytes(array, target) for array in arrays)
            spare_until = needed_by if needed_by > self.copies.now else NEVER
            self.make_room(target, nbytes, protected, spare_until)
            self.fetch(arrays, source, target)

    def fetch(self, arrays: Sequence[ArrayId], source: Tier, target: Tier) -> None:
        copies = [(a, target) for a in arrays]
        self.copies.occupy(copies)
        self.listing.add(
            Transfer(tuple(arrays), source, target),
            TRANSFER_LINKS[source, target],
            reads=[(a, source) for a in arrays],
            writes=copies,
            created=copies,
        )

    def prefetch(self, number: int, job: Job) -> None:
        """Fetches for the next jobs what fits without taking anything needed sooner.

        The jobs until then must find their room too, or they would take it back. (For
        350M parameters in 1 GiB, that saves a quarter of what is read from nvme.)
        """
        ahead, protected = 0, self.copies.touched(job)
        claimed: dict[Tier, int] = {}
        end = min(number + MAX_DISTANCE, len(self.jobs))
        for later in range(number + 1, end):
            upcoming = self.jobs[later]
            for tier, nbytes in self.claims[later].items():
                claimed[tier] = max(claimed.get(tier, 0), nbytes)
            if isinstance(upcoming.operation, Transfer):
                continue  # it moves what a job just before it made
            if missing := self.copies.early(later):
                if not self.fits(later, missing, protected, claimed):
                    return
                self.fetch_for(missing, protected, needed_by=later)
                ahead += 1
                if ahead == LOOKAHEAD:
                    return

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
        """Notes a budget that is too small, and goes on with one that is not.

        So the error knows of all that is missing, and not only of the first of it. What
        is fetched ahead goes first, so it is left out from then on.
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
        """What a job takes of each tier to create copies and to work in."""
        need: dict[Tier, int] = defaultdict(int)
        for array, tier in created:
            if not self.copies.is_home((array, tier)):
                need[tier] += self.catalog.nbytes(array, tier)
        for tier, nbytes in job.workspace:
            need[tier] += nbytes
        return need

    def claim(self, job: Job, created: Sequence[Copy]) -> None:
        """Makes room for what a job creates and works in."""
        for tier, nbytes in self.claim_of(job, created).items():
            self.make_room(tier, nbytes, self.copies.touched(job))
        self.copies.occupy(created)
        for tier, nbytes in job.workspace:
            self.copies.use_bytes(tier, nbytes)

    def free(self, arrays: Sequence[ArrayId], tier: Tier) -> None:
        nbytes = self.copies.vacate((a, tier) for a in arrays)
        self.listing.free(arrays, tier, nbytes)

    def drop_stale(self, job: Job) -> None:
        """Frees other copies of what a job is about to change."""
        for array, tier in job.writes:
            for other in Tier:
                copy = (array, other)
                moved = isinstance(job.operation, Transfer)
                if other != tier and copy in self.copies.temporary and not moved:
                    self.free([array], other)
