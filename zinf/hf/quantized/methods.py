"""The methods by which published weights are quantized."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from zinf.core.interchange.tensors import AbstractTensors
from zinf.hf.quantized import (
    awq,
    bitsandbytes,
    compressed_tensors,
    fp8,
    gptq,
    modelopt,
    mxfp4,
)
from zinf.hf.quantized.expected import Keeping, Section
from zinf.hf.quantized.packed import Dequantized, Packed


@dataclass(frozen=True)
class Method:
    """How the weights of one quantization method are read.

    Attributes:
        find: the plain weights that can be made of tensors, by name.
        refusal: what a section asks for that is not read; None: nothing.
        keeping: which weights stay in few bits; None: all are decoded.
    """

    find: Callable[[AbstractTensors, Section], Mapping[str, Packed]]
    refusal: Callable[[Section], str | None]
    keeping: Keeping | None = None


METHODS = {
    "fp8": Method(fp8.find, fp8.refusal),
    "mxfp4": Method(
        mxfp4.find,
        lambda section: None,
        Keeping(mxfp4.expected, mxfp4.left_out, mxfp4.is_named),
    ),
    "gptq": Method(gptq.find, gptq.refusal),
    "awq": Method(awq.find, awq.refusal),
    "compressed-tensors": Method(
        compressed_tensors.find,
        compressed_tensors.refusal,
        Keeping(
            compressed_tensors.expected,
            compressed_tensors.left_out,
            compressed_tensors.is_named,
        ),
    ),
    "modelopt": Method(
        modelopt.find,
        modelopt.refusal,
        Keeping(
            modelopt.expected,
            modelopt.left_out,
            modelopt.is_named,
            usually=modelopt.USUALLY_LEFT_OUT,
        ),
    ),
    "bitsandbytes": Method(bitsandbytes.find, bitsandbytes.refusal),
}
# Methods that names of tensors show, where config.json says nothing.
BY_NAME = ("fp8", "mxfp4")
# How names of tensors end that methods alone write, and no model has.
SIGNS = {
    ".qweight": "gptq or awq",
    "weight_packed": "compressed-tensors",
    "weight_scale_inv": "fp8",
    "_proj_blocks": "mxfp4",
    "weight.absmax": "bitsandbytes",
    "weight.SCB": "bitsandbytes",
}


def plain(files: AbstractTensors, section: Section | None) -> Dequantized:
    """The tensors of files, where quantized ones are plain numbers.

    Args:
        section: `quantization_config` of config.json.

    Raises:
        ValueError: scales are missing, or of another shape; or a tensor is of another
            method than the section says.
    """
    methods = [section["quant_method"]] if section else BY_NAME
    made: dict[str, Packed] = {}
    for method in methods:
        made |= METHODS[method].find(files, section or {})
    found = Dequantized(files, made)
    _check_method(found, section)
    return found


def _check_method(tensors: AbstractTensors, section: Section | None) -> None:
    """Refuse what a method wrote that config.json does not name."""
    for name in tensors.specs:
        for end, method in SIGNS.items():
            if name.endswith(end):
                said = section["quant_method"] if section else "none"
                raise ValueError(
                    f"{name} is quantized by {method}, and the method of "
                    f"quantization_config in config.json is {said}. zinf reads one "
                    "method in a model. Use a checkpoint of one, or that in bfloat16."
                )


def refusal(section: Section) -> str | None:
    """Why weights quantized as a section says cannot be read; None if they can."""
    method = section.get("quant_method")
    if method not in METHODS:
        return f"{method or 'an unknown method'}"
    reason = METHODS[method].refusal(section)
    return None if reason is None else f"{method}, {reason}"
