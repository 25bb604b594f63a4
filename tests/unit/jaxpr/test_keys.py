import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zinf.core.jaxpr.keys import from_words, in_words, is_key, to_words


@pytest.mark.parametrize(
    ("shape", "implementation"), [((), "rbg"), ((2, 3), "threefry2x32")]
)
def test_keys_come_back_from_their_words_with_their_implementation(
    shape, implementation
):
    keys = jax.random.split(jax.random.key(0, impl=implementation), shape)
    words, kind = to_words(keys), jax.eval_shape(lambda: keys)
    assert is_key(kind)
    assert not is_key(words)
    assert in_words(kind) == jax.eval_shape(lambda: words)
    # Words may come from a host or a drive.
    found = from_words(np.asarray(words), kind)
    assert found.dtype == keys.dtype
    assert jnp.all(found == keys)


def test_anything_else_is_left_alone():
    array = np.arange(3)
    assert to_words(array) is from_words(array, array) is array
    assert in_words(array) == jax.ShapeDtypeStruct((3,), array.dtype)
