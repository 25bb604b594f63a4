"""Gradients as one partial sum a device, until devices exchange them (ZeRO++'s qgZ).

The gradient of a weight is a sum over the examples of all devices. As *parts* each
device has the sum over its own examples, of the whole weight. They are added up over
microbatches, and then exchanged once: each device gets the sum over all devices of the
rows that it keeps. Wang et al. 2023, "ZeRO++", section 3.3: what is sent is quantized,
first within a node, and between nodes only the sums of each node.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from operator import add
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from zinf.core.program import Rows
from zinf.core.sharding.encoding import Nibbles
from zinf.core.sharding.layout import Layout

NODE, LOCAL = "node", "local"
# Parts of layers and tiles are rows of the parts of a leaf, so the leading dim stays.
DEVICE_DIM = 1


@dataclass(frozen=True)
class Parts:
    """The parts of one gradient, and how devices exchange them.

    The parts are one array (rows, devices, ...) for a gradient (rows, ...): device i
    has entry i of dim 1.

    Attributes:
        total: the layout of the gradient, which all devices cut along one dim.
        encoding: what is sent; every number is quantized once for each level.
        node_size: devices that exchange first, neighbours in the order of the mesh;
            their number, or 1, makes one level.
    """

    total: Layout
    encoding: Nibbles
    node_size: int

    @property
    def mesh(self) -> Mesh:
        assert isinstance(self.total.device.mesh, Mesh)
        return self.total.device.mesh

    @cached_property
    def layout(self) -> Layout:
        """The layout of the parts."""
        rows, *rest = self.total.shape
        shape = (rows, self.mesh.size, *rest)
        spec = PartitionSpec(None, self.mesh.axis_names)
        sharding = NamedSharding(self.mesh, spec)
        return Layout(shape, shape, sharding, sharding)

    def piece(self, rows: Rows) -> "Parts":
        """The parts of these rows of the gradient."""
        return replace(self, total=self.total.piece(rows))

    def exchange(self, parts: Any, dtype: Any) -> Any:
        """The gradient in its device form, from its parts; traceable.

        Args:
            dtype: of the gradient; sums are in float32.
        """
        mesh, entry = self._levels, (NODE, LOCAL)
        before = PartitionSpec(None, entry)
        after = PartitionSpec(*[None] * self._cut_dim, entry)
        sharding = NamedSharding(mesh, before)
        parts = jax.lax.with_sharding_constraint(parts, sharding)
        run = jax.shard_map(
            self._exchange_here, mesh=mesh, in_specs=before, out_specs=after
        )
        total = run(parts).astype(dtype)
        return jax.lax.with_sharding_constraint(total, self.total.device)

    def _exchange_here(self, own: Any) -> Any:
        """One device's rows of the sum in float32, from its own parts."""
        num_nodes, size = self._levels.devices.shape
        x = self._by_receiver(jnp.squeeze(own, DEVICE_DIM).astype(jnp.float32))
        x = x.reshape(num_nodes, size, *x.shape[1:])
        if size > 1:
            x = jnp.moveaxis(x, 1, 0)
            x = _sum(self._sent(x, LOCAL))
        else:
            x = x[:, 0]
        return _sum(self._sent(x, NODE)) if num_nodes > 1 else x[0]

    def _by_receiver(self, own: Any) -> Any:
        """The parts of all receivers, (devices, ...), in the order of the mesh."""
        sizes = zip(own.shape, self.total.padded, strict=True)
        own = jnp.pad(own, [(0, size - n) for n, size in sizes])
        dim, count = self._cut_dim, self.mesh.size
        shape = *own.shape[:dim], count, -1, *own.shape[dim + 1 :]
        return jnp.moveaxis(own.reshape(shape), dim, 0)

    def _sent(self, x: Any, axis: str) -> Any:
        """What devices along an axis send to this one, (senders, ...).

        Args:
            x: what this device sends to each, (receivers, ...).
        """
        count, shape = len(x), x.shape
        rows = x.reshape(-1, *self.total.device_shape[1:])
        sent = self.encoding.encode(rows)
        sent = [
            jax.lax.all_to_all(y.reshape(count, -1), axis, 0, 0, tiled=True)
            for y in sent
        ]
        return self.encoding.decode(sent, rows.shape, jnp.float32).reshape(shape)

    @cached_property
    def _cut_dim(self) -> int:
        """The dim along which devices cut the gradient."""
        entries = enumerate(self.total.device.spec)
        (dim,) = [d for d, entry in entries if entry]
        return dim

    @cached_property
    def _levels(self) -> Mesh:
        """The same devices as a mesh of nodes and of devices in each."""
        shape = -1, self.node_size
        types = (AxisType.Auto,) * 2
        devices = self.mesh.devices.reshape(shape)
        return Mesh(devices, (NODE, LOCAL), axis_types=types)


def _sum(parts: Sequence[Any]) -> Any:
    """The sum in the order of devices, so that all compilers round it alike."""
    return reduce(add, list(parts))
