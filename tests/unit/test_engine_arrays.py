"""One array of a running engine by its path: `engine.get` and `engine.set`."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zinf
from tests.robustness.small import DIM, content, draw, init, loss_fn, on_nvme

BF16 = {"bf16": {"enabled": True}}
CLIPPED = {"gradient_clipping": 1.0}
KEY = jax.random.key(0)
ADAM = optax.adam(1e-2)
NEW = np.linspace(-1, 1, DIM * DIM, dtype=np.float32).reshape(DIM, DIM)


def place(name, folder):
    mesh = {"mesh": {"fsdp": 2}, "persistence_threshold": 1}
    return {
        "fused": {"execution": "fused"} | BF16,
        "streamed": {"execution": "streamed"} | BF16,
        "nvme": on_nvme(folder) | BF16,
        "late": on_nvme(folder) | BF16 | CLIPPED,
        "mesh": on_nvme(folder) | BF16 | CLIPPED | mesh,
    }[name]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["fused", "streamed", "nvme", "late", "mesh"])
def test_an_array_is_read_and_set_on_any_tier(name, tmp_path):
    with zinf.initialize(loss_fn, init, ADAM, place(name, tmp_path)) as engine:
        engine.step(draw())
        path = "layers/1/w"
        # Updates that are due were done before anything was read.
        whole = engine.get(path)
        np.testing.assert_array_equal(whole, engine.params()["layers"][1]["w"])
        compute = engine.get(path, "compute")
        assert whole.dtype == np.float32
        assert compute.dtype == jnp.bfloat16
        np.testing.assert_array_equal(compute, whole.astype(jnp.bfloat16))
        (state,) = (
            leaf.states for leaf in engine.planner.separated.leaves if leaf.path == path
        )
        mu, nu = (engine.residents.read(s.array(path)) for s in state)
        np.testing.assert_array_equal(engine.get(path, "mu"), mu)
        np.testing.assert_array_equal(engine.get(path, "nu"), nu)

        before = content(engine)
        engine.step(draw(1))
        engine.set(path, NEW)
        engine.set(path, NEW**2, "nu")
        np.testing.assert_array_equal(engine.get(path), NEW)
        found = engine.get(path, "compute")
        np.testing.assert_array_equal(found, NEW.astype(jnp.bfloat16))
        np.testing.assert_array_equal(engine.get(path, "nu"), NEW**2)
        after = content(engine)
        assert set(after) == set(before)
        # The loss reads what was set, and an update starts from it.
        params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), engine.params())
        np.testing.assert_allclose(
            engine.evaluate(draw(2)), loss_fn(params, draw(2)), rtol=2e-2
        )
        engine.step(draw(2))
        assert np.abs(engine.get(path) - NEW).max() < 0.5
        # What is returned is the caller's own.
        mine = engine.get(path)
        mine[...] = 0
        assert engine.get(path).any()


def test_a_run_goes_on_from_what_was_set_as_from_what_was_given(tmp_path):
    # Not `jax.jit(init)`: on some processors it differs from zinf's own first values,
    # which are computed leaf by leaf, in the last bit.
    with zinf.initialize(loss_fn, init, optax.sgd(0.1), {}, batch=draw()) as engine:
        given = engine.params()
    given["layers"][0]["w"] = NEW
    losses = []
    for params in (given, init):
        config = on_nvme(tmp_path) | CLIPPED
        with zinf.initialize(
            loss_fn, params, optax.sgd(0.1), config, batch=draw()
        ) as engine:
            for path, leaf in (("layers/0/w", NEW), ("out", given["out"])):
                engine.set(path, leaf)
            losses.append([engine.step(draw(i))["loss"] for i in range(3)])
    assert losses[0] == losses[1]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["late", "mesh"])
@pytest.mark.parametrize("scale", [{}, {"fp16": {"initial_scale_power": 4}}], ids=str)
def test_a_gradient_is_read_as_long_as_its_update_is_due(name, scale, tmp_path):
    config = {k: v for k, v in place(name, tmp_path).items() if k != "bf16"}
    if scale:
        config |= {"fp16": {"enabled": True, **scale["fp16"]}}
    batch = draw()
    with zinf.initialize(loss_fn, init, ADAM, config, batch=batch) as engine:
        with pytest.raises(ValueError, match="'out' is not kept: there was no step"):
            engine.get("out", "gradient")
        expected = jax.grad(loss_fn)(engine.params(), batch)["out"]
        engine.step(batch)
        found = engine.get("out", "gradient")
        rest = {"rtol": 0.02, "atol": 0.01} if scale else {"rtol": 1e-4, "atol": 1e-6}
        np.testing.assert_allclose(found, expected, **rest)
        # Reading it has not done the update.
        np.testing.assert_array_equal(engine.get("out", "gradient"), found)
        assert engine._current.pending is not None
        engine.flush()
        with pytest.raises(ValueError, match="update has run"):
            engine.get("out", "gradient")


def test_a_stacked_leaf_is_one_array(tmp_path):
    def scanned(params, batch):
        layer = lambda x, w: (jnp.tanh(x @ w), None)  # noqa: E731
        x, _ = jax.lax.scan(layer, batch["x"], params["layers"])
        return jnp.mean(jnp.square(x - batch["y"]))

    params = {"layers": jax.random.normal(KEY, (3, DIM, DIM))}
    config = on_nvme(tmp_path) | CLIPPED
    with zinf.initialize(scanned, params, ADAM, config) as engine:
        engine.step(draw())
        assert any(array.rows for array in engine.plan.homes)
        gradient = engine.get("layers", "gradient")
        expected = jax.grad(scanned)(params, draw())["layers"]
        np.testing.assert_allclose(gradient, expected, rtol=1e-4, atol=1e-6)
        new = np.stack([NEW, 2 * NEW, 3 * NEW])
        engine.set("layers", new)
        np.testing.assert_array_equal(engine.get("layers"), new)
        assert engine.get("layers", "mu").shape == new.shape


@pytest.mark.slow
def test_keys_counters_and_states_of_one_name(tmp_path):
    def loss(params, state, batch):
        noise = jax.random.normal(state["key"], (1, DIM))
        return loss_fn(params, {**batch, "x": batch["x"] + noise}), {
            "key": state["key"],
            "count": state["count"] + 1,
        }

    state = {"key": KEY, "count": jnp.int32(0)}
    tx = optax.chain(optax.trace(0.9), optax.trace(0.5), optax.scale(-0.1))
    with zinf.initialize(
        loss, init, tx, on_nvme(tmp_path), model_state=state
    ) as engine:
        engine.step(draw())
        assert engine.get("model_state/key") == KEY
        assert engine.get("model_state/count") == 1
        engine.set("model_state/key", jax.random.key(5))
        engine.set("model_state/count", 7)
        assert engine.get("model_state/key") == jax.random.key(5)
        engine.step(draw())
        assert engine.get("model_state/count") == 8
        first, second = (engine.get("out", f"{i}/trace") for i in (0, 1))
        assert (first != second).any()


def test_what_cannot_be_is_refused_and_sets_nothing():
    config = {"execution": "streamed", "fp16": {"enabled": True}}
    engine = zinf.initialize(loss_fn, init, ADAM, config)
    for early in (lambda: engine.get("out"), lambda: engine.set("out", NEW)):
        with pytest.raises(ValueError, match="Pass batch= to zinf.initialize"):
            early()
    engine.prepare(draw())
    before = content(engine)
    cases = [
        (lambda: engine.get("layer/0/w"), "Did you mean 'layers/0/w'"),
        (lambda: engine.get("out", "muu"), "Did you mean 'mu'"),
        (lambda: engine.get("out", "trace"), "It has 'master', 'compute', 'mu', 'nu'"),
        (lambda: engine.get("ouut", "gradient"), "Did you mean 'out'"),
        (lambda: engine.set("ouut", NEW), "Did you mean 'out'"),
        (lambda: engine.set("out", NEW, "compute"), "Set kind='master'"),
        (lambda: engine.set("out", NEW, "gradient"), "made by each step"),
        (lambda: engine.set("out", NEW[:2]), r"has shape \[2, 8\]"),
        (lambda: engine.set("out", NEW + 0j), "is complex64; the array is float32"),
        (lambda: engine.set("out", NEW * 1e6), "infinite in float16"),
        (lambda: engine.set("out", [["a"] * DIM] * DIM), "does not hold such"),
    ]
    for call, message in cases:
        with pytest.raises(ValueError, match=message):
            call()
    assert content(engine) == before
    engine.set("out", NEW.tolist())
    engine.set("out", NEW.astype(np.float64))
    engine.set("out", np.ones((DIM, DIM), int))
    assert (engine.get("out") == 1).all()
    engine.close()
    with pytest.raises(RuntimeError, match="was closed"):
        engine.get("out")
