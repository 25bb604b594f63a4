"""Which leaves of a model hold the weights of experts."""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from zinf.core.jaxpr import Graph
from zinf.core.jaxpr.compat import Equation, Literal, Var, open_jaxpr, scan_arity
from zinf.core.sharding.mesh import EXPERT

# The path of a leaf, and for each dim of a value the dim of the leaf that it is.
Origin = tuple[str, tuple[int | None, ...]]
SAME = frozenset(
    "convert_element_type copy optimization_barrier sharding_constraint stop_gradient "
    "reduce_precision".split()
)


def expert_dims(
    graph: Graph, leaves: Mapping[Var, str], axis: str = EXPERT
) -> dict[str, int]:
    """The leaves that devices divide by experts, each with the dim that counts these.

    They are those that a `shard_map` of the program reads with one dim cut along the
    axis `expert` alone, as that of `zinf.moe.experts` does. Casts, transposes and
    slices out of a stack of layers may lie between.

    Args:
        graph: the program, as it is traced for the mesh.
        leaves: the paths of its parameters.
        axis: another axis, such as `tensor`, along which experts are cut inside.
    """
    found: dict[str, set[int]] = {}
    known: dict[Var, Origin] = {
        v: (path, tuple(range(v.aval.ndim))) for v, path in leaves.items()
    }
    _follow(graph.equations, known, found, axis)
    return {path: min(dims) for path, dims in found.items() if len(dims) == 1}


def _follow(
    equations: Iterable[Equation],
    known: dict[Var, Origin],
    found: dict[str, set[int]],
    axis: str,
) -> None:
    """Adds the origins of results to `known`, and what `axis` cuts to `found`."""
    for equation in equations:
        operands = [
            None if isinstance(a, Literal) else known.get(a) for a in equation.invars
        ]
        if not any(operands):
            continue
        name = equation.primitive.name
        inner = equation.params.get("jaxpr", equation.params.get("call_jaxpr"))
        if name == "shard_map":
            _add_cut(equation, operands, found, axis)
        elif inner is not None:
            if name == "scan":
                first = sum(scan_arity(equation))
                operands[first:] = map(_without_leading, operands[first:])
            variables = open_jaxpr(inner)[0].invars
            pairs = zip(variables, operands, strict=False)
            inside = {v: origin for v, origin in pairs if origin is not None}
            _follow(open_jaxpr(inner)[0].eqns, inside, found, axis)
        elif operands[0] is not None:
            path, dims = operands[0]
            moved = _moved(equation, dims)
            if moved is not None:
                known[equation.outvars[0]] = path, moved


def _add_cut(
    equation: Equation,
    operands: Sequence[Origin | None],
    found: dict[str, set[int]],
    axis: str,
) -> None:
    for origin, spec in zip(operands, equation.params["in_specs"], strict=True):
        if origin is None:
            continue
        path, dims = origin
        for dim, entry in zip(dims, spec, strict=False):
            if dim is not None and entry in (axis, (axis,)):
                found.setdefault(path, set()).add(dim)


def _without_leading(origin: Origin | None) -> Origin | None:
    return None if origin is None else (origin[0], origin[1][1:])


def _moved(
    equation: Equation, dims: tuple[int | None, ...]
) -> tuple[int | None, ...] | None:
    """The dims of an equation's result, from those of its operand."""
    name, params = equation.primitive.name, equation.params
    if name in SAME:
        return dims
    if name == "transpose":
        return tuple(dims[d] for d in params["permutation"])
    if name == "squeeze":
        gone = {d % len(dims) for d in params["dimensions"]}
        return tuple(dim for d, dim in enumerate(dims) if d not in gone)
    if name == "slice":
        before, after = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
        sizes = zip(dims, before, after, strict=True)
        return tuple(dim if n == m else None for dim, n, m in sizes)
    return None


class ExpertParts(NamedTuple):
    """How devices along `tensor` divide the weights of one expert.

    Attributes:
        dims: of each leaf, in the order of the pytree, the dim that is cut, or None.
        are_added: the leaves that one device adds to the sum over devices.
    """

    dims: tuple[int | None, ...]
    are_added: tuple[bool, ...]
