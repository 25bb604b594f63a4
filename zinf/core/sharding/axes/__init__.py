"""The axes of a mesh that divide more than batch and state: a row each."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from zinf.core.jaxpr import Graph
from zinf.core.jaxpr.compat import Var
from zinf.core.sharding.axes.experts import expert_leaves, on_mesh
from zinf.core.sharding.axes.sequence import along_sequence
from zinf.core.sharding.axes.tensor import along_tensor, channel_leaves
from zinf.core.sharding.mesh import EXPERT, SEQ, TENSOR, Dim
from zinf.core.sharding.rule import AxisRule

LeafDims = Mapping[str, Mapping[int, Dim]]
"""The dims of leaves that an axis cuts in every form of the leaf, by path."""


@dataclass(frozen=True)
class Axis:
    """What an axis changes; `mesh.INNER_AXES` has the dims of values that it cuts.

    Attributes:
        rewrite: `(function, rule)`: a function of parameters and a batch as it is
            traced for the mesh.
        rewrites_all: whether other functions than losses are rewritten too.
        divides: `(graph, leaves, rule)`: the dims of leaves that it cuts, from the
            training loss and the paths of its parameters.
    """

    rewrite: Callable[[Callable, AxisRule], Callable] = lambda function, rule: function
    rewrites_all: bool = False
    divides: Callable[[Graph, Mapping[Var, str], AxisRule], LeafDims] = (
        lambda graph, leaves, rule: {}
    )


# In the order in which they rewrite a function: the first is the innermost.
AXES = {
    EXPERT: Axis(on_mesh, rewrites_all=True, divides=expert_leaves),
    TENSOR: Axis(along_tensor, divides=channel_leaves),
    SEQ: Axis(along_sequence),
}


def rewritten(function: Callable, rule: AxisRule, *, is_loss: bool) -> Callable:
    """A function as all axes rewrite it for the mesh of a rule."""
    for axis in AXES.values():
        if is_loss or axis.rewrites_all:
            function = axis.rewrite(function, rule)
    return function


def divided_dims(
    graph: Graph, leaves: Mapping[Var, str], rule: AxisRule
) -> dict[str, dict[int, Dim]]:
    """The dims of leaves that any axis cuts, by path.

    Raises:
        ValueError: an axis cannot divide this model, and why.
    """
    found: dict[str, dict[int, Dim]] = {}
    for axis in AXES.values():
        for path, dims in axis.divides(graph, leaves, rule).items():
            found.setdefault(path, {}).update(dims)
    return found
