"""Matmuls tile by tile, by TMA and wgmma, for kernels to finish.

One warpgroup fetches pieces of both matrices and two multiply. Blocks of threads are
persistent: each takes tile after tile of the matmul, in an order that lets neighbours
share the cache. This follows jax's own example (hopper_matmul_mgpu.py in
jax/experimental/pallas/ops/gpu), with hooks before and after a tile.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from zinf_kernels.tiles import Tiles

# Shared memory of a block, some of its 227 KiB being left for barriers.
SHARED_BYTES = 226 << 10
MOST_STEPS = 4
# Columns of tiles that are computed before the next columns, for the cache.
SNAKE_WIDTH = 8
COMPUTE_WARPGROUPS = 2
# `plgpu.kernel` of jax 0.10 has no such argument.
TAKES_ESTIMATE = jax.__version_info__ >= (0, 12)
MEMORY_REGISTERS = 40


@dataclass(frozen=True)
class Place:
    """Where a tile lies in the matmul, and which part of it is this warpgroup's.

    Attributes:
        row, column: of tiles; a row is as high as all warpgroups together.
        rows, columns: of elements of the whole tile.
        mine: which of these rows are this warpgroup's.
    """

    warpgroup: Any
    row: Any
    column: Any
    rows: Any
    columns: Any
    mine: Any


def kernel(
    body: Callable[..., None], results: Any, *, num_cores: int, flops: int
) -> Any:
    """A kernel whose body calls `for_tiles`, with a block of threads for each core.

    `flops` is what a planner that counts operations is told.
    """
    estimate = pl.CostEstimate(flops=flops, transcendentals=0, bytes_accessed=0)
    options: Any = {"cost_estimate": estimate} if TAKES_ESTIMATE else {}
    return plgpu.kernel(
        body,
        out_type=results,
        grid=(num_cores,),
        grid_names=("block",),
        num_threads=COMPUTE_WARPGROUPS + 1,
        thread_name="warpgroup",
        **options,
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup
        ),
    )


def for_tiles(
    begin: Callable[[Place, Mapping[str, Any]], None],
    finish: Callable[[Place, Mapping[str, Any], Any], None],
    a: Any,
    b: Any,
    *,
    tiles: Tiles,
    memory: Mapping[str, Any],
    memory_bytes: int,
    is_transposed: bool = False,
) -> None:
    """The loop of every block of threads.

    Args:
        begin: called by each warpgroup that multiplies, before its part of a tile, with
            `memory`. It starts to fetch the operands of `finish`.
        finish: called after that part, also with its sums, float32 [tiles.m, tiles.n].
        a: [m, k] in device memory, sizes being multiples of tiles.
        b: [k, n], or [n, k] if it is transposed.
        memory: shared memory and barriers to allocate, by name.
        memory_bytes: the size of `memory`; the rest is for pieces of `a` and `b`.
    """
    block_m, block_n = tiles.m * COMPUTE_WARPGROUPS, tiles.n
    grid_m, grid_n = a.shape[0] // block_m, b.shape[not is_transposed] // block_n
    steps = _steps(a.dtype, memory_bytes, tiles)
    b_spec = _spec((tiles.k, block_n), lambda k: (k, 0), b.dtype)
    if is_transposed:
        b_spec = _spec((block_n, tiles.k), lambda k: (0, k), b.dtype)

    def pipeline(body: Any, context: Any) -> Any:
        return plgpu.emit_pipeline_warp_specialized(
            body,
            grid=(a.shape[1] // tiles.k,),
            memory_registers=MEMORY_REGISTERS,
            in_specs=[_spec((block_m, tiles.k), lambda k: (0, k), a.dtype), b_spec],
            wg_axis="warpgroup",
            num_compute_wgs=COMPUTE_WARPGROUPS,
            max_concurrent_steps=steps,
            compute_context=context,
        )

    def ignore(*_: Any, **__: Any) -> None:
        """Does nothing: allocations do not depend on the computation."""

    @partial(
        pl.run_scoped,
        allocations=pipeline(ignore, ignore).get_allocations(a, b),
        **memory,
        collective_axes="warpgroup",
    )
    def _(allocations: Any, **memory: Any) -> None:
        warpgroup = lax.axis_index("warpgroup")

        @plgpu.nd_loop((grid_m * grid_n,), collective_axes="block")
        def _(loop: Any) -> None:
            (index,) = loop.index
            i, j = plgpu.planar_snake(index, (grid_m, grid_n), 1, SNAKE_WIDTH)
            rows, columns = pl.ds(i * block_m, block_m), pl.ds(j * block_n, block_n)
            mine = pl.ds(warpgroup * tiles.m, tiles.m)
            place = Place(warpgroup, i, j, rows, columns, mine)

            def context(run: Any) -> None:
                begin(place, memory)

                @partial(pl.run_scoped, sums=plgpu.ACC((tiles.m, tiles.n), jnp.float32))
                def _(sums: Any) -> None:
                    run(sums)
                    finish(place, memory, sums)

            def multiply(_: Any, a_part: Any, b_part: Any, sums: Any) -> Any:
                b_part = b_part.transpose((1, 0)) if is_transposed else b_part
                plgpu.wgmma(sums, a_part.at[mine], b_part)
                plgpu.wgmma_wait(0)
                return sums

            b_tile = b.at[columns] if is_transposed else b.at[:, columns]
            pipeline(multiply, context)(a.at[rows], b_tile, allocations=allocations)

    plgpu.wait_smem_to_gmem(0, wait_read_only=False)


def transforms(columns: int, dtype: Any) -> tuple[Any, ...]:
    """The layout in shared memory of rows of so many elements."""
    itemsize = jnp.dtype(dtype).itemsize
    swizzle = plgpu.find_swizzle(columns * itemsize * 8)
    tiling = plgpu.TilingTransform((8, swizzle // itemsize))
    return tiling, plgpu.SwizzleTransform(swizzle)


def _steps(dtype: Any, memory_bytes: int, tiles: Tiles) -> int:
    """Number of pieces of the factors that fit in shared memory at once."""
    elements = tiles.k * (tiles.m * COMPUTE_WARPGROUPS + tiles.n)
    room = SHARED_BYTES - memory_bytes
    return min(room // (elements * jnp.dtype(dtype).itemsize), MOST_STEPS)


def _spec(shape: tuple[int, int], index: Any, dtype: Any) -> Any:
    return plgpu.BlockSpec(
        shape,
        index,
        transforms=transforms(shape[1], dtype),
        memory_space=plgpu.SMEM,
    )
