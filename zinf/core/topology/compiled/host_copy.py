"""The copies between device and host memory, and the matmuls that hide them."""

from collections.abc import Iterator
from dataclasses import dataclass

from zinf.core.topology.compiled.flops import flops_between
from zinf.core.topology.compiled.hlo import Instruction, Module, parse
from zinf.core.topology.compiled.loop import Visit, visits

SLICE_STARTS = ("dynamic-slice-start", "dynamic-update-slice-start")
# Opcodes that call a computation of one slice; for GPUs the slice is a kernel.
CALLS = ("async-start", "fusion-start", "fusion")
SLICES = ("dynamic-slice", "dynamic-update-slice", "copy")


@dataclass(frozen=True)
class HostCopy:
    """A copy between device and host; bytes and flops are per device and execution.

    `times`, `is_exact`, `is_async` and `overlapped_*` are as in `Collective`.
    """

    name: str
    is_to_host: bool
    nbytes: int
    times: int
    is_exact: bool
    is_async: bool
    overlapped_flops: int
    overlapped_matmuls: int


def host_copies(text: str) -> tuple[HostCopy, ...]:
    """The copies of a compiled program to and from pinned host memory.

    These are copies of whole arrays (`copy`, or `copy-start` and `copy-done`), and of
    slices (`dynamic-slice-start`, or inside `async-start`; for GPUs inside a fusion).
    Copies between two device memories are left out.
    """
    module = parse(text)
    return tuple(copy for visit in visits(module) for copy in _of(module, visit))


def _of(module: Module, visit: Visit) -> Iterator[HostCopy]:
    for one in visit.computation.instructions:
        if one.opcode == "copy":
            (source,) = visit.computation.operand_leaves(one)
            (result,) = one.leaves
            if source.is_on_host != result.is_on_host:
                yield _made(module, visit, one, result.is_on_host, result.nbytes)
        elif one.opcode == "copy-start":
            result, source = one.leaves[:2]
            if source.is_on_host != result.is_on_host:
                yield _made(module, visit, one, result.is_on_host, result.nbytes)
        elif one.opcode in CALLS:
            yield from _slices(module, visit, one)
        elif one.opcode in SLICE_STARTS:
            # The TPU compiler's short form: operands, result and context.
            operands = visit.computation.operand_leaves(one)
            moved, into = operands[0], one.leaves[-2]
            if one.opcode == SLICE_STARTS[1]:
                moved = operands[1]
            if moved.is_on_host != into.is_on_host:
                nbytes = min(moved.nbytes, into.nbytes)
                yield _made(module, visit, one, into.is_on_host, nbytes)


def _slices(module: Module, visit: Visit, one: Instruction) -> Iterator[HostCopy]:
    for name in one.called:
        inside = module.computations[name]
        root = inside.root
        if root.opcode not in SLICES:
            continue
        operands = inside.operand_leaves(root)
        result = root.leaves[0]
        moved, into = operands[0], result
        if root.opcode == "dynamic-update-slice":
            moved = operands[1]
        if moved.is_on_host != into.is_on_host:
            nbytes = min(moved.nbytes, into.nbytes)
            yield _made(module, visit, one, into.is_on_host, nbytes)


def _made(
    module: Module, visit: Visit, one: Instruction, is_to_host: bool, nbytes: int
) -> HostCopy:
    scheduled = visit.computation
    is_async = one.opcode.endswith("-start")
    flops = matmuls = 0
    if is_async:
        done = one.opcode.removesuffix("-start") + "-done"
        users = scheduled.users.get(one.name, ())
        ends = [scheduled.position[user.name] for user in users if user.opcode == done]
        first, last = scheduled.position[one.name], len(scheduled.instructions)
        flops, matmuls = flops_between(module, scheduled, first, min([*ends, last]))
    return HostCopy(
        name=one.name,
        is_to_host=is_to_host,
        nbytes=nbytes,
        times=visit.times,
        is_exact=visit.is_exact,
        is_async=is_async,
        overlapped_flops=flops,
        overlapped_matmuls=matmuls,
    )
