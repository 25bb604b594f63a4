"""Bytes and collectives of a step's executables, to compare with the plan.

The plan counts bytes from shapes and shardings. The compiler counts the bytes that it
assigned, with the padding of layouts. The comparison needs no device, so it also works
for a step that was planned for another machine.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from zinf.core.plan import Instruction
from zinf.core.step.prepared import AbstractPrepared
from zinf.core.topology import (
    Collective,
    Kind,
    Memory,
    Traffic,
    collectives_of,
    memory,
    traffic,
)


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


def compiled_runs(made: AbstractPrepared) -> tuple[CompiledRun, ...]:
    """Every distinct executable of a step, in the order of first use."""
    found: dict[int, tuple[Instruction, Any, int | None]] = {}
    times: Counter[int] = Counter()
    for instruction, executable, nbytes in made.executables():
        found.setdefault(id(executable), (instruction, executable, nbytes))
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
        for key, (instruction, executable, nbytes) in found.items()
    )


def step_traffic(runs: tuple[CompiledRun, ...]) -> Mapping[Kind, Traffic]:
    """Bytes that one device sends in a step, by kind of collective."""
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
