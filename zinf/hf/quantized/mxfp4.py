"""Two numbers of 4 bits in a byte, and a power of 2 for each 32 of them.

The microscaling format (https://arxiv.org/abs/2310.10537), as gpt-oss keeps its
experts. bfloat16 holds the values exactly.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from zinf.adapt.blocks import Encoding
from zinf.adapt.forms import FP4
from zinf.checkpoint.grid import whole_box
from zinf.core.interchange.tensors import AbstractTensors
from zinf.core.program import ArraySpec
from zinf.core.sharding import Box
from zinf.hf.quantized.fp8 import factors
from zinf.hf.quantized.layer import Layer
from zinf.hf.quantized.packed import Packed

BLOCKS, SCALES = "_blocks", "_scales"
GROUP = 32  # Numbers that share a scale.
# The two numbers of each byte; the first is in the low half.
PAIRS = np.stack([FP4[np.arange(256) & 15], FP4[np.arange(256) >> 4]], axis=1)


def find(files: AbstractTensors, section: Mapping[str, Any]) -> dict[str, "Experts"]:
    """The experts of `NAME_blocks` and `NAME_scales`."""
    found = {}
    for name, spec in files.specs.items():
        if not name.endswith(BLOCKS) or spec.dtype != "uint8":
            continue
        plain = name.removesuffix(BLOCKS)
        scales = files.specs.get(f"{plain}{SCALES}")
        if scales is None or scales.shape != spec.shape[:-1]:
            shape = "absent" if scales is None else list(scales.shape)
            raise ValueError(
                f"{plain}{SCALES} is {shape}, and {name!r} is {list(spec.shape)}: each "
                "of its rows needs a scale. Get the files again."
            )
        # The files have outputs before inputs, and the model the other order.
        count, rows, groups, width = spec.shape
        made = ArraySpec((count, 2 * groups * width, rows), "bfloat16", 2)
        encoding = Encoding("mxfp4", 2 * width, is_turned=True)
        parts = (name, f"{plain}{SCALES}")
        found[plain] = Experts(parts, made, encoding=encoding)
    return found


def expected(layer: Layer, section: Mapping[str, Any]) -> dict[str, ArraySpec]:
    """The tensors of the experts of a layer; none of other weights."""
    del section
    name, shape = layer.tensor, layer.shape
    if len(shape) != 3 or shape[1] % GROUP:
        return {}
    scales = shape[0], shape[2], shape[1] // GROUP
    return {
        f"{name}{BLOCKS}": ArraySpec((*scales, GROUP // 2), "uint8", 1),
        f"{name}{SCALES}": ArraySpec(scales, "uint8", 1),
    }


def left_out(section: Mapping[str, Any]) -> Sequence[str]:
    """Which layers a section leaves plain."""
    return section.get("modules_to_not_convert") or ()


def is_named(layer: Layer, entry: str) -> bool:
    """Whether a layer's name begins with an entry, as an expression, or ends with it.

    As in `should_convert_module` of `transformers`.
    """
    begins = re.compile(rf"(?:{entry})(?:(?<=\.)|(?=\.|$))")
    return any(begins.match(name) or name.endswith(entry) for name in layer.names)


class Experts(Packed):
    """Experts of gpt-oss, in the order of dims that the model has."""

    @property
    def copies(self) -> int:
        # The codes, their scales and the product in float32, which is twice a part in
        # bfloat16, the part in the order of the files, and in that of the model.
        return 5

    def block(self, files: AbstractTensors) -> tuple[int, ...]:
        return (1, *self.spec.shape[1:])

    def read(self, files: AbstractTensors, box: Box) -> np.ndarray:
        blocks, scales = self.parts
        rest = whole_box(files.specs[blocks].shape)[1:]
        codes = files.read(blocks, (box[0], *rest))
        steps = files.read(scales, (box[0], *rest[:-1]))
        values = PAIRS[codes].reshape(*codes.shape[:-1], -1)
        values *= factors(steps)[..., None]
        values = values.astype(ml_dtypes.bfloat16).reshape(*codes.shape[:2], -1)
        found = values.swapaxes(1, 2)[:, *(slice(*edges) for edges in box[1:])]
        return np.ascontiguousarray(found)
