"""Weights as NVIDIA's ModelOpt writes them: NVFP4, and float8 with one scale."""

from collections.abc import Mapping
from typing import Any

from zinf.core.interchange.tensors import AbstractTensors
from zinf.hf.quantized import compressed_tensors, fp4
from zinf.hf.quantized.packed import Packed

ALGORITHMS = ("NVFP4", "W4A16_NVFP4", "FP8")
# The algorithm of a section in which each layer has its own.
MIXED = "MIXED_PRECISION"


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
    """The weights with `NAME_scale` beside them: uint8 of two codes each, or float8."""
    found: dict[str, Packed] = {}
    for name, spec in files.specs.items():
        if f"{name}{fp4.SCALE}" not in files.specs:
            continue
        if spec.dtype == "uint8":
            found[name] = fp4.of_codes(
                files, name, name, second=fp4.SECOND, divides=False
            )
        else:
            found[name] = compressed_tensors.scaled(files, name)
    return found
