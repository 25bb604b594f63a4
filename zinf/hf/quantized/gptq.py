"""Weights as GPTQ's programs write them (https://arxiv.org/abs/2210.17323).

Eight inputs of one output are in a word, the first in its low bits. Inputs may be of
groups in any order (`desc_act`): `NAME.g_idx` has the group of each.
"""

from collections.abc import Mapping
from dataclasses import dataclass
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
from zinf.hf.quantized.packed import (
    WORD,
    check_shape,
    float32,
    read_whole,
    unpacked,
)

BITS = (2, 4, 8)
# By the form of the files: what is added to the stored code of 0.
MORE = {"gptq": 1, "gptq_v2": 0}


def form_of(section: Mapping[str, Any]) -> str:
    """The form of the files; transformers writes both keys, and others one of them."""
    form = section.get("checkpoint_format") or section.get("format") or "gptq"
    return str(form).lower()


def refusal(section: Mapping[str, Any]) -> str | None:
    bits, form = section.get("bits"), form_of(section)
    if form not in MORE:
        return f"checkpoint_format {form}, and {' and '.join(MORE)} are read"
    return None if bits in BITS else f"{bits} bits, and 2, 4 and 8 are read"


def find(files: AbstractTensors, section: Mapping[str, Any]) -> dict[str, "Gptq"]:
    """The weights of `NAME.qweight`."""
    bits = int(section["bits"])
    more = MORE[form_of(section)]
    found = {}
    for qweight, spec in files.specs.items():
        if not qweight.endswith(QWEIGHT):
            continue
        inputs, outputs = spec.shape[0] * WORD // bits, spec.shape[1]
        name, *parts = names_of(qweight)
        group = check_groups(files, qweight, section, inputs, outputs, bits)
        index = qweight.removesuffix(QWEIGHT) + ".g_idx"
        if index in files.specs:
            check_shape(files, index, (inputs,), of=qweight)
            parts.append(index)
        made = float32(outputs, inputs)
        found[name] = Gptq(tuple(parts), made, bits, group, more)
    return found


@dataclass(frozen=True)
class Gptq(ByInputs):
    """A weight of GPTQ's programs.

    Attributes:
        more: a number that is added to the stored code of 0.
    """

    more: int

    def codes(
        self, files: AbstractTensors, inputs: Edges, outputs: Edges
    ) -> np.ndarray:
        each, (start, stop) = WORD // self.bits, inputs
        rows = (start // each, -(-stop // each))
        words = files.read(self.parts[0], (rows, (0, self.spec.shape[0])))
        some = np.ascontiguousarray(words[:, slice(*outputs)].T)
        return unpacked(some, self.bits).T[: stop - start]

    def zeros(self, files: AbstractTensors, outputs: Edges) -> np.ndarray:
        words = read_whole(files, self.qzeros)
        codes = by_outputs(words, self.bits, outputs).astype(np.int32)
        # 15 and 1 more are 0 again, as the programs that read this form have it.
        return ((codes + self.more) & (2**self.bits - 1)).astype(np.float32)

    def groups(self, files: AbstractTensors) -> np.ndarray:
        if len(self.parts) < 4:
            return super().groups(files)
        return read_whole(files, self.parts[3])
