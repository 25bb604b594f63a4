"""What a step reports, what an engine holds, and what it saves and restores."""

from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zinf
from tests.robustness.small import DIM, content, draw, init, loss_fn, on_nvme
from tests.tiers import stage_3
from tests.unit.plain import trained_in_jax
from zinf.core.memory import StorageError, aligned_empty
from zinf.core.plan import Link
from zinf.core.program import Role, Tier

FUSED = {"execution": "fused"}
STREAMED = {"execution": "streamed", "segment": {"remat": "always"}}
KEY = jax.random.key(3)
KEYS = {
    *("step", "loss", "grad_norm", "learning_rate", "step_seconds", "plan_seconds"),
    *("tokens_per_second", "samples_per_second"),
    *("device_bytes", "host_bytes", "nvme_bytes"),
    *("nvme_read_bytes", "nvme_write_bytes", "h2d_bytes", "d2h_bytes", "skipped"),
}
LINKS = {
    "nvme_read_bytes": Link.NVME_READ,
    "nvme_write_bytes": Link.NVME_WRITE,
    "h2d_bytes": Link.H2D,
    "d2h_bytes": Link.D2H,
}
both = pytest.mark.parametrize("config", [FUSED, STREAMED], ids=["fused", "streamed"])


@pytest.fixture
def start():
    engines = []

    def make(config=None, *, loss=loss_fn, params=init, tx=None, **rest):
        tx = tx or optax.adam(1e-2)
        engines.append(zinf.initialize(loss, params, tx, config, **rest))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def assert_close(found, expected, rtol=1e-5):
    chex.assert_trees_all_close(found, expected, rtol=rtol, atol=1e-6)


def noisy_loss(params, batch, key):
    noise = jax.random.normal(key, (1, DIM))
    return loss_fn(params, {**batch, "x": batch["x"] + noise})


# What a step reports.


def test_a_fused_step_reports_all_that_is_documented(start):
    engine = start(FUSED, batch=draw())
    for number in (1, 2):
        metrics = engine.step(draw())
        assert set(metrics) == KEYS
        assert metrics["step"] == engine.num_steps == number
        loss, grads = jax.value_and_grad(loss_fn)(init(), draw())
        if number == 1:
            np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-5)
            norm = optax.tree.norm(grads)
            np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=1e-5)
        assert metrics["learning_rate"] == pytest.approx(1e-2)
        assert metrics["skipped"] is False
        # The batch has no integers, so its four examples are counted.
        tokens = metrics["tokens_per_second"] * metrics["step_seconds"]
        assert tokens == pytest.approx(4)
        assert metrics["samples_per_second"] == metrics["tokens_per_second"]
        assert metrics["device_bytes"] == engine.plan.peak_bytes[Tier.DEVICE]
        assert not any(metrics[name] for name in LINKS)
    # The step is one instruction.
    timeline = engine.last_step.timeline
    assert len(timeline.start) == len(engine.plan.instructions) == 1
    assert 0 <= timeline.start[0] < timeline.end[0] <= metrics["step_seconds"]


@pytest.mark.parametrize("settings", [{}, {"gradient_clipping": 1.0}], ids=str)
def test_bytes_and_times_are_those_of_the_plan(settings, start, tmp_path):
    settings = {**settings, "gradient_accumulation_steps": 2}
    engine = start(on_nvme(tmp_path / "nvme", **settings), batch=draw())
    assert engine.last_step.timeline is None
    for _ in range(2):
        nvme = engine.stores.nvme
        before = nvme.read_bytes, nvme.written_bytes
        metrics = engine.step(draw())
        assert set(metrics) == KEYS
        plan, timeline = engine.last_step.plan, engine.last_step.timeline
        for name, link in LINKS.items():
            assert metrics[name] == plan.link_bytes(link)
        assert nvme.read_bytes - before[0] == metrics["nvme_read_bytes"]
        assert nvme.written_bytes - before[1] == metrics["nvme_write_bytes"]
        for tier in Tier:
            assert 0 < metrics[f"{tier}_bytes"] <= plan.peak_bytes[tier]
            assert plan.peak_bytes[tier] <= plan.capacity_bytes[tier]
        # Each link runs its instructions in order, after those they wait for.
        ended: dict[Link, float] = dict.fromkeys(Link, 0.0)
        spans = zip(timeline.start, timeline.end, strict=True)
        for instruction, (begin, end) in zip(plan.instructions, spans, strict=True):
            assert ended[instruction.link] <= begin <= end
            assert all(timeline.end[i] <= begin for i in instruction.after)
            ended[instruction.link] = end
        assert timeline.seconds <= metrics["step_seconds"]
    # With clipping, the first step has nothing to write yet.
    assert plan is engine.plan
    assert all(metrics[name] for name in LINKS)
    engine.flush()
    used = {t: engine.stores[t].ledger.used_bytes for t in Tier}
    assert used == engine.plan.home_bytes


def test_the_learning_rate_and_the_loss_scale_are_reported_if_there_are_any(start):
    schedule = optax.linear_schedule(0.1, 0.0, 10)
    tx = optax.inject_hyperparams(optax.sgd)(learning_rate=schedule)
    fp16 = {"fp16": {"enabled": True, "initial_scale_power": 4}}
    engine = start(FUSED | fp16, tx=tx)
    for count in range(3):
        metrics = engine.step(draw())
        assert metrics["learning_rate"] == pytest.approx(float(schedule(count)))
        assert set(metrics) == KEYS | {"loss_scale", "num_skipped"}
        assert (metrics["loss_scale"], metrics["num_skipped"]) == (16, 0)


@pytest.mark.parametrize(("config", "count"), [(FUSED, 2), (STREAMED, 2), (FUSED, 1)])
def test_aux_has_a_dim_for_microbatches_if_there_are_several(config, count, start):
    def loss(params, batch):
        return loss_fn(params, batch), {"mean": batch["x"].mean(0), "n": 3}

    config = {**config, "gradient_accumulation_steps": count}
    aux = start(config, loss=loss, has_aux=True).step(draw())["aux"]
    means = [part.mean(0) for part in np.split(draw()["x"], count)]
    assert_close(aux["mean"], means[0] if count == 1 else np.stack(means))
    np.testing.assert_array_equal(aux["n"], 3 if count == 1 else [3, 3])


# Parameters.


def test_parameters_are_the_initial_ones_and_train_alike_however_given(start):
    plain = jax.jit(init)()
    made = start(STREAMED)
    ready = made.params()
    # A function is compiled leaf by leaf, which rounds in other places.
    assert_close(ready, plain)
    given = start(STREAMED, params=ready)
    for engine in (made, given):
        chex.assert_trees_all_equal(engine.params(), ready, strict=True)
        engine.prepare(draw())
        chex.assert_trees_all_equal(engine.params(), ready, strict=True)
    kept = jax.tree.map(np.copy, ready)
    losses = [[e.step(draw(i))["loss"] for i in range(3)] for e in (made, given)]
    assert losses[0] == losses[1]
    chex.assert_trees_all_equal(made.params(), given.params(), strict=True)
    # The engine trains arrays of its own.
    chex.assert_trees_all_equal(ready, kept, strict=True)


@both
def test_frozen_leaves_stay_bitwise_and_have_no_optimizer_state(config, start):
    engine = start({**config, "frozen": ["layers/0/*"]}, tx=optax.adamw(0.1))
    initial = engine.params()
    for i in range(3):
        engine.step(draw(i))
    found = engine.params()
    chex.assert_trees_all_equal(found["layers"][0], initial["layers"][0], strict=True)
    assert not np.array_equal(found["layers"][1]["w"], initial["layers"][1]["w"])
    owners = {a.path for a in engine.residents.specs if a.role == Role.STATE}
    assert owners == {"layers/1/w", "layers/1/b", "out"}


@both
def test_leaves_that_are_no_floats_stay_and_unused_ones_decay(config, start):
    rest = {
        "key": jax.random.key(5),
        "order": jnp.arange(DIM)[::-1],
        "unused": jnp.ones((3, 2)),
    }

    def params():
        return {**init(), **rest}

    def loss(p, batch):
        noise = jax.random.normal(p["key"], (DIM,))
        return loss_fn(p, {**batch, "x": batch["x"][:, p["order"]] + noise[None]})

    tx = optax.adamw(0.1, weight_decay=0.5)
    engine = start(config, loss=loss, params=params, tx=tx)
    batches = [draw(i) for i in range(3)]
    losses = [engine.step(batch)["loss"] for batch in batches]
    found = engine.params()
    assert found["key"] == jax.random.key(5)
    np.testing.assert_array_equal(found["order"], np.arange(DIM)[::-1])
    assert found["order"].dtype == np.int32
    # Each step multiplies it by 1 - 0.1 * 0.5.
    assert_close(found["unused"], np.full((3, 2), 0.95**3))

    def on_floats(floats, batch):
        return loss({**params(), **floats}, batch)

    expected, _ = trained_in_jax(on_floats, init(), tx, [[(b,)] for b in batches])
    assert_close(losses, expected)


# Plans and model state.


def test_a_plan_before_a_batch_is_a_clear_error(start, tmp_path):
    engine = start()
    for call in (lambda: str(engine.plan), lambda: engine.save(tmp_path / "saved")):
        with pytest.raises(ValueError, match="Pass batch= to zinf.initialize"):
            call()
    assert not engine.is_placed


@both
def test_model_state_is_carried_by_steps_and_read_by_evaluation(config, start):
    def loss(params, state, batch, *, train):
        mean = state["mean"]
        if train:
            mean = 0.9 * mean + 0.1 * batch["x"].mean(0)
        new = {"mean": mean, "count": state["count"] + 1} if train else None
        return loss_fn(params, {**batch, "x": batch["x"] - mean[None]}), new

    state = {"mean": jnp.zeros(DIM), "count": jnp.int32(0)}
    config = {**config, "gradient_accumulation_steps": 2}
    rules = {"count": "last"}
    engine = start(config, loss=loss, model_state=state, state_rules=rules)
    chex.assert_trees_all_equal(engine.model_state(), state, strict=True)
    mean = np.zeros(DIM)
    for i in range(3):
        engine.step(draw(i))
        # The mean over microbatches is that of the whole batch.
        mean = 0.9 * mean + 0.1 * draw(i)["x"].mean(0)
        found = engine.model_state()
        assert_close(found["mean"], mean)
        assert found["count"] == i + 1
    expected, _ = loss(engine.params(), found, draw(1), train=False)
    np.testing.assert_allclose(engine.evaluate(draw(1)), expected, rtol=1e-5)
    chex.assert_trees_all_equal(engine.model_state(), found, strict=True)
    assert not any("mean" in path for path in engine.params())


# Saving.


def test_a_run_goes_on_bit_equal_on_other_tiers(start, tmp_path):
    host = STREAMED | {
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    }
    make = partial(start, loss=noisy_loss)
    first = make(on_nvme(tmp_path / "nvme"), rng=KEY)
    for i in range(2):
        first.step(draw(i))
    first.save(tmp_path / "a")
    # Another key: that of the saved run takes its place.
    fused = make(FUSED, rng=jax.random.key(0), batch=draw())
    fused.restore(tmp_path / "a")
    assert content(fused) == content(first)
    assert fused.scalars() == first.scalars()
    fused.save(tmp_path / "b")
    # Before there is a plan, a restore is done with the first batch.
    last = make(host, rng=jax.random.key(0))
    last.restore(tmp_path / "b")
    for i in range(2, 4):
        expected, found = (e.step(draw(i)) for e in (first, last))
        assert found["loss"] == expected["loss"]
        assert found["step"] == expected["step"] == i + 1
    chex.assert_trees_all_equal(last.params(), first.params(), strict=True)


@pytest.mark.parametrize("device", ["none", "cpu"])
def test_arrays_that_a_user_gives_stay_the_users(start, device):
    """Also those that a store could keep as they are: aligned, and nobody else's."""

    def own(leaf):
        array = aligned_empty(leaf.shape, leaf.dtype)
        array[...] = leaf
        return array

    given = jax.tree.map(own, jax.device_get(init()))
    before = jax.tree.map(np.copy, given)
    engine = start(STREAMED | {"zero_optimization": stage_3(device)}, params=given)
    for step in range(2):
        engine.step(draw(step))
    chex.assert_trees_all_equal(given, before, strict=True)
    assert (engine.params()["out"] != before["out"]).any()


def test_loading_verifies_checksums_unless_told_not_to(start, tmp_path):
    engine = start(STREAMED, batch=draw(0))
    engine.save(tmp_path / "saved")
    (chunk,) = (tmp_path / "saved" / "param" / "out").glob("c.*")
    content = bytearray(chunk.read_bytes())
    content[0] ^= 1
    chunk.chmod(0o600)
    chunk.write_bytes(content)
    before = engine.params()["out"]
    with pytest.raises(StorageError, match="param/out"):
        engine.restore(tmp_path / "saved")
    engine.restore(tmp_path / "saved", verify=False)
    assert (before != engine.params()["out"]).sum() == 1
