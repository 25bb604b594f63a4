"""Two numbers of 4 bits (e2m1) in a byte, with a scale for each group of inputs.

| form | tensors of `NAME` | a number times |
|---|---|---|
| compressed-tensors, `nvfp4-pack-quantized` | `weight_packed`, `weight_scale` float8, `weight_global_scale` | scale / global scale |
| compressed-tensors, `mxfp4-pack-quantized` | `weight_packed`, `weight_scale` uint8 | 2 to the power (scale - 127) |
| ModelOpt, `NVFP4` | `weight` uint8, `weight_scale` float8, `weight_scale_2` | scale * scale 2 |

Scales of activations (`input_scale`, `input_global_scale`) are not read: zinf computes
with plain activations.
"""  # noqa: E501

from dataclasses import dataclass

import numpy as np

from zinf.adapt.blocks import Encoding
from zinf.adapt.forms import Name
from zinf.core.interchange.tensors import AbstractTensors
from zinf.core.program import ArraySpec
from zinf.core.sharding import Box
from zinf.hf.quantized.fp8 import factors
from zinf.hf.quantized.mxfp4 import PAIRS
from zinf.hf.quantized.packed import Packed, float32, read_floats, rows_of_part

SCALE, GLOBAL, SECOND = "_scale", "_global_scale", "_scale_2"
# Numbers of nvfp4 that share a scale, if a section of config.json does not say it.
NVFP4_GROUP = 16


def expected(
    name: str, codes: str, shape: tuple[int, ...], group: int, *, second: str | None
) -> dict[str, ArraySpec]:
    """The tensors that files have of a weight; none if groups do not fill its rows.

    Args:
        codes: the name of that of codes.
        shape: of the weight.
        group: numbers that share a scale.
        second: the end of the name of the scale for all, of nvfp4; None: it is mxfp4.
    """
    rows, inputs = shape
    if inputs % group:
        return {}
    dtype = "uint8" if second is None else "float8_e4m3fn"
    found = {
        codes: ArraySpec((rows, inputs // 2), "uint8", 1),
        f"{name}{SCALE}": ArraySpec((rows, inputs // group), dtype, 1),
    }
    if second is not None:
        found[f"{name}{second}"] = float32(1)
    return found


def of_codes(
    files: AbstractTensors, name: str, codes: str, *, second: str, divides: bool
) -> "Fp4":
    """A weight of codes, with `NAME_scale` and, where files have it, a scale for all.

    Args:
        second: the end of the name of the scale for all.
        divides: whether scales are divided by it.

    Raises:
        ValueError: scales are of another shape, or codes have another code of 0.
    """
    scales, whole = f"{name}{SCALE}", f"{name}{second}"
    rows, width = files.specs[codes].shape
    shape, dtype = files.specs[scales].shape, files.specs[scales].dtype
    if len(shape) != 2 or shape[0] != rows or not shape[1] or 2 * width % shape[1]:
        raise ValueError(
            f"{scales} is {list(shape)}, and {codes} is {[rows, width]}: it needs a "
            "scale for each group of an output's inputs. Get the files again."
        )
    if f"{name}_zero_point" in files.specs:
        raise ValueError(
            f"{name}_zero_point moves the code of 0 of a weight in fp4, which zinf "
            "does not read. Use the checkpoint in bfloat16."
        )
    parts = [codes, scales, *([whole] if whole in files.specs else [])]
    forms: dict[tuple[str, bool], Name] = {
        ("uint8", False): "mxfp4",
        ("float8_e4m3fn", False): "nvfp4",
        ("float8_e4m3fn", True): "nvfp4_over" if divides else "nvfp4",
    }
    form, block = forms.get((dtype, len(parts) > 2)), 2 * width // shape[1]
    encoding = None if form is None or block % 2 else Encoding(form, block)
    return Fp4(tuple(parts), float32(rows, 2 * width), divides, encoding=encoding)


@dataclass(frozen=True)
class Fp4(Packed):
    """A weight in e2m1, with scales of groups and maybe one of all.

    Attributes:
        divides: whether scales of groups are divided by that of all.
    """

    divides: bool

    @property
    def copies(self) -> int:
        # The numbers, and twice as many bytes for the numbers of their codes.
        return 3

    def block(self, files: AbstractTensors) -> tuple[int, ...]:
        return (rows_of_part(files, self.parts[0], self.spec), self.spec.shape[1])

    def read(self, files: AbstractTensors, box: Box) -> np.ndarray:
        rows, columns = box
        codes, scales = (
            files.read(part, (rows, (0, files.specs[part].shape[1])))
            for part in self.parts[:2]
        )
        steps = factors(scales)
        if len(self.parts) > 2:
            whole = read_floats(files, self.parts[2]).reshape(())
            steps = steps / whole if self.divides else steps * whole
        values = PAIRS[codes].reshape(*steps.shape, -1)
        values *= steps[..., None]
        found = values.reshape(len(codes), -1)[:, slice(*columns)]
        return np.ascontiguousarray(found)
