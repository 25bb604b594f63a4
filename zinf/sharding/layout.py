"""How one array lies on the devices of a mesh, and which part of it a process keeps.

An array has two forms. On the devices it is one global `jax.Array`, cut as its role and
the ZeRO stage say. On host and drive every process keeps its *share*: the block of the
array that its own devices have when it is cut, as one NumPy array. Where the two are
cut alike, moving a share moves nothing between devices.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, Sharding

from zinf.mesh import local_devices

Box = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Layout:
    """Attributes:
    shape: of the array as the program knows it.
    padded: the same with the dim that is cut rounded up to a multiple of the shards;
        what is beyond `shape` is zero or without meaning. Both forms are padded.
    device: sharding of the array on the devices.
    share: sharding whose local part is what this process keeps elsewhere.
    """

    shape: tuple[int, ...]
    padded: tuple[int, ...]
    device: NamedSharding
    share: NamedSharding

    @property
    def is_padded(self) -> bool:
        return self.shape != self.padded

    @property
    def is_gathered(self) -> bool:
        """Whether every device holds all of it."""
        return self.device.is_fully_replicated

    @cached_property
    def device_shape(self) -> tuple[int, ...]:
        """Shape of what one device holds."""
        return self.device.shard_shape(self.padded)

    @cached_property
    def share_shape(self) -> tuple[int, ...]:
        """Shape of what this process keeps on its host or drive."""
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
        """The dims along which other processes keep other parts."""
        sizes = zip(self.share_shape, self.padded, strict=True)
        return frozenset(d for d, (own, all_) in enumerate(sizes) if own != all_)

    @cached_property
    def keepers(self) -> tuple[int, ...]:
        """The processes that keep the same share as this one, itself among them."""
        first = next(iter(self.blocks(self.share)))
        everywhere = self.share.devices_indices_map(self.padded)
        same = {
            d.process_index for d, x in everywhere.items() if x == everywhere[first]
        }
        return tuple(sorted(same))

    @property
    def has_whole_rows(self) -> bool:
        """Whether rows of the leading dim lie as the whole does: it is not cut."""
        if not self.shape:
            return False
        return self.share.shard_shape(self.padded)[0] == self.shape[0]

    def blocks(self, sharding: Sharding) -> Mapping[jax.Device, Box]:
        """What each device of this process has of `padded` under a sharding."""
        return _blocks(sharding, self.padded)

    def rows(self, start: int, stop: int) -> "Layout":
        """The layout of rows of the leading dim, which is not cut."""
        assert self.has_whole_rows, "rows were asked of an array that is cut by rows"
        shape, padded = ((stop - start, *s[1:]) for s in (self.shape, self.padded))
        return Layout(shape, padded, self.device, self.share)

    def take_share(self, content: np.ndarray) -> np.ndarray:
        """The share of this process of a whole array, padded with zeros."""
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

    def unpadded(self, content: np.ndarray) -> np.ndarray:
        """The array itself, of one in `padded` shape."""
        return content[tuple(slice(n) for n in self.shape)]


@lru_cache(maxsize=4096)
def _blocks(sharding: Sharding, shape: tuple[int, ...]) -> Mapping[jax.Device, Box]:
    indices = dict(sharding.addressable_devices_indices_map(shape))
    if not indices and isinstance(sharding, NamedSharding):
        # Devices that are only compiled for: a host of them stands for this process.
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
    """The selection of `block` in an array that is the block `to`."""
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
