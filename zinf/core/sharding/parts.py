"""Gradients as one partial sum a device, until devices exchange them (ZeRO++'s qgZ).

The gradient of a weight is a sum over the examples of all devices. As *parts* each
device has the sum over its own examples, of the whole weight. They are added up over
microbatches, and then exchanged once: each device gets the sum over all devices of the
rows that it keeps. Wang et al. 2023, "ZeRO++", section 3.3: what is sent is quantized,
first within a node, and between nodes only the sums of each node.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from operator import add
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from zinf.core.program import Rows
from zinf.core.sharding.encoding import Nibbles
from zinf.core.sharding.layout import Layout

NODE, LOCAL = "node", "local"
# Parts of layers and tiles are rows of the parts of a leaf, so the leading dim stays.
DEVICE_DIM = 1


@dataclass(frozen=True)
class AbstractParts(ABC):
    """The parts of one gradient, and how devices exchange them.

    The parts are one array (rows, devices, ...) for a gradient (rows, ...): device i
    has entry i of dim 1.

    Attributes:
        total: the layout of the gradient.
        error_dtype: of the errors of exchanges.
        state: optax's name of the optimizer state that an exchange reads; empty: none.
    """

    total: Layout

    error_dtype: ClassVar[str]
    state: ClassVar[str] = ""

    @property
    def mesh(self) -> Mesh:
        assert isinstance(self.total.device.mesh, Mesh)
        return self.total.device.mesh

    @cached_property
    def layout(self) -> Layout:
        """The layout of the parts."""
        rows, *rest = self.total.shape
        whole = (rows, self.mesh.size, *rest)
        spec = PartitionSpec(None, self.mesh.axis_names)
        sharding = NamedSharding(self.mesh, spec)
        return Layout(whole, whole, sharding, sharding)

    @property
    @abstractmethod
    def errors(self) -> tuple[Layout, ...]:
        """The layouts of the errors, what exchanges lost; none if nothing is kept."""

    @abstractmethod
    def exchange(
        self, parts: Any, errors: Sequence[Any], dtype: Any, state: Any = None
    ) -> tuple[Any, list[Any], Any]:
        """The gradient in its device form, new errors, and the new state; traceable.

        Args:
            errors: in the layouts of `errors`.
            dtype: of the gradient; sums are in float32.
            state: whole, before the step, if `self.state` names one. The new state is
                what the update of the gradient makes of it; None without one.
        """

    @classmethod
    def exchange_all(
        cls, parts: Sequence[Self], contents: Sequence[tuple[Any, ...]]
    ) -> list[tuple[Any, list[Any], Any]]:
        """What `exchange` returns for several gradients, given its arguments."""
        pairs = zip(parts, contents, strict=True)
        return [one.exchange(*arguments) for one, arguments in pairs]

    def error_shapes(self, count: int) -> tuple[tuple[int, ...], ...]:
        """The shapes of the errors of so many devices, if `joined` takes them."""
        del count
        return ()

    def joined(self, slot: int, errors: np.ndarray) -> np.ndarray:
        """The errors of the devices of this mesh, from those of another number.

        Args:
            slot: the number of `errors` among those of another mesh.
        """
        raise NotImplementedError

    def piece(self, rows: Rows) -> Self:
        """The parts of these rows of the gradient."""
        return replace(self, total=self.total.piece(rows))


@dataclass(frozen=True)
class Parts(AbstractParts):
    """Parts that devices exchange in few bits; each gets the sums of its own rows.

    Attributes:
        total: all devices cut it along one dim.
        encoding: what is sent; every number is quantized once for each level.
        node_size: devices that exchange first, neighbours in the order of the mesh;
            their number, or 1, makes one level.
    """

    encoding: Nibbles
    node_size: int
    # Errors are added to numbers that are rounded to four bits.
    error_dtype: ClassVar[str] = "bfloat16"

    @cached_property
    def errors(self) -> tuple[Layout, ...]:
        """The layouts of the errors, one for each level; none without error feedback.

        An error is (rows, devices, receivers, ...): by device, what it lost of each
        part that it sent. At the second level it sends to as many as there are nodes.
        """
        if self.encoding.err_beta is None:
            return ()
        counts = [self.mesh.size, len(self._levels.devices)]
        rows, *rest = self.total.device_shape
        shapes = [(rows, self.mesh.size, n, *rest) for n in counts[: len(self._axes)]]
        return tuple(replace(self.layout, shape=x, padded=x) for x in shapes)

    def exchange(
        self, parts: Any, errors: Sequence[Any], dtype: Any, state: Any = None
    ) -> tuple[Any, list[Any], Any]:
        mesh, entry = self._levels, (NODE, LOCAL)
        before = PartitionSpec(None, entry)
        after = PartitionSpec(*[None] * self._cut_dim, entry)
        sharding = NamedSharding(mesh, before)
        run = jax.shard_map(
            self._exchange_here,
            mesh=mesh,
            in_specs=before,
            out_specs=(after, [before] * len(errors)),
        )
        given = [
            jax.lax.with_sharding_constraint(x, sharding) for x in (parts, *errors)
        ]
        total, new = run(*given)
        constrained = jax.lax.with_sharding_constraint
        pairs = zip(new, self.errors, strict=True)
        new = [constrained(error, layout.device) for error, layout in pairs]
        return constrained(total.astype(dtype), self.total.device), new, None

    def _exchange_here(self, own: Any, *errors: Any) -> tuple[Any, list[Any]]:
        """One device's rows of the sum in float32, and its new errors."""
        num_nodes, size = self._levels.devices.shape
        shape, new = self.total.device_shape, []
        x = self._by_receiver(jnp.squeeze(own, DEVICE_DIM).astype(jnp.float32))
        x = jnp.moveaxis(x.reshape(num_nodes, size, *shape), 1, 0)
        for level, axis in enumerate(self._axes):
            count = self._levels.shape[axis]
            x = x.reshape(-1, *shape)
            error = None
            if errors:
                error = jnp.moveaxis(jnp.squeeze(errors[level], DEVICE_DIM), 1, 0)
                x = x + error.astype(jnp.float32)
            sent = self.encoding.encode_all(x)
            if error is not None:
                lost = x - self.encoding.decode(sent, shape, jnp.float32)
                left = self.encoding.new_error(error.astype(jnp.float32), lost)
                left = jnp.expand_dims(jnp.moveaxis(left, 0, 1), DEVICE_DIM)
                new.append(left.astype(error.dtype))
            received = [
                jax.lax.all_to_all(y.reshape(count, -1), axis, 0, 0, tiled=True)
                for y in sent
            ]
            x = self.encoding.decode(received, shape, jnp.float32)
            x = _sum(x.reshape(count, -1, *shape))
        return x.reshape(shape), new

    def _by_receiver(self, own: Any) -> Any:
        """The parts of all receivers, (devices, ...), in the order of the mesh."""
        sizes = zip(own.shape, self.total.padded, strict=True)
        own = jnp.pad(own, [(0, size - n) for n, size in sizes])
        dim, count = self._cut_dim, self.mesh.size
        shape = *own.shape[:dim], count, -1, *own.shape[dim + 1 :]
        return jnp.moveaxis(own.reshape(shape), dim, 0)

    @cached_property
    def _cut_dim(self) -> int:
        """The dim along which devices cut the gradient."""
        entries = enumerate(self.total.device.spec)
        (dim,) = [d for d, entry in entries if entry]
        return dim

    @cached_property
    def _axes(self) -> list[str]:
        """The axes of `_levels` along which devices exchange, in order."""
        return [axis for axis in (LOCAL, NODE) if self._levels.shape[axis] > 1]

    @cached_property
    def _levels(self) -> Mesh:
        """The same devices as a mesh of nodes and of devices in each."""
        shape = -1, self.node_size
        types = (AxisType.Auto,) * 2
        devices = self.mesh.devices.reshape(shape)
        return Mesh(devices, (NODE, LOCAL), axis_types=types)


def _sum(parts: Any) -> Any:
    """The sum over dim 0 in its order, so that all compilers round it alike."""
    return reduce(add, list(parts))
