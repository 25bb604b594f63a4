import json

import chex
import jax.numpy as jnp
import optax
import pytest

from zinf.core.config import LossScaling
from zinf.core.engine.scalars import Scalars
from zinf.core.optim.advance import Advance
from zinf.core.optim.average import with_ema
from zinf.core.optim.separate import separate

PARAMS = {"w": jnp.ones((2, 3))}
SCALING = LossScaling(
    initial_scale=16.0,
    window=1000,
    hysteresis=1,
    min_scale=1.0,
    dynamic=True,
    consecutive_hysteresis=False,
)


def scalars(tx=None, loss_scaling=None):
    return Scalars(separate(tx or optax.adam(0.1), PARAMS), loss_scaling)


def counts(kept: Scalars) -> list[int]:
    return [s["value"] for s in kept.to_json()["shared"]]


def test_nothing_changes_until_a_step_is_committed_and_a_skipped_one_no_count():
    kept, scaled = scalars(), scalars(loss_scaling=SCALING)
    advanced = kept.advance().after
    assert (kept.num_steps, counts(kept)) == (0, [0])
    kept.commit(advanced, skipped=False)
    assert (kept.num_steps, counts(kept)) == (1, [1])
    assert (kept.loss_scale, kept.is_scaled) == (1.0, False)
    scaled.commit(scaled.advance().after, skipped=True)
    assert (scaled.num_steps, counts(scaled)) == (1, [0])
    assert (scaled.loss_scale, scaled.is_scaled) == (8.0, True)


FALLING = optax.linear_schedule(1.0, 0.0, 4)


@pytest.mark.parametrize(
    ("tx", "rate"),
    [
        (optax.inject_hyperparams(optax.sgd)(learning_rate=FALLING), FALLING),
        (optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(FALLING)), FALLING),
        (optax.sgd(FALLING, momentum=0.9), FALLING),
        (optax.chain(optax.adamw(FALLING), with_ema(0.9)), FALLING),
        (optax.adam(0.5), lambda count: 0.5),
        (optax.sgd(0.5), lambda count: 0.5),
        (optax.chain(optax.scale(-1.0), optax.adam(FALLING)), None),
        (optax.chain(optax.adam(FALLING), optax.sgd(FALLING)), None),
    ],
)
def test_the_learning_rate_is_that_which_the_step_used(tx, rate):
    """A skipped step does not count."""
    kept, done = scalars(tx), 0
    for skipped in (False, True, False):
        advanced = kept.advance().after
        found = kept.learning_rate(advanced)
        assert found == (None if rate is None else pytest.approx(float(rate(done))))
        kept.commit(advanced, skipped=skipped)
        done += not skipped


def test_all_of_it_survives_json():
    kept = scalars(loss_scaling=SCALING)
    for skipped in (False, True, False):
        kept.commit(kept.advance().after, skipped=skipped)
    state = json.loads(json.dumps(kept.to_json()))
    restored = scalars(loss_scaling=SCALING)
    restored.from_json(state)
    assert restored.to_json() == kept.to_json()
    assert (restored.num_steps, restored.loss_scale) == (3, 8.0)
    kept_next, restored_next = kept.advance().after, restored.advance().after
    chex.assert_trees_all_equal(kept_next, restored_next, strict=True)


def test_the_state_of_another_optimizer_is_refused_and_nothing_is_taken():
    schedule = optax.linear_schedule(1.0, 0.0, 4)
    kept, other = scalars(), scalars(optax.sgd(schedule))
    kept.commit(kept.advance().after, skipped=False)
    with pytest.raises(ValueError, match="Resume with the optimizer"):
        other.from_json(kept.to_json())
    assert other.num_steps == 0


DAMAGES = {
    "num_steps": ["x", -1, 1.5, None, 2**80],
    "shared": [None, {}, [1], [{"name": "count"}]],
    "loss_scale": [3, {}, {"scale": float("nan")}, {"scale": 0, "step": 0}],
}


@pytest.mark.parametrize("key", DAMAGES)
def test_damaged_scalars_are_refused_by_name_and_nothing_is_taken(key):
    kept, restored = (scalars(loss_scaling=SCALING) for _ in range(2))
    kept.commit(kept.advance().after, skipped=False)
    before, state = restored.to_json(), kept.to_json()
    damaged = [{**state, key: value} for value in DAMAGES[key]]
    for each in [*damaged, {k: v for k, v in state.items() if k != key}]:
        with pytest.raises(ValueError, match=f"not what zinf saves: {key}"):
            restored.from_json(each)
        assert restored.to_json() == before


def test_shared_state_of_another_shape_or_dtype_is_refused():
    kept = scalars()
    state = kept.to_json()
    changes = [("value", value) for value in ([1, 2], "one", None, [[1], [2, 3]])]
    for change in [*changes, ("dtype", "float32"), ("dtype", "no dtype")]:
        damaged = [{**s, **dict([change])} for s in state["shared"]]
        with pytest.raises(ValueError, match="count.*int32"):
            kept.from_json({**state, "shared": damaged})
        assert kept.to_json() == state


@pytest.mark.parametrize("reads_loss", [False, True])
def test_what_comes_after_a_step_is_computed_once(reads_loss):
    """From the state before it, and from its loss if the optimizer reads that."""
    given = []

    def compute(*arguments):
        given.append(arguments)
        return ["after"], ["value"]

    advance = Advance(["before"], compute, reads_loss=reads_loss)
    assert [advance.values(0.5), advance.values(0.5)] == [["value"]] * 2
    assert given == [(["before"], 0.5, []) if reads_loss else (["before"],)]
    assert advance.after == ["after"]
