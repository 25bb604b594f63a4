"""Counts how often each computation of a compiled program runs."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from zinf.core.topology.compiled.hlo import Computation, Instruction, Module

COPIES = ("copy", "copy-start", "copy-done", "bitcast")
TRIPS = r'known_trip_count"?[:=]\{"?n"?[:=]"?(\d+)'


@dataclass(frozen=True)
class Visit:
    """A computation, reached from the entry by one path of calls.

    Both branches of a conditional count as taken, so traffic is an upper bound.

    Attributes:
        times: how often it runs by this path: the product of the trip counts of the
            loops around it. A loop with unknown trip count counts once.
        is_exact: whether all these trip counts are known.
    """

    computation: Computation
    times: int
    is_exact: bool


def visits(module: Module) -> Iterator[Visit]:
    """Each computation that the entry reaches by loops, calls and conditionals.

    Computations of fusions and asynchronous wrappers belong to the instruction that
    calls them, and are not visited.
    """
    entry = Visit(module.computations[module.entry], 1, True)
    waiting = [entry]
    while waiting:
        visit = waiting.pop()
        yield visit
        for one in visit.computation.instructions:
            waiting.extend(_inside(module, visit, one))


def _inside(module: Module, visit: Visit, one: Instruction) -> Iterator[Visit]:
    if one.opcode == "while":
        trips = trip_count(module, visit.computation, one)
        body = one.attribute(r"\bbody=%?([\w.\-]+)")
        assert body is not None, f"{one.name} is a loop without a body"
        yield Visit(
            module.computations[body],
            visit.times * (1 if trips is None else trips),
            visit.is_exact and trips is not None,
        )
    elif one.opcode in ("call", "conditional"):
        for name in one.called:
            yield Visit(module.computations[name], visit.times, visit.is_exact)


def trip_count(module: Module, around: Computation, loop: Instruction) -> int | None:
    """How often a loop runs its body; None if the text does not tell.

    XLA writes the trip count of loops that it analysed. The TPU compiler does not write
    it for its own loops, which overlap matmuls with a ring of permutes. For those it is
    computed from the condition `i < limit`, the start of `i` and its increment.
    """
    if said := loop.attribute(TRIPS):
        return int(said)
    condition = loop.attribute(r"\bcondition=%?([\w.\-]+)")
    body = loop.attribute(r"\bbody=%?([\w.\-]+)")
    if condition is None or body is None:
        return None
    counter = _counter(module.computations[condition])
    if counter is None:
        return None
    index, limit = counter
    start = _constant(around, _element(around, loop.operands[0], index))
    step = _step(module.computations[body], index)
    if start is None or not step:
        return None
    return max(0, -(-(limit - start) // step))


def _counter(condition: Computation) -> tuple[int, int] | None:
    """The index of the counter in the loop's state, and the limit it stays below."""
    compare = condition.root
    if compare.opcode != "compare" or "direction=LT" not in compare.attributes:
        return None
    index = _index(condition, compare.operands[0])
    limit = _constant(condition, compare.operands[1])
    return None if index is None or limit is None else (index, limit)


def _step(body: Computation, index: int) -> int | None:
    name = _element(body, body.root.name, index)
    add = None if name is None else _original(body, name)
    if add is None or add.opcode != "add":
        return None
    first, second = add.operands
    return _constant(body, second) if _index(body, first) == index else None


def _element(inside: Computation, name: str, index: int) -> str | None:
    made = inside.by_name[name]
    return made.operands[index] if made.opcode == "tuple" else None


def _index(inside: Computation, name: str) -> int | None:
    """The index of the state element that `name` is; None if it is no such element."""
    one = _original(inside, name)
    said = one.attribute(r"\bindex=(\d+)")
    return None if one.opcode != "get-tuple-element" or said is None else int(said)


def _constant(inside: Computation, name: str | None) -> int | None:
    """The value of an integer scalar; None if it is not a constant."""
    if name is None:
        return None
    one = _original(inside, name)
    is_number = one.opcode == "constant" and re.fullmatch(r"-?\d+", one.arguments)
    return int(one.arguments) if is_number else None


def _original(inside: Computation, name: str) -> Instruction:
    """The instruction that `name` is a copy of, after all copies and bitcasts."""
    one = inside.by_name[name]
    while one.opcode in COPIES:
        one = inside.by_name[one.operands[0]]
    return one
