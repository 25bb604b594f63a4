"""Moves arrays between the two forms of their layout: shares on the host, and global
arrays on the devices."""

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from math import prod

import jax
import numpy as np
from jax.sharding import NamedSharding

from zinf.memory.aligned import aligned_empty
from zinf.memory.device import to_device, to_host
from zinf.sharding import Box, Layout, intersection, relative


def to_devices(
    shares: Sequence[np.ndarray], layouts: Sequence[Layout]
) -> list[jax.Array]:
    """Global arrays of shares, cut as the shares are; complete on return.

    No device has more of an array than its process's share, whatever form the layout
    has on the devices: `in_device_form` gathers the rest. The caller's memory is not
    aliased, and all transfers are begun before the first is waited for.

    Raises:
        ValueError: JAX would give an array another dtype there.
    """
    if layouts and layouts[0].share.num_devices == 1:
        return to_device(shares, next(iter(layouts[0].share.device_set)))
    pieces: list[np.ndarray] = []
    devices: list[jax.Device] = []
    for share, layout in zip(shares, layouts, strict=True):
        for device, block in layout.blocks(layout.share).items():
            pieces.append(share[(*relative(block, layout.box), ...)])
            devices.append(device)
    moved = iter(to_device(pieces, devices))
    arrays: list[jax.Array] = []
    for layout in layouts:
        parts = [next(moved) for _ in layout.blocks(layout.share)]
        assembled = jax.make_array_from_single_device_arrays(
            layout.padded, layout.share, parts
        )
        arrays.append(assembled)
    return arrays


def to_shares(
    arrays: Sequence[jax.Array], layouts: Sequence[Layout]
) -> list[np.ndarray]:
    """The shares of global arrays, in aligned memory of their own that the caller owns.

    Waits until the arrays are computed. Of an array that devices hold whole, the share
    alone is moved.
    """
    sources: list[list[tuple[Box, jax.Array]]] = []
    for array, layout in zip(arrays, layouts, strict=True):
        sources.append(list(_parts_of(layout.box, array, layout)))
    moved = iter(to_host(*[part for parts in sources for _, part in parts]))
    shares = []
    for array, layout, parts in zip(arrays, layouts, sources, strict=True):
        moved_parts = [(block, next(moved)) for block, _ in parts]
        shares.append(_assembled(layout.box, moved_parts, array.dtype))
    return shares


def to_part_of_share(array: jax.Array, layout: Layout, box: Box) -> np.ndarray:
    """A part of the share of a global array, alone, without any collective.

    So it may be taken whatever other processes do, and beside a step. Memory as of
    `to_shares`.
    """
    parts = list(_parts_of(box, array, layout))
    contents = to_host(*[part for _, part in parts])
    blocks = [block for block, _ in parts]
    return _assembled(box, list(zip(blocks, contents, strict=True)), array.dtype)


def in_device_form(array: jax.Array, layout: Layout) -> jax.Array:
    """`array` as its layout has it on the devices.

    Between devices this is a collective, which every process has to begin in the same
    order: on the device link, as the plan lists it.
    """
    wanted = layout.device
    if wanted.num_devices == 1 or array.sharding.is_equivalent_to(wanted, array.ndim):
        return array
    return _placing(wanted)(array)


def gathered(share: np.ndarray, layout: Layout) -> np.ndarray:
    """The whole array, of the shares of all processes, without padding.

    All processes have to call it, in the same order; the result is not to be changed.
    """
    if layout.is_whole:
        return share
    if layout.share_shape == layout.padded:
        return layout.unpadded(share)
    (array,) = to_devices([share], [layout])
    everywhere = NamedSharding(layout.share.mesh, jax.sharding.PartitionSpec())
    whole = _placing(everywhere)(array).addressable_data(0)
    return layout.unpadded(to_host(whole)[0])


def _assembled(
    box: Box, parts: Sequence[tuple[Box, np.ndarray]], dtype: np.dtype
) -> np.ndarray:
    if len(parts) == 1:
        return parts[0][1]
    whole = aligned_empty(tuple(stop - start for start, stop in box), dtype)
    for block, content in parts:
        whole[relative(block, box)] = content
    return whole


def _parts_of(
    box: Box, array: jax.Array, layout: Layout
) -> Iterator[tuple[Box, jax.Array]]:
    """Blocks that make up a part of this process's share, on some device each."""
    if len(array.devices()) == 1:
        yield box, array if box == layout.box else _part(array, box, layout.box)
        return
    blocks = layout.blocks(array.sharding)
    seen, volume = set(), 0
    for shard in array.addressable_shards:
        block = blocks[shard.device]
        part = intersection(block, box)
        if part is None or part in seen:
            continue
        seen.add(part)
        volume += prod(stop - start for start, stop in part)
        inside = shard.data
        if part != block:
            inside = _part(inside, part, block)
        yield part, inside
    wanted = prod(stop - start for start, stop in box)
    assert volume == wanted, "the devices lack some of the share"


def _part(array: jax.Array, box: Box, of: Box) -> jax.Array:
    """`box` of an array on one device that is the block `of`."""
    starts = [
        np.int32(low - first) for (low, _), (first, _) in zip(box, of, strict=True)
    ]
    sizes = tuple(stop - start for start, stop in box)
    return _dynamic_slice(array, starts, sizes=sizes)


# By starts that are arguments: blocks of one size are one executable.
_dynamic_slice = jax.jit(
    lambda array, starts, *, sizes: jax.lax.dynamic_slice(array, starts, sizes),
    static_argnames="sizes",
)


@cache
def _placing(sharding: NamedSharding) -> Callable[[jax.Array], jax.Array]:
    def identity(array: jax.Array) -> jax.Array:
        return array

    return jax.jit(identity, out_shardings=sharding)
