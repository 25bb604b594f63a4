"""Every model is made leaf by leaf with the values that its init function gives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from zinf.core.jaxpr.keys import to_words
from zinf.core.problem.leafwise import initialize, leaves_of
from zinf.core.problem.source import named_leaves

TABLE = np.arange(12, dtype=np.float32).reshape(3, 4)


def nnx_stacked_layers():
    @nnx.split_rngs(splits=5)
    @nnx.vmap(in_axes=(0,), out_axes=0)
    def make(rngs):
        return nnx.List([nnx.Linear(64, 256, rngs=rngs), nnx.Dropout(0.1, rngs=rngs)])

    return nnx.split(make(nnx.Rngs(0, dropout=1)))[1]


def plain_leaves():
    """Closed-over arrays, numbers, keys, integers, scalars, and a leaf twice."""
    key = jax.random.key(7)
    weight = jax.random.normal(key, (64, 64))
    return {
        "bool": jnp.ones((3,), bool),
        "computed": jnp.linspace(0, 1, 2000) + TABLE.sum(),
        "constant": TABLE,
        "count": jnp.int32(3),
        "key": key,
        "keys": jax.random.split(key, 4),
        "number": 2.5,
        "scalar": weight.mean(),
        "tied": weight,
        "weight": weight,
    }


def assert_equal_leaves(init_fn, **tolerance):
    """Leaves made one by one are those of the whole function."""
    wanted = named_leaves(jax.jit(init_fn)())
    found = dict(initialize(init_fn))
    assert list(found) == list(wanted)
    for path, leaf in wanted.items():
        assert found[path].dtype == leaf.dtype
        pair = map(to_words, (found[path], leaf))
        np.testing.assert_allclose(*pair, **tolerance, err_msg=path)


@pytest.mark.parametrize("init_fn", [plain_leaves, nnx_stacked_layers])
def test_leaves_equal_those_of_the_whole_init_function(init_fn):
    # The same operations on the same random bits, but compiled in other groups: a fused
    # multiply-add here and there, so a few units in the last place.
    assert_equal_leaves(init_fn, rtol=1e-6, atol=1e-7)


by_kind_of_key = pytest.mark.parametrize(
    "make_key", [jax.random.key, jax.random.PRNGKey]
)


@by_kind_of_key
def test_leaves_of_many_keys_are_compiled_once(monkeypatch, make_key):
    compiled, jit = [], jax.jit
    monkeypatch.setattr(jax, "jit", lambda f: compiled.append(f) or jit(f))

    def init_fn():
        keys = jax.random.split(make_key(0), 40)
        return [jax.random.normal(key, (16, 8)) for key in keys]

    assert len(list(initialize(init_fn))) == 40
    assert len(compiled) == 1


@by_kind_of_key
def test_keys_at_any_position_give_equal_bits(make_key):
    def init_fn():
        keys = jax.random.split(make_key(5), 12)
        grid = jax.random.split(keys[1], (3, 4))
        taken = [keys[0], keys[-1], grid[1, 2], grid[2, 3], keys[3:9:2][1]]
        taken += [*keys[4:6], *grid[1:, 3]]
        counts = jnp.arange(12).reshape(3, 4)
        return {
            "bits": [jax.random.bits(key, (100, 8)) for key in taken],
            "counts": [counts[1:, 2:], counts[::2, 1], counts[2, 0]],
            "keys": [keys[2:7], keys[1::3], grid[1:, 2:], grid[0]],
        }

    assert_equal_leaves(init_fn, rtol=0, atol=0)


def test_no_more_than_a_few_leaves_are_ever_alive():
    num_leaves, shape = 20, (1024, 2048)
    leaf_bytes = 4 * 1024 * 2048

    def init_fn():
        keys = jax.random.split(jax.random.key(0), num_leaves)
        return [jax.random.normal(k, shape) / np.sqrt(1024) for k in keys]

    def live_bytes():
        return sum(x.nbytes for x in jax.live_arrays())

    before, peak, count = live_bytes(), 0, 0
    for _, leaf in initialize(init_fn):
        assert leaf.shape == shape
        peak, count = max(peak, live_bytes() - before), count + 1
    assert count == num_leaves
    # The leaf that the caller still holds, the one just made, and the keys.
    assert peak <= 2 * leaf_bytes + 64 * 1024


def test_leaves_are_made_on_the_device_that_is_asked_for():
    device = jax.devices()[-1]
    elsewhere = jax.device_put(TABLE, jax.devices()[0])
    init_fn = lambda: [jnp.ones(3), jax.random.key(1), elsewhere]  # noqa: E731
    for _, leaf in initialize(init_fn, device=device):
        assert leaf.devices() == {device}


def test_leaves_of_a_tree_are_arrays_of_the_dtype_that_jax_gives_them():
    wide, key = np.arange(3, dtype=np.float64), jax.random.key(0)
    tree = {"a": wide, "b": 1.5, "c": 2, "d": True, "e": np.float32(3), "key": key}
    leaves = dict(leaves_of(tree))
    assert {p: x.dtype for p, x in leaves.items()} == {
        p: jnp.asarray(x).dtype for p, x in tree.items()
    }
    assert leaves["key"] is key
    np.testing.assert_array_equal(leaves["a"], wide)


@pytest.mark.parametrize("bad", ["text", np.array(["x"])])
def test_a_leaf_that_is_not_an_array_is_named(bad):
    tree = {"blocks": [{"kernel": np.zeros(3)}, {"kernel": bad}]}
    message = f"'blocks/1/kernel' is not an array of numbers but a {type(bad).__name__}"
    with pytest.raises(ValueError, match=message):
        list(leaves_of(tree))
