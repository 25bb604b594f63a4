"""The table of a step's arrays: what each is in the program, and how it is cut."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from math import prod
from types import MappingProxyType

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from zinf.core.program import FLOAT32_BYTES, ArrayId, ArraySpec, Program, Role, Rows
from zinf.core.sharding.layout import Layout
from zinf.core.sharding.mesh import Dim, make_mesh, replicated
from zinf.core.sharding.parts import AbstractParts, Parts
from zinf.core.sharding.rule import STATE_STAGE, AxisRule, axis_rule
from zinf.core.sharding.signs import Phase

ENCODED_DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class ArrayEntry:
    """A persistent array, as a whole or as rows of the leading dim."""

    spec: ArraySpec
    layout: Layout

    def piece(self, rows: Rows) -> "ArrayEntry":
        """The entry of these rows; the leading dim must not be cut."""
        return ArrayEntry(self.spec.piece(rows), self.layout.piece(rows))

    @property
    def share(self) -> ArraySpec:
        """The spec of this process's share."""
        return replace(self.spec, shape=self.layout.share_shape)

    @property
    def on_device(self) -> ArraySpec:
        """The spec of the part that one device holds."""
        return replace(self.spec, shape=self.layout.device_shape)


@dataclass(frozen=True)
class Layouts:
    """The table of all arrays that a step names.

    Attributes:
        arrays: every persistent array as a whole, in the order of the parameters.
        gradients: layouts of the gradients of parameters, by path.
        parts: of those, the gradients that may be parts until they are exchanged.
        values: layouts of the values that cross cuts, by name.
        by_signs: the leaves of which an optimizer sends signs in some steps.
    """

    rule: AxisRule
    arrays: Mapping[ArrayId, ArrayEntry]
    gradients: Mapping[str, Layout]
    values: Mapping[str, Layout]
    parts: Mapping[str, AbstractParts] = field(default_factory=dict)
    by_signs: frozenset[str] = frozenset()

    @property
    def mesh(self) -> Mesh:
        return self.rule.mesh

    def of(self, array: ArrayId) -> Layout:
        """The layout of an array, which may be rows of another."""
        match array.role.layout_role:
            case Role.VALUE:
                return self.values[array.path]
            case Role.NORM:
                return whole_layout((), self.mesh)
            case Role.GRADIENT:
                return self.gradients[array.path].piece(array.rows)
            case Role.PARTS:
                return self.parts[array.path].piece(array.rows).layout
        return self.arrays[array.whole].layout.piece(array.rows)

    def parts_of(self, array: ArrayId) -> AbstractParts | None:
        """How the gradient of a parameter, or of rows of it, may be parts."""
        found = self.parts.get(array.path)
        return None if found is None else found.piece(array.rows)

    def in_phase(self, phase: Phase) -> "Layouts":
        """The same arrays, with gradients as an optimizer sends them in a phase."""
        compression = self.rule.compression
        assert compression is not None
        found = {
            path: compression.parts(one.total, phase)
            for path, one in self.parts.items()
        }
        parts = {path: one for path, one in found.items() if one is not None}
        return replace(self, parts=parts)

    def restored_parts(self, path: str) -> AbstractParts | None:
        """The parts that a gradient has, or that it would have on several devices."""
        rule = self.rule.unused_compression
        if rule is None or path not in self.gradients:
            return self.parts.get(path)
        return rule.parts(self.gradients[path], rule.phases[0])

    @property
    def specs(self) -> dict[ArrayId, ArraySpec]:
        """The spec of every persistent array as a whole."""
        return {array: entry.spec for array, entry in self.arrays.items()}

    @property
    def device_bytes(self) -> int:
        """Bytes on one device if all persistent arrays rest on the devices."""
        return sum(entry.on_device.nbytes for entry in self.arrays.values())

    def share(self, array: ArrayId) -> ArraySpec:
        """The spec of this process's share of a persistent array, or of rows of it."""
        return self.arrays[array.whole].piece(array.rows).share

    def own_part(self, gradient: ArrayId) -> Layout | None:
        """The layout of the part of a gradient that each device updates alone.

        None if a device holds no more than that: before stage 1 each device updates
        everything, and from stage 2 on it has only its own part of a gradient. None
        also of leaves that go by signs, since each device updates the whole momentum.
        """
        layout = self.of(gradient.whole)
        if self.rule.stage < STATE_STAGE or layout.share == layout.device:
            return None
        if gradient.path in self.by_signs:
            return None
        return replace(layout, device=layout.share)

    def with_inputs(self, program: Program) -> "Layouts":
        """These layouts with those of a program's inputs.

        They are the batch, the key, constants, caches and tables of experts.

        Raises:
            ValueError: the batch does not divide among the devices.
        """
        shapes = {
            name: program.values[name].shape
            for name in (
                *(*program.batch, *program.consts, *program.caches),
                *program.tables,
            )
        }
        by_example = (*program.batch_leaves, *program.caches)
        batch = {name: shapes[name] for name in by_example}
        values = {n: whole_layout(shape, self.mesh) for n, shape in shapes.items()}
        return replace(self, values=values | batch_layouts(batch, self.rule))

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

        The keys are `ArrayId.layout_array`; fractions of 1 are left out.
        """
        layouts = {
            **{ArrayId(Role.VALUE, n): layout for n, layout in self.values.items()},
            **{array: entry.layout for array, entry in self.arrays.items()},
            **{ArrayId(Role.GRADIENT, p): x for p, x in self.gradients.items()},
        }
        parts = {array: _part(layout) for array, layout in layouts.items()}
        for path, one in self.parts.items():
            # Each device has a sum of the whole gradient, and a share counts as one.
            share = prod(self.gradients[path].share_shape)
            parts[ArrayId(Role.PARTS, path)] = Fraction(prod(one.total.shape), share)
        return {array: part for array, part in parts.items() if part != 1}


def whole_layout(shape: tuple[int, ...], mesh: Mesh) -> Layout:
    """The layout of an array that every device and process has whole."""
    sharding = replicated(mesh)
    return Layout(shape, shape, sharding, sharding)


def placed_layout(shape: tuple[int, ...], sharding: NamedSharding) -> Layout:
    """The layout of a value with this sharding on the devices."""
    return Layout(shape, shape, sharding, sharding)


def batch_layouts(
    shapes: Mapping[str, tuple[int, ...]], rule: AxisRule
) -> dict[str, Layout]:
    """The layouts of the leaves of a microbatch, by name.

    Examples are divided among devices, and positions too if the mesh has a `seq` axis.

    Raises:
        ValueError: examples or positions do not divide evenly.
    """
    found = {}
    for name, dims in batch_dims(shapes, rule).items():
        shape = shapes[name]
        # S + 1 tokens are cut later, where the loss takes S of them.
        even = [
            dim if dim is not None and size % rule.size(dim) == 0 else None
            for size, dim in zip(shape, dims, strict=True)
        ]
        found[name] = placed_layout(shape, rule.sharding(even))
    return found


def batch_dims(
    shapes: Mapping[str, tuple[int, ...]], rule: AxisRule
) -> dict[str, tuple[Dim | None, ...]]:
    """What the dims of the leaves of a microbatch hold, by name.

    Dim 0 holds examples. If the mesh has a `seq` axis, dim 1 of the largest leaf that
    has one holds positions, and so does dim 1 of others with as many, or with one more
    or less: labels may be tokens, shifted by one.

    Raises:
        ValueError: examples or positions do not divide evenly, or no leaf has
            positions.
    """
    count, parts = rule.size(Dim.BATCH), rule.size(Dim.SEQUENCE)
    length = _num_positions(shapes, parts) if parts > 1 else None
    found = {}
    for name, shape in shapes.items():
        if shape and shape[0] % count:
            raise ValueError(
                f"{name} has {shape[0]} examples in a microbatch of all processes, "
                f"which {count} data-parallel devices cannot divide evenly. Give a "
                f"multiple of {count}, or fewer devices "
                "(mesh=zinf.make_mesh(devices))."
            )
        dims: list[Dim | None] = [None] * len(shape)
        dims[:1] = [Dim.BATCH][: len(shape)]
        if length is not None and len(shape) > 1 and abs(shape[1] - length) <= 1:
            dims[1] = Dim.SEQUENCE
        found[name] = tuple(dims)
    return found


def _num_positions(shapes: Mapping[str, tuple[int, ...]], parts: int) -> int:
    """The number of positions in a batch, of which `parts` devices take some each."""
    sequences = {name: shape for name, shape in shapes.items() if len(shape) > 1}
    if not sequences:
        given = ", ".join(f"{n} {list(shape)}" for n, shape in shapes.items())
        raise ValueError(
            f"mesh.seq = {parts} divides the sequences of a batch, and no leaf has "
            f"any: {given or 'it has no leaves'}. Dim 1 of a leaf must hold positions. "
            "Give such a batch, or set mesh.seq to 1."
        )
    name = max(sequences, key=lambda n: prod(sequences[n]))
    length = sequences[name][1]
    # S inputs and their labels are S + 1 tokens.
    if length % parts and (length - 1) % parts:
        raise ValueError(
            f"{name} has {length} positions, which mesh.seq = {parts} devices cannot "
            f"divide evenly. Give a multiple of {parts}, or one more (inputs and "
            "labels of one array), or set mesh.seq to a divisor."
        )
    return length


def persistent_layouts(
    specs: Mapping[ArrayId, ArraySpec],
    rule: AxisRule,
    *,
    layers: Collection[str] = (),
    divided: Mapping[str, Mapping[int, Dim]] = MappingProxyType({}),
    indivisible: Collection[str] = (),
    trained: Collection[str] | None = None,
    read: Collection[ArrayId] = (),
) -> Layouts:
    """The table of persistent arrays, with the gradients of parameters.

    Args:
        specs: every array as a whole.
        layers: leaves whose leading dim counts layers (`core.segment.read_by_row`).
        divided: for leaves that axes of their own cut, in every form and at every
            stage, the dims that are cut (`axes.experts`).
        indivisible: leaves that are updated as wholes and therefore never padded.
        trained: leaves whose gradients may be parts; None: all.
        read: state that exchanges of parts read: every device has it whole.
    """
    arrays, gradients, parts = {}, {}, {}
    for array, spec in specs.items():
        # State may have fewer dims than its parameter (adafactor).
        param = specs.get(ArrayId(Role.PARAM, array.path), spec)
        has_layers = array.path in layers and spec.shape[:1] == param.shape[:1]
        dims = {
            d: meaning
            for d, meaning in divided.get(array.path, {}).items()
            if spec.shape[: d + 1] == param.shape[: d + 1]
        }
        flags = has_layers, dims, array.path not in indivisible
        layout = _layout(array.role, spec.shape, rule, *flags)
        if array.role == Role.PARAM and spec.dtype in ENCODED_DTYPES:
            is_copy = ArrayId(Role.MASTER, array.path) in specs
            is_short_copy = is_copy and spec.itemsize == 2
            layout = _encoded(layout, rule, is_short_copy=is_short_copy)
        arrays[array] = ArrayEntry(spec, layout)
        if array.role == Role.PARAM:
            total = _layout(Role.GRADIENT, spec.shape, rule, *flags)
            gradients[array.path] = total
            one = _parts(total, rule) if spec.dtype in ENCODED_DTYPES else None
            if one is not None and (trained is None or array.path in trained):
                parts[array.path] = one
                for slot, error in enumerate(one.errors):
                    its = ArrayId(Role.ERROR, array.path, slot=slot)
                    size = jnp.dtype(one.error_dtype).itemsize
                    kind = ArraySpec(error.shape, one.error_dtype, size)
                    arrays[its] = ArrayEntry(kind, error)
    for array in read:
        if array.path in parts:
            entry = arrays[array]
            whole = replace(entry.layout, device=entry.layout.computed)
            arrays[array] = replace(entry, layout=whole)
    by_signs = frozenset() if rule.compression is None else frozenset(parts)
    return Layouts(rule, arrays, gradients, {}, parts, by_signs)


def _parts(total: Layout, rule: AxisRule) -> AbstractParts | None:
    """How devices exchange parts of a gradient; None if encoding saves no bytes."""
    if rule.compression is not None:
        return rule.compression.parts(total, rule.compression.phases[0])
    encoding = rule.gradient_encoding
    if encoding is None or total.is_gathered or len(total.shape) < 2:
        return None
    if not encoding.is_worth_it(total.device_shape):
        return None
    return Parts(total, encoding, rule.node_size)


def _encoded(layout: Layout, rule: AxisRule, *, is_short_copy: bool) -> Layout:
    """A layout with the encoding of the rule, if that saves bytes.

    Args:
        is_short_copy: updates make the array, of 16 bits a number, from a master that
            no rounding reaches. So it is encoded between groups too ([Note: rounded
            once] holds for 16 bits).
    """
    encoding = rule.encoding
    if encoding is None or not encoding.is_worth_it(layout.device_shape):
        return layout
    own, groups = layout.share.shard_shape(layout.padded), 1
    if is_short_copy and encoding.is_worth_it(own):
        groups = prod(layout.device_shape) // prod(own)
    return replace(layout, encoding=encoding, num_groups=groups)


def layouts_on_one(device: jax.Device, specs: Mapping[ArrayId, ArraySpec]) -> Layouts:
    """The table of arrays that are whole on one device."""
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
    divided: Mapping[int, Dim],
    may_pad: bool,
) -> Layout:
    rule = rule.dividing(divided.values())
    # The bytes are counted in float32 for every dtype: all arrays of a shape are cut
    # alike, since those that are updated together must be.
    nbytes = prod(shape) * FLOAT32_BYTES
    dim = rule.cut_dim(
        shape, nbytes, has_layers=has_layers, divided=divided, may_pad=may_pad
    )
    padded = list(shape)
    if dim is not None:
        padded[dim] = -(-shape[dim] // rule.num_shards) * rule.num_shards

    def along(axes: tuple[str, ...]) -> NamedSharding:
        entries: list[tuple[str, ...] | None] = [None] * len(shape)
        for place, meaning in divided.items():
            entries[place] = rule.axes(meaning) or None
        if dim is not None:
            entries[dim] = axes or None
        while entries and entries[-1] is None:
            entries.pop()
        return NamedSharding(rule.mesh, PartitionSpec(*entries))

    return Layout(
        shape,
        tuple(padded),
        along(rule.device_axes(role)),
        along(rule.state_axes),
        whole=along(()) if divided else None,
    )
