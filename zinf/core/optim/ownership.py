"""Which parameter leaf each array of the optimizer state belongs to."""

from collections.abc import Mapping
from dataclasses import dataclass

from zinf.core.jaxpr.compat import Atom, Literal, Var
from zinf.core.optim.coupling import (
    dependencies,
    members,
    refuse_coupling,
    refuse_joint,
)
from zinf.core.optim.transform import Transform

SHARED = -1


@dataclass(frozen=True)
class Ownership:
    """State arrays, by number, of each leaf and of none.

    Attributes:
        of_leaf: those that depend on the leaf, and arrays that only it reads.
        shared: those that depend on no leaf and that several read, and all such
            scalars. Placeholders, constants that nothing reads (adafactor keeps three
            a leaf), belong to nobody.
        leaf_bits: the leaves behind each variable of `update`, as a bit set.
    """

    of_leaf: tuple[tuple[int, ...], ...]
    shared: tuple[int, ...]
    leaf_bits: Mapping[Var, int]


def find_owners(traced: Transform) -> Ownership:
    """Assigns every state array; raises ValueError where leaves are coupled."""
    num_leaves = len(traced.leaves)
    params = {v: 1 << i for i, v in enumerate(traced.init.invars)}
    found = dependencies(traced.init, params)
    _, bits = _settle(traced, [_bits(found, a) for a in traced.init.outvars])
    free = [k for k, leaves in enumerate(bits) if not leaves]
    readers, changing = _readers(traced, bits, free)
    shared = []
    for k in free:
        shape = traced.states[k][1].shape
        others = readers[k] - {k + num_leaves}
        owners = {_owner(j, num_leaves, bits) for j in others}
        if shape and len(owners) == 1 and SHARED not in owners:
            bits[k] = 1 << owners.pop()
        elif readers[k] or k in changing:
            shared.append(k)
    found, bits = _settle(traced, bits)
    of_leaf: list[list[int]] = [[] for _ in range(num_leaves)]
    for k, leaves in enumerate(bits):
        for i in members(leaves):
            of_leaf[i].append(k)
    return Ownership(tuple(tuple(ks) for ks in of_leaf), tuple(shared), found)


def _settle(traced: Transform, bits: list[int]) -> tuple[dict[Var, int], list[int]]:
    """Bit sets of the leaves behind variables and states, over any number of steps."""
    graph, num_leaves = traced.update, len(traced.leaves)
    grads, states, params = traced.update_inputs()
    paths = list(traced.leaves)
    while True:
        sources = dict(zip(states, bits, strict=True))
        for i in range(num_leaves):
            sources[grads[i]] = sources[params[i]] = 1 << i
        found = dependencies(graph, sources)
        refuse_coupling(graph, found, paths)
        outputs = [_bits(found, a) for a in graph.outvars]
        new = [b | o for b, o in zip(bits, outputs[num_leaves:], strict=True)]
        if new == bits:
            break
        bits = new
    for i, leaves in enumerate(outputs[:num_leaves]):
        refuse_joint(f"the update of {paths[i]!r}", leaves | 1 << i, paths)
    for (path, _), leaves in zip(traced.states, bits, strict=True):
        refuse_joint(f"the state {path!r}", leaves, paths)
    return found, bits


def _readers(
    traced: Transform, bits: list[int], free: list[int]
) -> tuple[dict[int, set[int]], set[int]]:
    """Outputs (by number) that read each free state; free states that change at all.

    A free state that depends on nothing, not even on itself or the loss, is a constant.
    """
    graph, num_leaves = traced.update, len(traced.leaves)
    _, states, _ = traced.update_inputs()
    sources = {states[k]: 1 << n for n, k in enumerate(free)}
    loss = 1 << len(free)
    found = dependencies(graph, sources | dict.fromkeys(traced.of_step, loss))
    readers: dict[int, set[int]] = {k: set() for k in free}
    changing = set()
    for j, atom in enumerate(graph.outvars):
        behind = _bits(found, atom)
        for n in members(behind & ~loss):
            readers[free[n]].add(j)
        if behind and j >= num_leaves:
            changing.add(j - num_leaves)
    return readers, changing


def _bits(found: Mapping[Var, int], atom: Atom) -> int:
    return 0 if isinstance(atom, Literal) else found.get(atom, 0)


def _owner(output: int, num_leaves: int, bits: list[int]) -> int:
    """The number of the leaf that an output of the update is of, or `SHARED`.

    The first `num_leaves` outputs are the leaves' updates. The others are state arrays,
    and `bits` has the leaves behind each of them.
    """
    if output < num_leaves:
        return output
    leaves = bits[output - num_leaves]
    return next(members(leaves), SHARED)
