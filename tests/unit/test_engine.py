from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zinf
from tests.robustness.small import DIM, content, draw, init, loss_fn, on_nvme
from zinf.memory import StorageError, aligned_empty
from zinf.plan import Link
from zinf.program import ArrayId, Role, Tier

FUSED = {"execution": "fused"}
STREAMED = {"execution": "streamed", "segment": {"remat": "always"}}
KEY = jax.random.key(3)
KEYS = {
    *("step", "loss", "grad_norm", "learning_rate", "step_seconds", "plan_seconds"),
    *("tokens_per_second", "device_bytes", "host_bytes", "nvme_bytes"),
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


def train_in_jax(loss, params, tx, batches):
    state, losses = tx.init(params), []
    for batch in batches:
        value, grads = jax.value_and_grad(loss)(params, batch)
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        losses.append(float(value))
    return losses, params


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
        assert 0 < metrics["loss"] < 100
        assert 0 < metrics["grad_norm"] < 100
        assert metrics["learning_rate"] is None
        assert metrics["skipped"] is False
        # The batch has no integers, so its four examples are counted.
        tokens = metrics["tokens_per_second"] * metrics["step_seconds"]
        assert tokens == pytest.approx(4)
        assert metrics["device_bytes"] == engine.plan.peak_bytes[Tier.DEVICE]
        assert not any(metrics[name] for name in LINKS)


@pytest.mark.parametrize("settings", [{}, {"gradient_clipping": 1.0}], ids=str)
@pytest.mark.parametrize("microbatches", [1, 2])
def test_bytes_moved_and_held_are_those_of_the_plan(
    settings, microbatches, start, tmp_path
):
    settings = {**settings, "gradient_accumulation_steps": microbatches}
    engine = start(on_nvme(tmp_path / "nvme", **settings), batch=draw())
    for _ in range(2):
        nvme = engine.stores.nvme
        before = nvme.read_bytes, nvme.written_bytes
        metrics = engine.step(draw())
        assert set(metrics) == KEYS
        plan = engine.last_step.plan
        for name, link in LINKS.items():
            assert metrics[name] == plan.link_bytes(link)
        assert nvme.read_bytes - before[0] == metrics["nvme_read_bytes"]
        assert nvme.written_bytes - before[1] == metrics["nvme_write_bytes"]
        for tier in Tier:
            peak = metrics[f"{tier}_bytes"]
            assert 0 < peak <= plan.peak_bytes[tier]
            assert plan.peak_bytes[tier] <= plan.capacity_bytes[tier]
    # With clipping, the first step has nothing to write yet.
    assert plan is engine.plan
    assert all(metrics[name] for name in LINKS)
    engine.flush()
    used = {t: engine.stores[t].ledger.used_bytes for t in Tier}
    assert used == engine.plan.home_bytes


@pytest.mark.parametrize("settings", [{}, {"gradient_clipping": 1.0}], ids=str)
def test_measured_instructions_keep_the_order_of_the_plan(settings, start, tmp_path):
    settings = {**settings, "gradient_accumulation_steps": 2}
    engine = start(on_nvme(tmp_path / "nvme", **settings), batch=draw())
    assert engine.last_step.timeline is None
    for _ in range(3):
        metrics = engine.step(draw())
        timeline = engine.last_step.timeline
        ended: dict[Link, float] = dict.fromkeys(Link, 0.0)
        spans = zip(timeline.start, timeline.end, strict=True)
        pairs = zip(engine.last_step.plan.instructions, spans, strict=True)
        for instruction, (begin, end) in pairs:
            assert ended[instruction.link] <= begin <= end
            assert all(timeline.end[i] <= begin for i in instruction.after)
            ended[instruction.link] = end
        assert timeline.seconds <= metrics["step_seconds"]


def test_a_fused_step_is_measured_as_one_instruction(start):
    engine = start(FUSED, batch=draw())
    metrics = engine.step(draw())
    timeline = engine.last_step.timeline
    assert len(timeline.start) == len(engine.plan.instructions) == 1
    assert 0 <= timeline.start[0] < timeline.end[0] <= metrics["step_seconds"]


def test_the_learning_rate_is_reported_if_the_optimizer_keeps_it(start):
    schedule = optax.linear_schedule(0.1, 0.0, 10)
    tx = optax.inject_hyperparams(optax.sgd)(learning_rate=schedule)
    plain = tx.init(init())
    engine = start(FUSED, tx=tx)
    for _ in range(3):
        _, plain = tx.update(init(), plain)
        expected = float(plain.hyperparams["learning_rate"])
        assert engine.step(draw())["learning_rate"] == pytest.approx(expected)


def test_the_loss_scale_is_reported_under_fp16_only(start):
    engine = start(FUSED | {"fp16": {"enabled": True, "initial_scale_power": 4}})
    metrics = engine.step(draw())
    assert set(metrics) == KEYS | {"loss_scale"}
    assert metrics["loss_scale"] == 16


@both
@pytest.mark.parametrize("microbatches", [1, 2])
def test_aux_is_returned_with_a_dim_for_microbatches_if_there_are_several(
    config, microbatches, start
):
    def loss(params, batch):
        return loss_fn(params, batch), {"mean": batch["x"].mean(0), "n": 3}

    config = {**config, "gradient_accumulation_steps": microbatches}
    aux = start(config, loss=loss, has_aux=True).step(draw())["aux"]
    parts = np.split(draw()["x"], microbatches)
    means = [part.mean(0) for part in parts]
    assert_close(aux["mean"], means[0] if microbatches == 1 else np.stack(means))
    np.testing.assert_array_equal(aux["n"], 3 if microbatches == 1 else [3, 3])


def test_a_loss_with_aux_that_was_not_announced_is_refused(start):
    with pytest.raises(ValueError, match="has_aux=True"):
        start(loss=lambda p, b: (loss_fn(p, b), 1), batch=draw())


# Parameters.


@both
def test_parameters_before_the_first_step_are_the_initial_ones(config, start):
    ready = jax.jit(init)()
    for params in (ready, init):
        engine = start(config, params=params)
        before = engine.params()
        # A function is compiled leaf by leaf, which rounds in other places.
        assert_close(before, ready)
        if params is ready:
            chex.assert_trees_all_equal(before, ready, strict=True)
        engine.prepare(draw())
        chex.assert_trees_all_equal(engine.params(), before, strict=True)


def test_a_pytree_and_a_function_that_returns_it_train_alike(start):
    ready = start(STREAMED).params()
    engines = [start(STREAMED, params=params) for params in (init, ready)]
    losses = [[e.step(draw(i))["loss"] for i in range(3)] for e in engines]
    assert losses[0] == losses[1]
    chex.assert_trees_all_equal(*(e.params() for e in engines), strict=True)
    # The engine trains arrays of its own.
    chex.assert_trees_all_equal(ready, start(STREAMED).params(), strict=True)


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


@pytest.mark.sampled(1)
@both
def test_leaves_that_are_no_floats_stay_what_they_are(config, start):
    def params():
        return {**init(), "key": jax.random.key(5), "order": jnp.arange(DIM)[::-1]}

    def loss(p, batch):
        noise = jax.random.normal(p["key"], (DIM,))
        return loss_fn(p, {**batch, "x": batch["x"][:, p["order"]] + noise[None]})

    engine = start(config, loss=loss, params=params)
    losses = [engine.step(draw(i))["loss"] for i in range(3)]
    found = engine.params()
    assert found["key"] == jax.random.key(5)
    np.testing.assert_array_equal(found["order"], np.arange(DIM)[::-1])
    assert found["order"].dtype == np.int32

    def on_floats(floats, batch):
        return loss({**params(), **floats}, batch)

    expected, _ = train_in_jax(
        on_floats, init(), optax.adam(1e-2), [draw(i) for i in range(3)]
    )
    assert_close(losses, expected)


@pytest.mark.sampled(1)
@both
def test_an_unused_parameter_decays_as_in_optax(config, start):
    def params():
        return {**init(), "unused": jnp.ones((3, 2))}

    tx = optax.adamw(0.1, weight_decay=0.5)
    engine = start(config, params=params, tx=tx)
    batches = [draw(i) for i in range(3)]
    for batch in batches:
        engine.step(batch)
    _, expected = train_in_jax(loss_fn, params(), tx, batches)
    # Each step multiplies it by 1 - 0.1 * 0.5.
    assert_close(engine.params()["unused"], np.full((3, 2), 0.95**3))
    assert_close(engine.params()["unused"], expected["unused"])


# Evaluation, plans, model state.


@pytest.mark.sampled(1)
@pytest.mark.parametrize("config", [FUSED, STREAMED, "nvme"], ids=str)
def test_evaluation_gives_the_loss_of_plain_jax_and_changes_nothing(
    config, start, tmp_path
):
    config = on_nvme(tmp_path / "nvme") if config == "nvme" else config
    config = {**config, "gradient_accumulation_steps": 2}
    engine = start(config, loss=noisy_loss, rng=KEY)
    engine.step(draw())
    before, scalars = content(engine), engine.scalars()
    keys = [jax.random.fold_in(jax.random.fold_in(KEY, 1), m) for m in range(2)]
    halves = [
        jax.tree.map(lambda x, m=m: x[2 * m : 2 * m + 2], draw(1)) for m in (0, 1)
    ]
    losses = [
        noisy_loss(engine.params(), b, k) for b, k in zip(halves, keys, strict=True)
    ]
    found = engine.evaluate(draw(1))
    assert isinstance(found, float)
    assert_close(found, np.mean(losses))
    assert engine.evaluate(draw(1)) == found
    assert content(engine) == before
    assert engine.scalars() == scalars


def test_a_plan_before_a_batch_is_a_clear_error(start, tmp_path):
    engine = start()
    with pytest.raises(ValueError, match="Pass batch= to zinf.initialize"):
        str(engine.plan)
    with pytest.raises(ValueError, match="Pass batch= to zinf.initialize"):
        engine.save(tmp_path / "saved")
    assert not engine.is_placed


@pytest.mark.sampled(2)
@both
@pytest.mark.parametrize("microbatches", [1, 2])
def test_model_state_is_carried_as_in_a_loop_by_hand(config, microbatches, start):
    def loss(params, state, batch):
        mean = 0.9 * state["mean"] + 0.1 * batch["x"].mean(0)
        x = batch["x"] - mean[None]
        new = {"mean": mean, "count": state["count"] + 1}
        return loss_fn(params, {**batch, "x": x}), new

    state = {"mean": jnp.zeros(DIM), "count": jnp.int32(0)}
    config = {**config, "gradient_accumulation_steps": microbatches}
    engine = start(config, loss=loss, model_state=state)
    chex.assert_trees_all_equal(engine.model_state(), state, strict=True)
    mean = np.zeros(DIM)
    for i in range(3):
        engine.step(draw(i))
        # The mean over microbatches is that of the whole batch.
        mean = 0.9 * mean + 0.1 * draw(i)["x"].mean(0)
        found = engine.model_state()
        assert_close(found["mean"], mean)
        assert found["count"] == i + 1
    engine.evaluate(draw())
    assert engine.model_state()["count"] == 3
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


def test_a_state_of_another_model_is_refused_and_changes_nothing(start, tmp_path):
    engine = start(FUSED, batch=draw())
    engine.save(tmp_path / "saved")
    other = start(FUSED, tx=optax.sgd(0.1), batch=draw())
    before = content(other)
    with pytest.raises(ValueError, match="state0"):
        other.restore(tmp_path / "saved")
    keyed = start(FUSED, loss=noisy_loss, rng=KEY, batch=draw())
    with pytest.raises(ValueError, match="random key"):
        keyed.restore(tmp_path / "saved")
    assert content(other) == before
    for refused in (other, keyed):
        assert refused.step(draw())["step"] == 1


def test_a_closed_engine_leaves_its_folder_to_the_next(start, tmp_path):
    config = on_nvme(tmp_path / "nvme")
    losses = []
    for _ in range(2):
        engine = start(config, batch=draw())
        losses.append([engine.step(draw(i))["loss"] for i in range(2)])
        engine.close()
        engine.close()
    assert losses[0] == losses[1]


@pytest.mark.slow
def test_two_engines_do_not_share_a_folder(start, tmp_path):
    config = on_nvme(tmp_path / "nvme")
    engine = start(config, batch=draw())
    with pytest.raises(OSError, match="in use by another engine of this process"):
        start(config, batch=draw())
    assert engine.step(draw())["step"] == 1


def test_arrays_are_read_by_name_from_any_tier(start, tmp_path):
    engine = start(on_nvme(tmp_path / "nvme"), batch=draw())
    found = engine.residents.read(ArrayId(Role.PARAM, "out"))
    np.testing.assert_array_equal(found, engine.params()["out"])
    rows = engine.residents.read(ArrayId(Role.PARAM, "out", (2, 5)))
    np.testing.assert_array_equal(rows, found[2:5])


@pytest.mark.parametrize("device", ["none", "cpu"])
def test_arrays_that_a_user_gives_stay_the_users(start, device):
    """Also those that a store could keep as they are: aligned, and nobody else's."""

    def own(leaf):
        array = aligned_empty(leaf.shape, leaf.dtype)
        array[...] = leaf
        return array

    given = jax.tree.map(own, jax.device_get(init()))
    before = jax.tree.map(np.copy, given)
    offload = {"device": device}
    stage = {"stage": 3, "offload_param": offload, "offload_optimizer": offload}
    engine = start(STREAMED | {"zero_optimization": stage}, params=given)
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
    with pytest.raises(StorageError, match="param/out"):
        start(STREAMED, batch=draw(0)).restore(tmp_path / "saved")
    lenient = start(STREAMED, batch=draw(0))
    lenient.restore(tmp_path / "saved", verify=False)
    before, after = engine.params()["out"], lenient.params()["out"]
    assert (before != after).sum() == 1
