import chex
import jax

from zinf.jaxpr import flatten, trace
from zinf.segment.index import index_by_literals
from zinf.segment.order import SMALL_BYTES


def program(function, *arguments):
    """The rewritten graph of a function whose first argument is the parameter."""
    graph = flatten(trace(function, *arguments)[0])
    found = index_by_literals(graph, graph.invars[:1])
    chex.assert_trees_all_equal(found(*arguments), graph(*arguments), strict=True)
    return [e.primitive.name for e in found.equations if "slice" in e.primitive.name]


def test_places_in_a_small_table_become_literals():
    keys = jax.random.split(jax.random.key(0), (3, 4))
    assert (
        program(lambda w, keys: (keys[1], keys[:, 2], keys[1:, :3]), 1.0, keys)
        == ["dynamic_slice"] * 3
    )


def test_parameters_strides_and_large_values_keep_their_slices():
    table = jax.random.split(jax.random.key(0), 8)
    large = jax.random.split(jax.random.key(0), SMALL_BYTES // 8 + 1)
    w = jax.random.split(jax.random.key(1), 8)
    assert program(lambda w: w[3], w) == ["slice"]
    assert program(lambda w: w.reshape(2, 4)[1], w) == ["slice"]
    assert program(lambda w, table: table[::2], w, table) == ["slice"]
    assert program(lambda w, large: large[3], w, large) == ["slice"]
