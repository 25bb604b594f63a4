"""Updates in host memory that cannot be translated to a loop: XLA, in pieces.

XLA writes results into memory of its own, and they are copied from there to the arrays
at rest. For a block of 16 MiB that maps new pages and doubles the traffic. The results
of a piece reuse pages, and are still in the cache when they are copied. AdamW alone
takes a third of the time, and two thirds in a step with work on all cores.
"""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import jax
import numpy as np

from zinf.core.optim.host.host_update import AbstractHostUpdate, flat
from zinf.core.optim.separate import Separated
from zinf.core.optim.update import Unit, UpdateStep, compile_updates

# Results of AdamW are 6 MiB then. 16M parameters on two cores with 32 MiB of cache took
# 78 ms; 92 with pieces of twice the length, 91 with half of it and 127 with a quarter,
# where calls take longer than work; 230 in blocks of 4M.
CHUNK_NUMEL = 512 * 1024


@dataclass(frozen=True)
class ChunkedUpdate(AbstractHostUpdate):
    """The update of one unit by an executable for `CHUNK_NUMEL` elements.

    It gives the bits of the unit's own executable: the code is the same.

    Attributes:
        num_states: the number of arrays between the master and the compute copy.
        padded_bytes: bytes of all operands of a piece. The last piece is padded, in
            memory of its own.
    """

    step: UpdateStep
    num_states: int
    padded_bytes: int
    device: jax.Device

    @property
    def workspace_bytes(self) -> int:
        return self.step.workspace_bytes + self.padded_bytes

    def __call__(
        self, factor: Any, step_values: Sequence[Any], *arrays: np.ndarray
    ) -> None:
        gradient, *results = map(flat, arrays)
        operands = [gradient, *results[: 1 + self.num_states]]
        for piece in _pieces(gradient.size):
            placed = jax.device_put([_whole(x[piece]) for x in operands], self.device)
            new = jax.block_until_ready(self.step(factor, step_values, *placed))
            for target, content in zip(results, new, strict=True):
                target = target[piece]
                np.copyto(target, np.asarray(content)[: target.size])

    def compile(self) -> None:
        """Nothing to do: the executable is compiled already."""


def chunked_updates(
    separated: Separated, units: Sequence[Unit], *, device: jax.Device
) -> list[ChunkedUpdate | None]:
    """For each unit an update in place, or None where its own executable serves better.

    Args:
        device: one of the CPU; on any other, pieces cost more than they save.
    """
    chunks: dict[Hashable, Unit] = {}
    for unit in units:
        if device.platform == "cpu" and _may_be_chunked(separated, unit):
            chunk = Unit(unit.leaf, (CHUNK_NUMEL,), unit.grad_dtype, unit.compute_dtype)
            chunks.setdefault(_key(unit), chunk)
    steps = compile_updates(separated, list(chunks.values()), device=device).steps
    step_of = dict(zip(chunks, steps, strict=True))
    return [
        _chunked(separated, unit, step_of[_key(unit)], device)
        if _key(unit) in step_of and _may_be_chunked(separated, unit)
        else None
        for unit in units
    ]


def _chunked(
    separated: Separated, unit: Unit, step: UpdateStep, device: jax.Device
) -> ChunkedUpdate:
    leaf = separated.leaves[unit.leaf]
    dtypes = [unit.grad_dtype, leaf.spec.dtype, *(s.spec.dtype for s in leaf.states)]
    padded_bytes = CHUNK_NUMEL * sum(np.dtype(d).itemsize for d in dtypes)
    return ChunkedUpdate(step, len(leaf.states), padded_bytes, device)


def _may_be_chunked(separated: Separated, unit: Unit) -> bool:
    # With float16 gradients XLA's rounding depends on the length.
    return (
        separated.leaves[unit.leaf].is_elementwise
        and prod(unit.shape) > CHUNK_NUMEL
        and np.dtype(unit.grad_dtype) != np.float16
    )


def _key(unit: Unit) -> Hashable:
    return unit.leaf, np.dtype(unit.grad_dtype), unit.compute_dtype


def _pieces(numel: int) -> Iterator[slice]:
    for start in range(0, numel, CHUNK_NUMEL):
        yield slice(start, min(start + CHUNK_NUMEL, numel))


def _whole(piece: np.ndarray) -> np.ndarray:
    if piece.size == CHUNK_NUMEL:
        return piece
    return np.pad(piece, (0, CHUNK_NUMEL - piece.size))
