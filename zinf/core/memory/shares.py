"""Moves arrays between the two forms of their layout: shares on the host, and global
arrays on the devices."""

from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from math import prod
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from zinf.core.memory.host.aligned import aligned_empty
from zinf.core.memory.host.pages import PAGEABLE, AbstractPages
from zinf.core.sharding import Box, Layout, intersection, relative, spread


def to_devices(
    shares: Sequence[np.ndarray],
    layouts: Sequence[Layout],
    pages: AbstractPages = PAGEABLE,
) -> list[jax.Array]:
    """Global arrays made from shares, sharded like them; complete on return.

    A device gets at most its process's share of an array. If the layout asks for more
    on each device, `in_device_form` gathers it. The caller's memory is not aliased. All
    transfers begin before the first is waited for.

    Raises:
        ValueError: JAX would give an array another dtype on the devices.
    """
    if layouts and layouts[0].share.num_devices == 1:
        return pages.to_device(shares, next(iter(layouts[0].share.device_set)))
    pieces: list[np.ndarray] = []
    devices: list[jax.Device] = []
    for share, layout in zip(shares, layouts, strict=True):
        for device, block in layout.blocks(layout.share).items():
            pieces.append(share[(*relative(block, layout.box), ...)])
            devices.append(device)
    moved = iter(pages.to_device(pieces, devices))
    arrays: list[jax.Array] = []
    for layout in layouts:
        parts = [next(moved) for _ in layout.blocks(layout.share)]
        assembled = jax.make_array_from_single_device_arrays(
            layout.padded, layout.share, parts
        )
        arrays.append(assembled)
    return arrays


def to_shares(
    arrays: Sequence[jax.Array],
    layouts: Sequence[Layout],
    pages: AbstractPages = PAGEABLE,
) -> list[np.ndarray]:
    """The shares of global arrays, in memory of `pages` that the caller owns.

    Waits until the arrays are computed. If the devices hold an array whole, only the
    share is moved.
    """
    sources: list[list[tuple[Box, jax.Array]]] = []
    for array, layout in zip(arrays, layouts, strict=True):
        sources.append(list(_parts_of(layout.box, array, layout)))
    moved = iter(pages.to_host(*[part for parts in sources for _, part in parts]))
    shares = []
    for array, layout, parts in zip(arrays, layouts, sources, strict=True):
        moved_parts = [(block, next(moved)) for block, _ in parts]
        shares.append(_assembled(layout.box, moved_parts, array.dtype))
    return shares


def to_part_of_share(array: jax.Array, layout: Layout, box: Box) -> np.ndarray:
    """The part `box` of this process's share of a global array, without a collective.

    So it may be called during a step, and whatever other processes do. The result is in
    memory like that of `to_shares`.
    """
    parts = list(_parts_of(box, array, layout))
    contents = PAGEABLE.to_host(*[part for _, part in parts])
    blocks = [block for block, _ in parts]
    return _assembled(box, list(zip(blocks, contents, strict=True)), array.dtype)


def in_device_form(array: jax.Array, layout: Layout) -> jax.Array:
    """`array` in the form that its layout has on the devices.

    With several devices this is a collective. Every process must begin collectives in
    the same order: on the device link, as the plan lists them.
    """
    wanted = layout.device
    if wanted.num_devices == 1 or array.sharding.is_equivalent_to(wanted, array.ndim):
        return array
    run = _placing(wanted) if layout.num_groups == 1 else _spreading(layout)
    return run(array)


def gathered(share: np.ndarray, layout: Layout) -> np.ndarray:
    """The whole array from the shares of all processes; see `all_gathered`."""
    return all_gathered([share], [layout])[0]


def all_gathered(
    shares: Sequence[np.ndarray], layouts: Sequence[Layout]
) -> list[np.ndarray]:
    """The whole arrays from the shares of all processes, without padding.

    All processes must call it for the same arrays in the same order. The arrays are
    exchanged by one program. The caller must not change the results.
    """
    found = list(shares)
    cut = [n for n, x in enumerate(layouts) if x.share_shape != x.padded]
    if cut:
        own = [shares[n] for n in cut], [layouts[n] for n in cut]
        everywhere = NamedSharding(own[1][0].share.mesh, jax.sharding.PartitionSpec())
        wholes = _placing(everywhere)(to_devices(*own))
        contents = PAGEABLE.to_host(*[x.addressable_data(0) for x in wholes])
        for number, content in zip(cut, contents, strict=True):
            found[number] = content
    return [x.unpadded(whole) for x, whole in zip(layouts, found, strict=True)]


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
    """Blocks that make up `box` of this process's share, each on one of its devices."""
    if len(array.devices()) == 1:
        yield box, array if box == layout.box else _part(array, box, layout.box)
        return
    is_spread = layout.num_groups > 1 and array.sharding.is_equivalent_to(
        layout.device, array.ndim
    )
    blocks = layout.blocks(layout.share if is_spread else array.sharding)
    seen, volume = set(), 0
    for shard in array.addressable_shards:
        block = blocks[shard.device]
        part = intersection(block, box)
        if part is None or part in seen:
            continue
        seen.add(part)
        volume += prod(stop - start for start, stop in part)
        held = layout.amid_others(block) if is_spread else block
        yield part, shard.data if part == held else _part(shard.data, part, held)
    wanted = prod(stop - start for start, stop in box)
    assert volume == wanted, "the devices lack some of the share"


def _part(array: jax.Array, box: Box, of: Box) -> jax.Array:
    """The part `box` of an array on one device; the array is the block `of`."""
    starts = [
        np.int32(low - first) for (low, _), (first, _) in zip(box, of, strict=True)
    ]
    sizes = tuple(stop - start for start, stop in box)
    return _dynamic_slice(array, starts, sizes=sizes)


# Starts are arguments, so all blocks of one size share one executable.
_dynamic_slice = jax.jit(
    lambda array, starts, *, sizes: jax.lax.dynamic_slice(array, starts, sizes),
    static_argnames="sizes",
)


@cache
def _spreading(layout: Layout) -> Callable[[Any], Any]:
    return jax.jit(partial(spread, layout=layout))


@cache
def _placing(sharding: NamedSharding) -> Callable[[Any], Any]:
    """A function that gives an array, or several, this sharding."""

    def identity(arrays: Any) -> Any:
        return arrays

    return jax.jit(identity, out_shardings=sharding)
