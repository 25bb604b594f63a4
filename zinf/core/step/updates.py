"""Compiles the separated optimizer's updates, and groups them into units of a plan."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, Sharding

from zinf.core.memory import in_device_form
from zinf.core.optim.decision import Pending
from zinf.core.optim.host.host_update import AbstractHostUpdate
from zinf.core.optim.host.on_host import host_updates
from zinf.core.optim.joint import JointCompiler
from zinf.core.optim.separate import Separated
from zinf.core.optim.update import (
    Unit,
    UnitPlacement,
    UpdateStep,
    compile_placed_updates,
    compile_updates,
)
from zinf.core.plan import (
    NO_EXCHANGE,
    ArrayUpdate,
    Exchange,
    UpdateUnit,
    tier_in_turn,
)
from zinf.core.problem.problem import Problem
from zinf.core.program import ArrayId, Program, Role, Rows, Tier
from zinf.core.sharding import Layout, Layouts, spread_bytes
from zinf.core.sharding.mesh import first_cpu, local_devices, replicated
from zinf.core.step.exchange import exchange_of
from zinf.core.step.sums import sum_dtype
from zinf.core.topology import compile_for

# Bytes of master in one block of an element-wise update. A block keeps a drive and the
# cores busy and is small compared with any host's memory.
BLOCK_BYTES = 16 * 1024 * 1024
# A plan lists every block. Very large models get larger blocks, so that a plan has at
# most a few thousand.
MAX_BLOCKS = 2048
# One instruction runs updates whose results take up to this many blocks.
UNIT_BLOCKS = 4


def block_bytes(separated: Separated) -> int:
    """Bytes of master in one block of an element-wise update of this model."""
    specs = (leaf.spec for leaf in separated.leaves)
    total = sum(prod(s.shape) * s.dtype.itemsize for s in specs)
    return max(BLOCK_BYTES, total // MAX_BLOCKS)


def block_rows(shape: tuple[int, ...], nbytes: int, limit: int) -> int | None:
    """Number of rows in a block of an array; None if the array is one block.

    Args:
        shape, nbytes: of the array.
        limit: most bytes of a block, unless a single row has more.
    """
    if not shape or nbytes <= limit or shape[0] == 1:
        return None
    return max(1, limit * shape[0] // nbytes)


def blocks(shape: tuple[int, ...], nbytes: int, limit: int) -> list[Rows]:
    """Rows of each block of an array, or `[None]` if the array is one block."""
    step = block_rows(shape, nbytes, limit)
    if step is None:
        return [None]
    return [(i, min(i + step, shape[0])) for i in range(0, shape[0], step)]


@dataclass(frozen=True)
class OwnPart:
    """The shard of a gradient that each device cuts out before an update.

    This is for a device that holds more of the gradient than it updates. The cut is not
    in the executable of the update: the compiler might then contract other products and
    sums than on the host, where the shard comes already cut.
    """

    layout: Layout
    nbytes: int


@dataclass(frozen=True)
class Updates:
    """Every array update of a program, in the order in which gradients complete.

    Attributes:
        arrays: the updates, grouped by the segment that completes their gradients.
        steps: the compiled updates by tier. On the host, a step updates this process's
            share on the CPU; on the device, one step updates on all devices. An update
            that needs a whole leaf has no host step if this process has only a share.
        in_place: what runs on the host instead of the host step; most updates have it.
        own_parts: the gradient's shard, for device updates that must cut it out first.
        num_executables: number of distinct executables on the device.
        cpu: the device that host updates are compiled for.
        unit_bytes: most bytes of results in a unit, unless a single update has more.
        exchanges: what each device update sends between devices.
        joint: compiles several device updates into one executable.
    """

    arrays: tuple[tuple[str, tuple[ArrayUpdate, ...]], ...]
    steps: Mapping[Tier, Mapping[ArrayUpdate, UpdateStep]]
    in_place: Mapping[ArrayUpdate, AbstractHostUpdate]
    own_parts: Mapping[ArrayUpdate, OwnPart]
    num_executables: int
    cpu: jax.Device
    unit_bytes: int
    exchanges: Mapping[ArrayUpdate, Exchange]
    joint: JointCompiler

    def units(
        self,
        homes: Mapping[ArrayId, Tier],
        update_tier: Tier = Tier.HOST,
        turns: int = 0,
    ) -> list[UpdateUnit]:
        """The update units for arrays that rest at `homes`.

        An update runs on the device if all its results rest there, or if it has no host
        step. Every other update runs on `update_tier`, or on the other of host and
        device if it is its turn (see `StepOptions`).
        """
        units = []
        for number, (segment, updates) in enumerate(self.arrays):
            usual = tier_in_turn(update_tier, turns, number)
            groups: dict[Tier, list[ArrayUpdate]] = {}
            for update in updates:
                is_there = _is_on_device(update, homes)
                has_choice = not is_there and update in self.steps[Tier.HOST]
                tier = usual if has_choice else Tier.DEVICE
                groups.setdefault(tier, []).append(update)
            for tier, members in groups.items():
                parts = self._split(members, tier)
                for i, part in enumerate(parts):
                    name = f"{segment} {i + 1}/{len(parts)}" if parts[1:] else segment
                    workspace = max(self.workspace_bytes(u, tier) for u in part)
                    exchange = NO_EXCHANGE
                    if tier == Tier.DEVICE:
                        exchange = sum((self.exchanges[u] for u in part), exchange)
                    unit = UpdateUnit(name, tier, tuple(part), workspace, exchange)
                    units.append(unit)
        return units

    def workspace_bytes(self, update: ArrayUpdate, tier: Tier) -> int:
        """Bytes that an update needs on its tier beside its operands and results."""
        if self.is_in_place(update, tier):
            return self.in_place[update].workspace_bytes
        nbytes = self.steps[tier][update].workspace_bytes
        if tier == Tier.DEVICE and update in self.own_parts:
            nbytes += self.own_parts[update].nbytes
        return nbytes

    def is_in_place(self, update: ArrayUpdate, tier: Tier) -> bool:
        """Whether the update runs by `apply_in_place` on this tier, and not `apply`."""
        return tier == Tier.HOST and update in self.in_place

    def compile_in_place(self, units: Iterable[UpdateUnit]) -> None:
        """Compile what `apply_in_place` runs for these units, before the first step."""
        for unit in units:
            for update in unit.arrays:
                if self.is_in_place(update, unit.tier):
                    self.in_place[update].compile()

    def _split(
        self, updates: Sequence[ArrayUpdate], tier: Tier
    ) -> list[list[ArrayUpdate]]:
        parts: list[list[ArrayUpdate]] = []
        total = self.unit_bytes
        for update in updates:
            nbytes = self.steps[tier][update].output_bytes
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
        decided: Pending,
    ) -> Sequence[Any]:
        """Compute new values of `update.results` on the tier.

        Those on the host are complete on return.
        """
        step = self.steps[tier][update]
        if tier == Tier.DEVICE and update in self.own_parts:
            gradient = in_device_form(gradient, self.own_parts[update].layout)
        arguments = [gradient, *operands]
        if tier == Tier.HOST:
            arguments = jax.device_put(arguments, self.cpu)
        results = step(decided.factor, decided.step_values, *arguments)
        return jax.block_until_ready(results) if tier == Tier.HOST else results

    def apply_in_place(
        self,
        update: ArrayUpdate,
        gradient: np.ndarray,
        decided: Pending,
        *results: np.ndarray,
    ) -> None:
        """Overwrite `update.results` with their new values.

        Args:
            results: the host memory of the results. The compute copy among them is
                written but not read.
        """
        self.in_place[update](decided.factor, decided.step_values, gradient, *results)


def compile_program_updates(
    program: Program,
    problem: Problem,
    separated: Separated,
    *,
    accumulates: Collection[ArrayId],
    layouts: Layouts,
    gradient_role: Role = Role.GRADIENT,
) -> Updates:
    """Compiles the update of every trained array of a program, for both tiers.

    Args:
        accumulates: parameter arrays whose gradient is a sum (see `sum_dtype`).
        layouts: the layouts of persistent arrays and gradients.
        gradient_role: of the arrays that have the gradients.
    """
    numbers = {leaf.path: i for i, leaf in enumerate(separated.leaves)}
    limit = block_bytes(separated)
    grouped = []
    units: dict[ArrayUpdate, Unit] = {}
    placements: list[UnitPlacement] = []
    for segment in reversed(program.segments):
        updates = []
        for array in _completed_by(program, segment.name):
            leaf = separated.leaves[numbers[array.path]]
            compute = problem.params[array.path].compute.dtype
            gradient_dtype = sum_dtype(compute) if array in accumulates else compute
            whole = layouts.of(array)
            in_blocks: list[Rows] = [None]
            # A tile is small enough, and blocks of a tile would have other names.
            if leaf.is_elementwise and whole.has_whole_rows and array.rows is None:
                share = whole.share_shape
                nbytes = prod(share) * leaf.spec.dtype.itemsize
                in_blocks = blocks(share, nbytes, limit)
            for block in in_blocks:
                gradient = array.of_role(gradient_role)
                update = _array_update(problem, leaf, gradient, block)
                size = layouts.of(update.master).padded
                copied = None if update.compute is None else compute
                units[update] = Unit(numbers[array.path], size, gradient_dtype, copied)
                placements.append(_placement(update, layouts))
                updates.append(update)
        grouped.append((segment.name, tuple(updates)))
    wanted = list(units.values())
    compile_here = partial(compile_for, layouts.mesh)
    compiled = compile_placed_updates(separated, wanted, placements, compile_here)
    on_device = dict(zip(units, compiled.steps, strict=True))
    cpu = cpu_device(layouts.mesh)
    shares = {}
    for update, unit in units.items():
        layout = layouts.of(update.master)
        if separated.leaves[unit.leaf].is_elementwise or layout.is_whole:
            shares[update] = replace(unit, shape=layout.share_shape)
    on_host = on_device
    if list(layouts.mesh.devices.flat) != [cpu] or shares != units:
        steps = compile_updates(separated, list(shares.values()), device=cpu).steps
        on_host = dict(zip(shares, steps, strict=True))
    in_place = host_updates(separated, list(shares.values()), device=cpu)
    return Updates(
        arrays=tuple(grouped),
        steps={Tier.DEVICE: on_device, Tier.HOST: on_host},
        in_place={u: x for u, x in zip(shares, in_place, strict=True) if x is not None},
        own_parts=_own_parts(units, layouts),
        num_executables=compiled.num_executables,
        cpu=cpu,
        joint=JointCompiler(compile_here),
        unit_bytes=UNIT_BLOCKS * limit,
        exchanges=_exchanges(on_device, units, layouts),
    )


def _exchanges(
    steps: Mapping[ArrayUpdate, UpdateStep],
    units: Mapping[ArrayUpdate, Unit],
    layouts: Layouts,
) -> dict[ArrayUpdate, Exchange]:
    """Bytes that each update sends between devices; an executable is analysed once.

    Copies for groups are counted here too: they are spread when they are next read.
    """
    read: dict[int, Exchange] = {}
    found = {}
    for update, step in steps.items():
        key = id(step.executable)
        if layouts.mesh.size == 1:
            read[key] = NO_EXCHANGE
        elif key not in read:
            read[key] = exchange_of(step.collectives())
        found[update] = read[key]
        copy = layouts.of(update.compute or update.master)
        if copy.num_groups > 1:
            sent = spread_bytes(copy, units[update].compute_dtype)
            found[update] += Exchange(hidden_bytes=0, exposed_bytes=sent)
    return found


def _placement(update: ArrayUpdate, layouts: Layouts) -> UnitPlacement:
    """The shardings of the arrays of an update on the devices."""

    def device(array: ArrayId) -> Sharding:
        return layouts.of(array.whole).updated

    gradient = layouts.own_part(update.gradient) or layouts.of(update.gradient.whole)
    return UnitPlacement(
        replicated(layouts.mesh),
        gradient.device,
        device(update.master),
        tuple(map(device, update.states)),
        device(update.compute or update.master),
    )


def _own_parts(
    units: Mapping[ArrayUpdate, Unit], layouts: Layouts
) -> dict[ArrayUpdate, OwnPart]:
    found = {}
    for update, unit in units.items():
        part = layouts.own_part(update.gradient)
        if part is not None:
            sizes = part.device.shard_shape(unit.shape)
            nbytes = prod(sizes) * jnp.dtype(unit.grad_dtype).itemsize
            found[update] = OwnPart(part, nbytes)
    return found


def cpu_device(mesh: Mesh) -> jax.Device:
    """The first local device of a mesh if it is a CPU, or else the first local CPU."""
    first = local_devices(mesh)[0]
    if first.platform == "cpu":
        return first
    return first_cpu()


def _completed_by(program: Program, segment_name: str) -> list[ArrayId]:
    """Trained arrays whose gradient this segment's backward pass completes."""
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


def _array_update(
    problem: Problem, leaf: Any, gradient: ArrayId, block: Rows
) -> ArrayUpdate:
    stored, param = block or gradient.rows, problem.params[gradient.path]
    return ArrayUpdate(
        gradient=gradient,
        block=block,
        master=param.updated(stored),
        states=tuple(
            s.array(leaf.path, stored if leaf.is_elementwise else None)
            for s in leaf.states
        ),
        compute=param.copy(stored),
    )


def _is_on_device(update: ArrayUpdate, homes: Mapping[ArrayId, Tier]) -> bool:
    tiers = {homes[a] if a in homes else homes[a.whole] for a in update.results}
    return tiers == {Tier.DEVICE}
