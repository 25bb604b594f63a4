"""Published weights in few bits whose codes are kept as they are in the files."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod

import numpy as np

from zinf.adapt.blocks import Encoding
from zinf.adapt.forms import CODES, TENSOR_SCALE
from zinf.core.interchange.tensors import AbstractTensors
from zinf.core.program import ArraySpec
from zinf.core.sharding import Box
from zinf.hf.quantized.packed import Packed, read_run

# A weight in the form of files, and the files.
Source = tuple[AbstractTensors, Packed]


class Codes(AbstractTensors):
    """The arrays of weights as `Encoding` has them, as tensors "NAME/PART".

    Args:
        weights: the files and tensors that each weight is made of, one after the other.
            Weights whose tensors have no encoding, or several, are left out.
    """

    # A part as the files have it, with the halves of its bytes exchanged, and one half.
    copies = 3

    def __init__(self, weights: Mapping[str, Sequence[Source]]) -> None:
        self.weights = {
            name: own
            for name, own in weights.items()
            if len({(x.encoding, x.spec.shape, len(x.parts)) for _, x in own}) == 1
            and own[0][1].encoding is not None
        }
        self.encodings: dict[str, Encoding] = {}
        specs: dict[str, ArraySpec] = {}
        for name, own in self.weights.items():
            (_, first), count = own[0], len(own)
            assert first.encoding is not None
            self.encodings[name] = replace(first.encoding, tensors=count)
            for part, x in first.encoding.shapes(first.spec.shape).items():
                shape = (count * x.shape[0], *x.shape[1:])
                specs[f"{name}/{part}"] = ArraySpec(
                    shape, str(x.dtype), x.dtype.itemsize
                )
        self.specs = specs

    def block(self, name: str) -> tuple[int, ...]:
        (files, tensor), (_, *rest) = self._tensors(name)[0], self.specs[name].shape
        if tensor is None:
            return (1,)
        numel = prod(map(min, files.block(tensor), files.specs[tensor].shape))
        return (max(1, numel // prod(rest)), *rest)

    def read(self, name: str, box: Box) -> np.ndarray:
        spec, tensors, (low, high) = self.specs[name], self._tensors(name), box[0]
        rows, row = spec.shape[0] // len(tensors), prod(spec.shape[1:])
        runs = []
        for number in range(low // rows, -(-high // rows)):
            (files, tensor), start = tensors[number], number * rows
            run = max(low - start, 0) * row, min(high - start, rows) * row
            runs.append(_stored(files, tensor, run, name.rpartition("/")[2]))
        found = runs[0] if len(runs) == 1 else np.concatenate(runs)
        return found.view(spec.dtype).reshape(high - low, *spec.shape[1:])

    def _tensors(self, name: str) -> list[tuple[AbstractTensors, str | None]]:
        """The tensors that an array is made of, with their files; None: absent ones."""
        weight, _, part = name.rpartition("/")
        place = self.encodings[weight].names.index(part)
        return [
            (files, packed.parts[place] if place < len(packed.parts) else None)
            for files, packed in self.weights[weight]
        ]


def _stored(
    files: AbstractTensors, tensor: str | None, run: tuple[int, int], part: str
) -> np.ndarray:
    """Some elements of a tensor in the form of a part of an encoding, [n]."""
    if tensor is None:
        return np.ones(1, np.float32)  # No scale of the whole tensor.
    found = read_run(files, tensor, *run)
    if part == CODES:
        # Files have the first code of a byte in its low half.
        return (found << 4) | (found >> 4)
    return found.astype(np.float32) if part == TENSOR_SCALE else found
