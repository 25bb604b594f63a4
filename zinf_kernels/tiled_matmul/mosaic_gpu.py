"""`matmul` for Hopper GPUs: TMA, wgmma, and blocks of threads that stay.

One warpgroup fetches pieces of both matrices, two multiply; each block takes tile after
tile of the result, in an order that keeps what neighbours read in the cache. This is as
in jax's own example (jax/experimental/pallas/ops/gpu/hopper_matmul_mgpu.py), but for
the epilogue: a residual's first pieces are fetched while the product is computed.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from zinf_kernels.tiled_matmul.epilogue import Epilogue
from zinf_kernels.tiled_matmul.tiles import TILES, Tiles

# Shared memory of a block, some of its 227 KiB being left for barriers.
SHARED_BYTES = 226 << 10
MOST_STEPS = 4
# Columns of tiles that are done before the next, for the cache.
SNAKE_WIDTH = 8
# Of pieces of the result, each of a warpgroup: one is filled while the other leaves.
SLOTS = 2
PIECE_ROWS = 64
# A row of a piece: as wide as the widest swizzle.
PIECE_ROW_BYTES = 128
COMPUTE_WARPGROUPS = 2
MEMORY_REGISTERS = 40


@partial(jax.jit, static_argnames=("epilogue", "num_cores", "tiles"))
def matmul(
    a: Float[Array, "m k"],
    b: Float[Array, "k n"],
    bias: Float[Array, " n"] | None,
    residual: Float[Array, "m n"] | None,
    *,
    epilogue: Epilogue,
    num_cores: int,
    tiles: Tiles = TILES,
) -> Float[Array, "m n"]:
    """The product in float32, and what comes after it; sizes are multiples of tiles."""
    result = jax.ShapeDtypeStruct((a.shape[0], b.shape[1]), epilogue.dtype)
    extras = [x for x in (bias, residual) if x is not None]

    def body(*refs: Any) -> None:
        a_ref, b_ref, *others, out = refs
        bias_ref = others.pop(0) if bias is not None else None
        residual_ref = others.pop(0) if residual is not None else None
        _blocks(a_ref, b_ref, bias_ref, residual_ref, out, epilogue, tiles)

    return plgpu.kernel(
        body,
        out_type=result,
        grid=(num_cores,),
        grid_names=("block",),
        num_threads=COMPUTE_WARPGROUPS + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup
        ),
    )(a, b, *extras)


@dataclass(frozen=True)
class _Pieces:
    """How a warpgroup's tile of the result is cut when it leaves."""

    columns: int
    tiles: Tiles

    @property
    def offsets(self) -> list[tuple[int, int]]:
        return [
            (i, j)
            for i in range(0, self.tiles.m, PIECE_ROWS)
            for j in range(0, self.tiles.n, self.columns)
        ]

    def memory(self, dtype: Any) -> Any:
        """Slots of all warpgroups in shared memory."""
        shape = (COMPUTE_WARPGROUPS, SLOTS, PIECE_ROWS, self.columns)
        return plgpu.SMEM(shape, dtype, transforms=_transforms(self.columns, dtype))

    def bytes(self, dtype: Any) -> int:
        slots = COMPUTE_WARPGROUPS * SLOTS
        return slots * PIECE_ROWS * self.columns * jnp.dtype(dtype).itemsize


@dataclass(frozen=True)
class _Outer:
    """The result, and what joins the product on its way there, in device memory."""

    out: Any
    bias: Any  # or None
    residual: Any  # or None
    epilogue: Epilogue
    pieces: _Pieces

    def scratch(self) -> dict[str, Any]:
        """What `_Scratch` is made of."""
        bias, residual, tiles = self.bias, self.residual, self.pieces.tiles
        slots = COMPUTE_WARPGROUPS * SLOTS
        bias_memory = plgpu.SMEM((COMPUTE_WARPGROUPS, tiles.n), jnp.float32)
        return {
            "leaving": self.pieces.memory(self.out.dtype),
            "coming": None if residual is None else self.pieces.memory(residual.dtype),
            "came": None if residual is None else plgpu.Barrier(num_barriers=slots),
            "biases": None if bias is None else bias_memory,
            "bias_came": None if bias is None else plgpu.Barrier(num_barriers=2),
        }


@dataclass(frozen=True)
class _Scratch:
    """Shared memory of a block beside the factors, and barriers for what comes.

    Without a residual `coming` and `came` are None, and so are the others without bias.
    """

    leaving: Any
    coming: Any
    came: Any
    biases: Any
    bias_came: Any


@dataclass(frozen=True)
class _Tile:
    """A tile of the result, and the part of it that is this warpgroup's."""

    outer: _Outer
    scratch: _Scratch
    warpgroup: Any
    rows: Any
    columns: Any
    mine: Any

    @property
    def offsets(self) -> list[tuple[int, int]]:
        return self.outer.pieces.offsets

    def fetch_first(self) -> None:
        """Begins to fetch what the epilogue takes in."""
        outer, scratch = self.outer, self.scratch
        if outer.bias is not None:
            target = scratch.biases.at[self.warpgroup]
            barrier = scratch.bias_came.at[self.warpgroup]
            plgpu.copy_gmem_to_smem(outer.bias.at[self.columns], target, barrier)
        if outer.residual is not None:
            for number in range(min(SLOTS, len(self.offsets))):
                self.fetch(number)

    def fetch(self, number: int) -> None:
        """Begins to fetch a piece of the residual."""
        slot = number % SLOTS
        plgpu.copy_gmem_to_smem(
            self.piece_of(self.outer.residual, self.offsets[number]),
            self.scratch.coming.at[self.warpgroup, slot],
            self.scratch.came.at[self.warpgroup * SLOTS + slot],
        )

    def piece_of(self, ref: Any, offset: tuple[int, int]) -> Any:
        tile = ref.at[self.rows, self.columns].at[self.mine]
        row, column = offset
        width = self.outer.pieces.columns
        return tile.at[pl.ds(row, PIECE_ROWS), pl.ds(column, width)]

    def finish(self, sums: Any) -> None:
        """Puts the product through the epilogue and sends it off, piece by piece."""
        outer, warpgroup = self.outer, self.warpgroup
        product = sums[...]
        if outer.bias is not None:
            plgpu.barrier_wait(self.scratch.bias_came.at[warpgroup])
        # Of the last tile; its pieces left while this one was summed.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        leaving = self.scratch.leaving
        for number, (row, column) in enumerate(self.offsets):
            slot = number % SLOTS
            there = slice(column, column + outer.pieces.columns)
            part = product[row : row + PIECE_ROWS, there]
            line, extra = self.joining(number, there)
            plgpu.wait_smem_to_gmem(SLOTS - 1, wait_read_only=True)
            leaving[warpgroup, slot] = outer.epilogue(part, line, extra)
            # Also ends all reads of the residual's slot.
            plgpu.commit_smem()
            target = self.piece_of(outer.out, (row, column))
            plgpu.copy_smem_to_gmem(leaving.at[warpgroup, slot], target)
            if outer.residual is not None and number + SLOTS < len(self.offsets):
                self.fetch(number + SLOTS)

    def joining(self, number: int, there: slice) -> tuple[Any | None, Any | None]:
        """Bias and residual of a piece."""
        outer, scratch, warpgroup = self.outer, self.scratch, self.warpgroup
        line = extra = None
        if outer.bias is not None:
            line = scratch.biases[warpgroup, there]
            shape = PIECE_ROWS, outer.pieces.columns
            line = lax.broadcast_in_dim(line, shape, (1,))
        if outer.residual is not None:
            slot = number % SLOTS
            plgpu.barrier_wait(scratch.came.at[warpgroup * SLOTS + slot])
            extra = scratch.coming[warpgroup, slot]
        return line, extra


def _blocks(
    a: Any,
    b: Any,
    bias: Any | None,
    residual: Any | None,
    out: Any,
    epilogue: Epilogue,
    tiles: Tiles,
) -> None:
    """What every block of threads does."""
    dtypes = [ref.dtype for ref in (out, residual) if ref is not None]
    widest = max(jnp.dtype(dtype).itemsize for dtype in dtypes)
    pieces = _Pieces(PIECE_ROW_BYTES // widest, tiles)
    outer = _Outer(out, bias, residual, epilogue, pieces)
    block_m, block_n = tiles.m * COMPUTE_WARPGROUPS, tiles.n
    grid_m, grid_n = a.shape[0] // block_m, b.shape[1] // block_n
    steps = _steps(a.dtype, sum(map(pieces.bytes, dtypes)), tiles)

    def pipeline(body: Any, context: Any) -> Any:
        return plgpu.emit_pipeline_warp_specialized(
            body,
            grid=(a.shape[1] // tiles.k,),
            memory_registers=MEMORY_REGISTERS,
            in_specs=[
                _spec((block_m, tiles.k), lambda k: (0, k), a.dtype),
                _spec((tiles.k, block_n), lambda k: (k, 0), b.dtype),
            ],
            wg_axis="warpgroup",
            num_compute_wgs=COMPUTE_WARPGROUPS,
            max_concurrent_steps=steps,
            compute_context=context,
        )

    def ignore(*_: Any, **__: Any) -> None:
        """Allocations do not depend on what is computed."""

    @partial(
        pl.run_scoped,
        allocations=pipeline(ignore, ignore).get_allocations(a, b),
        **outer.scratch(),
        collective_axes="warpgroup",
    )
    def _(allocations: Any, **memory: Any) -> None:
        scratch, warpgroup = _Scratch(**memory), lax.axis_index("warpgroup")

        @plgpu.nd_loop((grid_m * grid_n,), collective_axes="block")
        def _(loop: Any) -> None:
            (index,) = loop.index
            i, j = plgpu.planar_snake(index, (grid_m, grid_n), 1, SNAKE_WIDTH)
            rows = pl.ds(i * block_m, block_m)
            columns = pl.ds(j * block_n, block_n)
            mine = pl.ds(warpgroup * tiles.m, tiles.m)
            tile = _Tile(outer, scratch, warpgroup, rows, columns, mine)

            def context(run: Any) -> None:
                tile.fetch_first()

                @partial(pl.run_scoped, sums=plgpu.ACC((tiles.m, tiles.n), jnp.float32))
                def _(sums: Any) -> None:
                    run(sums)
                    tile.finish(sums)

            def multiply(_: Any, a_part: Any, b_part: Any, sums: Any) -> Any:
                plgpu.wgmma(sums, a_part.at[mine], b_part)
                plgpu.wgmma_wait(0)
                return sums

            pipeline(multiply, context)(
                a.at[rows], b.at[:, columns], allocations=allocations
            )

    plgpu.wait_smem_to_gmem(0, wait_read_only=False)


def _steps(dtype: Any, epilogue_bytes: int, tiles: Tiles) -> int:
    """Pieces of the factors that fit in shared memory at once."""
    elements = tiles.k * (tiles.m * COMPUTE_WARPGROUPS + tiles.n)
    room = SHARED_BYTES - epilogue_bytes - 4 * COMPUTE_WARPGROUPS * tiles.n
    return min(room // (elements * jnp.dtype(dtype).itemsize), MOST_STEPS)


def _transforms(columns: int, dtype: Any) -> tuple[Any, ...]:
    itemsize = jnp.dtype(dtype).itemsize
    swizzle = plgpu.find_swizzle(columns * itemsize * 8)
    tiling = plgpu.TilingTransform((8, swizzle // itemsize))
    return tiling, plgpu.SwizzleTransform(swizzle)


def _spec(shape: tuple[int, int], index: Any, dtype: Any) -> Any:
    return plgpu.BlockSpec(
        shape,
        index,
        transforms=_transforms(shape[1], dtype),
        memory_space=plgpu.SMEM,
    )
