"""Weights of linear layers whose files have inputs before outputs.

GPTQ's and AWQ's files hold for `NAME.weight` [outputs, inputs]

* `NAME.qweight`: codes of `bits`, packed in int32;
* `NAME.scales` [groups, outputs];
* `NAME.qzeros` [groups, outputs * bits / 32]: the code of 0, packed along outputs.
"""

from abc import abstractmethod
from dataclasses import dataclass

import numpy as np

from zinf.core.interchange.tensors import AbstractTensors
from zinf.core.sharding import Box
from zinf.hf.quantized.packed import WORD, Packed, check_shape, read_floats

QWEIGHT, QZEROS, SCALES, WEIGHT = ".qweight", ".qzeros", ".scales", ".weight"
# Inputs that are unpacked at once: a multiple of what a word holds.
SLAB = 512


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
        # The weight, and a slab of inputs as codes and as numbers.
        return 2

    def block(self, files: AbstractTensors) -> tuple[int, ...]:
        return self.spec.shape

    @abstractmethod
    def codes(self, files: AbstractTensors, start: int, stop: int) -> np.ndarray:
        """The codes of some inputs, uint8 [inputs, outputs]."""

    @abstractmethod
    def zeros(self, files: AbstractTensors) -> np.ndarray:
        """The code of 0, float32 [groups, outputs]."""

    def groups(self, files: AbstractTensors) -> np.ndarray:
        """The group of each input."""
        return np.arange(self.spec.shape[1]) // self.group

    def read(self, files: AbstractTensors, box: Box) -> np.ndarray:
        (low, high), (first, last) = box
        scales = read_floats(files, self.scales)[:, low:high]
        zeros = self.zeros(files)[:, low:high]
        groups = self.groups(files)
        found = np.empty((high - low, last - first), np.float32)
        for start in range(first - first % SLAB, last, SLAB):
            stop = min(start + SLAB, self.spec.shape[1])
            values = self.codes(files, start, stop)[:, low:high].astype(np.float32)
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
    files: AbstractTensors, qweight: str, inputs: int, outputs: int, bits: int
) -> int:
    """The inputs of a group, by the shapes of scales and zeros.

    Raises:
        ValueError: scales or zeros are missing, or of another shape.
    """
    _, _, scales, zeros = names_of(qweight)
    spec = files.specs.get(scales)
    groups = spec.shape[0] if spec is not None and len(spec.shape) == 2 else 1
    check_shape(files, scales, (groups, outputs), of=qweight)
    check_shape(files, zeros, (groups, outputs * bits // WORD), of=qweight)
    return -(-inputs // groups)
