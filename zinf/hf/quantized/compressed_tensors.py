"""Weights as llm-compressor and vLLM keep them: the library compressed-tensors.

| `format` | tensors of `NAME` |
|---|---|
| `pack-quantized` | `weight_packed` int32, `weight_scale`, `weight_shape` |
| `int-quantized` | `weight` int8, `weight_scale` |
| `float-quantized` | `weight` float8, `weight_scale` |
| `nvfp4-pack-quantized`, `mxfp4-pack-quantized` | see `fp4` |

A scale is of a group of inputs, of an output, or of all of a weight. With
`weight_zero_point` the code of 0 is not 0, and `weight_g_idx` has the group of each
input.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from zinf.core.interchange.tensors import AbstractTensors
from zinf.core.memory.zarr_format import numpy_dtype
from zinf.core.program import ArraySpec
from zinf.core.sharding import Box
from zinf.hf.quantized import fp4, mxfp4
from zinf.hf.quantized.layer import Layer
from zinf.hf.quantized.packed import (
    WORD,
    Packed,
    float32,
    packed_words,
    read_whole,
    rows_of_part,
    unpacked,
)
from zinf.hf.quantized.rounding import Grid, Rounded

FORMATS = (
    "pack-quantized",
    "int-quantized",
    "float-quantized",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
)
# The format of a section whose groups have formats of their own.
MIXED = "mixed-precision"
# Those of 4 bits in floating point: numbers of a group, and the end of the name of the
# scale for all.
FLOATS_OF_4_BITS = {
    FORMATS[3]: (fp4.NVFP4_GROUP, fp4.GLOBAL),
    FORMATS[4]: (mxfp4.GROUP, None),
}
DENSE = "dense"
BITS = (2, 4, 8)
WEIGHT = "weight"
PACKED, SCALE, ZERO = "_packed", "_scale", "_zero_point"
SHAPE, GROUP_OF = "_shape", "_g_idx"


def refusal(section: Mapping[str, Any]) -> str | None:
    groups = (section.get("config_groups") or {}).values()
    formats = {group.get("format") for group in groups}
    if section.get("format") != MIXED or None in formats or not formats:
        formats.add(section.get("format"))
    others = sorted(str(x) for x in formats - {*FORMATS, None})
    if others:
        return f"format {', '.join(others)}, and {', '.join(FORMATS)} are read"
    sparse = (section.get("sparsity_config") or {}).get("format", DENSE)
    if sparse != DENSE:
        return f"sparsity_config.format {sparse}, and {DENSE} is read"
    if (section.get("transform_config") or {}).get("config_groups"):
        return "transform_config, which changes activations beside the weights"
    return None


def section_of(bits: int, group: int, left_out: Sequence[str]) -> dict[str, Any]:
    """`quantization_config` of linear layers in `pack-quantized`, with a scale a group.

    Args:
        left_out: names of linear layers that stay as they are.
    """
    weights = {
        "num_bits": bits,
        "type": "int",
        "symmetric": True,
        "strategy": "group",
        "group_size": group,
        "dynamic": False,
    }
    groups = {"targets": ["Linear"], "weights": weights}
    groups |= {"input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": FORMATS[0],
        "quantization_status": "compressed",
        "config_groups": {"group_0": groups},
        "ignore": list(left_out),
    }


def parts_of(rounded: Rounded, grid: Grid) -> dict[str, np.ndarray]:
    """What a file has of a rounded weight, by the ends of the names."""
    codes = (rounded.codes.astype(np.int16) - grid.low).astype(np.uint8)
    return {
        PACKED: packed_words(codes, grid.bits),
        SCALE: rounded.scales.astype(numpy_dtype(grid.dtype)),
        SHAPE: np.array(rounded.codes.shape, np.int64),
    }


def expected(layer: Layer, section: Mapping[str, Any]) -> dict[str, ArraySpec]:
    """The tensors of a weight in nvfp4 or mxfp4; none of one in another form."""
    groups = (section.get("config_groups") or {}).values()
    targeting = (
        group
        for group in groups
        if any(is_named(layer, target) for target in group.get("targets") or ())
    )
    group = next(targeting, None)
    if group is None or len(layer.shape) != 2:
        return {}
    form = group.get("format") or section.get("format")
    if form not in FLOATS_OF_4_BITS:
        return {}
    count, second = FLOATS_OF_4_BITS[form]
    count = (group.get("weights") or {}).get("group_size") or count
    name = layer.tensor
    return fp4.expected(name, f"{name}{PACKED}", layer.shape, count, second=second)


def left_out(section: Mapping[str, Any]) -> Sequence[str]:
    """Which layers a section leaves plain."""
    return section.get("ignore") or ()


def is_named(layer: Layer, entry: str) -> bool:
    """Whether an entry is a layer's name or class, or after "re:" an expression."""
    expression = entry.removeprefix("re:")
    if expression == entry:
        return entry in (*layer.names, *layer.kinds)
    return any(re.match(expression, name) for name in layer.names)


def find(files: AbstractTensors, section: Mapping[str, Any]) -> dict[str, Packed]:
    """The weights of `NAME_packed`, and those with `NAME_scale` beside them."""
    found: dict[str, Packed] = {}
    for part in files.specs:
        if part.endswith(f"{WEIGHT}{PACKED}"):
            name = part.removesuffix(PACKED)
            found[name] = _packed(files, name)
        name = part.removesuffix(SCALE)
        if part.endswith(f"{WEIGHT}{SCALE}") and name in files.specs:
            found[name] = scaled(files, name)
    return found


def scaled(files: AbstractTensors, name: str) -> "Rows":
    """A weight of plain numbers, with scales and maybe codes of 0 beside it.

    Raises:
        ValueError: scales are of another shape.
    """
    parts = (name, *_beside(files, name, (SCALE, ZERO)))
    return _rows(files, parts, files.specs[name].shape, 0)


def _packed(files: AbstractTensors, name: str) -> Packed:
    codes = f"{name}{PACKED}"
    is_fp4 = files.specs[codes].dtype == "uint8"
    for needed in (f"{name}{SCALE}", *([] if is_fp4 else [f"{name}{SHAPE}"])):
        if needed not in files.specs:
            raise ValueError(f"{needed} is absent. Get the files again.")
    if is_fp4:
        return fp4.of_codes(files, name, codes, second=fp4.GLOBAL, divides=True)
    outputs, inputs = (int(x) for x in read_whole(files, f"{name}{SHAPE}"))
    width = files.specs[codes].shape[1]
    fitting = [bits for bits in BITS if -(-inputs * bits // WORD) == width]
    if len(fitting) != 1 or files.specs[codes].shape[0] != outputs:
        raise ValueError(
            f"{codes} is {list(files.specs[codes].shape)}, and {name}{SHAPE} says "
            f"[{outputs}, {inputs}], of which no {' or '.join(map(str, BITS))} bits "
            "make it. Get the files again."
        )
    ends = (SCALE, ZERO, GROUP_OF, SHAPE)
    parts = (codes, *_beside(files, name, ends))
    return _rows(files, parts, (outputs, inputs), fitting[0])


def _beside(files: AbstractTensors, name: str, ends: tuple[str, ...]) -> list[str]:
    return [f"{name}{end}" for end in ends if f"{name}{end}" in files.specs]


def _rows(
    files: AbstractTensors, parts: tuple[str, ...], plain: tuple[int, ...], bits: int
) -> "Rows":
    shape = files.specs[parts[1]].shape
    fits = shape in ((), (1,), (1, 1)) or shape[0] == plain[0]
    if not fits or len(shape) == 2 and plain[1] % shape[1]:
        raise ValueError(
            f"{parts[1]} is {list(shape)}, and the weight is {list(plain)}: it needs a "
            "scale for each group of an output's inputs, for each output, or one for "
            "all. Get the files again."
        )
    return Rows(parts, float32(*plain), bits)


@dataclass(frozen=True)
class Rows(Packed):
    """A weight in codes, with scales by row, by group of inputs, or one for all.

    Attributes:
        bits: the width of a packed code; 0: codes are plain numbers.
    """

    bits: int

    @property
    def copies(self) -> int:
        # The codes in 32 bits and in 8, the numbers, and their scales one by one.
        return 4

    def block(self, files: AbstractTensors) -> tuple[int, ...]:
        return (rows_of_part(files, self.parts[0], self.spec), self.spec.shape[1])

    def read(self, files: AbstractTensors, box: Box) -> np.ndarray:
        (low, high), columns = box
        inputs = self.spec.shape[1]
        width = files.specs[self.parts[0]].shape[1]
        found = files.read(self.parts[0], ((low, high), (0, width)))
        if self.bits:
            found = unpacked(found, self.bits)[:, :inputs]
        values = found.astype(np.float32)
        if self.bits:
            # Codes of signed numbers are stored from 0 on.
            values -= 2 ** (self.bits - 1)
        scales = self._of_rows(files, self.parts[1], low, high).astype(np.float32)
        groups = self._groups(files, scales.shape[1])
        zeros = self._zeros(files, low, high)
        if zeros is not None:
            values -= zeros[:, groups]
        values *= scales[:, groups]
        return np.ascontiguousarray(values[:, slice(*columns)])

    def _groups(self, files: AbstractTensors, count: int) -> np.ndarray:
        """The group of each input."""
        inputs = self.spec.shape[1]
        index = self._part(GROUP_OF)
        given = None if index is None else read_whole(files, index)
        # An index that was never set is -1.
        if given is None or (given < 0).any():
            return np.arange(inputs) // (inputs // count)
        return given

    def _zeros(self, files: AbstractTensors, low: int, high: int) -> np.ndarray | None:
        """The code of 0, float32 [rows, groups]; None: it is 0."""
        name = self._part(ZERO)
        if name is None:
            return None
        spec = files.specs[name]
        if not self.bits or spec.dtype != "int32":
            return self._of_rows(files, name, low, high).astype(np.float32)
        # Packed along the outputs.
        count = WORD // self.bits
        first = low // count
        words = files.read(name, ((first, -(-high // count)), (0, spec.shape[1])))
        codes = unpacked(np.ascontiguousarray(words.T), self.bits).T
        rows = codes[low - first * count : high - first * count]
        return rows.astype(np.float32) - 2 ** (self.bits - 1)

    def _of_rows(
        self, files: AbstractTensors, name: str, low: int, high: int
    ) -> np.ndarray:
        """Values of some rows [rows, groups], of one for each row, or one for all."""
        shape = files.specs[name].shape
        if prod(shape) == 1:
            value = read_whole(files, name)
            return np.broadcast_to(value.reshape(1, 1), (high - low, 1))
        rest = ((0, size) for size in shape[1:])
        return files.read(name, ((low, high), *rest)).reshape(high - low, -1)

    def _part(self, end: str) -> str | None:
        return next((name for name in self.parts if name.endswith(end)), None)
