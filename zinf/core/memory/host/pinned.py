"""The host tier of an offloaded step: arrays that a compiled program reads by itself.

The arrays are `jax.Array`s of the memory kind `pinned_host`. Equal arrays of
consecutive layers rest as one stack, so that a loop over the layers can slice it. The
devices of the CPU backend have the same memory kinds, all in one memory.
"""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from zinf.core.memory.host.aligned import aligned_empty
from zinf.core.memory.host.pages import PINNED
from zinf.core.memory.host.store import HostStore
from zinf.core.memory.store import DONE, check_kind, check_replaces, check_rows
from zinf.core.program import ArrayId
from zinf.core.sharding import ArrayEntry, Layout, relative


@dataclass(frozen=True)
class Stack:
    """Arrays that rest as one: rows of a new leading dim, or a single array.

    Attributes:
        members: whole persistent arrays of one shape and dtype, by layer.
        entry: of each; at rest an array is cut as its shares are.
    """

    members: tuple[ArrayId, ...]
    entry: ArrayEntry

    @property
    def layout(self) -> Layout:
        return self.entry.layout

    @property
    def dtype(self) -> str:
        """The NumPy (or ml_dtypes) name."""
        return self.entry.spec.dtype

    @property
    def is_stacked(self) -> bool:
        return len(self.members) > 1

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array of all devices."""
        return (*self._leading, *self.layout.padded)

    @property
    def share_shape(self) -> tuple[int, ...]:
        """Shape of what this process keeps."""
        return (*self._leading, *self.layout.share_shape)

    @property
    def nbytes(self) -> int:
        """Bytes that this process keeps."""
        return len(self.members) * self.entry.share.nbytes

    @property
    def sharding(self) -> NamedSharding:
        """The sharding of the array at rest, in pinned host memory."""
        layout = self.layout.share
        spec = PartitionSpec(*[None] * len(self._leading), *layout.spec)
        return NamedSharding(layout.mesh, spec, memory_kind=PINNED)

    def abstract(self, dtype: Any = None) -> jax.ShapeDtypeStruct:
        """The array of all devices, or as many numbers of another dtype."""
        kind = np.dtype(self.dtype) if dtype is None else dtype
        return jax.ShapeDtypeStruct(self.shape, kind, sharding=self.sharding)

    @property
    def _leading(self) -> tuple[int, ...]:
        return (len(self.members),) if self.is_stacked else ()


class PinnedStore(HostStore):
    """A host tier whose stacks rest in pinned memory while steps run.

    `take` and `put` are for the step. `read` and `write` address the members of the
    stacks as arrays of their own, as every host tier does: a value that was read is
    valid until the next step or write. The first write of a stack makes it a NumPy
    array, and the next `take` moves it to pinned memory. Arrays that belong to no stack
    are kept as in `HostStore`.
    """

    def __init__(self, stacks: Sequence[Stack], capacity_bytes: int | None = None):
        super().__init__(capacity_bytes)
        self._places = {
            member: (stack, n)
            for stack in stacks
            for n, member in enumerate(stack.members)
        }
        self._stacks: dict[Stack, np.ndarray | jax.Array] = {}

    def take(self, stack: Stack) -> jax.Array:
        """The content of a stack, for a step, which may donate it.

        Raises:
            NotImplementedError: the arrays rest in other stacks, because the program of
                an earlier batch has other loops.
        """
        if stack not in self._stacks:
            raise NotImplementedError(
                f"{stack.members[0]} does not rest in one stack with the "
                f"{len(stack.members) - 1} arrays that the program of this batch reads "
                "in one loop: an earlier batch has other loops over layers. Give "
                "batches of one shape, or use execution: streamed."
            )
        content = self._stacks[stack]
        if isinstance(content, np.ndarray):
            content = self._stacks[stack] = _pinned(stack, content)
        return content

    def put(self, stack: Stack, content: jax.Array) -> None:
        """Replace the content of a stack by the result of a step."""
        assert stack in self._stacks, stack.members
        self._stacks[stack] = content

    def write(self, array: ArrayId, value: np.ndarray) -> Future[None]:
        if array.whole not in self._places:
            return super().write(array, value)
        check_kind(array, value, self.tier, np.ndarray)
        self.holds.wait(array)
        stack, n = self._places[array.whole]
        member = self._writable(stack)
        member = member[n] if stack.is_stacked else member
        memory = (
            member[slice(*check_rows(array, member.shape))] if array.rows else member
        )
        check_replaces(array, value, shape=memory.shape, dtype=memory.dtype)
        memory[...] = value
        return DONE

    def contains(self, array: ArrayId) -> bool:
        place = self._places.get(array.whole)
        return super().contains(array) if place is None else place[0] in self._stacks

    def close(self) -> None:
        super().close()
        for stack in list(self._stacks):
            del self._stacks[stack]
            self.ledger.release(stack.nbytes)

    def _find(self, array: ArrayId) -> np.ndarray | None:
        place = self._places.get(array.whole)
        if place is None:
            return super()._find(array)
        stack, n = place
        content = self._stacks.get(stack)
        if content is None:
            return None
        share = content if isinstance(content, np.ndarray) else _share(stack, content)
        share = share[n, ...] if stack.is_stacked else share
        return share[slice(*check_rows(array, share.shape))] if array.rows else share

    def _writable(self, stack: Stack) -> np.ndarray:
        """The content of a stack as a NumPy array, which the caller may change."""
        content = self._stacks.get(stack)
        if isinstance(content, np.ndarray):
            return content
        fresh = aligned_empty(stack.share_shape, np.dtype(stack.dtype))
        if content is None:
            with self.ledger.holding(stack.nbytes, str(stack.members[0])):
                self._stacks[stack] = fresh
            return fresh
        # A step that failed may have donated it; then all members are written anew.
        if not content.is_deleted():
            fresh[...] = _share(stack, content)
        self._stacks[stack] = fresh
        return fresh


def _blocks(stack: Stack) -> dict[jax.Device, tuple[Any, ...]]:
    """The part of this process's share of a stack that each of its devices has."""
    layout = stack.layout
    leading = (slice(None),) * stack.is_stacked
    return {
        device: (*leading, *relative(block, layout.box), ...)
        for device, block in layout.blocks(layout.share).items()
    }


def _pinned(stack: Stack, share: np.ndarray) -> jax.Array:
    parts = [
        jax.device_put(share[block], SingleDeviceSharding(device, memory_kind=PINNED))
        for device, block in _blocks(stack).items()
    ]
    array = jax.make_array_from_single_device_arrays(stack.shape, stack.sharding, parts)
    return jax.block_until_ready(array)


def _share(stack: Stack, content: jax.Array) -> np.ndarray:
    """This process's share; without a copy if one device has it all."""
    # From new array objects, since an array keeps the view that np.asarray makes of it.
    blocks = _blocks(stack)
    shards = {s.device: s.data for s in content.addressable_shards}
    if len(blocks) == 1:
        return np.asarray(content.addressable_data(0))
    share = aligned_empty(stack.share_shape, np.dtype(stack.dtype))
    for device, block in blocks.items():
        share[block] = np.asarray(shards[device])
    return share
