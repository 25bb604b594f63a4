"""The layout of one array: its sharding on the devices, and the share of each process.

An array has two forms. On the devices it is one global `jax.Array`, cut according to
its role and the ZeRO stage. On host and drive each process stores its *share* as one
NumPy array: the block that its own devices have when the array is cut. If both forms
are cut alike, moving a share to the devices moves nothing between devices.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import prod

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, Sharding

from zinf.core.program import Rows
from zinf.core.sharding.encoding import Blocks
from zinf.core.sharding.mesh import local_devices, replicated

Box = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Layout:
    """The two forms of one array.

    Attributes:
        shape: the shape of the array in the program.
        padded: `shape` with the cut dim rounded up to a multiple of the number of
            shards. Both forms are padded; entries beyond `shape` are zero or unused.
        device: the sharding of the array on the devices.
        share: the sharding whose local part is the share of this process.
        whole: the sharding with which compiled programs compute; None: every device has
            the array. Experts and channels are cut by their own axes here too.
        encoding: what parts are sent as when compiled programs gather the array from
            its device form; None sends them as they are.
        num_groups: if more than 1, each of so many groups of devices holds the array,
            and a device holds the parts that its counterparts in all groups keep,
            instead of the block that `device` names. See [Note: parts of all groups].
    """

    shape: tuple[int, ...]
    padded: tuple[int, ...]
    device: NamedSharding
    share: NamedSharding
    encoding: Blocks | None = None
    whole: NamedSharding | None = None
    num_groups: int = 1

    @property
    def is_padded(self) -> bool:
        return self.shape != self.padded

    @cached_property
    def is_gathered(self) -> bool:
        """Whether every device holds all that its programs compute with."""
        return self.device.is_equivalent_to(self.computed, len(self.shape))

    @cached_property
    def computed(self) -> NamedSharding:
        """The sharding with which compiled programs compute."""
        if self.whole is not None:
            return self.whole
        assert isinstance(self.device.mesh, Mesh)
        return replicated(self.device.mesh)

    @property
    def updated(self) -> NamedSharding:
        """The sharding in which an update on the devices makes the array."""
        return self.device if self.num_groups == 1 else self.share

    @cached_property
    def device_shape(self) -> tuple[int, ...]:
        """Shape of the part that one device holds."""
        return self.device.shard_shape(self.padded)

    @cached_property
    def share_shape(self) -> tuple[int, ...]:
        """Shape of the share that this process stores on its host or drive."""
        return tuple(stop - start for start, stop in self.box)

    @cached_property
    def box(self) -> Box:
        """The share of this process: its range along each dim of `padded`.

        Raises:
            ValueError: the devices of the process do not hold one block.
        """
        blocks = set(self.blocks(self.share).values())
        ranges = list(zip(*blocks, strict=True))
        box = tuple((min(r)[0], max(stop for _, stop in r)) for r in ranges)
        if sum(map(_volume, blocks)) != _volume(box):
            raise ValueError(
                f"The devices of process {jax.process_index()} hold parts of an array "
                f"of shape {list(self.padded)} that are no neighbours: {blocks}. Order "
                "the devices of the mesh so that those of a process follow each other "
                "along fsdp (zinf.make_mesh does)."
            )
        return box

    @property
    def is_whole(self) -> bool:
        """Whether the share is the array itself, not padded."""
        return self.share_shape == self.shape

    @cached_property
    def cut_dims(self) -> frozenset[int]:
        """The dims along which processes have different parts."""
        sizes = zip(self.share_shape, self.padded, strict=True)
        return frozenset(d for d, (own, all_) in enumerate(sizes) if own != all_)

    @cached_property
    def keepers(self) -> tuple[int, ...]:
        """The processes with the same share as this one, including this one."""
        first = next(iter(self.blocks(self.share)))
        everywhere = self.share.devices_indices_map(self.padded)
        same = {
            d.process_index for d, x in everywhere.items() if x == everywhere[first]
        }
        return tuple(sorted(same))

    @property
    def has_whole_rows(self) -> bool:
        """Whether the leading dim is not cut, so rows are sharded like the whole."""
        if not self.shape:
            return False
        return self.share.shard_shape(self.padded)[0] == self.shape[0]

    def blocks(self, sharding: Sharding) -> Mapping[jax.Device, Box]:
        """The block of `padded` that each device of this process has."""
        return _blocks(sharding, self.padded)

    def amid_others(self, block: Box) -> Box:
        """The box of all that a device holds, as if parts of groups were neighbours.

        Args:
            block: the part that the device keeps itself, at its place in the box.
        """
        box = []
        sizes = zip(block, self.padded, self.device_shape, strict=True)
        for (start, stop), size, held in sizes:
            groups = held // (stop - start)
            first = start - start * groups // size * (stop - start)
            box.append((first, first + held))
        return tuple(box)

    def piece(self, rows: Rows) -> "Layout":
        """The layout of these rows; the leading dim must not be cut."""
        if rows is None:
            return self
        assert self.has_whole_rows, "rows were asked of an array that is cut by rows"
        start, stop = rows
        shape, padded = ((stop - start, *s[1:]) for s in (self.shape, self.padded))
        return replace(self, shape=shape, padded=padded)

    def take_share(self, content: np.ndarray) -> np.ndarray:
        """This process's share of the whole array `content`, padded with zeros."""
        if self.is_whole:
            return content
        inside = [
            slice(start, min(stop, size))
            for (start, stop), size in zip(self.box, self.shape, strict=True)
        ]
        part = content[tuple(inside)]
        missing = [
            (0, n - k) for n, k in zip(self.share_shape, part.shape, strict=True)
        ]
        return np.pad(part, missing)

    def own_of(self, content: np.ndarray) -> np.ndarray:
        """The share of this process, of an array that has its part of some dims only.

        Args:
            content: of the leaves of a batch, a process gives its own rows, whole.
        """
        sizes = zip(content.shape, self.padded, self.box, strict=True)
        inside = (slice(*span if n == whole else (None,)) for n, whole, span in sizes)
        return content[(*inside, ...)]

    def unpadded(self, content: np.ndarray) -> np.ndarray:
        """The array without its padding; `content` has the shape `padded`."""
        return content[(*(slice(n) for n in self.shape), ...)]


@lru_cache(maxsize=4096)
def _blocks(sharding: Sharding, shape: tuple[int, ...]) -> Mapping[jax.Device, Box]:
    indices = dict(sharding.addressable_devices_indices_map(shape))
    if not indices and isinstance(sharding, NamedSharding):
        # No device is local, so programs are only compiled for these devices: the
        # first host stands for this process.
        assert isinstance(sharding.mesh, Mesh)
        everywhere = sharding.devices_indices_map(shape)
        indices = {d: everywhere[d] for d in local_devices(sharding.mesh)}
    found = {}
    for device, index in indices.items():
        assert index is not None
        pairs = zip(index, shape, strict=True)
        found[device] = tuple(s.indices(size)[:2] for s, size in pairs)
    return found


def relative(block: Box, to: Box) -> tuple[slice, ...]:
    """The slices that select `block` from an array that holds the block `to`."""
    return tuple(
        slice(low - start, high - start)
        for (low, high), (start, _) in zip(block, to, strict=True)
    )


def intersection(block: Box, other: Box) -> Box | None:
    pairs = zip(block, other, strict=True)
    common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in pairs)
    return common if all(low < high for low, high in common) else None


def _volume(box: Sequence[tuple[int, int]]) -> int:
    return prod(stop - start for start, stop in box)
