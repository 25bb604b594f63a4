"""Clipping is taken off a transform, decided once a step, and given the loss."""

from functools import partial
from math import inf, nan, sqrt

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

from zinf.core.optim.apart import NormGroups
from zinf.core.optim.clipping import PROBE_ROUNDING, TORCH_EPSILON, Clipping
from zinf.core.optim.decision import Decision, decide
from zinf.core.optim.separate import separate
from zinf.core.optim.update import compile_advance

PARAMS = {
    "a": jax.ShapeDtypeStruct((3, 2), jnp.float32),
    "b": [jax.ShapeDtypeStruct((4,), jnp.float32)] * 2,
    "c": jax.ShapeDtypeStruct((), jnp.float32),
}
CLIP = optax.clip_by_global_norm(0.1)
LEADING = {
    "an_array": (
        optax.chain(optax.clip_by_global_norm(jnp.float32(0.1)), optax.adamw(0.1)),
        optax.adamw(0.1),
    ),
    "nested": (
        optax.chain(optax.chain(CLIP, optax.scale_by_lion()), optax.scale(-0.1)),
        optax.chain(optax.chain(optax.scale_by_lion()), optax.scale(-0.1)),
    ),
    "injected": (
        optax.inject_hyperparams(lambda lr: optax.chain(CLIP, optax.sgd(lr)))(lr=0.1),
        optax.inject_hyperparams(optax.sgd)(learning_rate=0.1),
    ),
    "alone": (CLIP, optax.identity()),
}


@pytest.mark.parametrize("name", LEADING)
def test_leading_clipping_leaves_the_code_of_the_rest(name):
    clipped, rest = (separate(tx, PARAMS) for tx in LEADING[name])
    assert clipped.clip_bounds == (pytest.approx(0.1),)
    assert rest.clip_bounds == ()
    for one, other in zip(clipped.updates, rest.updates, strict=True):
        names = ([e.primitive.name for e in p.equations] for p in (one, other))
        assert next(names) == next(names)
    assert [leaf.is_elementwise for leaf in clipped.leaves] == [True] * 4


def test_every_leading_clip_of_any_leaves_is_recognised():
    twice = optax.chain(optax.clip_by_global_norm(2.0), CLIP, optax.sgd(0.1))
    assert separate(twice, PARAMS).clip_bounds == (2.0, pytest.approx(0.1))
    half = jax.ShapeDtypeStruct((4,), jnp.bfloat16)
    tx = optax.chain(optax.clip_by_global_norm(1.5), optax.adam(0.1))
    for params in ({"w": half}, {"w": half, "v": PARAMS["a"]}, {"v": PARAMS["a"]}):
        assert separate(tx, params).clip_bounds == (1.5,)
    # Frozen leaves are no part of the norm.
    separated = separate(tx, PARAMS, trainable={"a", "b/1"})
    assert [leaf.path for leaf in separated.leaves] == ["a", "b/1"]
    assert separated.clip_bounds == (1.5,)


def test_gradients_that_are_also_read_unclipped_are_clipped_by_their_norm():
    def update(grads, params=None):
        clipped, _ = CLIP.update(grads, CLIP.init(grads))
        return jax.tree.map(lambda g, c: c + 0.1 * g, grads, clipped)

    separated = separate(optax.stateless(update), PARAMS)
    assert separated.clip_bounds == ()
    assert separated.norm_groups.paths == (frozenset({"a", "b/0", "b/1", "c"}),)


CLIPPED_APART = {
    "parts": (
        optax.partition({"x": CLIP, "y": CLIP}, {"a": "x", "b": ["y", "x"], "c": "y"}),
        [{"a", "b/1"}, {"b/0", "c"}],
        {"a": 1, "b/1": 1, "b/0": 2, "c": 2},
    ),
    "some, and all as well": (
        optax.chain(
            optax.masked(CLIP, {"a": True, "b": [True, False], "c": False}),
            optax.masked(
                optax.chain(optax.scale(2.0), CLIP), {"a": False, "b": False, "c": True}
            ),
        ),
        [{"a", "b/0"}],
        {"a": 1, "b/0": 1},
    ),
}


@pytest.mark.parametrize("name", CLIPPED_APART)
def test_leaves_that_are_clipped_apart_have_a_norm_of_their_own(name):
    """A leaf alone is clipped by its own update."""
    tx, groups, classes = CLIPPED_APART[name]
    separated = separate(tx, PARAMS)
    assert [set(group) for group in separated.norm_groups.paths] == groups
    assert separated.norm_groups.classes == classes
    assert separated.reads_step and not separated.reads_loss


def test_the_norm_of_a_group_is_that_of_its_classes_and_may_be_large():
    groups = NormGroups((frozenset("ab"), frozenset("bc")))
    assert groups.classes == {"a": 1, "b": 2, "c": 3}
    squares = [(0, 100.0), (1, 9.0), (2, 16.0), (3, 33.0), (1, 0.0)]
    assert groups.norms(squares, 0.5) == [2.5, 3.5]
    # Minus the sum of scaled squares, where that of squares overflows.
    (large,) = NormGroups((frozenset("a"),)).norms([(1, -(2.0**10))], 1.0)
    assert large == np.float32(2.0 ** (5 + 96))


def test_another_formula_under_the_name_of_optax_is_not_taken_off(monkeypatch):
    """If optax changed what it does, zinf must not do what it did."""

    def as_torch(grads, params=None):
        factor = jnp.minimum(1.0, 1.0 / (optax.tree.norm(grads) + 1e-2))
        return jax.tree.map(lambda g: g * factor, grads)

    monkeypatch.setattr(
        optax, "clip_by_global_norm", lambda _: optax.stateless(as_torch)
    )
    with pytest.raises(ValueError, match="couples parameters"):
        separate(optax.chain(optax.stateless(as_torch), optax.sgd(0.1)), PARAMS)


@pytest.mark.parametrize("bounds", [(0.3,), (2.0, 0.3), (0.3, 2.0)])
@pytest.mark.parametrize("size", [1e-6, 0.29, 0.31, 1.0, 1e4])
def test_the_factor_is_that_of_optax(bounds, size):
    grads = [np.float32([0.6 * size]), np.float32([0.8 * size])]
    tx = optax.chain(*map(optax.clip_by_global_norm, bounds))
    wanted, _ = tx.update([jnp.asarray(g) for g in grads], tx.init(grads))
    clipping = Clipping(optax_bounds=bounds)
    norm = np.float32(np.sqrt(sum(float(g[0]) ** 2 for g in grads)))
    traced = jax.jit(partial(clipping.factor, xp=jnp))
    for factor in (clipping.factor(float(norm)), traced(norm)):
        for grad, value in zip(grads, wanted, strict=True):
            np.testing.assert_allclose(grad * factor, value, rtol=PROBE_ROUNDING)


TORCH, OPTAX, FREE = Clipping(2.0), Clipping(None, (2.0, 1.0)), Clipping()
E = TORCH_EPSILON


@pytest.mark.parametrize(
    ("squares", "clipping", "loss_scale", "norm", "factor"),
    [
        ([0.0], FREE, 1.0, 0.0, 1.0),
        ([9.0, 16.0], FREE, 8.0, 5 / 8, 1 / 8),
        ([1.0], TORCH, 1.0, 1.0, 1.0),
        ([9.0, 16.0], OPTAX, 1.0, 5.0, 1.0 / 5.0),
        ([9.0, 16.0], Clipping(0.5), 8.0, 5 / 8, 0.5 / (5 / 8 + E) / 8),
        # After the clipping of the config the norm is below 4.
        ([9.0, 16.0], Clipping(2.0, (4.0,)), 1.0, 5.0, 2.0 / (5.0 + E)),
        # In float32, 2**24 + 1 is 2**24.
        ([2.0**24, 1.0], FREE, 1.0, sqrt(2**24 + 1), 1.0),
        # Without norms only the loss is looked at.
        (None, TORCH, 8.0, None, 1 / 8),
        # Torch differs from optax where norms are small.
        ([4e-6**2], Clipping(2e-6), 1.0, 4e-6, 2e-6 / (4e-6 + E)),
        ([4e-6**2], Clipping(None, (2e-6,)), 1.0, 4e-6, 0.5),
    ],
)
def test_a_step_has_the_mean_loss_the_unscaled_norm_and_one_factor(
    squares, clipping, loss_scale, norm, factor
):
    options = {"loss_scale": loss_scale, "skips_overflow": False}
    for weight, mean in ((3.0, 3.0), (4.5, 2.0)):
        options["weight"] = weight
        found = decide([1.0, 2.0, 6.0], squares, clipping=clipping, **options)
        assert found == Decision(mean, norm, factor, False)


def test_optax_clips_what_the_config_has_clipped():
    clipping = Clipping(2.0, (1.0,))
    assert clipping.factor(5.0) == pytest.approx(1.0 / 5.0, rel=1e-15)
    assert clipping and OPTAX and not FREE


@pytest.mark.parametrize(
    ("losses", "squares", "words"),
    [
        ([1.0, inf], None, "by microbatch: 1.0, inf"),
        ([1.0, -inf], [1.0], "by microbatch: 1.0, -inf"),
        ([1.0, nan], [1.0], "by microbatch: 1.0, nan"),
        ([1.0], [1.0, inf], "gradient norm is inf"),
        ([1.0], [1.0, nan], "gradient norm is nan"),
    ],
)
def test_what_is_not_finite_updates_nothing_and_is_refused(losses, squares, words):
    """With a loss scale, which could have caused it, the step is only skipped."""
    options = {"clipping": FREE, "loss_scale": 1.0, "weight": float(len(losses))}
    found = decide(losses, squares, skips_overflow=False, **options)
    assert found.skips and found.factor == 0.0
    assert words in found.refusal
    found = decide(losses, squares, skips_overflow=True, **options)
    assert found.skips and found.factor == 0.0 and found.refusal is None


def test_what_reads_the_loss_has_it_among_the_shared():
    plateau = optax.contrib.reduce_on_plateau(patience=1, factor=0.5)
    separated = separate(optax.chain(optax.sgd(0.1), plateau), PARAMS)
    assert separated.reads_loss
    assert not separate(optax.sgd(0.1), PARAMS).reads_loss
    advance = compile_advance(separated, device=jax.devices("cpu")[0])
    state = plateau.init(jnp.ones(()))
    shared = [s.value for s in separated.shared]
    names = [s.optax_path.split("/")[-1] for s in separated.shared]
    for loss in (3.0, 2.0, 2.5, 2.5, 1.0):
        shared, values = advance(shared, np.float32(loss))
        _, state = plateau.update(jnp.ones(()), state, value=loss)
        assert shared[names.index("scale")] == state.scale
    assert state.scale == 0.25
    assert state.scale in values


def test_a_state_that_only_keeps_the_loss_is_kept():
    def update(grads, state, params=None, *, value, **extra):
        return grads, value.astype(jnp.float32)

    tx = optax.GradientTransformationExtraArgs(lambda params: jnp.zeros(()), update)
    advance = compile_advance(separate(tx, PARAMS), device=jax.devices("cpu")[0])
    assert advance([np.float32(0)], np.float32(5))[0] == [5]
    # A transform that takes no value is given none.
    plain = optax.GradientTransformationExtraArgs(
        lambda params: (), lambda grads, state, params=None: (grads, state)
    )
    assert not separate(plain, PARAMS).reads_loss
