"""Tensors of files of which some are made of several quantized ones."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod

import numpy as np

from zinf.adapt.blocks import Encoding
from zinf.checkpoint.grid import whole_box
from zinf.core.interchange.tensors import AbstractTensors
from zinf.core.program import ArraySpec
from zinf.core.sharding import Box

WORD = 32  # Bits of the integers that codes are packed in.


@dataclass(frozen=True)
class Packed(ABC):
    """A weight that is made of tensors of files.

    Attributes:
        parts: the names of these tensors; the first one has the codes.
        spec: of the weight.
        encoding: how zinf keeps the codes as they are, in arrays made of `parts` in
            turn; None: it does not.
    """

    parts: tuple[str, ...]
    spec: ArraySpec
    encoding: Encoding | None = field(default=None, kw_only=True)

    @property
    @abstractmethod
    def copies(self) -> int:
        """See `AbstractTensors.copies_of`."""

    @abstractmethod
    def block(self, files: AbstractTensors) -> tuple[int, ...]:
        """See `AbstractTensors.block`."""

    @abstractmethod
    def read(self, files: AbstractTensors, box: Box) -> np.ndarray:
        """See `AbstractTensors.read`."""


class Dequantized(AbstractTensors):
    """The tensors of files, some of which are made of several.

    Args:
        made: the weights that are, by the name of the tensor.
    """

    def __init__(self, files: AbstractTensors, made: Mapping[str, Packed]) -> None:
        self.files, self.made = files, made
        first = {packed.parts[0]: name for name, packed in made.items()}
        others = {part for packed in made.values() for part in packed.parts}
        specs: dict[str, ArraySpec] = {}
        for name, spec in files.specs.items():
            if name in first:
                specs[first[name]] = made[first[name]].spec
            elif name not in others:
                specs[name] = spec
        self.specs = specs

    def block(self, name: str) -> tuple[int, ...]:
        packed = self.made.get(name)
        return self.files.block(name) if packed is None else packed.block(self.files)

    def copies_of(self, name: str) -> int:
        packed = self.made.get(name)
        return self.files.copies_of(name) if packed is None else packed.copies

    def read(self, name: str, box: Box) -> np.ndarray:
        packed = self.made.get(name)
        if packed is None:
            return self.files.read(name, box)
        return packed.read(self.files, box)


def float32(*shape: int) -> ArraySpec:
    return ArraySpec(shape, "float32", 4)


def read_whole(files: AbstractTensors, name: str) -> np.ndarray:
    return files.read(name, whole_box(files.specs[name].shape))


def read_floats(files: AbstractTensors, name: str) -> np.ndarray:
    return read_whole(files, name).astype(np.float32)


def read_run(files: AbstractTensors, name: str, low: int, high: int) -> np.ndarray:
    """Some elements of a tensor that lie side by side, numbered in C order: [n]."""
    shape, lead, first, each = files.specs[name].shape, [], 0, 1
    for dim in range(len(shape)):
        each = prod(shape[dim + 1 :])
        first, last = low // each, -(-high // each)
        lead.append((first, last))
        if last - first > 1:
            break
        low, high = low - first * each, high - first * each
        first = 0
    rest = whole_box(shape)[len(lead) :]
    found = files.read(name, (*lead, *rest)).reshape(-1)
    return found[low - first * each : high - first * each]


def rows_of_part(files: AbstractTensors, name: str, plain: ArraySpec) -> int:
    """Rows of a weight that take about as many bytes as a part of one of its codes."""
    spec = files.specs[name]
    part = prod(map(min, files.block(name), spec.shape)) * spec.itemsize
    return max(1, part // (prod(plain.shape[1:]) * plain.itemsize))


def unpacked(words: np.ndarray, bits: int) -> np.ndarray:
    """The codes of 32-bit words along the last dim, those in the low bits first.

    Args:
        words: int32 [..., n].

    Returns:
        uint8 [..., n * 32 // bits].
    """
    shifts = np.arange(0, WORD, bits, dtype=np.uint32)
    codes = words.view(np.uint32)[..., None] >> shifts
    codes &= np.uint32(2**bits - 1)
    return codes.astype(np.uint8).reshape(*words.shape[:-1], -1)


def packed_words(codes: np.ndarray, bits: int) -> np.ndarray:
    """`unpacked` undone: uint8 [rows, n] becomes int32 [rows, ceil(n * bits / 32)]."""
    count = WORD // bits
    padded = np.pad(codes, ((0, 0), (0, -codes.shape[1] % count)))
    words = np.zeros((len(codes), padded.shape[1] // count), np.uint32)
    for place in range(count):
        words |= padded[:, place::count].astype(np.uint32) << np.uint32(place * bits)
    return words.view(np.int32)


def check_shape(
    files: AbstractTensors, name: str, wanted: tuple[int, ...], *, of: str
) -> None:
    """Raise ValueError unless a tensor is there, and has a shape."""
    spec = files.specs.get(name)
    if spec is None or spec.shape != wanted:
        found = "absent" if spec is None else list(spec.shape)
        raise ValueError(
            f"{name} is {found}, and {of!r} {list(files.specs[of].shape)} needs "
            f"{list(wanted)}. Check quantization_config in config.json, or get the "
            "files again."
        )
