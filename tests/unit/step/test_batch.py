import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zinf.core.step.batch import (
    batch_spec,
    by_microbatch,
    check_values,
    count_tokens,
    has_tokens,
    signature,
)

BATCH = {"x": np.arange(12, dtype=np.float32).reshape(6, 2), "weight": 2.0}


def test_the_leading_dim_is_cut_into_consecutive_microbatches_and_scalars_are_not():
    spec = batch_spec(BATCH, 3)
    assert spec["x"].shape == (2, 2)
    assert spec["weight"].shape == ()
    assert spec["weight"].dtype == jnp.result_type(2.0)
    cut = by_microbatch(BATCH, spec, 3)
    np.testing.assert_array_equal(np.concatenate(cut["x"]), BATCH["x"])
    assert cut["weight"].tolist() == [2.0] * 3
    # The engine keeps them while the user may refill the buffer.
    whole = by_microbatch(BATCH, batch_spec(BATCH, 1), 1)
    assert not np.shares_memory(whole["x"], BATCH["x"])


def test_leaves_take_the_dtypes_that_jax_gives_them():
    batch = {"x": np.zeros(2, np.float64), "n": np.zeros(2, np.int64)}
    cut = by_microbatch(batch, batch_spec(batch, 1), 1)
    assert (cut["x"].dtype, cut["n"].dtype) == (np.float32, np.int32)
    for dtype in (bool, np.int8, jnp.bfloat16, np.float32):
        assert batch_spec({"x": np.zeros(2, dtype)}, 1)["x"].dtype == dtype


@pytest.mark.parametrize("shape", [(4, 2), (1,)])
def test_a_leading_dim_that_does_not_divide_is_refused(shape):
    with pytest.raises(ValueError, match="gradient_accumulation_steps = 3"):
        batch_spec({"x": np.zeros(shape)}, 3)


def test_a_leaf_that_is_no_array_of_numbers_is_refused():
    for leaf in ("a", b"a", np.array(["a"]), jax.random.key(0), {1}):
        for look in (signature, lambda batch: batch_spec(batch, 1)):
            with pytest.raises(ValueError, match="'x' is .*not an array of numbers"):
                look({"x": leaf})


def test_a_plan_is_for_one_structure_shape_and_dtype():
    x = np.zeros((2, 3), np.float32)
    assert signature({"x": x}) == signature({"x": jnp.ones((2, 3))})
    # Shapes stand for a batch.
    abstract = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, BATCH))
    assert batch_spec(abstract, 3) == batch_spec(BATCH, 3)
    assert signature(abstract) == signature(BATCH)
    for other in ({"y": x}, {"x": x[:1]}, {"x": x.astype(np.int32)}, [x]):
        assert signature({"x": x}) != signature(other)


@pytest.mark.parametrize(
    ("batch", "count", "counted"),
    [
        # The entries of the largest integer leaf, but not what is more than tokens.
        ({"tokens": np.zeros((4, 8), int), "n": np.zeros(4, int)}, 32, True),
        ({"tokens": np.zeros((4, 9), int), "kept": np.zeros((4, 6, 8), int)}, 36, True),
        # Without integers, examples.
        ({"x": np.zeros((4, 3)), "label": np.zeros(4, int)}, 4, False),
        (BATCH, 6, False),
        ({"weight": 1.0}, 1, False),
    ],
)
def test_tokens_are_counted(batch, count, counted):
    parts = 1 if count == 1 else 2
    spec = batch_spec(batch, parts)
    assert (count_tokens(spec, parts), has_tokens(spec)) == (count, counted)


def test_an_integer_that_jax_would_wrap_is_refused():
    largest = np.iinfo(np.int32).max
    check_values({"x": np.array([largest, -largest - 1], np.int64), "y": np.uint64(7)})
    for bad in (2**40 + 7, largest + 1, -largest - 2):
        with pytest.raises(ValueError, match=f"'x' has the int64 {bad}, which jax"):
            check_values({"x": np.array([1, bad])})
    with pytest.raises(ValueError, match="has the uint64 4294967296"):
        check_values({"x": np.array([2**32], np.uint64)})
    with jax.enable_x64(True):
        check_values({"x": np.array([2**40 + 7])})
