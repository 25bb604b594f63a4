"""Floating-point operations of the matmuls in a compiled program.

A transfer is hidden by the work between its start and its end, which in these programs
is mostly matmuls: `dot`, calls of GPU libraries, and the `convolution` that the TPU
compiler makes of a matmul.
"""

import math
import re

import jax

from zinf.core.topology.compiled.hlo import Computation, Instruction, Module, parse
from zinf.core.topology.compiled.loop import trip_count

GEMM_CALLS = ("__cublas$gemm", "__cublas$lt$matmul", "__cudnn$")
CONTRACTED = re.compile(r"\blhs_contracting_dims=\{([\d,]*)\}")
CONTRACTED_IN_JSON = re.compile(r'"lhs_contracting_dimensions":\[([^\]]*)\]')


def flops_of(compiled: jax.stages.Compiled) -> int:
    """Flops of a run of a program on one device.

    XLA counts the body of a loop once, and nothing of a program for an absent GPU. Of
    such programs, matmuls are counted here if that gives more.
    """
    by_xla = int((compiled.cost_analysis() or {}).get("flops", 0))
    text = compiled.as_text()
    if text is None or (by_xla and " while(" not in text):
        return by_xla
    module = parse(text)
    entry = module.computations[module.entry]
    matmuls, _ = flops_between(module, entry, -1, len(entry.instructions))
    return max(by_xla, matmuls)


def flops_between(
    module: Module, inside: Computation, first: int, last: int
) -> tuple[int, int]:
    """Flops and number of matmuls issued after instruction `first`, before `last`."""
    flops = matmuls = 0
    for one in inside.instructions[first + 1 : last]:
        more, count = _flops(module, inside, one)
        flops += more
        matmuls += count
    return flops, matmuls


def _flops(module: Module, inside: Computation, one: Instruction) -> tuple[int, int]:
    if one.opcode == "dot":
        return _dot(inside, one, CONTRACTED), 1
    if one.opcode == "convolution":
        return _convolution(inside, one), 1
    if one.opcode == "custom-call":
        target = one.attribute(r'custom_call_target="([^"]*)"') or ""
        if target.startswith(GEMM_CALLS):
            return _dot(inside, one, CONTRACTED_IN_JSON), 1
        return 0, 0
    flops = matmuls = 0
    for name in one.called:
        computation = module.computations[name]
        last = len(computation.instructions)
        more, count = flops_between(module, computation, -1, last)
        flops += more
        matmuls += count
    trips = trip_count(module, inside, one) if one.opcode == "while" else 1
    return flops * (trips or 1), matmuls * (trips or 1)


def _dot(inside: Computation, one: Instruction, contracted: re.Pattern[str]) -> int:
    """Two flops for each element of the result times each that it sums over."""
    said = contracted.search(one.attributes)
    if said is None:
        return 0
    left = inside.operand_leaves(one)[0].dims
    axes = [int(axis.strip('" ')) for axis in said.group(1).split(",") if axis]
    return 2 * one.leaves[0].numel * math.prod(left[axis] for axis in axes)


def _convolution(inside: Computation, one: Instruction) -> int:
    """Two flops for each element of the result times each that it sums over.

    A convolution sums over all kernel dims but the output features. The TPU compiler
    turns a batch dim of a matmul into a spatial dim with a dilated input; an output has
    one element along it, so that dim is left out too.
    """
    labels = one.attribute(r"\bdim_labels=\w+_(\w+)->")
    if labels is None:
        return 0
    kernel = inside.operand_leaves(one)[1].dims
    dilation = one.attribute(r"\blhs_dilate=([\dx]+)")
    dilations = [int(d) for d in dilation.split("x")] if dilation else []
    summed = 1
    for label, size in zip(labels, kernel, strict=True):
        is_batch = label.isdigit() and dilations and dilations[int(label)] > 1
        if label != "o" and not is_batch:
            summed *= size
    return 2 * one.leaves[0].numel * summed
