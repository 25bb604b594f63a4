"""One array of a running engine by its path: `engine.get` and `engine.set`."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zinf
from tests.robustness.small import DIM, content, draw, init, loss_fn, on_nvme
from tests.unit.refusals import refusals
from zinf.core.segment import named_leaves

BF16 = {"bf16": {"enabled": True}}
CLIPPED = {"gradient_clipping": 1.0}
KEY = jax.random.key(0)
ADAM, SGD = optax.adam(1e-2), optax.sgd(0.1)
NEW = np.linspace(-1, 1, DIM * DIM, dtype=np.float32).reshape(DIM, DIM)


FP16 = {"fp16": {"enabled": True, "initial_scale_power": 4}}


def late(folder, *, is_on_mesh=False):
    """A config whose updates are deferred to the next step."""
    mesh = {"mesh": {"fsdp": 2}} if is_on_mesh else {}
    return on_nvme(folder) | CLIPPED | mesh


@pytest.mark.parametrize("name", ["fused", "nvme", "mesh"])
def test_an_array_is_read_and_set_on_any_tier(name, tmp_path):
    config = {
        "fused": {"execution": "fused"},
        "nvme": late(tmp_path),
        "mesh": late(tmp_path, is_on_mesh=True),
    }[name]
    with zinf.initialize(loss_fn, init, ADAM, config | BF16) as engine:
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
        assert set(content(engine)) == set(before)
        # What is returned is the caller's own.
        engine.get(path)[...] = 0
        np.testing.assert_array_equal(engine.get(path), NEW)


def test_a_run_goes_on_from_what_was_set_as_from_what_was_given(tmp_path):
    given = jax.device_get(jax.jit(init)())
    given["layers"][0]["w"] = NEW
    losses = []
    for params in (given, init):
        with zinf.initialize(loss_fn, params, SGD, late(tmp_path)) as engine:
            engine.prepare(draw())
            for path, leaf in named_leaves(given).items():
                engine.set(path, leaf)
            losses.append([engine.step(draw(i))["loss"] for i in range(3)])
    assert losses[0] == losses[1]


@pytest.mark.parametrize(
    ("is_on_mesh", "fp16", "tolerance"),
    [
        (False, {}, {"rtol": 1e-4, "atol": 1e-6}),
        (True, FP16, {"rtol": 0.02, "atol": 0.01}),
    ],
)
def test_a_gradient_is_read_as_long_as_its_update_is_due(
    is_on_mesh, fp16, tolerance, tmp_path
):
    config, batch = late(tmp_path, is_on_mesh=is_on_mesh) | fp16, draw()
    with zinf.initialize(loss_fn, init, ADAM, config, batch=batch) as engine:
        with pytest.raises(ValueError, match="'out' is not kept: there was no step"):
            engine.get("out", "gradient")
        expected = jax.grad(loss_fn)(engine.params(), batch)["out"]
        engine.step(batch)
        found = engine.get("out", "gradient")
        np.testing.assert_allclose(found, expected, **tolerance)
        # Reading it has not done the update.
        np.testing.assert_array_equal(engine.get("out", "gradient"), found)
        assert engine._runners.current.pending is not None
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


def test_what_cannot_be_is_refused_and_sets_nothing(golden):
    config = {"execution": "streamed", "fp16": {"enabled": True}}
    engine = zinf.initialize(loss_fn, init, ADAM, config)
    early = {
        "a read before the first batch": lambda: engine.get("out"),
        "a write before the first batch": lambda: engine.set("out", NEW),
    }
    text = refusals(early)
    engine.prepare(draw())
    before = content(engine)
    cases = {
        "an unknown leaf": lambda: engine.get("layer/0/w"),
        "an unknown kind": lambda: engine.get("out", "muu"),
        "a kind of another optimizer": lambda: engine.get("out", "trace"),
        "a gradient of an unknown leaf": lambda: engine.get("ouut", "gradient"),
        "a write to an unknown leaf": lambda: engine.set("ouut", NEW),
        "a compute copy": lambda: engine.set("out", NEW, "compute"),
        "a gradient": lambda: engine.set("out", NEW, "gradient"),
        "another shape": lambda: engine.set("out", NEW[:2]),
        "complex numbers": lambda: engine.set("out", NEW + 0j),
        "numbers that overflow": lambda: engine.set("out", NEW * 1e6),
        "text": lambda: engine.set("out", [["a"] * DIM] * DIM),
    }
    golden.check("arrays_refusals.txt", text + "\n" + refusals(cases))
    assert content(engine) == before
    engine.set("out", NEW.tolist())
    engine.set("out", NEW.astype(np.float64))
    engine.set("out", np.ones((DIM, DIM), int))
    assert (engine.get("out") == 1).all()
    engine.close()


def test_a_step_in_memory_replaces_the_state_where_it_lies():
    """From the first step on: memory of NumPy would be kept beside the new state."""
    params = {"w": jnp.ones((512, 512)), "b": jnp.ones((256, 512))}

    def loss(params, batch):
        return ((batch @ params["w"]) ** 2).mean() + (params["b"] ** 2).mean()

    def places(engine):
        store = engine.stores.device
        arrays = [store.read(a).result() for a in engine.residents.specs]
        return {a.unsafe_buffer_pointer() for a in arrays if a.nbytes >= 2**18}

    with zinf.initialize(loss, params, ADAM, {"execution": "fused"}) as engine:
        batch = np.ones((2, 512), np.float32)
        engine.prepare(batch)
        for path in (None, "w"):  # As initialized, and as set.
            if path is not None:
                engine.set(path, np.full((512, 512), 2, np.float32))
            before = places(engine)
            engine.step(batch)
            assert places(engine) == before
            assert len(before) == 6  # Two parameters with two moments each.
