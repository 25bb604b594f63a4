"""The layouts of all arrays that a step names."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from math import prod

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from zinf.mesh import make_mesh, replicated
from zinf.program import FLOAT32_BYTES, ArrayId, ArraySpec, Program, Role
from zinf.sharding.layout import Layout
from zinf.sharding.rule import (
    STATE_STAGE,
    AxisRule,
    Dim,
    axis_rule,
    num_data_parallel,
)


@dataclass(frozen=True)
class Layouts:
    """The layouts of all arrays that a step names.

    Attributes:
        arrays: layouts of persistent arrays and gradients, as wholes.
        values: layouts of the values that cross cuts, by name.
    """

    rule: AxisRule
    arrays: Mapping[ArrayId, Layout]
    values: Mapping[str, Layout]

    @property
    def mesh(self) -> Mesh:
        return self.rule.mesh

    def of(self, array: ArrayId) -> Layout:
        """The layout of an array, which may be rows of another."""
        if array.role.lies_as == Role.VALUE:
            return self.values[array.path]
        if array.role == Role.NORM:
            return whole_layout((), self.mesh)
        layout = self.arrays[array.lies_as]
        return layout.rows(*array.rows) if array.rows else layout

    def own_part(self, gradient: ArrayId) -> Layout | None:
        """The layout of the part of a gradient that each device updates alone.

        None if a device holds no more than that: before stage 1 each device updates
        everything, and from stage 2 on it has only its own part of a gradient.
        """
        layout = self.of(gradient.whole)
        if self.rule.stage < STATE_STAGE or layout.share == layout.device:
            return None
        return replace(layout, device=layout.share)

    def with_inputs(self, program: Program) -> "Layouts":
        """These layouts with those of a program's inputs: batch, key, constants.

        Raises:
            ValueError: the batch does not divide among the devices.
        """
        values = {}
        for name in (*program.batch, *program.consts):
            shape = program.values[name].shape
            is_batch = name in program.batch_leaves
            layout = batch_layout(name, shape, self.rule) if is_batch else None
            values[name] = layout or whole_layout(shape, self.mesh)
        return replace(self, values=values)

    def share_spec(self, array: ArrayId, spec: ArraySpec) -> ArraySpec:
        """The spec of this process's share of an array of `spec`."""
        return replace(spec, shape=self.of(array).share_shape)

    def share_of(self, program: Program) -> Program:
        """The program with specs of this process's shares and one device's flops."""
        values = {
            name: replace(spec, shape=self.values[name].share_shape)
            for name, spec in program.values.items()
            if name in self.values  # The last segment's outputs have other names.
        }
        count = self.mesh.size
        segments = tuple(replace(s, flops=s.flops // count) for s in program.segments)
        return replace(program, values=values, segments=segments)

    def device_parts(self) -> dict[ArrayId, Fraction]:
        """The size of one device's part of each array over that of the process's share.

        The keys are `ArrayId.lies_as`; fractions of 1 are left out.
        """
        values = {ArrayId(Role.VALUE, n): layout for n, layout in self.values.items()}
        parts = {a: _part(layout) for a, layout in {**values, **self.arrays}.items()}
        return {array: part for array, part in parts.items() if part != 1}


def whole_layout(shape: tuple[int, ...], mesh: Mesh) -> Layout:
    """The layout of an array that every device and process has whole."""
    sharding = replicated(mesh)
    return Layout(shape, shape, sharding, sharding)


def placed_layout(shape: tuple[int, ...], sharding: NamedSharding) -> Layout:
    """The layout of a value with this sharding on the devices."""
    return Layout(shape, shape, sharding, sharding)


def batch_layout(name: str, shape: tuple[int, ...], rule: AxisRule) -> Layout:
    """The layout of a leaf of a microbatch: its examples are divided among devices.

    Raises:
        ValueError: the examples do not divide evenly.
    """
    count = num_data_parallel(rule.mesh)
    if not shape or count == 1:
        return whole_layout(shape, rule.mesh)
    if shape[0] % count:
        raise ValueError(
            f"{name} has {shape[0]} examples in a microbatch of all processes, which "
            f"{count} data-parallel devices cannot divide evenly. Give a multiple of "
            f"{count}, or fewer devices (mesh=zinf.make_mesh(devices))."
        )
    return placed_layout(shape, rule.sharding([Dim.BATCH]))


def persistent_layouts(
    specs: Mapping[ArrayId, ArraySpec],
    rule: AxisRule,
    *,
    layers: Collection[str] = (),
    indivisible: Collection[str] = (),
) -> Layouts:
    """The layouts of persistent arrays, and of the gradients of parameters.

    Args:
        specs: every array as a whole.
        layers: leaves whose leading dim counts layers (`zinf.segment.read_by_row`).
        indivisible: leaves that are updated as wholes and therefore never padded.
    """
    found = {}
    for array, spec in specs.items():
        # State may have fewer dims than its parameter (adafactor).
        param = specs[ArrayId(Role.PARAM, array.path)]
        has_layers = array.path in layers and spec.shape[:1] == param.shape[:1]
        flags = has_layers, array.path not in indivisible
        found[array] = _layout(array.role, spec.shape, rule, *flags)
        if array.role == Role.PARAM:
            gradient = ArrayId(Role.GRADIENT, array.path)
            found[gradient] = _layout(Role.GRADIENT, spec.shape, rule, *flags)
    return Layouts(rule, found, {})


def layouts_on_one(device: jax.Device, specs: Mapping[ArrayId, ArraySpec]) -> Layouts:
    """The layouts of arrays that are whole on one device."""
    rule = axis_rule(make_mesh([device]), stage=0, min_bytes=0)
    return persistent_layouts(specs, rule)


def _part(layout: Layout) -> Fraction:
    share = prod(layout.share_shape)
    return Fraction(prod(layout.device_shape), share) if share else Fraction(1)


def _layout(
    role: Role,
    shape: tuple[int, ...],
    rule: AxisRule,
    has_layers: bool,
    may_pad: bool,
) -> Layout:
    # The bytes are counted in float32 for every dtype: all arrays of a shape are cut
    # alike, since those that are updated together must be.
    nbytes = prod(shape) * FLOAT32_BYTES
    dim = rule.cut_dim(shape, nbytes, has_layers=has_layers, may_pad=may_pad)
    if dim is None:
        return whole_layout(shape, rule.mesh)
    size = -(-shape[dim] // rule.num_shards) * rule.num_shards
    padded = (*shape[:dim], size, *shape[dim + 1 :])

    def along(axes: tuple[str, ...]) -> NamedSharding:
        entries = [None] * dim + [axes] if axes else []
        return NamedSharding(rule.mesh, PartitionSpec(*entries))

    return Layout(shape, padded, along(rule.device_axes(role)), along(rule.state_axes))
