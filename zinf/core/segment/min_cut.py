"""Chooses which values to keep so that others can be recomputed from them.

These are the values of least total weight such that every path from a source to a
target goes through one: the minimum vertex cut, by maximum flow (Ford and Fulkerson
1956, with the shortest augmenting paths of Edmonds and Karp 1972). Chen et al. 2016
(https://arxiv.org/abs/1604.06174) and PyTorch's AOTAutograd choose residuals likewise.
"""

from collections import defaultdict, deque
from collections.abc import Collection, Hashable, Mapping
from typing import TypeVar

V = TypeVar("V", bound=Hashable)
Residual = dict[Hashable, dict[Hashable, int]]  # node -> neighbour -> spare capacity
SOURCE, TARGET = "source", "target"


def min_vertex_cut(
    weights: Mapping[V, int],
    parents: Mapping[V, Collection[V]],
    sources: Collection[V],
    targets: Collection[V],
) -> set[V]:
    """The cheapest vertices that separate `sources` from `targets`, ends included.

    Of equally cheap cuts, the one nearest to the targets, which needs the least
    recomputing.

    Args:
        weights: what it costs to keep each vertex.
        parents: the vertices that one is computed from, none for a source.
    """
    spare: Residual = defaultdict(lambda: defaultdict(int))
    unlimited = 1 + sum(weights.values())
    # Each vertex is an edge from its entry to its exit, with its weight. A weight of
    # zero counts as positive, or an empty cut would leave values of size zero
    # uncomputed.
    for vertex, weight in weights.items():
        spare[vertex, "in"][vertex, "out"] = max(weight, 1)
    unlimited += len(weights)
    for vertex, read in parents.items():
        for parent in read:
            spare[parent, "out"][vertex, "in"] = unlimited
    for vertex in sources:
        spare[SOURCE][vertex, "in"] = unlimited
    for vertex in targets:
        spare[vertex, "out"][TARGET] = unlimited
    while path := _shortest_path(spare):
        _augment(spare, path)
    beyond = _reaching_target(spare)
    return {v for v in weights if (v, "out") in beyond and (v, "in") not in beyond}


def _shortest_path(spare: Residual) -> list[Hashable]:
    """Nodes from source to target along spare capacity; empty if there are none."""
    came_from: dict[Hashable, Hashable] = {SOURCE: SOURCE}
    queue: deque[Hashable] = deque([SOURCE])
    while queue and TARGET not in came_from:
        node = queue.popleft()
        for neighbour, capacity in spare[node].items():
            if capacity and neighbour not in came_from:
                came_from[neighbour] = node
                queue.append(neighbour)
    if TARGET not in came_from:
        return []
    path: list[Hashable] = [TARGET]
    while path[-1] != SOURCE:
        path.append(came_from[path[-1]])
    return path[::-1]


def _augment(spare: Residual, path: list[Hashable]) -> None:
    edges = list(zip(path, path[1:], strict=False))
    flow = min(spare[a][b] for a, b in edges)
    for a, b in edges:
        spare[a][b] -= flow
        spare[b][a] += flow


def _reaching_target(spare: Residual) -> set[Hashable]:
    """The nodes with a path of spare capacity to the target."""
    before: dict[Hashable, list[Hashable]] = defaultdict(list)
    for node, neighbours in spare.items():
        for neighbour, capacity in neighbours.items():
            if capacity:
                before[neighbour].append(node)
    found: set[Hashable] = {TARGET}
    stack: list[Hashable] = [TARGET]
    while stack:
        for node in before[stack.pop()]:
            if node not in found:
                found.add(node)
                stack.append(node)
    return found
