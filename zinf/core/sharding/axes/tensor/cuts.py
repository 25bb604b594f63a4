"""Finds Megatron's cuts of weights in a jaxpr: which dims devices may divide.

Megatron-LM (https://arxiv.org/abs/1909.08053, section 3) cuts the first weight of an
MLP by columns and the second by rows: each device computes some of the hidden values,
and one sum over devices completes the result. In an attention it cuts heads. A model is
not changed for this: dims that must be cut together are found in its program.

Each dim of each value is a member of one group. An equation joins the dims of its
operands with those of its results that they become (`zinf.core.jaxpr.dims`): a
sum of two values joins their dims, a product joins a contracted dim of one factor with
that of the other. A group can be cut if all that its values need from other devices is
a sum over products with a weight. What needs more blocks the group: a norm over the
dim, a softmax, a split of it, a result of the program. So the width of a Transformer
cannot be cut, and the hidden values of its MLPs and its heads can.
"""

import logging
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod

from zinf.core.jaxpr import Graph, inlined, variables
from zinf.core.jaxpr.compat import Atom, Equation, Literal, Var
from zinf.core.jaxpr.dims import Merge, NotByRow, factor_of, merge_of
from zinf.core.jaxpr.primitives import Factor, factors
from zinf.core.program import FLOAT32_BYTES
from zinf.core.sharding.axes.experts import expert_dims
from zinf.core.sharding.mesh import TENSOR, Dim
from zinf.core.sharding.rule import AxisRule

logger = logging.getLogger(__name__)
# One dim of one value.
Member = tuple[Var, int]
NUM_LISTED = 3


@dataclass(frozen=True)
class Cuts:
    """The weights of a program that devices divide.

    Attributes:
        dims: the dim of each such leaf, by path.
        reasons: why weights of two or more dims stay whole, by path.
        uneven: the weights that another number of devices could divide.
        merges: the reshapes that alone keep some weights whole.
    """

    dims: Mapping[str, int]
    reasons: Mapping[str, str]
    uneven: tuple[str, ...] = ()
    merges: tuple[Merge, ...] = ()


def channel_leaves(
    graph: Graph, leaves: Mapping[Var, str], rule: AxisRule
) -> dict[str, dict[int, Dim]]:
    """The dims of weights that devices along `tensor` divide, by path.

    They are those of experts that are cut inside, and those that `find_cuts` finds.
    Weights that another number of devices could divide are named in a warning.

    Raises:
        ValueError: no weight can be cut, and why.
    """
    parts = rule.size(Dim.CHANNELS)
    if parts == 1:
        return {}
    inside = expert_dims(graph, leaves, axis=TENSOR)
    cuts = find_cuts(graph, leaves, parts, min_bytes=rule.min_bytes)
    if not cuts.dims and not inside:
        raise ValueError(_refusal(cuts, parts))
    if cuts.uneven:
        names = ", ".join(cuts.uneven)
        text = "mesh.tensor = %d does not divide %s; each device has them whole."
        logger.warning(text, parts, names)
    found = {path: {dim: Dim.CHANNELS} for path, dim in inside.items()}
    for path, dim in cuts.dims.items():
        found.setdefault(path, {})[dim] = Dim.CHANNELS
    return found


def _refusal(cuts: Cuts, parts: int) -> str:
    listed = [f"{path} ({why})" for path, why in cuts.reasons.items()][:NUM_LISTED]
    more = len(cuts.reasons) - len(listed)
    listed += [f"and {more} more"] if more > 0 else []
    found = ", ".join(listed) or "it has no weight of two dims that a product reads"
    return (
        f"mesh.tensor = {parts} divides the weights of a model among devices, and none "
        f"of this model's can be divided: {found}. Use mesh.fsdp for these devices, or "
        "a number that divides the heads and the hidden values of each layer."
    )


def find_cuts(
    graph: Graph, leaves: Mapping[Var, str], parts: int, *, min_bytes: int = 0
) -> Cuts:
    """The weights that `parts` devices divide.

    A weight that could be cut along two dims is cut with the larger group of weights.

    Args:
        leaves: the paths of the parameters of the program.
        min_bytes: a group of weights is cut if one of them has so many bytes, in
            float32. Around small weights the sum over devices costs more than it saves.
    """
    flat = inlined(graph)
    groups = _Groups(flat, list(leaves)).found()
    reasons: dict[str, list[str]] = defaultdict(list)
    possible, uneven, merges = [], [], []
    for group in groups:
        why = group.why_whole(parts, min_bytes)
        if why is None:
            possible.append(group)
            continue
        if group.unmerged().why_whole(parts, min_bytes) is None:
            merges += group.merges
        for variable, dim in group.weights:
            if variable.aval.ndim > 1:
                reasons[leaves[variable]].append(f"dim {dim}: {why}")
                if group.why_whole(1, min_bytes) is None:
                    uneven.append(leaves[variable])
    dims: dict[str, int] = {}
    # The largest first, in the order of the program.
    for group in sorted(possible, key=lambda g: -g.num_elements):
        own = {leaves[v]: dim for v, dim in group.weights}
        if dims.keys().isdisjoint(own):
            dims |= own
    whole = {path: "; ".join(r) for path, r in reasons.items() if path not in dims}
    unequal = tuple(path for path in uneven if path in whole)
    return Cuts(dims, whole, unequal, tuple(merges))


@dataclass
class _Group:
    """Dims that devices divide together or not at all.

    Attributes:
        weights: those of parameters.
        sizes: how many entries each has, and a value that has it.
        has_values: whether values that are computed from the batch have such a dim.
        blocks: why the group cannot be cut; of a reshape that merges such a dim with
            those before it, also how.
    """

    weights: list[Member] = field(default_factory=list)
    sizes: dict[int, Var] = field(default_factory=dict)
    blocks: list[tuple[str, Merge | None]] = field(default_factory=list)
    has_values: bool = False

    @property
    def num_elements(self) -> int:
        return sum(prod(v.aval.shape) for v, _ in self.weights)

    def unmerged(self) -> "_Group":
        """The group as if no reshape merged its dims with others."""
        return replace(self, blocks=[b for b in self.blocks if b[1] is None])

    @property
    def merges(self) -> list[Merge]:
        return [merge for _, merge in self.blocks if merge is not None]

    def why_whole(self, parts: int, min_bytes: int) -> str | None:
        """Why devices cannot, or should not, divide the group; None if they may."""
        if self.blocks:
            return self.blocks[0][0]
        if len({v for v, _ in self.weights}) < len(self.weights):
            return "one weight would be cut along two dims"
        if not self.has_values:
            return "only weights have it, so it would save no computed value"
        for size, value in self.sizes.items():
            if size % parts:
                shape = list(value.aval.shape)
                return f"{size} entries of a value {shape} do not divide by {parts}"
        largest = max(prod(v.aval.shape) for v, _ in self.weights) * FLOAT32_BYTES
        if largest < min_bytes:
            return (
                f"its largest weight has {largest:,} bytes, and persistence_threshold "
                f"keeps arrays below {min_bytes:,} whole"
            )
        return None


class _Groups:
    """Joins the dims of values that depend on parameters."""

    def __init__(self, graph: Graph, params: Sequence[Var]):
        self.params = params
        self.parent: dict[Member, Member] = {}
        self.blocked: list[tuple[Member, str, Merge | None]] = []
        # Values that depend on parameters, and those that depend on nothing else.
        self.dependent, self.weights = set(params), set(params)
        inputs = set(graph.invars) - self.weights
        self.varying = set(inputs)
        for equation in graph.equations:
            read = variables(equation.invars)
            if not self.varying.isdisjoint(read):
                self.varying.update(equation.outvars)
            if not self.dependent.isdisjoint(read):
                self.dependent.update(equation.outvars)
                self.join(equation)
        for v in variables(graph.outvars):
            if v in self.dependent:
                for member in _members(v):
                    self.block(member, "it is a result of the program")

    def found(self) -> list[_Group]:
        """The groups that have dims of parameters, in the order of these."""
        groups: dict[Member, _Group] = defaultdict(_Group)
        for param in self.params:
            for member in _members(param):
                groups[self.root(member)].weights.append(member)
        for member in list(self.parent):
            group = groups.get(self.root(member))
            if group is not None:
                value, dim = member
                group.sizes.setdefault(value.aval.shape[dim], value)
                group.has_values |= value in self.varying
        for member, why, merge in self.blocked:
            group = groups.get(self.root(member))
            if group is not None:
                group.blocks.append((why, merge))
        return list(groups.values())

    def root(self, member: Member) -> Member:
        self.parent.setdefault(member, member)
        while self.parent[member] != member:
            above = self.parent[member] = self.parent[self.parent[member]]
            member = above
        return member

    def union(self, first: Member, second: Member) -> None:
        self.parent[self.root(first)] = self.root(second)

    def block(self, member: Member, why: str, merge: Merge | None = None) -> None:
        self.blocked.append((member, why, merge))

    def join(self, equation: Equation) -> None:
        """Joins the dims of an equation's operands and results, or blocks them."""
        made: set[int | None] = set()
        for number, atom in enumerate(equation.invars):
            for member in _members(atom) if self.depends(atom) else ():
                try:
                    factor = factor_of(equation, {number: member[1]})
                except NotByRow as reason:
                    self.block(member, str(reason), merge_of(equation, member[1]))
                    continue
                for other, dim in factor.operands.items():
                    if self.depends(equation.invars[other]):
                        self.union(member, (equation.invars[other], dim))
                if factor.result is not None:
                    made.add(factor.result)
                    for v in equation.outvars:
                        self.union(member, (v, factor.result))
                elif self.varying.issuperset(variables(equation.invars)):
                    self.block(member, f"a sum over it by `{equation.primitive.name}`")
        for member in self.unmade(equation, made):
            self.block(member, f"`{equation.primitive.name}` makes it")

    def unmade(self, equation: Equation, made: set[int | None]) -> Iterator[Member]:
        """The dims of results that no dim of an operand becomes.

        Devices can divide what a broadcast repeats, and what comes from operands that
        do not depend on parameters, which each device has.
        """
        known = factors(equation)
        made = made | {f.result for f in known if not self.is_followed(equation, f)}
        for v in equation.outvars:
            yield from (member for member in _members(v) if member[1] not in made)

    def is_followed(self, equation: Equation, factor: Factor) -> bool:
        return any(self.depends(equation.invars[n]) for n in factor.operands)

    def depends(self, atom: Atom) -> bool:
        return not isinstance(atom, Literal) and atom in self.dependent


def _members(variable: Var) -> list[Member]:
    shape = getattr(variable.aval, "shape", ())
    return [(variable, d) for d, size in enumerate(shape) if size > 1]
