"""Cross entropy: values and derivatives of softmax, in the memory of the logits."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from zinf.core.problem.cross_entropy import cross_entropy


def plain(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return -jnp.sum(jax.nn.log_softmax(logits) * jax.nn.one_hot(labels, 11), axis=-1)


@pytest.mark.parametrize("shape", [(), (2, 3)])
def test_values_and_derivatives_are_those_of_log_softmax(shape: tuple[int, ...]):
    rng = np.random.default_rng(0)
    logits = jnp.asarray(rng.normal(size=(*shape, 11)) * 3, jnp.float32)
    labels = jnp.asarray(rng.integers(0, 11, shape))

    def of(function):
        return jax.value_and_grad(lambda x: jnp.mean(function(x, labels)))(logits)

    # Sums of 11 numbers in another order.
    found, wanted = of(cross_entropy), of(plain)
    chex.assert_trees_all_close(found, wanted, rtol=1e-5, atol=1e-6)
    if not shape:
        # Of every order and kind.
        check_grads(
            lambda x: cross_entropy(x, labels), (logits,), 2, eps=1e-2, rtol=1e-2
        )


def test_logits_that_overflow_an_exponential_are_right() -> None:
    logits = jnp.asarray([1000.0, 0.0, -1000.0])
    loss, gradient = jax.value_and_grad(cross_entropy)(logits, jnp.asarray(1))
    assert loss == 1000
    np.testing.assert_array_equal(gradient, [1, -1, 0])


def test_the_backward_pass_holds_one_array_of_the_size_of_the_logits() -> None:
    """Differentiated by jax, `logsumexp` less the logit of the label takes two."""
    rows, width, words = 64, 256, 8192
    x = jax.ShapeDtypeStruct((rows, width), jnp.float32)
    table = jax.ShapeDtypeStruct((words, width), jnp.float32)
    labels = jax.ShapeDtypeStruct((rows,), jnp.int32)

    def loss(x, table, labels):
        return jnp.mean(cross_entropy(x @ table.T, labels))

    both = jax.jit(jax.value_and_grad(loss, (0, 1)))
    compiled = both.lower(x, table, labels).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 1.1 * 4 * rows * words
