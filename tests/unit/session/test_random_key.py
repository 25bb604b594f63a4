import json

import jax
import numpy as np
import pytest

from zinf.session.random_key import key_from_json, key_to_json, step_keys

KEY = jax.random.key(7)


def words(key):
    return np.asarray(jax.random.key_data(key)).tolist()


def test_a_run_without_a_key_gives_none():
    assert step_keys(None, 3, 2) == []


def test_one_microbatch_gets_the_key_of_the_step():
    (key,) = step_keys(KEY, 3, 1)
    assert words(key) == words(jax.random.fold_in(KEY, 3))


def test_several_get_that_folded_with_their_number():
    keys = step_keys(KEY, 3, 2)
    step = jax.random.fold_in(KEY, 3)
    assert [words(k) for k in keys] == [
        words(jax.random.fold_in(step, m)) for m in range(2)
    ]


@pytest.mark.parametrize(
    "key",
    [
        KEY,
        jax.random.PRNGKey(2**31),
        jax.random.key(5, impl="rbg"),
        jax.random.key(5, impl="unsafe_rbg"),
        None,
    ],
    ids=["typed", "raw", "rbg", "unsafe_rbg", "none"],
)
def test_a_key_survives_json(key):
    saved = json.loads(json.dumps(key_to_json(key)))
    current = None if key is None else jax.random.key(0)
    restored = key_from_json(saved, current)
    if key is None:
        assert restored is None
        return
    assert restored.dtype == key.dtype
    draws = [jax.random.normal(jax.random.fold_in(k, 1), (3,)) for k in (key, restored)]
    np.testing.assert_array_equal(*draws)


def test_a_run_with_a_key_is_not_resumed_without_one():
    with pytest.raises(ValueError, match="the saved run has a random key"):
        key_from_json(key_to_json(KEY), None)
    with pytest.raises(ValueError, match="this one has a random key"):
        key_from_json(None, KEY)


@pytest.mark.parametrize(
    "damage",
    [
        {"words": "x"},
        {"words": [1]},
        {"words": [[1, 2], [3]]},
        {"words": [-1, 2**40]},
        {"words": None},
        {"implementation": "no such"},
        {"implementation": 3},
    ],
    ids=str,
)
def test_a_damaged_key_is_refused(damage):
    for key in (KEY, jax.random.PRNGKey(1)):
        with pytest.raises(ValueError, match="not what zinf saves: rng"):
            key_from_json({**key_to_json(key), **damage}, KEY)
    with pytest.raises(ValueError, match="not what zinf saves: rng"):
        key_from_json({}, KEY)
