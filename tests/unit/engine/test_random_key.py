import json

import jax
import numpy as np
import pytest

from zinf.core.engine.random_key import key_from_json, key_to_json, step_keys

KEY = jax.random.key(7)
KEYS = {
    "typed": KEY,
    "raw": jax.random.PRNGKey(2**31),
    "rbg": jax.random.key(5, impl="rbg"),
}


def test_microbatches_get_the_key_of_the_step_folded_with_their_number():
    assert step_keys(None, 3, 2) == []
    step = jax.random.fold_in(KEY, 3)
    (only,) = step_keys(KEY, 3, 1)
    assert only == step
    folded = [jax.random.fold_in(step, m) for m in range(2)]
    assert step_keys(KEY, 3, 2) == folded


@pytest.mark.parametrize("name", KEYS)
def test_a_key_survives_json(name):
    key = KEYS[name]
    saved = json.loads(json.dumps(key_to_json(key)))
    restored = key_from_json(saved, jax.random.key(0))
    assert restored.dtype == key.dtype
    draws = [jax.random.normal(jax.random.fold_in(k, 1), (3,)) for k in (key, restored)]
    np.testing.assert_array_equal(*draws)


def test_a_run_with_a_key_is_not_resumed_without_one():
    assert key_from_json(json.loads(json.dumps(key_to_json(None))), None) is None
    with pytest.raises(ValueError, match="the saved run has a random key"):
        key_from_json(key_to_json(KEY), None)
    with pytest.raises(ValueError, match="this one has a random key"):
        key_from_json(None, KEY)


DAMAGES = [{"words": words} for words in ("x", [1], [[1, 2], [3]], [-1, 2**40], None)]
DAMAGES += [{"implementation": name} for name in ("no such", 3)]
DAMAGES += [{"implementation": name} for name in ("no such", 3)]


def test_a_damaged_key_is_refused():
    keys = key_to_json(KEY), key_to_json(KEYS["raw"])
    for damaged in [{}, *(key | damage for key in keys for damage in DAMAGES)]:
        with pytest.raises(ValueError, match="not what zinf saves: rng"):
            key_from_json(damaged, KEY)
