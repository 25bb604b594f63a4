import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zinf.prepare.batch import batch_spec, by_microbatch, count_tokens, signature

BATCH = {"x": np.arange(12, dtype=np.float32).reshape(6, 2), "weight": 2.0}


def test_the_leading_dim_is_cut_and_scalars_are_not():
    spec = batch_spec(BATCH, 3)
    assert spec["x"].shape == (2, 2)
    assert spec["weight"].shape == ()
    assert spec["weight"].dtype == jnp.result_type(2.0)


def test_microbatches_are_consecutive_and_together_the_batch():
    cut = by_microbatch(BATCH, batch_spec(BATCH, 3), 3)
    np.testing.assert_array_equal(np.concatenate(cut["x"]), BATCH["x"])
    assert cut["weight"].tolist() == [2.0] * 3


def test_microbatches_share_no_memory_with_the_batch():
    """The engine keeps them while the user may refill the buffer."""
    cut = by_microbatch(BATCH, batch_spec(BATCH, 1), 1)
    assert not np.shares_memory(cut["x"], BATCH["x"])


def test_leaves_take_the_dtypes_that_jax_gives_them():
    batch = {"x": np.zeros(2, np.float64), "n": np.zeros(2, np.int64)}
    cut = by_microbatch(batch, batch_spec(batch, 1), 1)
    assert cut["x"].dtype == np.float32
    assert cut["n"].dtype == np.int32


@pytest.mark.parametrize("shape", [(4, 2), (1,)])
def test_a_leading_dim_that_does_not_divide_is_refused(shape):
    with pytest.raises(ValueError, match="gradient_accumulation_steps = 3"):
        batch_spec({"x": np.zeros(shape)}, 3)


@pytest.mark.parametrize("leaf", ["a", b"a", np.array(["a"]), jax.random.key(0), {1}])
@pytest.mark.parametrize("look", [signature, lambda batch: batch_spec(batch, 1)])
def test_a_leaf_that_is_no_array_of_numbers_is_refused(leaf, look):
    with pytest.raises(ValueError, match="batch leaf 'x' is .*not an array of numbers"):
        look({"x": leaf})


@pytest.mark.parametrize("dtype", [bool, np.int8, jnp.bfloat16, np.float32])
def test_all_dtypes_of_numbers_are_taken(dtype):
    assert batch_spec({"x": np.zeros(2, dtype)}, 1)["x"].dtype == dtype


def test_shapes_stand_for_a_batch():
    abstract = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, BATCH))
    assert batch_spec(abstract, 3) == batch_spec(BATCH, 3)
    assert signature(abstract) == signature(BATCH)


def test_a_plan_is_for_one_structure_shape_and_dtype():
    x = np.zeros((2, 3), np.float32)
    assert signature({"x": x}) == signature({"x": jnp.ones((2, 3))})
    for other in ({"y": x}, {"x": x[:1]}, {"x": x.astype(np.int32)}, [x]):
        assert signature({"x": x}) != signature(other)


def test_tokens_are_the_entries_of_the_largest_integer_leaf():
    spec = batch_spec({"tokens": np.zeros((4, 8), int), "n": np.zeros(4, int)}, 2)
    assert count_tokens(spec, 2) == 32


def test_without_integers_examples_are_counted():
    assert count_tokens(batch_spec(BATCH, 3), 3) == 6
    assert count_tokens(batch_spec({"weight": 1.0}, 1), 1) == 1


def test_positions_of_tokens_are_no_tokens():
    batch = {"tokens": np.zeros((4, 9), np.int32), "kept": np.zeros((4, 6, 8), int)}
    assert count_tokens(batch_spec(batch, 2), 2) == 4 * 9
