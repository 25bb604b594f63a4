"""Weights as bitsandbytes keeps them.

* nf4 and fp4 (https://arxiv.org/abs/2305.14314): `NAME` has two codes a byte, the first
  in the high half, of the weight row after row; `NAME.absmax` the largest magnitude of
  each block, and `NAME.quant_map` the number of each code. absmax may be in 8 bits
  itself, with `NAME.nested_absmax` and `NAME.nested_quant_map`. What else belongs to
  them is JSON in the bytes of `NAME.quant_state.bitsandbytes__nf4`.
* LLM.int8 (https://arxiv.org/abs/2208.07339): `NAME` int8, and `SCB` beside it, the
  largest magnitude of each output.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from zinf.core.interchange.tensors import AbstractTensors
from zinf.core.sharding import Box
from zinf.hf.quantized.packed import (
    Packed,
    check_shape,
    float32,
    read_floats,
    read_run,
    read_whole,
    rows_of_part,
)

STATE = ".quant_state.bitsandbytes__"
ABSMAX, MAP = ".absmax", ".quant_map"
NESTED_ABSMAX, NESTED_MAP = ".nested_absmax", ".nested_quant_map"
WEIGHT, SCB, FORM = "weight", "SCB", "weight_format"
LARGEST = np.float32(127)
STORAGE = "uint8"  # The dtype as which codes of 4 bits are in files.


def refusal(section: Mapping[str, Any]) -> str | None:
    storage = section.get("bnb_4bit_quant_storage") or STORAGE
    if storage != STORAGE:
        return f"bnb_4bit_quant_storage {storage}, and {STORAGE} is read"
    return None


def find(files: AbstractTensors, section: Mapping[str, Any]) -> dict[str, Packed]:
    """The weights with a `quant_state` or an `SCB` beside them."""
    found: dict[str, Packed] = {}
    for name in files.specs:
        weight, is_state, _ = name.partition(STATE)
        if is_state:
            found[weight] = _in_blocks(files, weight, name)
        elif name.endswith(f".{SCB}"):
            stem = name.removesuffix(SCB)
            weight = f"{stem}{WEIGHT}"
            shape = files.specs[weight].shape
            check_shape(files, name, shape[:1], of=weight)
            others = [n for n in (f"{stem}{FORM}",) if n in files.specs]
            if others and read_whole(files, *others).any():
                raise ValueError(
                    f"{weight} is in an order of a kernel ({others[0]} is not 0), and "
                    "zinf reads rows. Load the model in bitsandbytes and save it again."
                )
            found[weight] = Int8((weight, name, *others), float32(*shape))
    return found


def _in_blocks(files: AbstractTensors, name: str, state: str) -> "Blocks":
    try:
        raw = json.loads(read_whole(files, state).tobytes())
        shape, block = tuple(map(int, raw["shape"])), int(raw["blocksize"])
        nested = int(raw.get("nested_blocksize", 0))
        offset = float(raw.get("nested_offset", 0.0))
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{state} is no JSON with a shape and a blocksize ({error}). Get the files "
            "again."
        ) from error
    ends = [ABSMAX, MAP, *((NESTED_ABSMAX, NESTED_MAP) if nested else ())]
    parts = (name, state, *(f"{name}{end}" for end in ends))
    check_shape(files, f"{name}{ABSMAX}", (-(-prod(shape) // block),), of=name)
    for part in parts[3:]:
        if part not in files.specs:
            raise ValueError(f"{part} is absent. Get the files again.")
    return Blocks(parts, float32(*shape), block, nested, offset)


@dataclass(frozen=True)
class Blocks(Packed):
    """A weight in 4-bit codes, with an absmax for each block of numbers.

    Attributes:
        size: numbers that share an absmax.
        nested: absmax that share a scale, if absmax are in 8 bits; else 0.
        offset: a number that is added to absmax in 8 bits.
    """

    size: int
    nested: int
    offset: float

    @property
    def copies(self) -> int:
        # The numbers, the absmax of each, and what is begun before the part.
        return 3

    def block(self, files: AbstractTensors) -> tuple[int, ...]:
        return (rows_of_part(files, self.parts[0], self.spec), *self.spec.shape[1:])

    def read(self, files: AbstractTensors, box: Box) -> np.ndarray:
        (low, high), *rest = box
        width = prod(self.spec.shape[1:])
        first, last = low * width, high * width
        # Whole bytes, of two codes each.
        start, stop = first // 2, -(-last // 2)
        codes = read_run(files, self.parts[0], start, stop).view(np.uint8)
        numbers = read_floats(files, self.parts[3])
        pairs = np.stack(
            [numbers[np.arange(256) >> 4], numbers[np.arange(256) & 15]], 1
        )
        values = pairs[codes].reshape(-1)[first - 2 * start :][: last - first]
        largest = self._absmax(files, first // self.size, -(-last // self.size))
        largest = np.repeat(largest, self.size)
        values *= largest[first % self.size :][: last - first]
        found = values.reshape(high - low, *self.spec.shape[1:])
        return np.ascontiguousarray(found[:, *(slice(*edges) for edges in rest)])

    def _absmax(self, files: AbstractTensors, low: int, high: int) -> np.ndarray:
        """The largest magnitude of some blocks."""
        found = files.read(self.parts[2], ((low, high),))
        if not self.nested:
            return found.astype(np.float32)
        blocks = np.arange(low, high) // self.nested
        outer = ((int(blocks[0]), int(blocks[-1]) + 1),)
        scales = files.read(self.parts[4], outer).astype(np.float32)
        numbers = read_floats(files, self.parts[5])
        return numbers[found] * scales[blocks - blocks[0]] + np.float32(self.offset)


class Int8(Packed):
    """int8 numbers, and the largest magnitude of each output."""

    @property
    def copies(self) -> int:
        return 2

    def block(self, files: AbstractTensors) -> tuple[int, ...]:
        return files.block(self.parts[0])

    def read(self, files: AbstractTensors, box: Box) -> np.ndarray:
        values = files.read(self.parts[0], box).astype(np.float32)
        scales = files.read(self.parts[1], box[:1]).astype(np.float32)
        values *= (scales / LARGEST)[:, None]
        return values
