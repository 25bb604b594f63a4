"""Programs made by hand: what `segment` and `optim` would say of a small model.

Nothing here imports jax, numpy or the packages that do.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from zinf.core.plan import (
    ArrayUpdate,
    Catalog,
    UpdateUnit,
    count_contributions,
    tier_in_turn,
)
from zinf.core.program import ArrayId, ArraySpec, Leaf, Program, Role, SegmentSpec, Tier

FLOAT_BYTES, HALF_BYTES = 4, 2


@dataclass(frozen=True)
class LeafCase:
    """A parameter leaf of `num_rows` rows; kept by row if it `is_stacked`."""

    path: str
    num_rows: int = 1
    row_numel: int = 64
    is_stacked: bool = False
    is_trainable: bool = True

    def leaf(self, itemsize: int) -> Leaf:
        spec = ArraySpec((self.num_rows, self.row_numel), f"f{itemsize}", itemsize)
        rows = self.num_rows if self.is_stacked else None
        return Leaf(self.path, spec, self.is_trainable, rows)


@dataclass(frozen=True)
class Layer:
    """A segment: `params` are leaves or rows of stacked ones, `outputs` new values."""

    name: str
    params: tuple[ArrayId, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True)
class Toy:
    """A program with the sizes of everything that a plan of it may name.

    `workspace_bytes` are those of each pass, and of each update.
    """

    program: Program
    specs: Mapping[ArrayId, ArraySpec]
    updates: Sequence[tuple[str, tuple[ArrayUpdate, ...]]] = field(repr=False)
    workspace_bytes: int
    is_fine: bool = False

    def catalog(
        self, homes: Mapping[ArrayId, Tier], *, num_microbatches: int = 1
    ) -> Catalog:
        workspace = [(self.workspace_bytes, 2 * self.workspace_bytes)]
        counts = count_contributions(self.program, num_microbatches)
        num_segments = len(self.program.segments)
        consts = {ArrayId(Role.CONST, n): Tier.DEVICE for n in self.program.consts}
        return Catalog(
            self.program,
            self.specs,
            {**homes, **consts},
            workspace * num_segments,
            counts,
        )

    def units(self, homes: Mapping[ArrayId, Tier]) -> list[UpdateUnit]:
        return self.units_for(homes, Tier.HOST)

    def units_for(
        self, homes: Mapping[ArrayId, Tier], update_tier: Tier, turns: int = 0
    ) -> list[UpdateUnit]:
        """One unit a segment and tier: an update runs on the device if all that it
        touches is there."""
        units = []
        for number, (segment, updates) in enumerate(self.updates):
            usual = tier_in_turn(update_tier, turns, number)
            groups: dict[Tier, list[ArrayUpdate]] = {}
            for update in updates:
                homes_of = {homes.get(a, homes.get(a.whole)) for a in update.results}
                tier = Tier.DEVICE if homes_of == {Tier.DEVICE} else usual
                groups.setdefault(tier, []).append(update)
            for tier, members in groups.items():
                parts = [[m] for m in members] if self.is_fine else [members]
                units += [
                    UpdateUnit(segment, tier, tuple(part), self.workspace_bytes)
                    for part in parts
                ]
        return units

    def homes(self, param: Tier, state: Tier) -> dict[ArrayId, Tier]:
        """Parameters on one tier; masters and optimizer state on another."""
        return {
            a: param if a.role == Role.PARAM else state
            for a in self.specs
            if a.role != Role.CONST
        }

    def bytes_of(self, *roles: str) -> int:
        return sum(s.nbytes for a, s in self.specs.items() if a.role in roles)


def make_toy(
    leaves: Sequence[LeafCase],
    layers: Sequence[Layer],
    *,
    value_numel: Mapping[str, int] | int = 32,
    batch: tuple[str, ...] = ("batch/x",),
    consts: tuple[str, ...] = (),
    num_aux: int = 0,
    is_mixed: bool = False,
    num_states: int = 2,
    block_rows: int | None = None,
    workspace_bytes: int = 40,
    is_fine: bool = False,
) -> Toy:
    """The last layer computes the loss, whatever its `outputs`.

    Args:
        value_numel: elements of values, by name or of all.
        is_mixed: trained leaves have a float32 master beside 16-bit compute copies.
        block_rows: leaves that are not stacked are updated by blocks of so many rows.
        is_fine: every block is a unit of its own.
    """
    itemsize = HALF_BYTES if is_mixed else FLOAT_BYTES
    all_leaves = tuple(case.leaf(itemsize) for case in leaves)
    names = [*batch, *consts, *(v for layer in layers[:-1] for v in layer.outputs)]
    outputs = tuple(f"out/{i}" for i in range(1 + num_aux))
    numel = value_numel if isinstance(value_numel, Mapping) else {}
    size = 32 if isinstance(value_numel, Mapping) else value_numel
    values = {n: ArraySpec((numel.get(n, size),), "f4", FLOAT_BYTES) for n in names}
    values.update({n: ArraySpec((), "f4", FLOAT_BYTES) for n in outputs})
    layers = (*layers[:-1], _with_outputs(layers[-1], outputs))
    trainable = {leaf.path for leaf in all_leaves if leaf.is_trainable}
    active = _active(layers, trainable)
    segments = tuple(
        SegmentSpec(
            name=layer.name,
            params=layer.params,
            trainable=tuple(a.path in trainable for a in layer.params),
            inputs=layer.inputs,
            outputs=layer.outputs,
            active_inputs=tuple(v for v in layer.inputs if v in active),
            active_outputs=tuple(v for v in layer.outputs if v in active),
            body=i,
            flops=100,
        )
        for i, layer in enumerate(layers)
    )
    program = Program(all_leaves, segments, values, batch, consts, tuple(outputs))
    specs = _specs(all_leaves, is_mixed=is_mixed, num_states=num_states)
    specs.update({ArrayId(Role.CONST, name): values[name] for name in consts})
    updates = _updates(program, is_mixed, num_states, block_rows)
    return Toy(program, specs, updates, workspace_bytes, is_fine)


def chain(num_layers: int, *, leaf: LeafCase | None = None, **options: object) -> Toy:
    """Layers in a row, each with a leaf of its own (`leaf`, under the layer's name)."""
    base = leaf or LeafCase("w")
    leaves, layers, value = [], [], "batch/x"
    for i in range(num_layers):
        path = f"layer{i}/w"
        leaves.append(LeafCase(path, base.num_rows, base.row_numel))
        output = f"layer{i}.0"
        layers.append(
            Layer(f"layer{i}", (ArrayId(Role.PARAM, path),), (value,), (output,))
        )
        value = output
    return make_toy(leaves, layers, **options)


def _with_outputs(layer: Layer, outputs: tuple[str, ...]) -> Layer:
    return Layer(layer.name, layer.params, layer.inputs, outputs)


def _active(layers: Sequence[Layer], trainable: set[str]) -> set[str]:
    """Values on a path from a trained parameter to the loss."""
    depends: set[str] = set()
    for layer in layers:
        trains = any(a.path in trainable for a in layer.params)
        if trains or not depends.isdisjoint(layer.inputs):
            depends.update(layer.outputs)
    influences = {layers[-1].outputs[0]}
    for layer in reversed(layers):
        if not influences.isdisjoint(layer.outputs):
            influences.update(layer.inputs)
    return depends & influences


def _specs(
    leaves: Sequence[Leaf], *, is_mixed: bool, num_states: int
) -> dict[ArrayId, ArraySpec]:
    specs = {}
    for leaf in leaves:
        spec = leaf.array_spec()
        wide = ArraySpec(spec.shape, "f4", FLOAT_BYTES)
        specs.update(dict.fromkeys(leaf.arrays(), spec))
        if leaf.is_trainable:
            wholes = [ArrayId(Role.MASTER, leaf.path)] if is_mixed else []
            slots = range(num_states)
            wholes += [ArrayId(Role.STATE, leaf.path, slot=i) for i in slots]
            for whole in wholes:
                specs.update(dict.fromkeys(leaf.pieces(whole), wide))
    return specs


def _updates(
    program: Program, is_mixed: bool, num_states: int, block_rows: int | None
) -> list[tuple[str, tuple[ArrayUpdate, ...]]]:
    leaves = {leaf.path: leaf for leaf in program.leaves}
    grouped = []
    for position in reversed(range(len(program.segments))):
        segment = program.segments[position]
        earlier = {
            a
            for s in program.segments[:position]
            if s.has_backward
            for a in s.trained_params
        }
        runs = position == len(program.segments) - 1 or segment.has_backward
        done = [a for a in segment.trained_params if a not in earlier] if runs else []
        updates = [
            _update(array, rows, is_mixed, num_states)
            for array in done
            for rows in _blocks(leaves[array.path], block_rows)
        ]
        grouped.append((segment.name, tuple(updates)))
    return grouped


def _blocks(leaf: Leaf, block_rows: int | None) -> list[tuple[int, int] | None]:
    count = leaf.spec.shape[0]
    if leaf.num_layers is not None or block_rows is None or count <= block_rows:
        return [None]
    starts = range(0, count, block_rows)
    return [(start, min(start + block_rows, count)) for start in starts]


def _update(
    array: ArrayId, rows: tuple[int, int] | None, is_mixed: bool, num_states: int
) -> ArrayUpdate:
    stored = rows or array.rows
    compute = ArrayId(Role.PARAM, array.path, stored)
    return ArrayUpdate(
        gradient=ArrayId(Role.GRADIENT, array.path, array.rows),
        block=rows,
        master=ArrayId(Role.MASTER, array.path, stored) if is_mixed else compute,
        states=tuple(
            ArrayId(Role.STATE, array.path, stored, slot=i) for i in range(num_states)
        ),
        compute=compute if is_mixed else None,
    )
