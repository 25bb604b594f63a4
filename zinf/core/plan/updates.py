"""Adds the updates to the jobs of a step, and chooses where gradients wait for them.

A unit is updated when its gradients are complete, in this step or, if it is deferred
(see `pending`), at the beginning of the next. Its results are then moved home.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence

from zinf.core.plan.catalog import Catalog, StepOptions, UpdateUnit
from zinf.core.plan.instruction import Update
from zinf.core.plan.job import JobList
from zinf.core.plan.pending import first_reader, pending_copies, rest_tier
from zinf.core.program import ArrayId, Link, Tier


class Updates:
    """The updates that are not yet in `jobs`; the methods add them as they are due.

    Attributes:
        units: `(number, unit)` of units to update with gradients of this step.
        at_rest: gradients at rest between steps, with their tiers.
        pending: `(number, unit)` of pending updates, by the first segment that reads
            their results.
        by_row: gradients that wait on the device and come to the host by row.
        gradient_tiers: the tier where each complete gradient waits.
    """

    def __init__(
        self,
        jobs: JobList,
        catalog: Catalog,
        units: Sequence[UpdateUnit],
        options: StepOptions,
    ):
        self.jobs, self.catalog, self.options = jobs, catalog, options
        deferred = options.deferred
        self.units = [(i, u) for i, u in enumerate(units) if i not in deferred]
        self.at_rest = dict(pending_copies(units, deferred, catalog, options))
        self.pending: dict[int, list[tuple[int, UpdateUnit]]] = defaultdict(list)
        readers = catalog.program.first_readers()
        for number in sorted(deferred):
            position = first_reader(units[number], readers)
            self.pending[position].append((number, units[number]))
        self.pending_reads = Counter(g for i in deferred for g in _gradients(units[i]))
        self.by_row = self._by_row() if options.gradients_by_row else frozenset()
        self.gradient_tiers = self._gradient_tiers()

    def _by_row(self) -> frozenset[ArrayId]:
        """Gradients that several units on the host read, and that are not deferred."""
        if not self.options.updates_in_backward:
            return frozenset()
        on_host = [u for _, u in self.units if u.tier == Tier.HOST]
        readers = Counter(g for unit in on_host for g in _gradients(unit))
        return frozenset(g for g, n in readers.items() if n > 1) - set(self.at_rest)

    def _gradient_tiers(self) -> dict[ArrayId, Tier]:
        tiers = {}
        for _, unit in self.units:
            tier = unit.tier
            if not self.options.updates_in_backward:
                tier = rest_tier(unit, self.catalog, self.options)
            for gradient in _gradients(unit):
                tiers[gradient] = Tier.DEVICE if gradient in self.by_row else tier
        return tiers | self.at_rest

    def add_ready(self, is_complete: Callable[[ArrayId], bool]) -> None:
        """Adds the updates of the units whose gradients are complete, in order."""
        waiting = []
        for number, unit in self.units:
            if all(is_complete(update.gradient) for update in unit.arrays):
                self.add(number, unit)
            else:
                waiting.append((number, unit))
        self.units = waiting

    def add_pending(self, k: int) -> None:
        """Adds the pending updates whose results segment `k` is the first to read."""
        for number, unit in self.pending[k]:
            self.add(number, unit, is_pending=True)

    def add(self, number: int, unit: UpdateUnit, *, is_pending: bool = False) -> None:
        tier = unit.tier
        gradients = _gradients(unit)
        operands = [a for update in unit.arrays for a in update.operands]
        results = [a for update in unit.arrays for a in update.results]
        consumed = []
        if is_pending:
            operands = _with_whole_params(unit, self.catalog)
            self.pending_reads.subtract(gradients)
            consumed = [g for g in gradients if not self.pending_reads[g]]
        elif tier == Tier.HOST:
            gradients = self.bring_rows(unit)
        self.jobs.add(
            Update(number, unit.name, tier, is_pending),
            Link.HOST if tier == Tier.HOST else Link.DEVICE,
            reads=tuple((a, tier) for a in (*gradients, *operands)),
            writes=tuple((a, tier) for a in results),
            workspace=((tier, unit.workspace_bytes),),
            exchange=unit.exchange,
            consumes=tuple(consumed),
        )
        away: dict[Tier, list[ArrayId]] = {}
        for array in results:
            home = self.catalog.home_tier(array)
            assert home is not None
            if home != tier:
                away.setdefault(home, []).append(array)
        for home, arrays in away.items():
            self.jobs.transfer(arrays, tier, home)

    def bring_rows(self, unit: UpdateUnit) -> list[ArrayId]:
        """The gradients that a unit reads; transfers the rows of waiting ones first."""
        rows = [u.gradient_block for u in unit.arrays if u.gradient in self.by_row]
        if rows:
            nbytes = sum(self.catalog.nbytes(a, Tier.DEVICE) for a in rows)
            self.jobs.transfer(rows, Tier.DEVICE, Tier.HOST, workspace_bytes=nbytes)
        rest = [g for g in _gradients(unit) if g not in self.by_row]
        return [*rows, *rest]


def tier_in_turn(update_tier: Tier, turns: int, number: int) -> Tier:
    """The tier of the `number`-th updates: every `turns`-th is on the other one."""
    is_other = bool(turns) and number % turns == turns - 1
    others = {Tier.HOST: Tier.DEVICE, Tier.DEVICE: Tier.HOST}
    return others[update_tier] if is_other else update_tier


def _with_whole_params(unit: UpdateUnit, catalog: Catalog) -> list[ArrayId]:
    """The operands of a unit, with whole parameters in place of blocks of them.

    The forward pass reads the whole parameter next, so its blocks are updated inside a
    copy of the whole. Separate blocks would be moved home and fetched again from there,
    unless the home is the device.
    """
    operands: list[ArrayId] = []
    for update in unit.arrays:
        param = update.compute or update.master
        if update.block is None or catalog.home_tier(param) == Tier.DEVICE:
            operands += update.operands
            continue
        operands += [a for a in update.operands if a != param]
        operands.append(param.whole)
    return list(dict.fromkeys(operands))


def _gradients(unit: UpdateUnit) -> list[ArrayId]:
    return list(dict.fromkeys(update.gradient for update in unit.arrays))
