"""Weights as NVIDIA's ModelOpt writes them: NVFP4, and float8 with one scale."""

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import chain
from typing import Any

from zinf.core.interchange.tensors import AbstractTensors
from zinf.core.program import ArraySpec
from zinf.hf.quantized import compressed_tensors, fp4
from zinf.hf.quantized.layer import Layer
from zinf.hf.quantized.packed import Packed

FOUR_BITS = ("NVFP4", "W4A16_NVFP4")
ALGORITHMS = (*FOUR_BITS, "FP8")
# The algorithm of a section in which each layer has its own.
MIXED = "MIXED_PRECISION"
# Keys of lists of layers that stay plain.
LEFT_OUT = ("ignore", "exclude_modules")
# Heads and routers, which ModelOpt leaves plain unless it is told otherwise.
USUALLY_LEFT_OUT = (
    *("*lm_head*", "*proj_out.*", "*output_layer*", "output.*"),
    *("*block_sparse_moe.gate*", "*router*", "*mlp.gate.*"),
    "*mlp.shared_expert_gate.*",
)
# Factors of inputs, which AWQ's weights need.
FACTORS = "pre_quant_scale"


def refusal(section: Mapping[str, Any]) -> str | None:
    algorithm, layers = section.get("quant_algo"), section.get("quantized_layers") or {}
    named = {name: layer.get("quant_algo") for name, layer in layers.items()}
    if algorithm != MIXED or not named:
        named[""] = algorithm
    for name, own in named.items():
        if own not in ALGORITHMS:
            place = f" of {name}" if name else ""
            return f"quant_algo {own}{place}, and {', '.join(ALGORITHMS)} are read"
    return None


def find(files: AbstractTensors, section: Mapping[str, Any]) -> dict[str, Packed]:
    """The weights with `NAME_scale` beside them: uint8 of two codes each, or float8.

    Raises:
        ValueError: a layer has factors of its inputs, or see `of_codes` and `scaled`.
    """
    found: dict[str, Packed] = {}
    for name, spec in files.specs.items():
        if name.endswith(FACTORS):
            raise ValueError(
                f"{name} multiplies the inputs of a layer, which zinf does not read. "
                "Use the checkpoint in bfloat16."
            )
        if f"{name}{fp4.SCALE}" not in files.specs:
            continue
        if spec.dtype == "uint8":
            found[name] = fp4.of_codes(
                files, name, name, second=fp4.SECOND, divides=False
            )
        else:
            found[name] = compressed_tensors.scaled(files, name)
    return found


def expected(layer: Layer, section: Mapping[str, Any]) -> dict[str, ArraySpec]:
    """The tensors of a weight in NVFP4; none of one that is float8 or plain."""
    algorithm, group = section["quant_algo"], section.get("group_size")
    if algorithm == MIXED:
        layers = section["quantized_layers"]
        own = next((layers[name] for name in layer.names if name in layers), {})
        algorithm, group = own.get("quant_algo"), own.get("group_size", group)
    if algorithm not in FOUR_BITS or not layer.is_linear:
        return {}
    name, group = layer.tensor, group or fp4.NVFP4_GROUP
    return fp4.expected(name, name, layer.shape, group, second=fp4.SECOND)


def left_out(section: Mapping[str, Any]) -> Sequence[str] | None:
    """Which layers a section leaves plain; None: it does not say."""
    lists = [section[key] or () for key in LEFT_OUT if key in section]
    if not lists and section["quant_algo"] != MIXED:
        return None
    return [*chain(*lists)]


def is_named(layer: Layer, entry: str) -> bool:
    """Whether an entry is a part of a layer's name, or has wildcards for it."""
    ended = (form for name in layer.names for form in (name, f"{name}."))
    return any(entry in name or fnmatchcase(name, entry) for name in ended)
