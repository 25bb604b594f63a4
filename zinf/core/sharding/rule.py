"""One rule: which dims of arrays and values are cut along which axes of a mesh.

A dim of an array has a meaning, its *logical dim*: examples of a batch, positions of a
sequence, layers of a stack, or rows, which have no other meaning. `mesh.DIM_AXES` maps
each to mesh axes. The rule is the same for values that a step computes and for state
that persists.

For state the ZeRO stage decides which arrays are cut on the devices (Rajbhandari et al.
2020, "ZeRO", section 5): optimizer state from stage 1, gradients from 2, parameters
from 3. On host and drive all arrays are cut at every stage: each process stores its own
share, so the links of all processes move a part of every array ("bandwidth-centric
partitioning", Rajbhandari et al. 2021, "ZeRO-Infinity", section 6.1).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from types import MappingProxyType

import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from zinf.core.program import Role
from zinf.core.sharding.encoding import Blocks, Nibbles
from zinf.core.sharding.mesh import (
    DIM_AXES,
    FSDP,
    INNER_AXES,
    REPLICA,
    SEQ,
    TENSOR,
    Dim,
    axis_size,
    local_devices,
)
from zinf.core.sharding.signs import AbstractCompression

STATE_STAGE, GRADIENT_STAGE, PARAM_STAGE = 1, 2, 3
# A shard narrower than this along the last dim wastes lanes of a TPU.
LANES = 128
# Arrays of fewer bytes waste little so, and keep their rows whole for reads by tile.
WIDE_BYTES = 4 << 20


@dataclass(frozen=True)
class AxisRule:
    """How arrays and values are cut.

    Attributes:
        stage: the ZeRO stage, 0 to 3.
        min_bytes: smaller arrays are not cut.
        gathers_in_group: if true, parameters are cut within each replica only, and all
            other arrays among all replicas too (ZeRO++'s hpZ). If false, no array is
            cut along `replica`, so the groups are copies of each other (MiCS).
        cuts_experts: whether devices along `tensor` divide the weights of each expert.
        encoding: what floating-point parameters are sent as when they are gathered.
        gradient_encoding: what parts of gradients are sent as; None leaves sums over
            devices to the compiler.
        node_size: devices that exchange parts of gradients first.
        compression: what devices send by its signs, in place of gradients.
        unused_compression: the same of one device, which sends nothing.
        divided: dims of the arrays that their own axes cut in every form of the array,
            such as `Dim.EXPERTS`. ZeRO cuts the arrays along the other axes alone,
            since devices along `expert` have other experts (DeepSpeed-MoE's expert-data
            parallelism, https://arxiv.org/abs/2201.05596, section 5.2).
    """

    mesh: Mesh
    stage: int
    min_bytes: int
    gathers_in_group: bool = False
    encoding: Blocks | None = None
    cuts_experts: bool = False
    gradient_encoding: Nibbles | None = None
    node_size: int = 1
    compression: AbstractCompression | None = None
    unused_compression: AbstractCompression | None = None
    divided: frozenset[Dim] = frozenset()

    def dividing(self, dims: Iterable[Dim]) -> "AxisRule":
        """The rule of arrays with these dims, which their own axes cut."""
        return replace(self, divided=frozenset(dims))

    def axes(self, dim: Dim) -> tuple[str, ...]:
        """The axes of the mesh that cut a logical dim; none if it is not cut."""
        found = axes_of(self.mesh, dim)
        if dim != Dim.ROWS:
            return found
        taken = {name for other in self.divided for name in self.axes(other)}
        return tuple(name for name in found if name not in taken)

    def size(self, dim: Dim) -> int:
        """The number of parts into which a logical dim is cut."""
        return axis_size(self.mesh, self.axes(dim))

    def sharding(self, dims: Sequence[Dim | None]) -> NamedSharding:
        """The sharding of a value whose dims have these meanings."""
        entries = [None if dim is None else self.axes(dim) or None for dim in dims]
        while entries and entries[-1] is None:
            entries.pop()
        return NamedSharding(self.mesh, PartitionSpec(*entries))

    @property
    def param_axes(self) -> tuple[str, ...]:
        """The axes that cut parameters on the devices from stage 3 on."""
        return self.axes(Dim.ROWS)

    @property
    def state_axes(self) -> tuple[str, ...]:
        """The axes that cut masters, optimizer state and gradients on the devices, and
        all arrays off the devices."""
        group = self.param_axes
        spans = self.gathers_in_group and axis_size(self.mesh, (REPLICA,)) > 1
        return (REPLICA, *group) if spans else group

    def device_axes(self, role: Role) -> tuple[str, ...]:
        """The axes that cut arrays of a role on the devices; none if they are whole."""
        if role == Role.PARAM:
            return self.param_axes if self.stage >= PARAM_STAGE else ()
        if role == Role.GRADIENT:
            return self.state_axes if self.stage >= GRADIENT_STAGE else ()
        return self.state_axes if self.stage >= STATE_STAGE else ()

    @property
    def num_shards(self) -> int:
        return axis_size(self.mesh, self.state_axes)

    def cut_dim(
        self,
        shape: tuple[int, ...],
        nbytes: int,
        *,
        has_layers: bool = False,
        divided: Mapping[int, Dim] = MappingProxyType({}),
        may_pad: bool = True,
    ) -> int | None:
        """The dim along which ZeRO cuts an array into shares; None if it does not.

        Dims after the leading one are tried first: rows of the leading dim (tiles,
        blocks of an update) are moved and updated separately, which would need a
        collective if that dim were cut.

        Args:
            has_layers: the leading dim counts layers, so it is never cut.
            divided: dims that other axes cut, so that ZeRO never does.
            may_pad: a dim that does not divide evenly may be padded with zeros.
        """
        count = self.num_shards
        # Keep arrays whole whose shards would have one element: XLA compiles those as
        # scalars, which may round differently from the share on the host.
        if count == 1 or nbytes < self.min_bytes or prod(shape) <= count:
            return None
        meanings = [Dim.ROWS] * len(shape)
        if has_layers and shape:
            meanings[0] = Dim.LAYERS
        for place, meaning in divided.items():
            meanings[place] = meaning
        order = (*range(1, len(shape)), *range(min(1, len(shape))))
        dims = [d for d in order if meanings[d] == Dim.ROWS and shape[d] > 1]
        even = [d for d in dims if shape[d] % count == 0]
        last = len(shape) - 1
        wide = [d for d in even if d != last or shape[d] // count >= LANES]
        if wide == [0] and nbytes < WIDE_BYTES:
            wide = []  # Only the leading dim is wide, and lanes matter less than rows.
        if wide or even:
            return (wide or even)[0]
        # Padding the largest dim wastes least.
        return max(dims, key=lambda d: shape[d], default=None) if may_pad else None


def axis_rule(
    mesh: Mesh,
    *,
    stage: int,
    min_bytes: int,
    gathers_in_group: bool = False,
    encoding: Blocks | None = None,
    cuts_experts: bool = False,
    gradient_encoding: Nibbles | None = None,
    compression: AbstractCompression | None = None,
) -> AxisRule:
    """The rule of a ZeRO stage on a mesh.

    Raises:
        ValueError: the devices of a group of hpZ are of several processes.
        NotImplementedError: both a sequence and weights are divided; parts of gradients
            would be exchanged between devices that divide more than examples.
    """
    if gathers_in_group and stage >= PARAM_STAGE:
        # The devices of a process must have all of its share of a parameter.
        what = "A group of {} devices (zero_hpz_partition_size)"
        _check_within_processes(mesh, (REPLICA,), f"{what} has", "use mics_shard_size")
    if axis_size(mesh, (SEQ,)) > 1 and axis_size(mesh, (TENSOR,)) > 1:
        raise NotImplementedError(
            f"mesh.seq = {mesh.shape[SEQ]} divides heads of attentions, and so does "
            f"mesh.tensor = {mesh.shape[TENSOR]}; zinf cannot do both. Set one of them "
            "to 1."
        )
    if not axes_of(mesh, Dim.ROWS):
        encoding = None
    unused_compression = None
    if mesh.size == 1:
        gradient_encoding = None
        compression, unused_compression = None, compression
    if compression is not None:
        _check_exchange(mesh, f"{compression.name} averages by signs")
    node_size = 1
    if gradient_encoding is not None:
        what = "zero_quantized_gradients exchanges gradients"
        _check_exchange(mesh, what, spans_replicas=gathers_in_group)
        node_size = mesh.shape[FSDP] if gathers_in_group else _process_size(mesh)
    return AxisRule(
        mesh,
        stage,
        min_bytes,
        gathers_in_group,
        encoding,
        cuts_experts,
        gradient_encoding,
        node_size,
        compression,
        unused_compression,
    )


def _check_exchange(mesh: Mesh, what: str, *, spans_replicas: bool = False) -> None:
    """Raise unless every device has other examples, and all exchange with each other.

    Args:
        what: begins the message.
    """
    others = [axis.name for axis in INNER_AXES]
    if not spans_replicas:
        others.append(REPLICA)
    found = [name for name in others if mesh.shape.get(name, 1) > 1]
    if found:
        sizes = " and ".join(f"mesh.{name} = {mesh.shape[name]}" for name in found)
        raise NotImplementedError(
            f"{what} among all devices, each of which has other examples. It does not "
            f"work yet with {sizes}. Set mesh.fsdp alone, for zero_quantized_gradients "
            "also zero_hpz_partition_size, or do without."
        )


def _process_size(mesh: Mesh) -> int:
    """Devices of each process; all, if processes have no neighbours of equal number."""
    owners = np.asarray([d.process_index for d in mesh.devices.flat])
    size = len(owners) // len(set(owners))
    if len(owners) % size or np.ptp(owners.reshape(-1, size), axis=1).any():
        return len(owners)
    return size


def axes_of(mesh: Mesh, dim: Dim) -> tuple[str, ...]:
    """The axes, of more than one device, that cut a logical dim on a mesh."""
    return tuple(name for name in DIM_AXES[dim] if mesh.shape.get(name, 1) > 1)


def num_data_parallel(mesh: Mesh) -> int:
    """The number of parts into which the examples of a batch are divided."""
    return axis_size(mesh, DIM_AXES[Dim.BATCH])


def batch_share(mesh: Mesh) -> tuple[int, int]:
    """(index, count): which of the parts of a batch this process gives.

    Processes whose devices have the same examples, for instance those of one tensor
    group, give the same part.
    """
    axes = [mesh.axis_names.index(name) for name in axes_of(mesh, Dim.BATCH)]
    by_examples = np.moveaxis(mesh.devices, axes, range(len(axes)))
    places = by_examples.reshape(num_data_parallel(mesh), -1)
    mine = set(local_devices(mesh))
    own = [n for n, place in enumerate(places) if mine.intersection(place)]
    return own[0] // len(own), len(places) // len(own)


def rows_of_process(mesh: Mesh, rows: int) -> int:
    """The rows that this process gives of a batch of at least `rows` rows.

    The batch is the smallest one that the devices divide evenly.
    """
    count = num_data_parallel(mesh)
    return -(-rows // count) * count // batch_share(mesh)[1]


def _check_within_processes(
    mesh: Mesh, across: Sequence[str], what: str, instead: str
) -> None:
    """Raise unless the devices at one place along the axes `across` are of one process.

    Args:
        what: the subject of the message, with a place for the number of devices.
        instead: what else to do, for the message.
    """
    names = [name for name in across if name in mesh.shape]
    sources = [mesh.axis_names.index(name) for name in names]
    groups = np.moveaxis(mesh.devices, sources, range(len(sources)))
    for place in np.ndindex(*groups.shape[: len(sources)]):
        group = np.atleast_1d(groups[place])
        processes = sorted({device.process_index for device in group.flat})
        if processes[1:]:
            raise ValueError(
                f"{what.format(group.size)} some "
                f"of the processes {', '.join(map(str, processes))}. Make it a divisor "
                f"of the devices of a process, or {instead}."
            )
