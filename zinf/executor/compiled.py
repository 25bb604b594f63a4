"""What the executables of a planned step need and send, beside what the plan says.

The plan counts bytes from shapes and shardings; the compiler counts what it assigned,
padding of layouts and all. Comparing the two needs no device: a step that was planned
for a machine that is not there can be read as well as one that runs.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from zinf.executor.prepare import Fused, Streamed
from zinf.plan import Instruction, Pass, Run, Update
from zinf.program import Tier
from zinf.topology import (
    Collective,
    Kind,
    Memory,
    Traffic,
    collectives_of,
    memory,
    traffic,
)

FORWARD = {Pass.FORWARD, Pass.KEEPING}


@dataclass(frozen=True)
class CompiledRun:
    """One executable of a step.

    Attributes:
        name: of the first instruction that runs it; `times` how many of a step do.
        planned_bytes: what the plan counts for its arguments and results on a device;
            None of the fused step, where the compiler's figure is the plan's.
    """

    name: str
    times: int
    flops: int
    planned_bytes: int | None
    memory: Memory
    collectives: tuple[Collective, ...]

    @property
    def compiled_bytes(self) -> int:
        """Arguments and results on a device, as the compiler lays them out."""
        return self.memory.argument_bytes + self.memory.output_bytes


def compiled_runs(made: Streamed | Fused) -> tuple[CompiledRun, ...]:
    """Every distinct executable of a step, in the order of first use."""
    if isinstance(made, Fused):
        return (_fused(made),)
    found: dict[int, tuple[Any, Instruction]] = {}
    times: Counter[int] = Counter()
    for instruction in made.plan.instructions:
        for executable in _executables(made, instruction):
            found.setdefault(id(executable), (executable, instruction))
            times[id(executable)] += 1
    return tuple(
        CompiledRun(
            str(instruction.operation),
            times[key],
            instruction.flops,
            _planned_bytes(made, instruction, executable),
            memory(executable),
            collectives_of(executable),
        )
        for key, (executable, instruction) in found.items()
    )


def step_traffic(runs: tuple[CompiledRun, ...]) -> Mapping[Kind, Traffic]:
    """What one device sends in a step, by kind of collective."""
    return traffic(
        one for run in runs for one in run.collectives for _ in range(run.times)
    )


def largest_deviation(runs: tuple[CompiledRun, ...]) -> float:
    """How far the plan's bytes are from the compiler's, as a share of the latter."""
    return max(
        (
            abs(run.compiled_bytes - run.planned_bytes) / run.compiled_bytes
            for run in runs
            if run.planned_bytes is not None
        ),
        default=0.0,
    )


def _executables(made: Streamed, instruction: Instruction) -> list[Any]:
    operation = instruction.operation
    if isinstance(operation, Run):
        segment = made.segments[operation.segment]
        is_kept = operation.kind in (Pass.KEEPING, Pass.KEPT)
        passes = segment.keeping if is_kept else segment.executables
        return [passes.forward if operation.kind in FORWARD else passes.backward]
    if isinstance(operation, Update) and operation.tier == Tier.DEVICE:
        unit = made.arranged.units[operation.unit]
        steps = made.updates.steps[Tier.DEVICE]
        return [steps[update].executable for update in unit.arrays]
    return []


def _planned_bytes(
    made: Streamed, instruction: Instruction, executable: Any
) -> int | None:
    operation, catalog = instruction.operation, made.arranged.catalog
    if isinstance(operation, Run):
        copies = (*instruction.reads, *instruction.writes)
        return sum(catalog.nbytes(array, tier) for array, tier in copies)
    assert isinstance(operation, Update)
    steps = made.updates.steps[Tier.DEVICE]
    for update in made.arranged.units[operation.unit].arrays:
        if steps[update].executable is executable:
            arrays = (*update.operands, *update.results)
            given = sum(catalog.nbytes(array, Tier.DEVICE) for array in arrays)
            if update in made.updates.own_parts:
                return given + made.updates.own_parts[update].nbytes
            rows = update.rows or update.gradient.rows
            gradient = replace(update.gradient, rows=rows)
            return given + catalog.nbytes(gradient, Tier.DEVICE)
    raise AssertionError("an update runs an executable that is not its own")


def _fused(made: Fused) -> CompiledRun:
    executable = made.program.step
    return CompiledRun(
        str(made.plan.instructions[0].operation),
        1,
        made.program.flops,
        None,
        memory(executable),
        collectives_of(executable),
    )
