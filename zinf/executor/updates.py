"""Binds the separated optimizer to a plan: which blocks are updated, and by what."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zinf.executor.decision import Pending
from zinf.optim.host_update import AbstractHostUpdate
from zinf.optim.on_host import host_updates
from zinf.optim.separate import Separated
from zinf.optim.update import Unit, UpdateStep, compile_updates
from zinf.plan import ArrayUpdate, UpdateUnit
from zinf.program import ArrayId, Program, Tier
from zinf.segment.problem import Problem

# An element-wise update works on this many bytes of master at a time: enough to keep a
# drive and the cores busy, little beside any host's memory.
BLOCK_BYTES = 16 * 1024 * 1024
# A model much larger than a block has larger blocks, so that there are never more than
# a few thousand: the plan lists each of them.
MAX_BLOCKS = 2048
# Updates run as one instruction up to this many blocks' worth of results.
UNIT_BLOCKS = 4


def block_bytes(separated: Separated) -> int:
    """Bytes of master that an element-wise update of this model works on at a time."""
    specs = (leaf.spec for leaf in separated.leaves)
    total = sum(prod(s.shape) * s.dtype.itemsize for s in specs)
    return max(BLOCK_BYTES, total // MAX_BLOCKS)


@dataclass(frozen=True)
class Updates:
    """Every array update of a program, in the order in which gradients complete.

    Attributes:
        arrays: the updates, grouped by the segment that completes their gradients.
        steps: by tier, the compiled update of each. Those on the host are for the CPU.
        in_place: of most, what takes its place where it runs on the host.
        num_executables: how many distinct ones there are.
    """

    arrays: tuple[tuple[str, tuple[ArrayUpdate, ...]], ...]
    steps: Mapping[Tier, Mapping[ArrayUpdate, UpdateStep]]
    in_place: Mapping[ArrayUpdate, AbstractHostUpdate]
    num_executables: int
    devices: Mapping[Tier, jax.Device]
    unit_bytes: int

    def units(
        self, homes: Mapping[ArrayId, Tier], update_tier: Tier = Tier.HOST
    ) -> list[UpdateUnit]:
        """The work units for a placement: an update runs on the device if all that it
        touches rests there, and on `update_tier` otherwise."""
        units = []
        for segment, updates in self.arrays:
            groups: dict[Tier, list[ArrayUpdate]] = {}
            for update in updates:
                tier = Tier.DEVICE if _is_on_device(update, homes) else update_tier
                groups.setdefault(tier, []).append(update)
            for tier, members in groups.items():
                parts = self._split(members)
                for i, part in enumerate(parts):
                    name = f"{segment} {i + 1}/{len(parts)}" if parts[1:] else segment
                    workspace = max(self.workspace_bytes(u, tier) for u in part)
                    units.append(UpdateUnit(name, tier, tuple(part), workspace))
        return units

    def workspace_bytes(self, update: ArrayUpdate, tier: Tier) -> int:
        """What an update needs on its tier beside operands and results at rest."""
        if self.is_in_place(update, tier):
            return self.in_place[update].workspace_bytes
        return self.steps[tier][update].workspace_bytes

    def is_in_place(self, update: ArrayUpdate, tier: Tier) -> bool:
        """Whether `apply_in_place` is how the update runs there, and not `apply`."""
        return tier == Tier.HOST and update in self.in_place

    def compile_in_place(self, units: Iterable[UpdateUnit]) -> None:
        """Compiles what `apply_in_place` runs for these units, so that no step does."""
        for unit in units:
            for update in unit.arrays:
                if self.is_in_place(update, unit.tier):
                    self.in_place[update].compile()

    def _split(self, updates: Sequence[ArrayUpdate]) -> list[list[ArrayUpdate]]:
        parts: list[list[ArrayUpdate]] = []
        total = self.unit_bytes
        for update in updates:
            nbytes = self.steps[Tier.DEVICE][update].output_bytes
            if total + nbytes > self.unit_bytes:
                parts.append([])
                total = 0
            parts[-1].append(update)
            total += nbytes
        return parts

    def apply(
        self,
        update: ArrayUpdate,
        tier: Tier,
        gradient: Any,
        operands: Sequence[Any],
        goes_by: Pending,
    ) -> Sequence[Any]:
        """New values of `update.results`, on the tier's device; complete on return."""
        factor = np.float32(goes_by.decision.factor)
        step = self.steps[tier][update]
        arguments = jax.device_put([gradient, *operands], self.devices[tier])
        return jax.block_until_ready(step(factor, goes_by.step_values, *arguments))

    def apply_in_place(
        self,
        update: ArrayUpdate,
        gradient: np.ndarray,
        goes_by: Pending,
        *results: np.ndarray,
    ) -> None:
        """Gives `update.results`, of which it takes the host memory, their new values.

        What the compute copy among them holds is not read.
        """
        factor = np.float32(goes_by.decision.factor)
        self.in_place[update](factor, goes_by.step_values, gradient, *results)


def compile_program_updates(
    program: Program,
    problem: Problem,
    separated: Separated,
    *,
    accumulates: Collection[ArrayId],
    device: jax.Device,
) -> Updates:
    """Compiles the update of every trained array of a program, for both tiers.

    Args:
        device: the accelerator. Where it is one, updates on the host are compiled for
            this process's CPU.
        accumulates: parameter arrays whose gradient is a float32 sum.
    """
    numbers = {leaf.path: i for i, leaf in enumerate(separated.leaves)}
    limit = block_bytes(separated)
    grouped = []
    units: dict[ArrayUpdate, Unit] = {}
    for segment in reversed(program.segments):
        updates = []
        for array in _completed_by(program, segment.name):
            leaf = separated.leaves[numbers[array.path]]
            compute = problem.params[array.path].compute.dtype
            gradient_dtype = jnp.float32 if array in accumulates else compute
            shape = leaf.spec.shape
            if array.rows is not None:
                shape = (array.rows[1] - array.rows[0], *shape[1:])
            blocks = [None]
            if leaf.is_elementwise:
                blocks = _blocks(shape, leaf.spec.dtype.itemsize, limit)
            for rows in blocks:
                update = _array_update(problem, leaf, array, rows)
                size = shape if rows is None else (rows[1] - rows[0], *shape[1:])
                units[update] = Unit(numbers[array.path], size, gradient_dtype, compute)
                updates.append(update)
        grouped.append((segment.name, tuple(updates)))
    wanted = list(units.values())
    cpu = cpu_device(device)
    compiled = compile_updates(separated, wanted, device=device)
    for_cpu = compiled
    if cpu != device:
        for_cpu = compile_updates(separated, wanted, device=cpu)
    on_host = host_updates(separated, wanted, device=cpu)
    return Updates(
        arrays=tuple(grouped),
        steps={
            Tier.DEVICE: dict(zip(units, compiled.steps, strict=True)),
            Tier.HOST: dict(zip(units, for_cpu.steps, strict=True)),
        },
        in_place={u: x for u, x in zip(units, on_host, strict=True) if x is not None},
        num_executables=compiled.num_executables,
        devices={Tier.HOST: cpu, Tier.DEVICE: device},
        unit_bytes=UNIT_BLOCKS * limit,
    )


def cpu_device(device: jax.Device) -> jax.Device:
    """The CPU next to a device; the device itself, if it is one."""
    if device.platform == "cpu":
        return device
    return jax.local_devices(backend="cpu")[0]


def _completed_by(program: Program, segment_name: str) -> list[ArrayId]:
    """Trained arrays whose gradient is complete after this segment's backward pass."""
    names = [s.name for s in program.segments]
    position = names.index(segment_name)
    earlier = {
        a
        for s in program.segments[:position]
        if s.has_backward
        for a in s.trained_params
    }
    segment = program.segments[position]
    runs = segment is program.segments[-1] or segment.has_backward
    return [a for a in segment.trained_params if a not in earlier] if runs else []


def _blocks(
    shape: tuple[int, ...], itemsize: int, limit: int
) -> list[tuple[int, int] | None]:
    """Rows of each block of an array, or `[None]` when it is updated whole."""
    nbytes = prod(shape) * itemsize
    if nbytes <= limit or shape[0] == 1:
        return [None]
    rows = max(1, limit * shape[0] // nbytes)
    count = ceil(shape[0] / rows)
    return [(i * rows, min((i + 1) * rows, shape[0])) for i in range(count)]


def _array_update(
    problem: Problem, leaf: Any, array: ArrayId, rows: tuple[int, int] | None
) -> ArrayUpdate:
    stored = rows or array.rows
    has_master = problem.params[array.path].has_master
    return ArrayUpdate(
        gradient=ArrayId("gradient", array.path, array.rows),
        rows=rows,
        master=ArrayId("master" if has_master else "param", array.path, stored),
        states=tuple(
            ArrayId(s.role, array.path, stored if leaf.is_elementwise else None)
            for s in leaf.states
        ),
        compute=ArrayId("param", array.path, stored) if has_master else None,
    )


def _is_on_device(update: ArrayUpdate, homes: Mapping[ArrayId, Tier]) -> bool:
    tiers = {homes[a] if a in homes else homes[a.whole] for a in update.results}
    return tiers == {Tier.DEVICE}
