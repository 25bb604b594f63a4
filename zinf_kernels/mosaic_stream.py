"""Rows of arrays through a function, tile by tile, at the speed of device memory.

The frame of memory-bound kernels: of n blocks of threads, each takes every nth tile of
rows. TMA copies the next tiles to shared memory while one is computed, and copies
results out while the next are computed.
"""

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

# Shared memory of a core for tiles: 227 KiB, less some for barriers.
SHARED_BYTES = 208 << 10
# Two blocks for each core, one of which computes while the other waits, if both fit.
MOST_BLOCKS_PER_CORE = 2
# More tiles in flight gain nothing: at 4.8 TB/s and a microsecond of latency a core
# needs 36 KB in flight.
MOST_TILES = 4
LEAST_TILES = 2
# Results of one tile are copied out while those of the next are written.
RESULT_SLOTS = 2

# A warpgroup reduces rows only in the layout of a matrix, which has 64 rows.
TILE_ROWS = 64

Compute = Callable[[Any, Sequence[Any], Sequence[Any], Sequence[Any]], None]


def stream(
    compute: Compute,
    arrays: Sequence[jax.Array],
    scalars: Sequence[jax.Array] = (),
    *,
    results: Sequence[jax.ShapeDtypeStruct],
    num_cores: int,
) -> tuple[jax.Array, ...]:
    """Runs `compute` on all tiles.

    Args:
        compute: is called with the index of the tile's first row (int32), the elements
            of `scalars`, references to a tile of each of `arrays` and to one of each
            result, and writes the last. It runs once for a tile, on one warpgroup.
        arrays: of one length, a positive multiple of `TILE_ROWS`, with one or two
            dimensions. A row of two dimensions has 16, 32, 64 or n * 128 bytes.
        scalars: small arrays with one dimension, read once by each block of threads.
        results: shapes and dtypes of what to return, under the same conditions.
        num_cores: streaming multiprocessors of the device.
    """
    tiles, rest = divmod(arrays[0].shape[0], TILE_ROWS)
    assert tiles and not rest, arrays[0].shape
    per_core, in_flight = _occupancy(arrays, results)
    blocks = min(tiles, num_cores * per_core)

    def body(*refs: Any) -> None:
        inputs, others = refs[: len(arrays)], refs[len(arrays) :]
        scalar_refs, outputs = others[: len(scalars)], others[len(scalars) :]
        numbers = [ref[i] for ref in scalar_refs for i in range(ref.shape[0])]
        first = lax.axis_index("block")

        def index(step: Any) -> Any:
            return first + step * blocks

        @partial(pl.run_scoped, slots=[_slots(result) for result in results])
        def _(slots: Any) -> None:
            def step(indices: Any, *tile_refs: Any) -> None:
                (number,) = indices
                slot = lax.rem(number, RESULT_SLOTS)
                written = [ref.at[slot] for ref in slots]
                # Each result is a group of its own. Wait for all but the last tile's.
                outstanding = len(results) * (RESULT_SLOTS - 1)
                plgpu.wait_smem_to_gmem(outstanding, wait_read_only=True)
                start = index(number) * TILE_ROWS
                compute(start, numbers, tile_refs, written)
                plgpu.commit_smem()
                for ref, output in zip(written, outputs, strict=True):
                    rows = output.at[pl.ds(start, TILE_ROWS)]
                    plgpu.copy_smem_to_gmem(ref, rows)

            plgpu.emit_pipeline(
                step,
                grid=(lax.div(tiles - first + blocks - 1, blocks),),
                in_specs=[_spec(array, index) for array in arrays],
                max_concurrent_steps=in_flight,
            )(*inputs)
            plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        body,
        out_type=tuple(results),
        grid=(blocks,),
        grid_names=("block",),
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup
        ),
    )(*arrays, *scalars)


def _occupancy(arrays: Sequence[Any], results: Sequence[Any]) -> tuple[int, int]:
    """Blocks for each core, and tiles in flight for each block."""
    tile_bytes = sum(map(_bytes, arrays))
    result_bytes = RESULT_SLOTS * sum(map(_bytes, results))
    for blocks in range(MOST_BLOCKS_PER_CORE, 0, -1):
        tiles = (SHARED_BYTES // blocks - result_bytes) // tile_bytes
        if tiles >= LEAST_TILES:
            return blocks, min(tiles, MOST_TILES)
    raise AssertionError(f"tiles of {tile_bytes:,} bytes do not fit in shared memory")


def _bytes(array: Any) -> int:
    return prod(_shape(array)) * jnp.dtype(array.dtype).itemsize


def _shape(array: Any) -> tuple[int, ...]:
    return (TILE_ROWS, *array.shape[1:])


def _transforms(array: Any) -> tuple[Any, ...]:
    """The layout of a tile in shared memory, swizzled against bank conflicts."""
    if len(array.shape) == 1:
        return ()
    itemsize = jnp.dtype(array.dtype).itemsize
    swizzle = plgpu.find_swizzle(array.shape[1] * itemsize * 8)
    tiling = plgpu.TilingTransform((8, swizzle // itemsize))
    return tiling, plgpu.SwizzleTransform(swizzle)


def _slots(result: Any) -> Any:
    shape = (RESULT_SLOTS, *_shape(result))
    return plgpu.SMEM(shape, result.dtype, transforms=_transforms(result))


def _spec(array: Any, index: Callable[[Any], Any]) -> Any:
    rest = (0,) * (array.ndim - 1)
    return plgpu.BlockSpec(
        _shape(array),
        lambda step: (index(step), *rest),
        transforms=_transforms(array),
    )
