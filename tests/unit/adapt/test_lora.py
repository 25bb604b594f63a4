"""`zinf.adapt.lora`: the loss with adapters is that of weights merged by hand."""

from math import sqrt

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import zinf
from tests.unit.adapt.small import (
    BATCH,
    DIM,
    merged_by_hand,
    normal,
    two_layers,
    two_layers_loss,
)
from zinf.adapt import lora
from zinf.core.segment import named_leaves

# Float32 sums in another order.
TOLERANCE = 1e-5


def assert_equals_merging(loss, params, batch=BATCH, **options):
    """Loss and gradients of the adapters, with random lora_B."""
    adapted = lora(loss, params, batch=batch, init_lora_weights=False, **options)
    base, adapters = adapted.params["base"], adapted.params["adapter"]

    def ours(adapters):
        return adapted.loss_fn({"base": base, "adapter": adapters}, batch)

    def by_hand(adapters):
        return loss(merged_by_hand(adapted, params, adapters), batch)

    found, wanted = (jax.jit(jax.value_and_grad(f))(adapters) for f in (ours, by_hand))
    np.testing.assert_allclose(found[0], wanted[0], rtol=TOLERANCE)
    for path, grad in named_leaves(wanted[1]).items():
        assert np.any(grad), path
        np.testing.assert_allclose(
            named_leaves(found[1])[path],
            grad,
            rtol=0,
            atol=TOLERANCE * np.max(np.abs(grad)),
            err_msg=path,
        )
    return adapted


def test_a_linear_layer():
    adapted = assert_equals_merging(two_layers_loss, two_layers(), r=2)
    assert list(adapted.targets) == ["first/kernel", "second/kernel"]


def test_weights_as_torch_keeps_them_and_heads_in_three_dims():
    def loss(params, batch):
        x = batch["x"] @ params["torch"].T
        heads = jnp.einsum("td,dhk->thk", x, params["query"])
        x = jnp.einsum("thk,hkd->td", jnp.tanh(heads), params["out"])
        flat = params["flat"].reshape(DIM, 6)
        return jnp.mean(jnp.square(x @ flat @ flat.T - batch["y"]))

    params = {
        "torch": normal(0, 5, DIM),
        "query": normal(1, 5, 2, 3),
        "out": normal(2, 2, 3, DIM),
        "flat": normal(3, DIM, 2, 3),
    }
    adapted = assert_equals_merging(loss, params, r=2)
    shapes = {p: t.factor_shapes for p, t in adapted.targets.items()}
    assert shapes["query"] == {"lora_A": (5, 2), "lora_B": (2, 2, 3)}
    assert shapes["out"] == {"lora_A": (2, 3, 2), "lora_B": (2, DIM)}
    assert len(shapes) == 4


def test_experts():
    def loss(params, batch):
        x = jnp.einsum("cd,edf->ecf", batch["x"], params["up"])
        x = lax.ragged_dot(jnp.tanh(x[0]), params["down"], jnp.array([1, 2, 1]))
        return jnp.mean(jnp.square(x - batch["y"]))

    params = {"up": normal(0, 2, DIM, 6), "down": normal(1, 3, 6, DIM)}
    assert_equals_merging(loss, params, r=2)


def test_a_weight_that_is_not_only_multiplied_is_merged_where_it_is_used():
    def loss(params, batch):
        scaled = params["w"] / jnp.linalg.norm(params["w"], axis=0, keepdims=True)
        x = (batch["x"] @ scaled).reshape(4, DIM, 1)
        x = lax.conv_general_dilated(
            x, params["conv"], (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
        )
        return jnp.mean(jnp.square(x))

    params = {"w": normal(0, DIM, DIM), "conv": normal(1, 3, 1, 4)}
    assert_equals_merging(loss, params, r=2, target_modules=["w", "conv"])


def test_no_gradient_has_the_size_of_a_weight():
    """The merged form would make one: [inputs, outputs] for each weight."""
    params = {"w": normal(0, DIM, 64)}
    loss = lambda p, b: jnp.mean(jnp.tanh(b["x"] @ p["w"]))  # noqa: E731
    adapted = lora(loss, params, batch=BATCH, r=2)
    grad = jax.grad(
        lambda a, base: adapted.loss_fn({"base": base, "adapter": a}, BATCH)
    )
    traced = jax.make_jaxpr(grad)(adapted.params["adapter"], params)
    made = [v.aval.shape for e in traced.jaxpr.eqns for v in e.outvars]
    assert (4, 64) in made and (DIM, 64) not in made and (64, DIM) not in made


def test_the_first_loss_is_that_of_the_base_to_the_bit():
    for options, scale in (
        ({}, 6 / 4),
        ({"init_lora_weights": "gaussian"}, 6 / 4),
        ({"use_rslora": True}, 6 / sqrt(4)),
    ):
        named = {"batch": BATCH, "r": 4, "lora_alpha": 6, **options}
        adapted = lora(two_layers_loss, two_layers(), **named)
        found = jax.jit(adapted.loss_fn)(adapted.params, BATCH)
        assert found == jax.jit(two_layers_loss)(two_layers(), BATCH)
        # As in PEFT.
        assert adapted.targets["first/kernel"].scale == scale


def test_first_values_are_spread_as_in_peft():
    """Uniform within 1 / sqrt(inputs), or normal with deviation 1 / r."""
    params = {"w": jnp.ones((256, 256))}
    loss = lambda p, b: jnp.mean(b @ p["w"])  # noqa: E731
    batch = jnp.ones((2, 256))
    uniform = lora(loss, params, batch=batch, r=64).params["adapter"]["w"]["lora_A"]
    assert 0.95 / 16 < jnp.max(jnp.abs(uniform)) <= 1 / 16
    drawn = lora(loss, params, batch=batch, r=64, init_lora_weights="gaussian")
    deviation = float(jnp.std(drawn.params["adapter"]["w"]["lora_A"]))
    # 16384 draws: the deviation of the deviation is 1 / sqrt(2 * 16384) = 0.6%.
    assert deviation == pytest.approx(1 / 64, rel=0.04)


def test_dora_sets_the_length_of_each_column():
    params = two_layers()
    adapted = lora(
        two_layers_loss, params, batch=BATCH, r=2, use_dora=True, lora_alpha=3
    )
    adapters = adapted.params["adapter"]
    drawn = lora(two_layers_loss, params, batch=BATCH, r=2, init_lora_weights=False)
    for path, own in adapters.items():
        # Lengths of the columns of [inputs, outputs].
        kernel = named_leaves(params)[path]
        lengths = jnp.linalg.norm(kernel, axis=0)
        magnitude = own["lora_magnitude_vector"]
        np.testing.assert_allclose(magnitude, lengths, rtol=1e-6)
        adapters[path] = {
            **drawn.params["adapter"][path],
            "lora_magnitude_vector": 1.3 * magnitude,
        }

    def by_hand(adapters):
        merged = merged_by_hand(adapted, params, adapters)
        for path, own in adapters.items():
            layer = merged[path.partition("/")[0]]
            lengths = jnp.linalg.norm(layer["kernel"], axis=0, keepdims=True)
            gain = own["lora_magnitude_vector"][None] / lax.stop_gradient(lengths)
            layer["kernel"] = layer["kernel"] * gain
        return two_layers_loss(merged, BATCH)

    def ours(adapters):
        return adapted.loss_fn({"base": params, "adapter": adapters}, BATCH)

    found, wanted = (jax.value_and_grad(f)(adapters) for f in (ours, by_hand))
    np.testing.assert_allclose(found[0], wanted[0], rtol=TOLERANCE)
    for path, grad in named_leaves(wanted[1]).items():
        atol = TOLERANCE * np.max(np.abs(grad))
        given = named_leaves(found[1])[path]
        np.testing.assert_allclose(given, grad, rtol=0, atol=atol, err_msg=path)


def test_dropout_keeps_the_mean_and_evaluation_has_none():
    params = {"w": normal(0, DIM, DIM)}
    loss = lambda p, b: jnp.mean(b["x"] @ p["w"])  # noqa: E731
    given = {"batch": BATCH, "rng": jax.random.key(0), "init_lora_weights": False}
    adapted = lora(loss, params, r=2, lora_dropout=0.25, **given)
    plain = adapted.eval_loss_fn(adapted.params, BATCH, given["rng"])
    keys = jax.random.split(jax.random.key(1), 1000)
    drawn = jax.vmap(lambda key: adapted.loss_fn(adapted.params, BATCH, key))(keys)
    deviation = float(jnp.std(drawn))
    assert deviation > 0
    # Four standard errors of the mean.
    assert abs(float(jnp.mean(drawn) - plain)) < 4 * deviation / sqrt(1000)


def test_rows_of_a_stack_and_places_draw_their_own_dropout():
    w = normal(0, DIM, DIM)
    params = {"w": jnp.stack([w, w])}

    def loss(params, batch):
        def layer(x, w):
            return x, x @ w

        return jnp.mean(lax.scan(layer, batch["x"], params["w"])[1], (1, 2)), None

    given = {"batch": BATCH, "rng": jax.random.key(0), "init_lora_weights": False}
    adapted = lora(lambda p, b: loss(p, b)[0][0], params, r=2, **given)
    row = jax.tree.map(lambda x: jnp.stack([x[0]] * 2), adapted.params["adapter"])
    both = lora(
        lambda p, b: loss(p, b)[0].sum(), params, r=2, lora_dropout=0.5, **given
    )
    one = lora(lambda p, b: loss(p, b)[0][0], params, r=2, lora_dropout=0.5, **given)
    values = {"base": params, "adapter": row}
    key = jax.random.key(3)
    # With equal rows and equal masks the sum would be twice the first.
    first = one.loss_fn(values, BATCH, key)
    assert not np.isclose(both.loss_fn(values, BATCH, key), 2 * first)


def test_leaves_to_save_are_trained_whole():
    adapted = lora(
        two_layers_loss,
        two_layers(),
        batch=BATCH,
        r=2,
        target_modules="first.kernel",
        modules_to_save=["second"],
    )
    trained = named_leaves(adapted.params["adapter"])
    assert [*trained] == ["first/kernel/lora_A", "first/kernel/lora_B", "second/kernel"]
    assert "second/kernel" not in named_leaves(adapted.params["base"])
    after = adapted.merge(adapted.params)
    np.testing.assert_array_equal(
        after["second"]["kernel"], two_layers()["second"]["kernel"]
    )


BOTH = ["first/kernel", "second/kernel"]


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ("all-linear", BOTH),
        (["first"], BOTH[:1]),
        (["kernel"], BOTH),
        (["second/kernel"], BOTH[1:]),
        (["second.kernel"], BOTH[1:]),
        (r".*sec.*", BOTH[1:]),
    ],
)
def test_weights_are_named_by_endings_or_an_expression(names, expected):
    named = {"batch": BATCH, "r": 2, "target_modules": names}
    assert [*lora(two_layers_loss, two_layers(), **named).targets] == expected


WRONG = (
    {"r": 0},
    {"r": 7},
    {"rank": 4},
    {"target_modules": ["frist"]},
    {"target_modules": ["bias"]},
    {"target_modules": "("},
    {"target_modules": []},
    {"exclude_modules": ["kernel"]},
    {"modules_to_save": ["third"]},
    {"target_modules": ["first"], "modules_to_save": ["first/kernel"]},
    {"lora_dropout": 0.1},
    {"init_lora_weights": "pissa"},
    {"quantize_base": "int3"},
)


def test_a_wrong_option_is_refused_by_name(golden):
    found = []
    for options in WRONG:
        with pytest.raises(ValueError) as error:
            lora(two_layers_loss, two_layers(), batch=BATCH, **{"r": 2, **options})
        found.append(f"{options}\n  {error.value}")
    golden.check("options.txt", "\n".join(found))
    assert lora(two_layers_loss, two_layers(), batch=BATCH, r=6).targets


def test_what_cannot_be_adapted_is_refused():
    with pytest.raises(ValueError, match="multiplies no parameter"):
        lora(lambda p, b: jnp.sum(p["a"]), {"a": jnp.ones((4, 4))}, batch=BATCH)
    # Python makes adapters before the engine.
    with pytest.raises(ValueError, match=r"zinf\.adapt\.lora\(loss_fn, params"):
        config = {"adapter": {"r": 2}}
        zinf.initialize(two_layers_loss, two_layers(), optax.sgd(0.1), config)
