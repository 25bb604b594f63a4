"""float8 numbers with one scale for each block of them.

As DeepSeek-V3 has it (https://arxiv.org/abs/2412.19437, section 3.3.2). A part is as
exact as float32.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, prod
from typing import Any

import numpy as np

from zinf.core.interchange.tensors import AbstractTensors
from zinf.core.program import ArraySpec
from zinf.core.sharding import Box
from zinf.hf.quantized.packed import Packed, read_whole

SCALE = "_scale_inv"
FLOAT8 = ("float8_e4m3fn", "float8_e5m2")
# A scale of 8 bits is an exponent of 2, less this.
BIAS = 127


def refusal(section: Mapping[str, Any]) -> str | None:
    size = section.get("weight_block_size")
    if size is None or len(size) == 2:
        return None
    return f"weight_block_size {size}, which is no pair"


def find(
    files: AbstractTensors, section: Mapping[str, Any]
) -> dict[str, "BlockScaled"]:
    """The weights with `NAME_scale_inv` beside them."""
    size = section.get("weight_block_size")
    block = None if size is None else (int(size[0]), int(size[1]))
    found = {}
    for name, spec in files.specs.items():
        if spec.dtype in FLOAT8 and f"{name}{SCALE}" in files.specs:
            _check_scales(files, name, block or spec.shape[-2:])
            plain = ArraySpec(spec.shape, "float32", 4)
            found[name] = BlockScaled((name, f"{name}{SCALE}"), plain, block)
    return found


def _check_scales(files: AbstractTensors, name: str, step: tuple[int, ...]) -> None:
    shape = files.specs[name].shape
    scales = files.specs[f"{name}{SCALE}"].shape
    wanted = tuple(map(ceil, np.divide(shape[-2:], step).tolist()))
    if prod(scales) != prod((*shape[:-2], *wanted)):
        raise ValueError(
            f"{name}{SCALE} has the shape {list(scales)}, and blocks of "
            f"{list(step)} in {name!r} {list(shape)} have {list(wanted)} "
            "scales. Check weight_block_size in config.json."
        )


@dataclass(frozen=True)
class BlockScaled(Packed):
    """A float8 weight with a scale for each block of it.

    Attributes:
        size: rows and columns that share a scale; None: the whole weight has one.
    """

    size: tuple[int, int] | None

    @property
    def copies(self) -> int:
        # The quantized numbers, their scales one by one, and the product.
        return 3

    def block(self, files: AbstractTensors) -> tuple[int, ...]:
        return files.block(self.parts[0])

    def read(self, files: AbstractTensors, box: Box) -> np.ndarray:
        values = files.read(self.parts[0], box).astype(np.float32)
        if self.size is None:
            return values * factors(read_whole(files, self.parts[1])).reshape(())
        scales = factors(self._scales(files, box))
        for dim, (edges, step) in enumerate(zip(box[-2:], self.size, strict=True)):
            index = np.arange(*edges) // step
            scales = np.take(scales, index - index[0], axis=dim - 2)
        values *= scales
        return values

    def _scales(self, files: AbstractTensors, box: Box) -> np.ndarray:
        """The scales of the blocks that a part of the weight touches."""
        assert self.size is not None
        shape = files.specs[self.parts[1]].shape
        # Dims of a stack first, then rows and columns.
        (low, high), columns = box[-2:]
        rows, step = self.size
        some = (*box[:-2], (low // rows, -(-high // rows)), (0, shape[-1]))
        found = files.read(self.parts[1], some)
        return found[..., columns[0] // step : -(-columns[1] // step)]


def factors(scales: np.ndarray) -> np.ndarray:
    """Scales as float32; those of 8 bits are exponents of 2."""
    if scales.dtype == np.uint8:
        return np.ldexp(np.float32(1), scales.astype(np.int32) - BIAS)
    return scales.astype(np.float32)
