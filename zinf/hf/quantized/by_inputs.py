"""Weights of linear layers whose files have inputs before outputs.

GPTQ's and AWQ's files hold for `NAME.weight` [outputs, inputs]

* `NAME.qweight`: codes of `bits`, packed in int32;
* `NAME.scales` [groups, outputs];
* `NAME.qzeros` [groups, outputs * bits / 32]: the code of 0, packed along outputs.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from zinf.core.interchange.tensors import AbstractTensors
from zinf.core.sharding import Box
from zinf.hf.quantized.packed import (
    WORD,
    Packed,
    check_shape,
    read_whole,
    rows_of_part,
    unpacked,
)

QWEIGHT, QZEROS, SCALES, WEIGHT = ".qweight", ".qzeros", ".scales", ".weight"
# Inputs that are unpacked at once: a multiple of what a word holds.
SLAB = 512
Edges = tuple[int, int]


@dataclass(frozen=True)
class ByInputs(Packed):
    """A weight in codes whose files have inputs before outputs.

    Attributes:
        bits: the width of a code.
        group: inputs that share a scale.
    """

    bits: int
    group: int

    @property
    def copies(self) -> int:
        # The part, a slab of inputs as words of all outputs and as numbers of some, and
        # scales and zeros.
        return 3

    def block(self, files: AbstractTensors) -> tuple[int, ...]:
        outputs, inputs = self.spec.shape
        rows = rows_of_part(files, self.parts[0], self.spec)
        return (min(rows - rows % WORD or WORD, outputs), inputs)

    @abstractmethod
    def codes(
        self, files: AbstractTensors, inputs: Edges, outputs: Edges
    ) -> np.ndarray:
        """Some codes, uint8 [inputs, outputs]; inputs begin and end with a word."""

    @abstractmethod
    def zeros(self, files: AbstractTensors, outputs: Edges) -> np.ndarray:
        """The code of 0 of some outputs, float32 [groups, outputs]."""

    def groups(self, files: AbstractTensors) -> np.ndarray:
        """The group of each input."""
        return np.arange(self.spec.shape[1]) // self.group

    def read(self, files: AbstractTensors, box: Box) -> np.ndarray:
        outputs, (first, last) = box
        # The words of all outputs are read, and those of some are unpacked.
        scales = read_whole(files, self.scales)[:, slice(*outputs)].astype(np.float32)
        zeros, groups = self.zeros(files, outputs), self.groups(files)
        found = np.empty((outputs[1] - outputs[0], last - first), np.float32)
        for start in range(first - first % SLAB, last, SLAB):
            stop = min(start + SLAB, self.spec.shape[1])
            codes = self.codes(files, (start, stop), outputs)
            values = codes.astype(np.float32)
            values -= zeros[groups[start:stop]]
            values *= scales[groups[start:stop]]
            begin, end = max(start, first), min(stop, last)
            found[:, begin - first : end - first] = values[
                begin - start : end - start
            ].T
        return found

    @property
    def scales(self) -> str:
        return self.parts[1]

    @property
    def qzeros(self) -> str:
        return self.parts[2]


def names_of(qweight: str) -> tuple[str, str, str, str]:
    """Names of a weight, its codes, its scales and its zeros, by that of its codes."""
    stem = qweight.removesuffix(QWEIGHT)
    return f"{stem}{WEIGHT}", qweight, f"{stem}{SCALES}", f"{stem}{QZEROS}"


def check_groups(
    files: AbstractTensors,
    qweight: str,
    section: Mapping[str, Any],
    inputs: int,
    outputs: int,
    bits: int,
) -> int:
    """The inputs of a group, by the shapes of scales and zeros.

    The last group of the size in `section` may be smaller than the others.

    Raises:
        ValueError: scales or zeros are missing, or of another shape.
    """
    _, _, scales, zeros = names_of(qweight)
    spec = files.specs.get(scales)
    groups = spec.shape[0] if spec is not None and len(spec.shape) == 2 else 1
    check_shape(files, scales, (groups, outputs), of=qweight)
    check_shape(files, zeros, (groups, outputs * bits // WORD), of=qweight)
    asked = int(section.get("group_size") or 0)
    is_so = asked > 0 and -(-inputs // asked) == groups
    return asked if is_so else -(-inputs // groups)


def by_outputs(
    words: np.ndarray, bits: int, outputs: Edges, order: Sequence[int] | None = None
) -> np.ndarray:
    """The codes of some outputs, of words along outputs: uint8 [rows, outputs].

    Args:
        words: int32 [rows, words].
        order: the place in a word of each of its outputs; None: as they come.
    """
    count = WORD // bits
    low, high = outputs[0] // count, -(-outputs[1] // count)
    codes = unpacked(np.ascontiguousarray(words[:, low:high]), bits)
    if order is not None:
        codes = codes.reshape(len(words), -1, count)[..., order]
    codes = codes.reshape(len(words), -1)
    return codes[:, outputs[0] - low * count : outputs[1] - low * count]
