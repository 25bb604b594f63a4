"""Quantized weights of published checkpoints as plain ones, part by part.

* fp8: float8 numbers, and one scale for each block of them, as DeepSeek-V3 has it
  (https://arxiv.org/abs/2412.19437, section 3.3.2). A part is as exact as float32.
* mxfp4: two numbers of 4 bits in a byte, and a power of 2 for each 32 of them
  (https://arxiv.org/abs/2310.10537), as gpt-oss keeps its experts. bfloat16 holds the
  values exactly.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, prod
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from zinf.checkpoint.grid import whole_box
from zinf.core.interchange.tensors import AbstractTensors
from zinf.core.program import ArraySpec
from zinf.core.sharding import Box

METHODS = ("fp8", "mxfp4")
SCALE, BLOCKS, SCALES = "_scale_inv", "_blocks", "_scales"
FLOAT8 = ("float8_e4m3fn", "float8_e5m2")
# A scale of 8 bits is an exponent of 2, less this.
BIAS = 127
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
FP4 = np.array([*MAGNITUDES, *(-x for x in MAGNITUDES)], np.float32)
# The two numbers of each byte; the first is in the low half.
PAIRS = np.stack([FP4[np.arange(256) & 15], FP4[np.arange(256) >> 4]], axis=1)


@dataclass(frozen=True)
class _Source:
    """The tensors of files that a weight is made of."""

    values: str
    scales: str


class Dequantized(AbstractTensors):
    """The tensors of files, where quantized ones are plain numbers.

    Args:
        block: rows and columns that share a scale, for fp8; None: all of a weight.

    Raises:
        ValueError: scales are missing, or of another shape.
    """

    def __init__(
        self, files: AbstractTensors, block: tuple[int, int] | None = None
    ) -> None:
        self._files, self._block = files, block
        self._made_of: dict[str, _Source] = {}
        specs = dict(files.specs)
        for name, spec in files.specs.items():
            if spec.dtype in FLOAT8 and f"{name}{SCALE}" in files.specs:
                self._add_fp8(specs, name)
            elif name.endswith(BLOCKS) and spec.dtype == "uint8":
                self._add_mxfp4(specs, name)
        self.specs = specs

    def _add_fp8(self, specs: dict[str, ArraySpec], name: str) -> None:
        spec = specs[name]
        scales = self._files.specs[f"{name}{SCALE}"].shape
        step = self._block or spec.shape[-2:]
        wanted = tuple(map(ceil, np.divide(spec.shape[-2:], step).tolist()))
        if prod(scales) != prod((*spec.shape[:-2], *wanted)):
            raise ValueError(
                f"{name}{SCALE} has the shape {list(scales)}, and blocks of "
                f"{list(step)} in {name!r} {list(spec.shape)} have {list(wanted)} "
                "scales. Check weight_block_size in config.json."
            )
        self._made_of[name] = _Source(name, f"{name}{SCALE}")
        specs[name] = ArraySpec(spec.shape, "float32", 4)
        del specs[f"{name}{SCALE}"]

    def _add_mxfp4(self, specs: dict[str, ArraySpec], name: str) -> None:
        spec = specs[name]
        plain = name.removesuffix(BLOCKS)
        scales = self._files.specs.get(f"{plain}{SCALES}")
        if scales is None or scales.shape != spec.shape[:-1]:
            found = "absent" if scales is None else list(scales.shape)
            raise ValueError(
                f"{plain}{SCALES} is {found}, and {name!r} is {list(spec.shape)}: each "
                "of its rows needs a scale. Get the files again."
            )
        # The files have outputs before inputs, and the model the other order.
        count, rows, groups, width = spec.shape
        self._made_of[plain] = _Source(name, f"{plain}{SCALES}")
        specs[plain] = ArraySpec((count, 2 * groups * width, rows), "bfloat16", 2)
        del specs[name], specs[f"{plain}{SCALES}"]

    def block(self, name: str) -> tuple[int, ...]:
        source = self._made_of.get(name)
        if source is None or source.values == name:
            return self._files.block(name)
        return (1, *self.specs[name].shape[1:])

    def copies_of(self, name: str) -> int:
        source = self._made_of.get(name)
        if source is None:
            return self._files.copies_of(name)
        # In fp8: the quantized numbers, their scales one by one, and the product, all
        # but the first in float32. In mxfp4: the same product, which is twice a part in
        # bfloat16, the part in the order of the files, and in that of the model.
        return 3 if source.values == name else 5

    def read(self, name: str, box: Box) -> np.ndarray:
        source = self._made_of.get(name)
        if source is None:
            return self._files.read(name, box)
        if source.values == name:
            return self._fp8(source, box)
        return self._mxfp4(source, box)

    def _fp8(self, source: _Source, box: Box) -> np.ndarray:
        values = self._files.read(source.values, box).astype(np.float32)
        scales = _factors(self._whole(source.scales))
        if self._block is None:
            return values * scales.reshape(())
        # Dims of a stack first, then rows and columns.
        lead = tuple(slice(*edges) for edges in box[:-2])
        scales = scales[lead]
        for dim, (edges, step) in enumerate(zip(box[-2:], self._block, strict=True)):
            index = np.arange(*edges) // step
            scales = np.take(scales, index, axis=dim - 2)
        values *= scales
        return values

    def _mxfp4(self, source: _Source, box: Box) -> np.ndarray:
        shape = self._files.specs[source.values].shape
        rest = whole_box(shape)[1:]
        codes = self._files.read(source.values, (box[0], *rest))
        scales = self._files.read(source.scales, (box[0], *rest[:-1]))
        values = PAIRS[codes].reshape(*codes.shape[:-1], -1)
        values *= _factors(scales)[..., None]
        values = values.astype(ml_dtypes.bfloat16).reshape(*codes.shape[:2], -1)
        found = values.swapaxes(1, 2)[:, *(slice(*edges) for edges in box[1:])]
        return np.ascontiguousarray(found)

    def _whole(self, name: str) -> np.ndarray:
        return self._files.read(name, whole_box(self._files.specs[name].shape))


def _factors(scales: np.ndarray) -> np.ndarray:
    """Scales as float32; those of 8 bits are exponents of 2."""
    if scales.dtype == np.uint8:
        return np.ldexp(np.float32(1), scales.astype(np.int32) - BIAS)
    return scales.astype(np.float32)


def block_of(folder: Path) -> tuple[int, int] | None:
    """Rows and columns that share a scale of fp8, as config.json says."""
    raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    size = (raw.get("quantization_config") or {}).get("weight_block_size")
    return None if size is None else (int(size[0]), int(size[1]))


def is_readable(quantization: Mapping[str, Any]) -> bool:
    """Whether weights that were quantized so are read here."""
    size: Sequence[Any] | None = quantization.get("weight_block_size")
    return quantization.get("quant_method") in METHODS and (
        size is None or len(size) == 2
    )
