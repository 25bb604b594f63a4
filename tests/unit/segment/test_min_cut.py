"""The cut is the cheapest that leaves no way from a source to a target."""

from itertools import combinations

from hypothesis import example, given
from hypothesis import strategies as st

from zinf.core.segment.min_cut import min_vertex_cut


def is_separated(cut, parents, sources, targets):
    stack, seen = [t for t in targets if t not in cut], set()
    while stack:
        vertex = stack.pop()
        if vertex in sources:
            return False
        if vertex not in seen:
            seen.add(vertex)
            stack += [p for p in parents[vertex] if p not in cut]
    return True


@st.composite
def programs(draw):
    """Up to 7 values, each a source or computed from earlier ones."""
    vertices = range(draw(st.integers(1, 7)))
    weights = {v: draw(st.integers(0, 5)) for v in vertices}
    subsets = {
        v: st.lists(st.sampled_from(range(v)), unique=True) for v in vertices[1:]
    }
    parents = {0: []} | {v: draw(subset) for v, subset in subsets.items()}
    sources = [v for v in vertices if not parents[v]]
    targets = draw(st.lists(st.sampled_from(vertices), unique=True, min_size=1))
    return weights, parents, sources, targets


# Nearer to the target, a value of size one is taken in place of one of size zero.
@example(({0: 0, 1: 1}, {0: [], 1: [0]}, [0], [1]))
@given(programs())
def test_no_set_of_values_that_separates_weighs_less(program):
    weights, parents, sources, targets = program
    found = min_vertex_cut(weights, parents, sources, targets)
    # A value of size zero counts as one of size one.
    weights = {v: max(weight, 1) for v, weight in weights.items()}
    assert is_separated(found, parents, sources, targets)
    subsets = (cut for n in range(len(weights) + 1) for cut in combinations(weights, n))
    least = min(
        sum(weights[v] for v in cut)
        for cut in subsets
        if is_separated(set(cut), parents, sources, targets)
    )
    assert sum(weights[v] for v in found) == least


def test_of_equal_cuts_the_one_nearest_to_the_targets_is_taken():
    chain = {"a": [], "b": ["a"], "c": ["b"]}
    assert min_vertex_cut(dict.fromkeys(chain, 4), chain, ["a"], ["c"]) == {"c"}
    assert min_vertex_cut({"a": 0}, {"a": []}, ["a"], ["a"]) == {"a"}
    assert min_vertex_cut({}, {}, [], []) == set()
