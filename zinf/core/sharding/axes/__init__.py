"""The axes of a mesh that divide more than batch and state: a row each."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from zinf.core.jaxpr import Graph
from zinf.core.jaxpr.compat import Var
from zinf.core.sharding.axes.experts import expert_leaves, on_mesh
from zinf.core.sharding.axes.sequence import along_sequence
from zinf.core.sharding.axes.tensor import (
    along_tensor,
    channel_leaves,
    forward_along_tensor,
)
from zinf.core.sharding.mesh import EXPERT, SEQ, TENSOR, Dim
from zinf.core.sharding.rule import AxisRule

LeafDims = Mapping[str, Mapping[int, Dim]]
"""The dims of leaves that an axis cuts in every form of the leaf, by path."""


Rewrite = Callable[[Callable, AxisRule], Callable]
"""`(function, rule)`: a function of parameters and a batch as it is traced for a mesh.
"""


def _as_it_is(function: Callable, rule: AxisRule) -> Callable:
    del rule
    return function


@dataclass(frozen=True)
class Axis:
    """What an axis changes; `mesh.INNER_AXES` has the dims of values that it cuts.

    Attributes:
        rewrite: of a loss.
        rewrite_forward: of a function that only runs forward.
        divides: `(graph, leaves, rule)`: the dims of leaves that it cuts, from the
            training loss and the paths of its parameters.
    """

    rewrite: Rewrite = _as_it_is
    rewrite_forward: Rewrite = _as_it_is
    divides: Callable[[Graph, Mapping[Var, str], AxisRule], LeafDims] = (
        lambda graph, leaves, rule: {}
    )


# In the order in which they rewrite a function: the first is the innermost.
AXES = {
    EXPERT: Axis(on_mesh, on_mesh, divides=expert_leaves),
    TENSOR: Axis(along_tensor, forward_along_tensor, divides=channel_leaves),
    SEQ: Axis(along_sequence),
}


def rewritten(function: Callable, rule: AxisRule, *, is_loss: bool) -> Callable:
    """A function as all axes rewrite it for the mesh of a rule."""
    for axis in AXES.values():
        rewrite = axis.rewrite if is_loss else axis.rewrite_forward
        function = rewrite(function, rule)
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
