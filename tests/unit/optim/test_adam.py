"""What is Adam, and which of its numbers is which."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from zinf.core.optim.host.adam import match_adam
from zinf.core.optim.separate import separate
from zinf.core.optim.update import compile_advance
from zinf_kernels.adam import adam_scalars

MATRIX, VECTOR = (4, 8), (8,)
PARAMS = {"matrix": jnp.ones(MATRIX), "vector": jnp.ones(VECTOR)}
# No two numbers are equal, so that none can pass for another.
NUMBERS = {"b1": 0.8, "b2": 0.97, "eps": 1e-6, "eps_root": 1e-12}
RATE, DECAY = 0.02, 0.3
ADAM = {**NUMBERS, "learning_rate": RATE}
ADAMW = {**ADAM, "weight_decay": DECAY}


def matrices(params):
    return jax.tree.map(lambda p: jnp.ndim(p) > 1, params)


def hand_built():
    """Adam with states and operands in another order than optax has them."""

    def init(params):
        zeros = jax.tree.map(jnp.zeros_like, params)
        # The dict's keys are sorted: "a_v" comes first.
        return {"a_v": zeros, "count": jnp.zeros((), jnp.float32), "m": zeros}

    def update(updates, state, params):
        c = state["count"] + 1

        def change(p, m, v):
            root = jnp.sqrt(1e-12 + v / (1 - 0.97**c))
            return (p * DECAY + (m / (1 - 0.8**c)) / (1e-6 + root)) * -RATE

        def new_m(m, g):
            return m * 0.8 + g**1 * (1 - 0.8)

        def new_v(v, g):
            return v * 0.97 + g**2 * (1 - 0.97)

        m = jax.tree.map(new_m, state["m"], updates)
        v = jax.tree.map(new_v, state["a_v"], updates)
        new = {"a_v": v, "count": c, "m": m}
        return jax.tree.map(change, params, m, v), new

    return optax.GradientTransformation(init, update)


def both(matrix, vector):
    transforms = {"matrix": matrix, "vector": vector}
    return optax.multi_transform(transforms, {name: name for name in transforms})


CHAIN = (
    optax.scale_by_adam(**NUMBERS),
    optax.add_decayed_weights(DECAY),
    optax.scale(-RATE),
)
# The optimizer, and what it does to a matrix and to a vector.
IS_ADAM = {
    "adam": (optax.adam(**ADAM), ADAM, ADAM),
    "adamw": (optax.adamw(**ADAMW), ADAMW, ADAMW),
    "no_decay": (optax.adamw(**ADAM, weight_decay=0.0), ADAM, ADAM),
    "masked": (optax.adamw(**ADAMW, mask=matrices), ADAMW, ADAM),
    "chain": (optax.chain(*CHAIN), ADAMW, ADAMW),
    "hand_built": (hand_built(), ADAMW, ADAMW),
    "hyperparams": (optax.inject_hyperparams(optax.adamw)(**ADAMW), ADAMW, ADAMW),
    "two_rates": (
        both(optax.adam(**ADAM), optax.adam(**{**ADAM, "learning_rate": 0.5})),
        ADAM,
        {**ADAM, "learning_rate": 0.5},
    ),
    "half_sgd": (both(optax.adam(**ADAM), optax.sgd(0.1)), ADAM, None),
}
IS_ANOTHER = {
    "nesterov": optax.nadam(**ADAM),
    "amsgrad": optax.amsgrad(**ADAM),
    "float16_moment": optax.adamw(**ADAMW, mu_dtype=jnp.float16),
    "clipped": optax.chain(optax.clip(1.0), optax.adamw(**ADAMW)),
    "decay_before": optax.chain(optax.add_decayed_weights(DECAY), optax.adam(**ADAM)),
    "scaled_twice": optax.chain(optax.adamw(**ADAMW), optax.scale(0.5)),
    "no_rate": optax.scale_by_adam(**NUMBERS),
    "uncorrected": optax.chain(optax.scale_by_rms(), optax.trace(0.9), *CHAIN[1:]),
    "adabelief": optax.adabelief(RATE),
    "yogi": optax.yogi(RATE),
    "lion": optax.lion(RATE),
    "frozen": optax.set_to_zero(),
}


def forms(separated):
    """The form of each leaf, and the hoisted values that go with it."""
    shapes = [(i, leaf.spec.shape) for i, leaf in enumerate(separated.leaves)]
    bodies = separated.bodies(shapes)
    return [(match_adam(shared.body), shared.hoisted) for shared in bodies]


def scalars_of_steps(tx, leaf, count, factor=0.5):
    """What a leaf's form makes of the first steps."""
    separated = separate(tx, PARAMS)
    form, hoisted = forms(separated)[leaf]
    advance = compile_advance(separated, device=jax.devices()[0])
    shared, found = [s.value for s in separated.shared], []
    for _ in range(count):
        shared, values = advance(shared)
        mine = [values[k] for k in separated.leaves[leaf].step_values]
        found.append(form.values([*mine, *hoisted], factor))
    return found


@pytest.mark.parametrize("name", IS_ADAM)
def test_every_number_is_taken_for_what_it_is(name):
    tx, *numbers = IS_ADAM[name]
    # Injected hyperparameters are float32 before 1 is taken off them.
    rtol = 1e-5 if name == "hyperparams" else 3e-7
    for leaf, own in enumerate(numbers):
        if own is None:
            assert forms(separate(tx, PARAMS))[leaf][0] is None
            continue
        for n, found in enumerate(scalars_of_steps(tx, leaf, 3), 1):
            for field, value in vars(adam_scalars(step=n, **own, factor=0.5)).items():
                scalar = vars(found)[field]
                np.testing.assert_allclose(scalar, value, rtol, err_msg=field)
                assert isinstance(scalar, np.float32)


def form_of(tx, params=PARAMS):
    """The form of the first leaf."""
    return forms(separate(tx, params))[0][0]


def test_a_form_says_where_moments_are_and_which_decays_there_may_be():
    assert [(f.m, f.v) for f in map(form_of, (optax.adam(0.1), hand_built()))] == [
        (0, 1),
        (1, 0),
    ]
    decays = [form_of(IS_ADAM[name][0]).decays for name in ("no_decay", "hyperparams")]
    assert decays == [(0.0,), (0.0, 1.0)]
    # Masters in short floats are left to XLA.
    short = jax.tree.map(lambda p: p.astype(jnp.bfloat16), PARAMS)
    assert form_of(optax.adam(0.1), short) is None


def test_a_scheduled_rate_is_that_of_the_step():
    tx = optax.adamw(**{**ADAMW, "learning_rate": lambda step: RATE / (1 + step)})
    rates = [float(s.learning_rate) for s in scalars_of_steps(tx, 0, 3)]
    np.testing.assert_allclose(rates, [RATE, RATE / 2, RATE / 3], rtol=1e-6)


def test_constants_have_the_bits_that_optax_rounds_them_to():
    """1 - b1 in float32 would be several units in the last place off."""
    (found,) = scalars_of_steps(optax.adamw(1e-3), 0, 1)
    assert found.one_minus_b1 == np.float32(1 - 0.9) != 1 - np.float32(0.9)
    assert found.one_minus_b2 == np.float32(1 - 0.999) != 1 - np.float32(0.999)


def test_a_moment_in_bfloat16_decays_by_a_bfloat16():
    (found,) = scalars_of_steps(optax.adamw(1e-3, mu_dtype=jnp.bfloat16), 0, 1)
    assert found.b1 == 0.8984375  # 0.9, of which bfloat16 keeps 8 bits


@pytest.mark.parametrize("name", IS_ANOTHER)
def test_other_optimizers_are_not_adam(name):
    assert {form for form, _ in forms(separate(IS_ANOTHER[name], PARAMS))} == {None}


def test_one_number_in_two_roles_must_be_the_same_number():
    """m of the change and the m that is kept, made with different b1."""

    def update(grads, state, params=None):
        g, m, v = grads["w"], state["m"]["w"], state["v"]["w"]
        kept, used = (0.1 * g**1 + b1 * m for b1 in (0.9, 0.8))
        v = 0.1 * g**2 + 0.9 * v
        change = -0.1 * (used / 0.5 / (jnp.sqrt(v / 0.5 + 1e-12) + 1e-8))
        return {"w": change}, {"m": {"w": kept}, "v": {"w": v}}

    tx = optax.GradientTransformation(lambda p: {"m": p, "v": p}, update)
    assert form_of(tx, {"w": jnp.ones(MATRIX)}) is None
