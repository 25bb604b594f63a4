"""Finds the collectives of a compiled program, in each form that XLA writes.

* plain: `all-gather(...)`, for which the device waits;
* a pair, `all-gather-start(...)` and `all-gather-done(...)`, between which the device
  works;
* `async-start(...)`, which calls a computation with a plain collective;
* on TPU, a chain of fusions that compute matmuls during a collective. Each fusion of
  the chain has the collective; the first also has `AsyncCollectiveStart` and the last
  `AsyncCollectiveDone`;
* on TPU, a fusion of an all-reduce and a slice, which is a reduce-scatter.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

from zinf.core.topology.compiled.hlo import Computation, Instruction, Module
from zinf.core.topology.compiled.shape import Leaf

Kind = Literal[
    "all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute"
]
KINDS: tuple[Kind, ...] = get_args(Kind)
RAGGED = "ragged-all-to-all"
# The GPU compiler's mark of a start-done pair that the device waits for.
IS_SYNCHRONOUS = '"is_sync":true'
CHANNEL = r"\bchannel_id=(\d+)"
CHAINED = "chain_id="
FIRST, LAST = "AsyncCollectiveStart", "AsyncCollectiveDone"


@dataclass(frozen=True)
class Site:
    """A collective in the computation that issues it.

    Attributes:
        operation: the collective instruction, with its operands and groups.
        inside: the computation of `operation`.
        issued: the instruction that starts the collective.
        ended: the instruction that waits for it; None if this computation has none.
        results: the arrays that it returns.
    """

    kind: Kind
    operation: Instruction
    inside: Computation
    issued: Instruction
    ended: Instruction | None
    is_async: bool
    results: tuple[Leaf, ...]


def sites(module: Module, scheduled: Computation) -> Iterator[Site]:
    """The collectives that a computation issues, in order."""
    for one in scheduled.instructions:
        if one.opcode.removesuffix("-start") == RAGGED:
            raise NotImplementedError(
                f"{one.name} is a {RAGGED}, whose bytes only the data tells."
            )
        if kind := _kind(one.opcode):
            yield Site(kind, one, scheduled, one, None, False, one.leaves)
        elif kind := _kind(one.opcode.removesuffix("-start")):
            ended = _user(scheduled, one, f"{kind}-done")
            results = ended.leaves if ended else one.leaves[-1:]
            is_async = IS_SYNCHRONOUS not in one.attributes
            yield Site(kind, one, scheduled, one, ended, is_async, results)
        elif one.opcode == "async-start":
            yield from _in_wrapper(module, scheduled, one)
        elif one.opcode == "fusion":
            yield from _in_fusion(module, scheduled, one)


def _in_wrapper(
    module: Module, scheduled: Computation, one: Instruction
) -> Iterator[Site]:
    for inside, inner, kind in _held(module, one):
        ended = _user(scheduled, one, "async-done")
        is_async = IS_SYNCHRONOUS not in one.attributes
        yield Site(kind, inner, inside, one, ended, is_async, inner.leaves)


def _in_fusion(
    module: Module, scheduled: Computation, one: Instruction
) -> Iterator[Site]:
    for inside, inner, kind in _held(module, one):
        if _feeds(inside, inner, FIRST):
            ended = _last_of_chain(module, scheduled, one, inner)
            yield Site(kind, inner, inside, one, ended, True, inner.leaves)
        elif CHAINED in inner.attributes:
            continue
        elif kind == "all-reduce" and _is_sliced(inside):
            yield Site("reduce-scatter", inner, inside, one, None, False, one.leaves)
        else:
            yield Site(kind, inner, inside, one, None, False, inner.leaves)


def _held(
    module: Module, one: Instruction
) -> Iterator[tuple[Computation, Instruction, Kind]]:
    for name in one.called:
        inside = module.computations[name]
        for inner in inside.instructions:
            if kind := _kind(inner.opcode):
                yield inside, inner, kind


def _kind(opcode: str) -> Kind | None:
    return next((kind for kind in KINDS if kind == opcode), None)


def _user(inside: Computation, one: Instruction, opcode: str) -> Instruction | None:
    """The user of `one` with this opcode, perhaps after `async-update`s."""
    for user in inside.users.get(one.name, ()):
        if user.opcode == opcode:
            return user
        if user.opcode == "async-update":
            return _user(inside, user, opcode)
    return None


def _feeds(inside: Computation, one: Instruction, target: str) -> bool:
    users = inside.users.get(one.name, ())
    return any(f'custom_call_target="{target}"' in user.attributes for user in users)


def _last_of_chain(
    module: Module, scheduled: Computation, first: Instruction, inner: Instruction
) -> Instruction | None:
    channel = inner.attribute(CHANNEL)
    for one in scheduled.instructions[scheduled.position[first.name] + 1 :]:
        if one.opcode != "fusion":
            continue
        for inside, held, _ in _held(module, one):
            if held.attribute(CHANNEL) == channel and _feeds(inside, held, LAST):
                return one
    return None


def _is_sliced(inside: Computation) -> bool:
    return any(one.opcode == "dynamic-slice" for one in inside.instructions)
