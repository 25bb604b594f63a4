"""Bytes and collectives of a step's executables, to compare with the plan.

The plan counts bytes from shapes and shardings. The compiler counts the bytes that it
assigned, with the padding of layouts. The comparison needs no device, so it also works
for a step that was planned for another machine.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from zinf.core.plan import ArrayUpdate, Instruction, Pass, Run, Update
from zinf.core.program import ArrayId, Tier
from zinf.core.step.joint import jointly_and_singly
from zinf.core.step.planner import Fused, Offloaded, Streamed
from zinf.core.topology import (
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
        name: the operation of the first instruction that runs it.
        times: how often a step runs it.
        planned_bytes: the plan's count for its arguments and results on one device.
            None for a step of one executable, whose plan uses the compiler's count.
    """

    name: str
    times: int
    flops: int
    planned_bytes: int | None
    memory: Memory
    collectives: tuple[Collective, ...]

    @property
    def compiled_bytes(self) -> int:
        """Bytes of arguments and results on a device in the compiler's layouts."""
        return self.memory.argument_bytes + self.memory.output_bytes


def compiled_runs(made: Streamed | Fused | Offloaded) -> tuple[CompiledRun, ...]:
    """Every distinct executable of a step, in the order of first use."""
    if isinstance(made, Fused | Offloaded):
        return (_fused(made),)
    found: dict[int, tuple[Any, int, Instruction]] = {}
    times: Counter[int] = Counter()
    for instruction in made.plan.instructions:
        for executable, nbytes in _executables(made, instruction):
            found.setdefault(id(executable), (executable, nbytes, instruction))
            times[id(executable)] += 1
    return tuple(
        CompiledRun(
            str(instruction.operation),
            times[key],
            instruction.flops,
            nbytes,
            memory(executable),
            collectives_of(executable),
        )
        for key, (executable, nbytes, instruction) in found.items()
    )


def step_traffic(runs: tuple[CompiledRun, ...]) -> Mapping[Kind, Traffic]:
    """What one device sends in a step, by kind of collective."""
    return traffic(
        one for run in runs for one in run.collectives for _ in range(run.times)
    )


def largest_deviation(runs: tuple[CompiledRun, ...]) -> float:
    """Largest difference of planned and compiled bytes, as a share of the compiled."""
    return max(
        (
            abs(run.compiled_bytes - run.planned_bytes) / run.compiled_bytes
            for run in runs
            if run.planned_bytes is not None
        ),
        default=0.0,
    )


def _executables(made: Streamed, instruction: Instruction) -> list[tuple[Any, int]]:
    """The executables that an instruction runs, each with the bytes the plan counts."""
    operation, catalog = instruction.operation, made.arranged.catalog
    if isinstance(operation, Run):
        segment = made.segments[operation.segment]
        is_kept = operation.kind in (Pass.KEEPING, Pass.KEPT)
        passes = segment.keeping if is_kept else segment.executables
        copies = (*instruction.reads, *instruction.writes)
        nbytes = sum(catalog.nbytes(array, tier) for array, tier in copies)
        is_forward = operation.kind in FORWARD
        return [(passes.forward if is_forward else passes.backward, nbytes)]
    if isinstance(operation, Update) and operation.tier == Tier.DEVICE:
        units, steps = made.arranged.units, made.updates.steps[Tier.DEVICE]
        together, single = jointly_and_singly(operation, units, made.joint)
        return [
            (joint.step.executable, sum(_update_bytes(made, u) for u in joint.arrays))
            for joint in together
        ] + [(steps[u].executable, _update_bytes(made, u)) for u in single]
    return []


def _update_bytes(made: Streamed, update: ArrayUpdate) -> int:
    """Bytes on one device that an update reads and writes, as the plan counts them."""

    def device_bytes(array: ArrayId) -> int:
        return made.arranged.catalog.nbytes(array, Tier.DEVICE)

    own = made.updates.own_parts.get(update)
    rows = update.block or update.gradient.rows
    gradient = update.gradient.piece(rows)
    nbytes = device_bytes(gradient) if own is None else own.nbytes
    return nbytes + sum(map(device_bytes, (*update.operands, *update.results)))


def _fused(made: Fused | Offloaded) -> CompiledRun:
    executable = made.program.step
    return CompiledRun(
        str(made.plan.instructions[0].operation),
        1,
        made.program.flops,
        None,
        memory(executable),
        collectives_of(executable),
    )
