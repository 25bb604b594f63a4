"""What belongs to which leaf is read off the jaxpr; coupled transforms are refused."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

from zinf.core.optim.separate import separate
from zinf.core.optim.update import compile_advance
from zinf.core.segment import named_leaves

PARAMS = {
    "bias": jax.ShapeDtypeStruct((16,), jnp.float32),
    "down": jax.ShapeDtypeStruct((16, 24), jnp.float32),
    "up": jax.ShapeDtypeStruct((24, 16), jnp.float32),
}
SCHEDULE = optax.warmup_cosine_decay_schedule(0.0, 1e-2, 3, 20)


def layers(num_layers):
    """4 leaves a layer, of 3 shapes."""
    shapes = [(8, 8), (8, 8), (8, 32), (8,)]
    spec = {str(i): jax.ShapeDtypeStruct(s, jnp.float32) for i, s in enumerate(shapes)}
    return {f"blocks/{i}": spec for i in range(num_layers)}


def transform(update, init=lambda params: ()):
    return optax.GradientTransformation(init, update)


def test_moments_belong_to_their_leaf_and_counts_to_all():
    separated = separate(optax.adamw(SCHEDULE), PARAMS)
    assert [leaf.path for leaf in separated.leaves] == ["bias", "down", "up"]
    for leaf in separated.leaves:
        assert leaf.is_elementwise
        assert [s.slot for s in leaf.states] == [0, 1]
        assert [s.spec.shape for s in leaf.states] == [leaf.spec.shape] * 2
        moments = [f"0/mu/{leaf.path}", f"0/nu/{leaf.path}"]
        assert [s.optax_path for s in leaf.states] == moments
        # Of a whole schedule an update reads one number, beside two bias corrections.
        assert len(leaf.step_values) == 3
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


@pytest.mark.parametrize(
    ("tx", "elementwise"),
    [
        (optax.lion(1e-3), {"bias", "down", "up"}),
        (optax.lamb(1e-3), set()),
        (optax.adaptive_grad_clip(0.1), set()),
        (optax.contrib.muon(1e-3), {"bias"}),
        (optax.add_noise(0.1, 0.5, jax.random.key(0)), set()),
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
        assert len({shared.body for shared in separated.bodies(blocks)}) == 3


def test_per_leaf_constants_are_hoisted_out_of_shared_bodies():
    rates = {"down": 0.1, "twin": 0.2}
    params = dict.fromkeys(rates, jax.ShapeDtypeStruct((4, 4), jnp.float32))
    transforms = {name: optax.sgd(rate) for name, rate in rates.items()}
    tx = optax.multi_transform(transforms, {name: name for name in rates})
    down, twin = separate(tx, params).bodies([(0, (4, 4)), (1, (4, 4))])
    assert down.body is twin.body
    found = [-float(x) for x in (*down.hoisted, *twin.hoisted)]
    assert found == pytest.approx([0.1, 0.2])


def test_initial_state_is_that_of_optax_block_by_block():
    rng = np.random.default_rng(0)
    params = {k: rng.normal(size=x.shape).astype("f") for k, x in PARAMS.items()}
    tx = optax.chain(optax.adagrad(0.1, 0.3), optax.contrib.schedule_free_sgd(0.1))
    separated = separate(tx, params)
    wanted = named_leaves(tx.init(params))
    assert all(leaf.is_elementwise for leaf in separated.leaves)
    for i, leaf in enumerate(separated.leaves):
        param = params[leaf.path]
        parts = [param[k : k + 5] for k in range(0, len(param), 5)]
        blocks = [separated.init_state(i, part) for part in parts]
        # None shares memory with the parameter.
        param[:] = np.nan
        for state, *parts in zip(leaf.states, *blocks, strict=True):
            whole = np.concatenate(parts)
            np.testing.assert_array_equal(whole, wanted[state.optax_path])
    for state in separated.shared:
        np.testing.assert_array_equal(state.value, wanted[state.optax_path])


def update_clipped(grads, state, params=None):
    norm = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(grads)))
    return jax.tree.map(lambda g: g * jnp.minimum(1.0, 1.0 / norm), grads), state


def update_by_neighbours_state(grads, state, params=None):
    scales = dict(zip(state, map(jnp.sum, reversed(state.values())), strict=True))
    return {k: g * scales[k] for k, g in grads.items()}, grads


def update_swapped(grads, state, params=None):
    return {**grads, "down": grads["up"].T, "up": grads["down"].T}, state


def update_shortened(grads, state, params=None):
    return grads, jax.tree.map(lambda x: x.astype(jnp.bfloat16), state)


CLIP, ADAM = optax.clip_by_global_norm(1.0), optax.adam(1e-3)
ZEROS = lambda params: jax.tree.map(jnp.zeros_like, params)  # noqa: E731
STEPS = optax.MultiSteps(ADAM, 4)
REFUSED = {
    "clipping of updates": optax.chain(ADAM, CLIP),
    "clipping of updates of some": optax.masked(
        optax.chain(ADAM, CLIP), {k: k != "up" for k in PARAMS}
    ),
    "clipping by hand": transform(update_clipped),
    "normalized": optax.normalize_by_update_norm(),
    "apply_if_finite": optax.apply_if_finite(ADAM, 5),
    "prodigy": optax.contrib.prodigy(),
    "multi steps": STEPS,
    "multi steps in a chain": optax.chain(STEPS.gradient_transformation(), CLIP),
    "polyak": optax.polyak_sgd(),
    "line search": optax.lbfgs(),
    "an earlier step": transform(update_by_neighbours_state, ZEROS),
    "another parameter alone": transform(update_swapped),
    "dtype of the state": transform(update_shortened, ZEROS),
}


def test_what_cannot_be_separated_is_refused_with_the_config_key(golden):
    sentences = []
    for name, tx in REFUSED.items():
        with pytest.raises(ValueError) as raised:
            separate(tx, PARAMS)
        # Lines and inner functions of optax differ from version to version.
        place = re.sub(r"at \S+ \((\w+)[^)]*\)", r"at \1", str(raised.value))
        sentences.append(f"{name}: {place}")
    with pytest.raises(ValueError) as raised:
        separate(optax.lamb(1e-3), PARAMS).bodies([(1, (4, 24))])
    sentences.append(f"block: {raised.value}")
    golden.check("separate.txt", "\n\n".join(sentences))
