"""Measures the rates of this machine by running some instructions of a plan alone.

With `rates: measured` a few instructions of a run's plan run before its first step, one
at a time, on arrays of zeros in stores of their own. Each does what it does in a step,
by the same executable, host update, transfer or file. So the first plan that a run
prints predicts its steps with rates of this machine. (`zinf bench step` measures whole
steps instead.)

The rates are remembered for the next start of the same work on the same machine, for a
week at most. If steps show that they are off, as after a measurement in a busy moment,
they are forgotten and the next start measures anew.

In a step the plan holds all that one of its instructions needs. So measuring keeps
within the budgets too.
"""

import logging
import shutil
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from hashlib import sha256
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter, time
from typing import Any

import jax.numpy as jnp
import numpy as np

from zinf.core.machine.rates_file import RatesFile
from zinf.core.memory import Stores, aligned_empty, to_devices
from zinf.core.memory.nvme import find_profile
from zinf.core.memory.storage_error import from_os_error
from zinf.core.optim.advance import Advance
from zinf.core.optim.decision import Decision, Pending
from zinf.core.optim.update import compile_advance
from zinf.core.plan import (
    Copy,
    Instruction,
    Link,
    Plan,
    Rates,
    Run,
    SumSquares,
    Timeline,
    Transfer,
    Update,
    measured_rates,
)
from zinf.core.plan.cost import duration
from zinf.core.process.compile_cache import machine_digest, starts_folder
from zinf.core.process.user_cache import recall, remember
from zinf.core.program import ArrayId, ArraySpec, Role, Tier
from zinf.core.sharding import whole_layout
from zinf.core.step.run.run import StepRecord, Work, run_alone
from zinf.core.step.run.streamed import Streamed, StreamedRunner
from zinf.core.step.setup import Setup
from zinf.core.step.updates import cpu_device

logger = logging.getLogger(__name__)

# Of each kind of work, the instructions that move or compute most in a step; two kinds
# of transfers, such as of parameters and of optimizer state, differ in array sizes.
MOST_OF_A_KIND = 2
# An instruction runs once to touch its memory, then for about this long by the assumed
# rates, but no more often than this.
MEASURED_SECONDS, MAX_TIMES = 0.2, 5
# Instructions that take longer by the assumed rates are not measured.
MAX_SECONDS = 1.0
FOUND: dict[Any, Rates] = {}
REMEMBERED_SECONDS = 7 * 24 * 3600.0
# Rates are forgotten if the median of `JUDGED_STEPS` steps after the first is further
# from the prediction, as a part of it.
MAX_ERROR, JUDGED_STEPS = 0.25, 3


@dataclass(frozen=True)
class _Known:
    """Measured rates, the file that remembers them, and when they were measured."""

    rates: Rates
    file: Path | None
    measured_at: float
    is_of_earlier_start: bool = False


# By the text of the rates, which a plan has too.
_KNOWN: dict[str, _Known] = {}


def measure_rates(made: Streamed, setup: Setup, spec: Any) -> Rates:
    """The rates of this machine, for the work of a plan.

    They are measured once in a process, and remembered for the next start.

    For a run of one process: several would have to run each instruction together.

    Args:
        made: planned by assumed rates, which stay for work that it does not have.
        spec: shapes and dtypes of one microbatch.
    """
    rates = made.plan.rates
    chosen = samples(made.plan)
    counts = Counter(map(_kind, made.plan.instructions))
    kinds = [_kind(x) for some in chosen for x in some]
    work = tuple((kind, counts[kind]) for kind in kinds)
    key = work, setup.rule.mesh, setup.config.nvme_paths
    if key not in FOUND:
        file = _file(work, setup, rates)
        known = _recalled(file) or _Known(
            _measured(chosen, counts, made, setup, spec), file, time()
        )
        if not known.is_of_earlier_start and file is not None:
            written = RatesFile.of(known.rates, "").model_dump(mode="json")
            remember(file, {"at": known.measured_at, "rates": written})
        FOUND[key] = known.rates
        _KNOWN[repr(known.rates)] = known
    return FOUND[key]


def said_of_rates(plan: Plan) -> str:
    """When the rates of a plan were measured, if that was in an earlier start."""
    known = _KNOWN.get(repr(plan.rates))
    if known is None or not known.is_of_earlier_start:
        return ""
    when = datetime.fromtimestamp(known.measured_at).isoformat(" ", "minutes")
    return (
        f"The rates of this machine are those measured {when}. "
        "compile_cache: false measures them at each start."
    )


class StepsBesideRates:
    """Compares steps with their prediction, and forgets rates that are off."""

    def __init__(self) -> None:
        self._errors: list[float] = []

    def see(self, record: StepRecord) -> None:
        """Take a step that ran; the first ones decide."""
        plan, timeline = record.plan, record.timeline
        if plan is None or timeline is None or len(self._errors) > JUDGED_STEPS:
            return
        known = _KNOWN.get(repr(plan.rates))
        if known is None or known.file is None:
            return
        self._errors.append(timeline.seconds / max(plan.timeline.seconds, 1e-9) - 1)
        # The first step also compiles, and touches its memory for the first time.
        error = median(self._errors[1:]) if len(self._errors) > JUDGED_STEPS else 0.0
        if abs(error) > MAX_ERROR:
            known.file.unlink(missing_ok=True)
            logger.info(
                "Steps take %.0f%% of the time predicted by the measured rates; the "
                "next start measures them anew.",
                100 + 100 * error,
            )


def _measured(
    chosen: Sequence[tuple[Instruction, ...]],
    counts: Mapping[Any, int],
    made: Streamed,
    setup: Setup,
    spec: Any,
) -> Rates:
    """Rates at which all instructions of the measured kinds take the time measured.

    A small transfer is slower a byte than a large one, and there may be more of them.

    Args:
        counts: instructions of each kind in the plan.
    """
    ran: list[Instruction] = []
    seconds: list[float] = []
    with _bench(made, setup, spec) as bench:
        for some in chosen:
            for instruction, taken in zip(some, bench.seconds(some), strict=True):
                count = counts[_kind(instruction)]
                ran += [instruction] * count
                seconds += [taken] * count
    timeline = Timeline((0.0,) * len(ran), tuple(seconds))
    return measured_rates(ran, timeline, made.plan.rates)


def _kind(instruction: Instruction) -> tuple[Link, int, int]:
    """What instructions that take as long have in common."""
    return instruction.link, instruction.nbytes, instruction.flops


def _file(work: Any, setup: Setup, otherwise: Rates) -> Path | None:
    """The file that remembers the rates of this work on this machine; None: none.

    Args:
        otherwise: the rates of what the work does not have.
    """
    folder, config = starts_folder(), setup.config
    if folder is None:
        return None
    drives = [_drive(path) for path in config.nvme_paths]
    options = {k: v for k, v in config.nvme_options.items() if k != "nvme_paths"}
    machine = machine_digest(setup.rule.mesh)
    parts = repr((machine, work, otherwise, drives, options, config.pinned))
    return folder / f"rates-{sha256(parts.encode()).hexdigest()[:32]}.json"


def _drive(path: Path) -> tuple[Any, ...]:
    """Identity of the drive of a path: its device number and size, and its profile."""
    existing = _existing(path)
    size = shutil.disk_usage(existing).total
    return existing.stat().st_dev, size, find_profile(existing)


def _recalled(file: Path | None) -> _Known | None:
    content = None if file is None else recall(file)
    if content is None or not 0 <= time() - content["at"] < REMEMBERED_SECONDS:
        return None
    return _Known(RatesFile(**content["rates"]).rates, file, content["at"], True)


def samples(plan: Plan) -> list[tuple[Instruction, ...]]:
    """The instructions to measure; those in one tuple use each other's results."""
    groups: dict[Any, dict[Any, list[Instruction]]] = defaultdict(
        lambda: defaultdict(list)
    )
    passes: dict[tuple[int, int], list[tuple[Run, Instruction]]] = defaultdict(list)
    for instruction in plan.instructions:
        operation = instruction.operation
        if duration(instruction, plan.rates) > MAX_SECONDS:
            continue
        match operation:
            case Transfer():
                groups[instruction.link][instruction.nbytes].append(instruction)
            case Update():
                groups[operation.tier][instruction.nbytes].append(instruction)
            case Run():
                one_pass = operation, instruction
                passes[operation.segment, operation.microbatch].append(one_pass)
            case SumSquares():
                groups[SumSquares][len(instruction.reads)].append(instruction)
    found: list[tuple[Instruction, ...]] = []
    for kind in groups.values():
        most = sorted(kind.values(), key=lambda some: -sum(x.nbytes for x in some))
        found += [(some[0],) for some in most[:MOST_OF_A_KIND]]
    bodies: dict[Any, list[tuple[Instruction, ...]]] = defaultdict(list)
    for some in passes.values():
        kind = tuple((run.kind, x.flops) for run, x in some)
        bodies[kind].append(tuple(x for _, x in some))
    most = sorted(
        bodies.values(), key=lambda some: -sum(x.flops for each in some for x in each)
    )
    return found + [some[0] for some in most[:MOST_OF_A_KIND]]


class _Bench:
    """Runs instructions of a plan, on zeros."""

    def __init__(self, made: Streamed, stores: Stores, work: Work, decided: Pending):
        self.plan, self.catalog = made.plan, made.arranged.catalog
        self.stores, self.work, self.decided = stores, work, decided
        self.layouts = work.layouts
        loss = self.catalog.program.values[self.catalog.program.loss]
        seed = np.zeros((), jnp.dtype(loss.dtype))
        (self.seed,) = to_devices([seed], [whole_layout((), self.layouts.mesh)])

    def seconds(self, some: Sequence[Instruction]) -> list[float]:
        """The median time of each instruction; they run in turn."""
        assumed = sum(duration(x, self.plan.rates) for x in some)
        times = max(1, min(MAX_TIMES, int(MEASURED_SECONDS / assumed)))
        found: list[list[float]] = [[] for _ in some]
        try:
            for _ in range(1 + times):
                for instruction, seconds in zip(some, found, strict=True):
                    # An update in place changes copies that exist before it runs.
                    changed = [
                        copy
                        for copy in instruction.writes
                        if copy not in instruction.creates
                    ]
                    for copy in (*instruction.reads, *changed):
                        self.make(copy)
                    began = perf_counter()
                    run_alone(
                        instruction,
                        self.plan,
                        self.work,
                        self.stores,
                        self.seed,
                        self.decided,
                    )
                    seconds.append(perf_counter() - began)
                written = (c for x in some for c in x.writes)
                free_copies(self.stores, (c for c in written if c[1].row.is_memory))
        finally:
            free_copies(self.stores, (c for x in some for c in (*x.reads, *x.writes)))
        return [median(seconds[1:]) for seconds in found]

    def make(self, copy: Copy) -> None:
        """Writes zeros as a copy, unless it is there."""
        array, tier = copy
        if self.stores[tier].contains(array):
            return
        spec = self.spec(array)
        content = aligned_empty(spec.shape, jnp.dtype(spec.dtype))
        content[...] = 0
        if tier == Tier.DEVICE:
            (content,) = to_devices([content], [self.layouts.of(array)])
        self.stores[tier].write(array, content).result()

    def spec(self, array: ArrayId) -> ArraySpec:
        """Shape and dtype of this process's share of an array."""
        catalog, role = self.catalog, array.role.layout_role
        if array.role == Role.NORM:
            return ArraySpec((), "float32", 4)
        if role == Role.VALUE:
            return catalog.program.values[array.path]
        if role == Role.GRADIENT:
            spec = catalog.param_spec(array)
            is_wide = catalog.nbytes(array) > spec.nbytes
            return replace(spec, dtype="float32", itemsize=4) if is_wide else spec
        return catalog.spec(array)


def free_copies(stores: Stores, copies: Iterable[Copy]) -> None:
    """Free those copies that are there; rows of an array that is there whole stay.

    Such rows have no memory of their own, and go with the array.
    """
    wholes_first = sorted(copies, key=lambda copy: copy[0].rows is not None)
    for array, tier in wholes_first:
        store = stores[tier]
        is_part = array.rows is not None and store.contains(array.whole)
        if store.contains(array) and not is_part:
            store.free(array)


def _existing(path: Path) -> Path:
    """A folder, or the nearest one above it that exists."""
    while not path.exists():
        path = path.absolute().parent
    return path


@contextmanager
def _scratch(path: Path) -> Iterator[Path]:
    """A new folder on the drive of `path`, which need not exist yet."""
    path = _existing(path)
    try:
        folder = TemporaryDirectory(prefix=".zinf-", dir=path)
    except OSError as error:
        what = "Cannot make a folder to measure the drive in"
        raise from_os_error(what, path, error) from error
    with folder as name:
        yield Path(name) / "measured"


@contextmanager
def _bench(made: Streamed, setup: Setup, spec: Any) -> Iterator[_Bench]:
    config, separated = setup.config, setup.separated
    with ExitStack() as opened:
        scratch = [opened.enter_context(_scratch(path)) for path in config.nvme_paths]
        stores = made.open_stores(setup, nvme_paths=scratch)
        opened.callback(stores.close)
        runner = StreamedRunner(
            made,
            stores,
            spec,
            clipping=setup.clipping,
            skips_overflow=False,
        )
        cpu = cpu_device(setup.rule.mesh)
        shared = [np.asarray(s.value) for s in separated.shared]
        advance = compile_advance(separated, device=cpu)
        values = Advance(
            shared,
            advance,
            reads_loss=separated.reads_loss,
            norm_groups=separated.norm_groups,
        ).values(0.0)
        decided = Pending(Decision(0.0, 0.0, 1.0, skips=False), values)
        runner.pending = decided
        yield _Bench(made, stores, runner.work(1.0), decided)
