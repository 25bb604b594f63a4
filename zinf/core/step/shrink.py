"""Cuts a program into segments that fit the device, and compiles them.

While they do not fit, segments get fewer parameters, and weights larger than such a
segment are read by tile. If intermediate values take most of the bytes, segments run in
blocks of rows instead. An update reads a whole tile, so a tile may be too large for the
host too.
"""

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from time import monotonic
from typing import TypeVar

from zinf.core.plan import InfeasibleError, Shortage, count_contributions
from zinf.core.problem.source import Source
from zinf.core.program import ArrayId, Program, Role, Tier
from zinf.core.segment import Segment, Segmented, compile_segments, segment_loss
from zinf.core.segment.chosen import NO_TABLES, Tables
from zinf.core.sharding import Layouts
from zinf.core.step.setup import Setup

# The new workspace limit is a sixteenth below the limit that would just fit.
SPARE = 16
# Give up on smaller tiles if so many tile sizes in turn say that none would fit. One
# pair may mislead: the job that needs most may read a weight that is not yet tiled.
NUM_SIZES = 3
# Log each further attempt once a search has taken so long.
QUIET_SECONDS = 10
Made = TypeVar("Made")
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Limits:
    """Upper bounds on a segment; None is no limit.

    Attributes:
        param_bytes: bytes of parameters.
        workspace_bytes: bytes of intermediate values; only a segment with independent
            rows can keep this limit.
        least_param_bytes: segments with parameters of so many bytes are not cut.
    """

    param_bytes: int | None
    workspace_bytes: int | None = None
    least_param_bytes: int = 1


@dataclass(frozen=True)
class Compiled:
    """Compiled segments, and the layouts of all arrays that they read and write."""

    segments: tuple[Segment, ...]
    layouts: Layouts


@dataclass(frozen=True)
class Failure:
    """A program that did not fit."""

    program: Program
    limits: Limits
    error: InfeasibleError


def cut(
    setup: Setup,
    source: Source,
    layouts: Layouts,
    max_bytes: int | None,
    tables: Tables = NO_TABLES,
) -> Segmented:
    """The training loss in segments of at most so many bytes of parameters."""
    return segment_loss(
        source,
        frozen=setup.frozen,
        splittable=setup.splittable(layouts),
        max_bytes=max_bytes,
        tables=tables,
    )


def compiled(
    setup: Setup, segmented: Segmented, layouts: Layouts, limits: Limits
) -> Compiled:
    """The compiled segments of a program."""
    layouts = layouts.with_inputs(segmented.program)
    segments, values = compile_segments(
        segmented,
        layouts,
        limits.workspace_bytes,
        accumulates=accumulates(setup, segmented.program),
    )
    return Compiled(segments, replace(layouts, values=values))


def accumulates(setup: Setup, program: Program) -> frozenset[ArrayId]:
    """The parameter arrays whose gradient is the sum of several contributions."""
    counts = count_contributions(program, setup.config.num_microbatches)
    return frozenset(ArrayId(Role.PARAM, *key) for key, n in counts.items() if n > 1)


def shrunk(
    setup: Setup,
    layouts: Layouts,
    cut_to: Callable[[int | None], Segmented],
    attempt: Callable[[Segmented, Compiled, Limits], Made],
    limits: Limits,
) -> Made:
    """Tighten the limits until the segments fit the device; return what `attempt` made.

    Args:
        layouts: the table of persistent arrays.
        cut_to: cuts the program into segments of at most so many parameter bytes.
        limits: the first limits that are tried.
    """
    segmented, began = cut_to(limits.param_bytes), monotonic()
    failures: list[Failure] = []
    while True:
        seconds = monotonic() - began
        if failures and seconds > QUIET_SECONDS and setup.group.is_first:
            _log_attempt(segmented.program, failures, seconds)
        made = compiled(setup, segmented, layouts, limits)
        try:
            return attempt(segmented, made, limits)
        except InfeasibleError as error:
            before = segmented.program
            failures.append(Failure(before, limits, error))
            tight = tighter(limits, error, made.segments, before)
        if tight is None:
            raise _refusal(failures, reasons(before, made.segments))
        why = why_no_tile_fits(failures, tight)
        if not why and tight.param_bytes != limits.param_bytes:
            segmented = cut_to(tight.param_bytes)
        program = segmented.program
        rest = setup.capacity()[Tier.DEVICE], setup.rule.mesh.size
        why = why or why_values_do_not_fit(program, *rest)
        if why or not (program is before or has_smaller_segments(program, before)):
            found = [*filter(None, [why]), *reasons(program, made.segments)]
            raise _refusal(failures, found, is_least=not why)
        limits = tight


def _refusal(
    failures: Sequence[Failure], reasons: Sequence[str], *, is_least: bool = True
) -> InfeasibleError:
    """The error of the program that was nearest to the budgets, with `reasons`."""
    best = min((f.error for f in failures), key=lambda error: error.missing_bytes)
    return best.because(reasons, is_least=is_least)


def _log_attempt(program: Program, failures: Sequence[Failure], seconds: float) -> None:
    shortages = failures[-1].error.shortages
    logger.warning(
        "Planning for %.0f s. Attempt %d: %d segments of up to %s bytes of parameters. "
        "The last attempt needed %s.",
        seconds,
        len(failures) + 1,
        len(program.segments),
        f"{largest_segment_bytes(program):,}",
        " and ".join(
            f"{short.needed_bytes:,} bytes of {short.capacity_bytes:,} on the {tier}"
            for tier, short in shortages.items()
        ),
    )


def tighter(
    limits: Limits,
    error: InfeasibleError,
    segments: Sequence[Segment],
    program: Program,
) -> Limits | None:
    """Tighter limits to try next, or None to give up.

    Args:
        error: the shortages of the plan that was tried.
        segments: the compiled segments of that plan.
        program: the program of that plan.
    """
    if not error.may_rest:
        return None
    params = largest_segment_bytes(program)
    if Tier.DEVICE not in error.shortages:
        if Tier.HOST in error.shortages and program.tilings:
            return _with_fewer_params(limits, params, error.shortages[Tier.HOST])
        return None
    short = error.shortages[Tier.DEVICE]
    spaces = [s.workspace() for s in segments]
    workspace = max(max(w.forward_bytes, w.backward_bytes) for w in spaces)
    may_shrink = limits.workspace_bytes is None or workspace <= limits.workspace_bytes
    # Try blocks of rows first if they suffice, because they change nothing else.
    if may_shrink and workspace > short.missing_bytes:
        enough = workspace - short.missing_bytes
        return replace(limits, workspace_bytes=enough - enough // SPARE)
    # The factor 2 counts gradients, which are as large as their parameters.
    if may_shrink and workspace > 2 * params:
        return replace(limits, workspace_bytes=workspace // _divisor(short))
    return _with_fewer_params(limits, params, short)


def _with_fewer_params(limits: Limits, params: int, short: Shortage) -> Limits | None:
    if params <= limits.least_param_bytes:
        return None
    return replace(limits, param_bytes=params // _divisor(short))


def _divisor(short: Shortage) -> int:
    return max(2, short.needed_bytes // max(1, short.capacity_bytes))


def why_no_tile_fits(failures: Sequence[Failure], tight: Limits) -> str:
    """Why tiles of any size would need too much of the device; empty if they may fit.

    What a job needs is linear in the size of its tiles, so the largest need is convex:
    it is at least the line through two sizes, extended to tiles without bytes.

    Args:
        tight: the limits that would be tried next.
    """
    last = failures[-NUM_SIZES:]
    tiled = {frozenset(t.path for t in f.program.tilings) for f in last}
    spaces = {f.limits.workspace_bytes for f in last} | {tight.workspace_bytes}
    shortages = [
        f.error.shortages[Tier.DEVICE] for f in last if Tier.DEVICE in f.error.shortages
    ]
    alike = len(shortages) == NUM_SIZES and len(tiled) == len(spaces) == 1
    if not alike or frozenset() in tiled:
        return ""
    sizes = [largest_segment_bytes(f.program) for f in last]
    least = [
        after.needed_bytes
        - (before.needed_bytes - after.needed_bytes) * size // (larger - size)
        for (before, after), (larger, size) in zip(
            pairwise(shortages), pairwise(sizes), strict=True
        )
    ]
    if min(least) <= shortages[-1].capacity_bytes:
        return ""
    return f"Smaller tiles of weights would need at least {min(least):,} bytes."


def why_values_do_not_fit(
    program: Program, capacity_bytes: int, num_devices: int
) -> str:
    """Why it would be in vain to compile `program`, which takes long; or empty.

    The inputs and outputs of its largest segment must fit the device.
    """
    value_bytes = _value_bytes(program) // num_devices
    if value_bytes <= capacity_bytes:
        return ""
    return (
        "Smaller segments were not tried, because the inputs and outputs of one take "
        f"{value_bytes:,} bytes."
    )


def has_smaller_segments(program: Program, before: Program) -> bool:
    """Whether the largest segment has fewer parameters than that of `before`."""
    return largest_segment_bytes(program) < largest_segment_bytes(before)


def reasons(program: Program, segments: Sequence[Segment]) -> list[str]:
    """Sentences that say why the step cannot be made smaller."""
    wholes = {s.spec.name: s.why_whole for s in segments if s.why_whole}
    bodies = {why: name for name, why in reversed(wholes.items())}
    return untiled(program) + [
        f"Segment {name!r} cannot run in smaller blocks of rows: {why}."
        for why, name in bodies.items()
    ]


def untiled(program: Program) -> list[str]:
    """Sentences that say why weights that are too large are not read by tile."""
    return [
        f"The parameter {path!r} cannot be read by tile: {reason}."
        for path, reason in program.untiled.items()
    ]


def largest_segment_bytes(program: Program) -> int:
    """Parameter bytes of the segment with the most."""
    specs = {leaf.path: leaf.spec for leaf in program.leaves}

    def nbytes(array: ArrayId) -> int:
        return specs[array.path].piece(array.rows).nbytes

    return max(sum(map(nbytes, s.params)) for s in program.segments)


def _value_bytes(program: Program) -> int:
    """Bytes of inputs and outputs, without parameters, of the segment with the most."""

    def nbytes(names: Collection[str]) -> int:
        return sum(program.values[name].nbytes for name in names)

    return max(nbytes({*s.inputs, *s.outputs}) for s in program.segments)
