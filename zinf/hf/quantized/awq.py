"""Weights as AWQ's programs write them (https://arxiv.org/abs/2306.00978).

Eight outputs of one input are in a word, in the order that its kernels unpack fastest.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from zinf.core.interchange.tensors import AbstractTensors
from zinf.hf.quantized.by_inputs import (
    QWEIGHT,
    ByInputs,
    Edges,
    by_outputs,
    check_groups,
    names_of,
)
from zinf.hf.quantized.packed import WORD, float32, read_whole

BITS = 4
# The place in a word of each of eight outputs.
ORDER = (0, 4, 1, 5, 2, 6, 3, 7)


def refusal(section: Mapping[str, Any]) -> str | None:
    bits = section.get("bits", BITS)
    version = section.get("version") or section.get("format") or "gemm"
    if bits != BITS:
        return f"{bits} bits, and {BITS} are read"
    if str(version).lower() != "gemm":
        return f"version {version}, and gemm is read"
    return None


def find(files: AbstractTensors, section: Mapping[str, Any]) -> dict[str, "Awq"]:
    """The weights of `NAME.qweight`."""
    found = {}
    for qweight, spec in files.specs.items():
        if not qweight.endswith(QWEIGHT):
            continue
        inputs, outputs = spec.shape[0], spec.shape[1] * WORD // BITS
        name, *parts = names_of(qweight)
        group = check_groups(files, qweight, section, inputs, outputs, BITS)
        found[name] = Awq(tuple(parts), float32(outputs, inputs), BITS, group)
    return found


class Awq(ByInputs):
    """A weight of one `NAME.qweight` [inputs, outputs / 8]."""

    def codes(
        self, files: AbstractTensors, inputs: Edges, outputs: Edges
    ) -> np.ndarray:
        width = files.specs[self.parts[0]].shape[1]
        words = files.read(self.parts[0], (inputs, (0, width)))
        return by_outputs(words, BITS, outputs, ORDER)

    def zeros(self, files: AbstractTensors, outputs: Edges) -> np.ndarray:
        words = read_whole(files, self.qzeros)
        return by_outputs(words, BITS, outputs, ORDER).astype(np.float32)
