"""Which leaves of a model hold the weights of experts, and what divides experts."""

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from zinf.core.jaxpr import Graph
from zinf.core.jaxpr.compat import Equation, Var, build_jaxpr
from zinf.core.jaxpr.dims import Dims, Shape, guessed_view, own_dims
from zinf.core.jaxpr.walk import Follower
from zinf.core.sharding import AxisRule, Dim
from zinf.core.sharding.mesh import EXPERT

# The path of a leaf, and the dims of the leaf in each dim of a value.
Origin = tuple[str, Dims]


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
    inputs = *graph.consts, *graph.invars
    jaxpr = build_jaxpr(inputs, graph.outvars, graph.equations)
    finder = _Finder({path: v.aval.shape for v, path in leaves.items()}, axis)
    origins = {v: (path, own_dims(v.aval.shape)) for v, path in leaves.items()}
    finder.walk(jaxpr, [origins.get(v) for v in inputs])
    return {path: min(dims) for path, dims in finder.found.items() if len(dims) == 1}


class _Finder(Follower[Origin | None]):
    """Follows leaves to the devices that divide them.

    Attributes:
        shapes: those of the leaves, by path.
        found: by path, the dims that `axis` cuts.
    """

    nothing = None

    def __init__(self, shapes: Mapping[str, Shape], axis: str):
        self.shapes, self.axis = shapes, axis
        self.found: dict[str, set[int]] = {}

    def visit(
        self, equation: Equation, facts: list[Origin | None]
    ) -> Sequence[Origin | None]:
        if equation.primitive.name == "shard_map":
            self.add(equation, facts)
        results: list[Origin | None] = [None for _ in equation.outvars]
        if results and facts and facts[0] is not None:
            path, dims = facts[0]
            moved = guessed_view(equation, dims, self.shapes[path])
            results[0] = None if moved is None else (path, moved)
        return results

    def add(self, equation: Equation, facts: Sequence[Origin | None]) -> None:
        for fact, spec in zip(facts, equation.params["in_specs"], strict=True):
            if fact is not None:
                path, dims = fact
                for group, entry in zip(dims, spec, strict=False):
                    if len(group) == 1 and entry in (self.axis, (self.axis,)):
                        self.found.setdefault(path, set()).update(group)

    def meet(self, first: Origin | None, second: Origin | None) -> Origin | None:
        return first if first == second else None

    def row(self, equation: Equation, fact: Origin | None) -> Origin | None:
        return None if fact is None else (fact[0], fact[1][1:])


class ExpertParts(NamedTuple):
    """How devices along `tensor` divide the weights of one expert.

    Attributes:
        dims: of each leaf, in the order of the pytree, the dim that is cut, or None.
        are_added: the leaves that one device adds to the sum over devices.
    """

    dims: tuple[int | None, ...]
    are_added: tuple[bool, ...]


# The rule of the step that is traced; None for one device. jax traces a cached function
# again if it changes.
_context = jax.make_user_context(None)


def on_mesh(function: Callable, rule: AxisRule) -> Callable:
    """A function in which `zinf.moe.experts` divides its work among a mesh.

    It is traceable only. On one device it is `function` itself.
    """
    if rule.mesh.size == 1:
        return function

    @wraps(function, updated=())
    def wrapped(*arguments: Any) -> Any:
        with _context(rule):
            return function(*arguments)

    return wrapped


def current_mesh() -> Mesh | None:
    """The mesh of `on_mesh` while its function is traced."""
    rule: AxisRule | None = _context.value
    return None if rule is None else rule.mesh


def num_expert_parts() -> int:
    """The number of devices along `tensor` that divide the weights of each expert."""
    rule: AxisRule | None = _context.value
    return rule.size(Dim.CHANNELS) if rule is not None and rule.cuts_experts else 1


def expert_leaves(
    graph: Graph, leaves: Mapping[Var, str], rule: AxisRule
) -> dict[str, dict[int, Dim]]:
    """`expert_dims` of the devices along `expert`, as an axis divides them."""
    found = expert_dims(graph, leaves)
    return {path: {dim: Dim.EXPERTS} for path, dim in found.items()}
