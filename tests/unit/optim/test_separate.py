"""What belongs to which leaf is read off the jaxpr; coupled transforms are refused."""

import re
import sys
from itertools import count

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

from zinf.optim.separate import separate
from zinf.optim.update import compile_advance

PARAMS = {
    "bias": jax.ShapeDtypeStruct((16,), jnp.float32),
    "down": jax.ShapeDtypeStruct((16, 24), jnp.float32),
    "up": jax.ShapeDtypeStruct((24, 16), jnp.float32),
}
SCHEDULE = optax.warmup_cosine_decay_schedule(0.0, 1e-2, 3, 20)


def layers(num_layers):
    """12 leaves a layer, of 8 shapes."""
    shapes = [(8, 8)] * 4 + [(8, 32), (32, 8), (8,), (8,), (32,), (8, 24), (24,), (4,)]
    spec = {str(i): jax.ShapeDtypeStruct(s, jnp.float32) for i, s in enumerate(shapes)}
    return {f"blocks/{i}": spec for i in range(num_layers)}


def paths(separated):
    return [leaf.path for leaf in separated.leaves]


def test_moments_belong_to_their_leaf_and_counts_to_all():
    separated = separate(optax.adamw(SCHEDULE), PARAMS)
    assert paths(separated) == ["bias", "down", "up"]
    for leaf in separated.leaves:
        assert leaf.is_elementwise
        assert [s.slot for s in leaf.states] == [0, 1]
        assert [s.spec.shape for s in leaf.states] == [leaf.spec.shape] * 2
        moments = [f"0/mu/{leaf.path}", f"0/nu/{leaf.path}"]
        assert [s.optax_path for s in leaf.states] == moments
    assert [s.optax_path for s in separated.shared] == ["0/count", "2/count"]
    assert [s.value for s in separated.shared] == [0, 0]


def test_hyperparameters_are_shared_state_and_follow_their_schedule():
    tx = optax.inject_hyperparams(optax.adamw)(SCHEDULE, weight_decay=0.5)
    separated = separate(tx, PARAMS)
    advance = compile_advance(separated, device=jax.devices()[0])
    names = [s.optax_path for s in separated.shared]
    values = [s.value for s in separated.shared]
    for step in range(4):
        values, _ = advance(values)
        shared = dict(zip(names, values, strict=True))
        assert shared["hyperparams/weight_decay"] == 0.5
        assert shared["hyperparams/learning_rate"] == pytest.approx(SCHEDULE(step))


def test_a_whole_schedule_costs_updates_one_number():
    # Bias corrections of both moments, and the learning rate.
    for leaf in separate(optax.adamw(SCHEDULE), PARAMS).leaves:
        assert len(leaf.step_values) == 3


@pytest.mark.parametrize(
    ("tx", "elementwise"),
    [
        (optax.lion(1e-3), {"bias", "down", "up"}),
        (optax.lamb(1e-3), set()),
        (optax.adafactor(1e-3), set()),
        (optax.adaptive_grad_clip(0.1), set()),
        (optax.contrib.muon(1e-3), {"bias"}),
        (optax.add_noise(0.1, 0.5, jax.random.key(0)), set()),
        (optax.clip(1.0), {"bias", "down", "up"}),
        (optax.scale_by_factored_rms(min_dim_size_to_factor=8), {"bias"}),
    ],
)
def test_only_updates_without_reductions_are_elementwise(tx, elementwise):
    leaves = separate(tx, PARAMS).leaves
    assert {leaf.path for leaf in leaves if leaf.is_elementwise} == elementwise


def test_factored_states_have_their_own_shapes_and_placeholders_are_dropped():
    tx = optax.scale_by_factored_rms(min_dim_size_to_factor=8)
    separated = separate(tx, PARAMS)
    shapes = {x.path: [s.spec.shape for s in x.states] for x in separated.leaves}
    assert shapes == {"bias": [(16,)], "down": [(16,), (24,)], "up": [(16,), (24,)]}
    assert [s.optax_path for s in separated.shared] == ["count"]


def test_frozen_leaves_take_no_part_and_label_trees_keep_their_structure():
    labels = {"bias": "sgd", "down": "adam", "up": "adam"}
    transforms = {"adam": optax.adam(1e-3), "sgd": optax.sgd(1e-2, momentum=0.9)}
    for given in (labels, lambda tree: {name: labels[name] for name in tree}):
        tx = optax.multi_transform(transforms, given)
        separated = separate(tx, PARAMS, trainable={"bias", "up"})
        assert {x.path: len(x.states) for x in separated.leaves} == {"bias": 1, "up": 2}


def test_a_mask_by_number_of_rows_sees_the_leaf_and_not_its_blocks():
    tx = optax.add_decayed_weights(
        0.1, lambda p: jax.tree.map(lambda x: len(x) > 20, p)
    )
    separated = separate(tx, PARAMS)
    (shared,) = separated.bodies([(2, (1, 16))])
    (update,) = shared.body(np.zeros((1, 16)), np.ones((1, 16)), *shared.hoisted)
    np.testing.assert_allclose(update, 0.1, rtol=1e-6)


def test_equal_leaves_share_a_body_whatever_the_number_of_layers():
    for num_layers in (2, 5):
        separated = separate(optax.adamw(SCHEDULE), layers(num_layers))
        blocks = [(i, x.spec.shape) for i, x in enumerate(separated.leaves)]
        assert len({shared.body for shared in separated.bodies(blocks)}) == 8


def test_per_leaf_constants_are_hoisted_out_of_shared_bodies():
    rates = {"down": 0.1, "twin": 0.2}
    params = dict.fromkeys(rates, jax.ShapeDtypeStruct((4, 4), jnp.float32))
    transforms = {name: optax.sgd(rate) for name, rate in rates.items()}
    tx = optax.multi_transform(transforms, {name: name for name in rates})
    separated = separate(tx, params)
    down, twin = separated.bodies([(0, (4, 4)), (1, (4, 4))])
    assert down.body is twin.body
    assert [-float(x) for x in (*down.hoisted, *twin.hoisted)] == pytest.approx(
        [0.1, 0.2]
    )


def num_calls(num_layers: int) -> int:
    """Calls of functions in which so many layers are separated."""
    calls = count()

    def note(frame: object, event: str, argument: object) -> None:
        next(calls)

    sys.setprofile(note)
    try:
        separated = separate(optax.adamw(SCHEDULE), layers(num_layers))
        separated.bodies([(i, x.spec.shape) for i, x in enumerate(separated.leaves)])
    finally:
        sys.setprofile(None)
    assert len(separated.leaves) == 12 * num_layers
    return next(calls)


@pytest.mark.slow
def test_leaves_are_separated_with_work_in_proportion_to_their_number():
    num_calls(4)  # what is traced once in a process
    # Anything quadratic would take 16 times as many.
    assert num_calls(16) < 5 * num_calls(4)


def test_initial_state_is_that_of_optax_block_by_block():
    rng = np.random.default_rng(0)
    params = {k: rng.normal(size=x.shape).astype("f") for k, x in PARAMS.items()}
    tx = optax.chain(optax.adagrad(0.1, 0.3), optax.contrib.schedule_free_sgd(0.1))
    separated = separate(tx, params)
    wanted = dict(named_states(tx.init(params)))
    assert all(leaf.is_elementwise for leaf in separated.leaves)
    for i, leaf in enumerate(separated.leaves):
        param = params[leaf.path]
        blocks = [
            separated.init_state(i, param[k : k + 5]) for k in range(0, len(param), 5)
        ]
        for state, *parts in zip(leaf.states, *blocks, strict=True):
            whole = np.concatenate(parts)
            np.testing.assert_array_equal(whole, wanted[state.optax_path])
    for state in separated.shared:
        np.testing.assert_array_equal(state.value, wanted[state.optax_path])


def named_states(state):
    for path, leaf in jax.tree_util.tree_flatten_with_path(state)[0]:
        yield jax.tree_util.keystr(path, simple=True, separator="/"), leaf


def test_initial_state_shares_no_memory_with_the_parameter():
    param = np.ones(16, np.float32)
    separated = separate(optax.contrib.schedule_free_sgd(0.1), {"w": param})
    states = separated.init_state(0, param)
    param[:] = 2
    assert all(float(np.max(x)) <= 1 for x in states)


def test_random_keys_in_the_state_are_plain_numbers():
    tx = optax.add_noise(0.1, 0.5, jax.random.key(3))
    (_, key) = separate(tx, PARAMS).shared
    np.testing.assert_array_equal(key.value, jax.random.key_data(jax.random.key(3)))


def scaled_by(factor):
    def update(grads, state, params=None):
        norm = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(grads)))
        return jax.tree.map(lambda g: g * factor(norm), grads), state

    return optax.GradientTransformation(lambda params: (), update)


COUPLED = {
    "clipping_of_updates": (
        optax.chain(optax.adam(1e-3), optax.clip_by_global_norm(1.0)),
        "`add` at .*clip_by_global_norm.*'bias' and 'down'.* is the first transform",
    ),
    "clipping_of_some": (
        optax.masked(optax.clip_by_global_norm(1.0), {k: k != "up" for k in PARAMS}),
        "`add` at .*clip_by_global_norm.*'bias' and 'down'.*sees all trained",
    ),
    "clipping_that_ends": (
        optax.conditionally_transform(optax.clip_by_global_norm(1.0), lambda n: n < 9),
        "`add` at .*clip_by_global_norm.*'bias' and 'down'.* is the first transform",
    ),
    "clipping_of_ones_own": (
        scaled_by(lambda norm: jnp.minimum(1.0, 1.0 / norm)),
        "`add` at .*scaled_by.*'bias' and 'down'.*optax.clip_by_global_norm first.*"
        "`gradient_clipping` in the config, which divides by the norm \\+ 1e-6",
    ),
    "normalized": (optax.normalize_by_update_norm(), "scale_by_trust_ratio"),
    "apply_if_finite": (
        optax.apply_if_finite(optax.adam(1e-3), 5),
        "apply_if_finite.*'bias' and 'down'.*`fp16`",
    ),
    "prodigy": (
        optax.contrib.prodigy(),
        "prodigy.*'bias' and 'down'.*estimates a learning rate",
    ),
    "multi_steps": (
        optax.MultiSteps(optax.adam(1e-3), 4),
        "MultiSteps.*`gradient_accumulation_steps`",
    ),
    "multi_steps_in_a_chain": (
        optax.chain(
            optax.MultiSteps(optax.adam(1e-3), 4).gradient_transformation(),
            optax.scale(0.5),
        ),
        "MultiSteps.*`gradient_accumulation_steps`",
    ),
    "polyak": (optax.polyak_sgd(), "scale_by_polyak.*'bias' and 'down'.*reduce_on_pla"),
    "line_search": (optax.lbfgs(), "'grad' and 'value_fn'.* line search"),
}


@pytest.mark.parametrize("name", COUPLED)
def test_what_cannot_be_separated_is_refused_with_the_config_key(name):
    tx, message = COUPLED[name]
    with pytest.raises(ValueError, match=re.compile(message, re.DOTALL)):
        separate(tx, PARAMS)


def test_coupling_through_the_state_of_an_earlier_step_is_found():
    def init(params):
        return jax.tree.map(jnp.zeros_like, params)

    def update(grads, state, params=None):
        names = list(grads)
        others = names[1:] + names[:1]
        scales = {a: jnp.sum(state[b]) for a, b in zip(names, others, strict=True)}
        return {k: g * scales[k] for k, g in grads.items()}, grads

    with pytest.raises(ValueError, match="couples parameters: `mul`"):
        separate(optax.GradientTransformation(init, update), PARAMS)


def test_an_update_made_from_another_parameter_alone_is_refused():
    def update(grads, state, params=None):
        return {"a": grads["b"], "b": grads["a"]}, state

    tx = optax.GradientTransformation(lambda params: (), update)
    params = dict.fromkeys("ab", jax.ShapeDtypeStruct((2,), jnp.float32))
    with pytest.raises(
        ValueError, match="the update of 'a' depends on both 'a' and 'b'"
    ):
        separate(tx, params)


def test_a_state_that_changes_its_dtype_is_refused():
    def update(grads, state, params=None):
        return grads, jax.tree.map(lambda x: x.astype(jnp.bfloat16), state)

    tx = optax.GradientTransformation(lambda params: params, update)
    with pytest.raises(ValueError, match="changes the state 'bias' from float32"):
        separate(tx, PARAMS)


def test_a_block_of_a_leaf_that_needs_to_be_whole_is_refused():
    separated = separate(optax.lamb(1e-3), PARAMS)
    with pytest.raises(ValueError, match="'down' is not element-wise"):
        separated.bodies([(1, (4, 24))])
