"""Experts that are read on demand: finds them in a program, and gives them slots.

The weights of such experts are no parameters of their segment. It reads constants whose
rows are slots, and a table that says in which slot each expert is; the program is cut
right before, since the choice must be known when the experts are brought there.
"""

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zinf.core.jaxpr import Emitter, Graph
from zinf.core.jaxpr.chosen import CHOSEN_EXPERTS, NUM_OPERANDS
from zinf.core.jaxpr.compat import Atom, Equation, Literal, Var, fresh
from zinf.core.jaxpr.walk import CALLS, CUSTOM, REMAT, inner, programs
from zinf.core.problem.source import Source

logger = logging.getLogger(__name__)
# Shape and dtype of each weight of one expert. Experts of a kind can share slots.
Kind = tuple[tuple[tuple[int, ...], str], ...]
# For each input of a program that is a table of slots, the leaves that it is for.
Tables = Mapping[Var, tuple[str, ...]]
NO_TABLES: Tables = MappingProxyType({})


@dataclass(frozen=True)
class Experts:
    """The experts of a layer, all of whose weights are leaves of the parameters.

    Attributes:
        leaves: the leaf of each weight by name, with shape and dtype; rows are experts.
    """

    equation: Equation
    leaves: Mapping[str, Any]

    @property
    def num_experts(self) -> int:
        return self.equation.params["num_experts"]

    @property
    def choices(self) -> tuple[int, int]:
        """Tokens of a microbatch, and how many experts each chooses."""
        return self.equation.invars[0].aval.shape

    @property
    def most(self) -> int:
        """The most different experts that the tokens of a microbatch choose."""
        return min(self.num_experts, prod(self.choices))

    def kind(self, away: Collection[str]) -> Kind:
        """What one expert consists of in the leaves `away`, which rest elsewhere."""
        return tuple(
            (tuple(aval.shape[1:]), str(aval.dtype))
            for path, aval in self.leaves.items()
            if path in away
        )


def kind_bytes(kind: Kind) -> int:
    """Bytes of one expert."""
    return sum(prod(shape) * jnp.dtype(dtype).itemsize for shape, dtype in kind)


def inlined_experts(source: Source, *, is_trained: bool = False) -> Source:
    """The program in which experts are equations of its own, not of calls inside it.

    Args:
        is_trained: it is differentiated afterwards, so custom rules stay.
    """
    emitter = _OfTraining() if is_trained else _OfForward()
    emitter.consts.update(source.graph.consts)
    env: dict[Var, Atom] = {v: v for v in (*source.graph.invars, *source.graph.consts)}
    for equation in source.graph.equations:
        given = [a if isinstance(a, Literal) else env[a] for a in equation.invars]
        is_call = equation.primitive.name in emitter.inlines
        if is_call and len(inner(equation)) == 1 and _has_experts(equation):
            results = emitter.emit(equation, given)
        else:
            emitter.equations.append(equation.replace(invars=given))
            results = list(equation.outvars)
        env.update(zip(equation.outvars, results, strict=True))
    outvars = [a if isinstance(a, Literal) else env[a] for a in source.graph.outvars]
    rest = tuple(outvars), tuple(emitter.equations), emitter.consts
    return replace(source, graph=Graph(source.graph.invars, *rest))


class _OfTraining(Emitter):
    inlines = CALLS | REMAT


class _OfForward(Emitter):
    inlines = CALLS | CUSTOM | REMAT


def _has_experts(equation: Equation) -> bool:
    if equation.primitive.name == CHOSEN_EXPERTS:
        return True
    return any(map(has_experts, programs(equation)))


def has_experts(program: Any) -> bool:
    """Whether a jaxpr has experts that may be read on demand."""
    return any(map(_has_experts, _equations(program)))


def _equations(program: Any) -> Sequence[Equation]:
    return getattr(program, "jaxpr", program).eqns


def find_experts(source: Source) -> list[Experts]:
    """The experts of each layer whose weights are read as they are, in order."""
    found = []
    for equation in source.graph.equations:
        if equation.primitive.name != CHOSEN_EXPERTS:
            continue
        weights = equation.invars[NUM_OPERANDS:]
        leaves = {
            source.params[w]: w.aval
            for w in weights
            if not isinstance(w, Literal) and w in source.params
        }
        if len(leaves) == len(weights) and not isinstance(equation.invars[0], Literal):
            found.append(Experts(equation, leaves))
    return found


def slot_counts(
    experts: Sequence[Experts],
    away: Collection[str],
    slot_bytes: int,
    asked_bytes: int | None,
) -> dict[Kind, int]:
    """How many slots each kind of experts gets.

    Kinds are left out of which a microbatch may choose more than there are slots for:
    those are read whole.

    Args:
        away: names of the leaves that are read on demand.
        slot_bytes: bytes for all slots; 0 for no slots.
        asked_bytes: what the config asks for; None leaves at least as many slots as a
            microbatch may need.

    Raises:
        ValueError: fewer slots are asked for than a token needs.
    """
    by_kind: dict[Kind, list[Experts]] = {}
    for each in experts:
        if slot_bytes and (kind := each.kind(away)):
            by_kind.setdefault(kind, []).append(each)
    sharing = {kind: sum(x.num_experts for x in own) for kind, own in by_kind.items()}
    total = sum(kind_bytes(kind) * count for kind, count in sharing.items())
    found = {}
    for kind, own in by_kind.items():
        count = slot_bytes * sharing[kind] // total
        most = max(each.most for each in own)
        if asked_bytes is None:
            count = max(most, count)
        _check_token(kind, own, count, asked_bytes, total // sharing[kind])
        if count < most:
            logger.warning(
                "memory.experts holds %d experts of a layer, and its tokens may choose "
                "%d: all are read. Give it %d bytes, or give fewer rows.",
                *(count, most, -(-most * total // sharing[kind])),
            )
            continue
        found[kind] = min(sharing[kind], count)
    return found


def _check_token(
    kind: Kind, own: Sequence[Experts], count: int, asked_bytes: Any, each_bytes: int
) -> None:
    """Raise unless there are slots for what one token chooses in a layer."""
    largest = max(own, key=lambda x: min(x.num_experts, x.choices[1]))
    needed = min(largest.num_experts, largest.choices[1])
    if count < needed:
        raise ValueError(
            f"memory.experts is {asked_bytes:,} bytes, which holds {count:,} experts "
            f"of {kind_bytes(kind):,}, and a token chooses {needed:,} of the "
            f"{largest.num_experts:,} experts of a layer. Give at least "
            f"{needed * each_bytes:,} bytes, or off: then all experts of a layer are "
            "read for each pass."
        )


def in_slots(
    source: Source,
    experts: Sequence[Experts],
    away: Collection[str],
    num_slots: Mapping[Kind, int],
) -> tuple[Source, Tables]:
    """The program that reads the weights `away` of experts from slots.

    Args:
        experts: of `find_experts`.
        away: names of the leaves that are read on demand.
        num_slots: by the kind of the experts; those of other kinds are read whole.

    Returns:
        The program, and its new inputs.
    """
    made: dict[Kind, tuple[Var, ...]] = {}
    tables: dict[Var, tuple[str, ...]] = {}
    changed: dict[int, Equation] = {}
    for each in experts:
        kind = each.kind(away)
        if kind not in num_slots:
            continue
        if kind not in made:
            made[kind] = tuple(
                fresh(_aval((num_slots[kind], *shape), dtype)) for shape, dtype in kind
            )
        table = fresh(_aval((each.num_experts,), "int32"))
        tables[table] = tuple(path for path in each.leaves if path in away)
        changed[id(each.equation)] = _with_slots(each, away, table, made[kind])
    graph = source.graph
    # No memory: slots begin as zeros, which are made on the device.
    consts = {
        v: np.broadcast_to(np.zeros((), v.aval.dtype), v.aval.shape)
        for slots in made.values()
        for v in slots
    }
    equations = tuple(changed.get(id(e), e) for e in graph.equations)
    graph = replace(
        graph,
        invars=(*graph.invars, *tables),
        equations=equations,
        consts={**graph.consts, **consts},
    )
    return replace(source, graph=graph), tables


def _with_slots(
    experts: Experts, away: Collection[str], table: Var, slots: Sequence[Var]
) -> Equation:
    equation, rest = experts.equation, iter(slots)
    first, weights = equation.invars[:NUM_OPERANDS], equation.invars[NUM_OPERANDS:]
    flags = tuple(path in away for path in experts.leaves)
    read = [
        next(rest) if is_away else w for w, is_away in zip(weights, flags, strict=True)
    ]
    params = {**equation.params, "in_slots": flags}
    return equation.replace(invars=[*first, table, *read], params=params)


def _aval(shape: tuple[int, ...], dtype: str) -> Any:
    return jax.core.ShapedArray(shape, jnp.dtype(dtype))


def must_be_cut(
    anchored: Sequence[Equation], leaves: Collection[Var], consts: Collection[Var]
) -> list[int]:
    """The positions before which a program is cut: those of experts read by leaf.

    It is cut there even if nothing is read on demand, so that where weights rest
    changes no bit.
    """

    def is_whole(atom: Atom) -> bool:
        return not isinstance(atom, Literal) and (atom in leaves or atom in consts)

    return [
        position
        for position, equation in enumerate(anchored)
        if equation.primitive.name == CHOSEN_EXPERTS
        and all(map(is_whole, equation.invars[_first_weight(equation) :]))
    ]


def slots_of(equation: Equation) -> list[Var] | None:
    """The table and the slots that an equation reads; None if it reads none."""
    if equation.primitive.name != CHOSEN_EXPERTS or not any(
        equation.params["in_slots"]
    ):
        return None
    weights = equation.invars[_first_weight(equation) :]
    flags = equation.params["in_slots"]
    slots = [w for w, is_in_slot in zip(weights, flags, strict=True) if is_in_slot]
    return [equation.invars[NUM_OPERANDS], *slots]


def slot_names(graph: Graph) -> dict[Var, str]:
    """Names of slots by what they hold: alike slots of two programs are the same."""
    names: dict[Var, str] = {}
    for equation in graph.equations:
        if (own := slots_of(equation)) is not None:
            kind = "+".join(v.aval.str_short() for v in own[1:])
            names |= {v: f"slots/{kind}/{i}" for i, v in enumerate(own[1:])}
    return names


def _first_weight(equation: Equation) -> int:
    return NUM_OPERANDS + any(equation.params["in_slots"])
