import jax.numpy as jnp
import numpy as np

from zinf.executor.outcome import Outcome, mean_over_microbatches


def test_the_loss_is_the_mean_of_the_microbatches():
    assert Outcome([1.0, 2.0, 6.0], 0.0, False, None).loss == 3.0


def test_statistics_are_averaged_over_microbatches_in_float32():
    found = mean_over_microbatches(np.float32([[1, 2], [3, 6]]))
    np.testing.assert_array_equal(found, [2, 4])
    many = np.ones((4096, 1), jnp.bfloat16)
    # Added up in bfloat16, ones would stop at 256.
    averaged = mean_over_microbatches(many)
    assert averaged.dtype == jnp.bfloat16
    assert float(averaged[0]) == 1.0


def test_counters_advance_once_and_one_microbatch_is_taken_as_it_is():
    assert mean_over_microbatches(np.int32([5, 5])) == 5
    found = mean_over_microbatches(np.uint32([[1, 2], [3, 4]]))
    np.testing.assert_array_equal(found, [3, 4])
    value = np.float32([[0.1, np.nan]])
    np.testing.assert_array_equal(mean_over_microbatches(value), value[0])
