"""Steps in two halves: `forward_backward` for several batches, then one update."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zinf
from tests.robustness.small import DIM, draw, init, loss_fn, on_nvme
from tests.tiers import streamed
from zinf.core.optim.decision import NonFiniteError
from zinf.core.program import Tier
from zinf.core.step.run import streamed as streamed_step
from zinf.models import GPT, GPTConfig, next_token_loss
from zinf.nnx import initialize as of_module

ADAM = optax.adam(1e-2)
VERBS = {"forward_backward": True}
PATH = "layers/1/w"


def config_of(name: str, folder: Any) -> dict[str, Any]:
    clipped = {"gradient_clipping": 0.01}
    return {
        "fused": {"execution": "fused"} | clipped,
        "fused, two microbatches": {
            "execution": "fused",
            "gradient_accumulation_steps": 2,
        },
        "host, clipped": streamed("cpu", **clipped),
        "bf16, two microbatches": streamed(
            "cpu", bf16={"enabled": True}, gradient_accumulation_steps=2
        ),
        "nvme, clipped": on_nvme(folder) | clipped,
        "nvme": on_nvme(folder),
        "mesh": streamed("cpu", mesh={"fsdp": 2}),
    }[name]


def other_loss(params: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
    """The mean of absolute values, and those of each row (B,)."""
    rows_B = jnp.abs(batch["x"] @ params["out"]).mean(-1)
    return rows_B.mean(), rows_B


NAMES = (
    "fused",
    "fused, two microbatches",
    "host, clipped",
    "bf16, two microbatches",
    "nvme, clipped",
    "mesh",
)


@pytest.mark.parametrize("name", NAMES)
def test_one_call_and_an_update_are_a_step_to_the_bit(name, tmp_path):
    config, found = config_of(name, tmp_path), []
    with zinf.initialize(loss_fn, init, ADAM, config) as engine:
        losses = [engine.step(draw(i))["loss"] for i in range(3)]
        found.append((losses, engine.params()))
    with zinf.initialize(loss_fn, init, ADAM, config | VERBS) as engine:
        losses = []
        for i in range(2):
            losses.append(engine.forward_backward(draw(i))["loss"])
            metrics = engine.optim_step()
            assert (metrics["step"], metrics["summed"]) == (i + 1, 1)
        step = engine.step(draw(2))  # which is both
        assert step["step"] == engine.num_steps == 3
        found.append(([*losses, step["loss"]], engine.params()))
    assert found[0][0] == found[1][0]
    jax.tree.map(np.testing.assert_array_equal, found[0][1], found[1][1])


@pytest.mark.parametrize("name", ["fused", "nvme"])
def test_gradients_of_several_batches_and_losses_add_up(name, tmp_path):
    batches = draw(0), draw(1, size=6), draw(2)
    with zinf.initialize(
        loss_fn, init, ADAM, config_of(name, tmp_path) | VERBS
    ) as engine:
        before = engine.forward_backward(batches[0])
        assert before["summed"] == 1
        params = engine.params()
        engine.forward_backward(batches[1])
        metrics = engine.forward_backward(batches[2], other_loss, has_aux=True)
        assert metrics["summed"] == 3
        jax.tree.map(np.testing.assert_array_equal, params, engine.params())
        # What takes no step may run in between.
        engine.evaluate(draw(3))
        wanted = jax.tree.map(
            lambda *xs: sum(xs),
            jax.grad(loss_fn)(params, batches[0]),
            jax.grad(loss_fn)(params, batches[1]),
            jax.grad(other_loss, has_aux=True)(params, batches[2])[0],
        )
        loss, rows_B = other_loss(params, batches[2])
        np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-6)
        np.testing.assert_allclose(metrics["aux"], rows_B, rtol=1e-6)
        total = engine.get(PATH, "gradient")
        np.testing.assert_allclose(total, wanted["layers"][1]["w"], atol=1e-6)
        norm = float(optax.tree.norm(wanted))
        np.testing.assert_allclose(engine.optim_step()["grad_norm"], norm, rtol=1e-6)
        # The next sum begins with its first batch.
        engine.forward_backward(batches[0])
        again = jax.grad(loss_fn)(engine.params(), batches[0])
        total = engine.get(PATH, "gradient")
        np.testing.assert_allclose(total, again["layers"][1]["w"], atol=1e-6)


def test_memory_is_pinned_for_passes_and_for_the_update(tmp_path, monkeypatch):
    """On nvme, only the update has masters and moments on the host."""
    needed = []
    open_pages = streamed_step.open_pages

    def opened(asked, devices, needed_bytes, gather):
        needed.append(needed_bytes)
        return open_pages(asked, devices, needed_bytes, gather)

    monkeypatch.setattr(streamed_step, "open_pages", opened)
    config = config_of("nvme", tmp_path) | VERBS
    with zinf.initialize(loss_fn, init, ADAM, config, batch=draw()) as engine:
        engine.forward_backward(draw(0))
        engine.optim_step()
        plans = engine.plan, engine.last_step.plan
        of_pass, of_update = (plan.peak_bytes[Tier.HOST] for plan in plans)
    assert needed == [of_update] and of_pass < of_update


def test_a_batch_whose_runner_cannot_begin_leaves_the_engine_usable(
    tmp_path, monkeypatch
):
    entered, enter = [], streamed_step.StreamedRunner.enter

    def failing(self):
        entered.append(self)
        enter(self)
        if len(entered) == 1:
            raise MemoryError

    config, losses = config_of("nvme", tmp_path), []
    with zinf.initialize(loss_fn, init, ADAM, config) as engine:
        losses.append(engine.step(draw(0))["loss"])
        with monkeypatch.context() as patch:
            patch.setattr(streamed_step.StreamedRunner, "enter", failing)
            with pytest.raises(MemoryError):
                engine.step(draw(1, size=6))
        assert len(entered) == 2  # The runner of the first batch is back.
        losses.append(engine.step(draw(2))["loss"])
        engine.step(draw(1, size=6))
    assert np.isfinite(losses).all()


@pytest.mark.parametrize("name", ["fused", "nvme"])
def test_sums_are_saved_and_restored_between_the_verbs(name, tmp_path):
    config = config_of(name, tmp_path / "a") | VERBS
    given = loss_fn, init, ADAM
    with zinf.initialize(*given, config, rng=None) as engine:
        engine.step(draw(0))
        engine.forward_backward(draw(1))
        engine.save_state(tmp_path / "saved")
        engine.forward_backward(draw(2))
        engine.optim_step()
        wanted = engine.params()
    config = config_of(name, tmp_path / "b") | VERBS
    with zinf.initialize(*given, config, batch=draw(0)) as engine:
        engine.restore(tmp_path / "saved")
        assert engine.forward_backward(draw(2))["summed"] == 2
        engine.optim_step()
        jax.tree.map(np.testing.assert_array_equal, wanted, engine.params())
    config = config_of(name, tmp_path / "c")
    with zinf.initialize(*given, config, batch=draw(0)) as engine:
        with pytest.raises(ValueError, match="restore them with forward_backward: tr"):
            engine.restore(tmp_path / "saved")


@pytest.mark.parametrize("name", ["fused", "nvme"])
def test_runs_with_and_without_the_verbs_restore_each_other(name, tmp_path):
    """Nothing is lost if no gradient waits: sums are empty, whatever they hold."""
    given, kinds = (loss_fn, init, ADAM), ({}, VERBS, {}, VERBS)
    found = []
    for number, more in enumerate(kinds):
        config = config_of(name, tmp_path / str(number)) | more
        with zinf.initialize(*given, config, batch=draw(0)) as engine:
            if number:
                engine.restore(tmp_path / f"saved {number - 1}")
            engine.step(draw(number))
            engine.save(tmp_path / f"saved {number}")
            found.append(engine.params())
    with zinf.initialize(*given, config_of(name, tmp_path / "whole")) as engine:
        for number, params in enumerate(found):
            engine.step(draw(number))
            jax.tree.map(np.testing.assert_array_equal, engine.params(), params)


@pytest.mark.parametrize("name", ["fused", "nvme"])
def test_a_sum_that_is_not_finite_updates_nothing_and_is_dropped(name, tmp_path):
    def infinite(params, batch):
        # Its value is 0 and its derivative infinite.
        return jnp.sqrt(jnp.sum(params["out"] * 0.0)) + 0.0 * loss_fn(params, batch)

    config = config_of(name, tmp_path) | VERBS
    with zinf.initialize(loss_fn, init, ADAM, config, batch=draw()) as engine:
        before = engine.params()
        engine.forward_backward(draw(0))
        with pytest.raises(NonFiniteError):
            engine.forward_backward(draw(1), infinite)
        jax.tree.map(np.testing.assert_array_equal, before, engine.params())
        engine.forward_backward(draw(0))
        assert np.isfinite(engine.optim_step()["grad_norm"])
        # Finite gradients may have a sum that is not.
        huge = np.full((DIM, DIM), np.inf, np.float32)
        engine.forward_backward(draw(0))
        engine.residents.write(engine.planner.problem.params[PATH].sum, huge)
        after = engine.params()
        with pytest.raises(NonFiniteError, match="sums of gradients are dropped"):
            engine.optim_step()
        jax.tree.map(np.testing.assert_array_equal, after, engine.params())
        assert np.isfinite(engine.step(draw(0))["grad_norm"])


def test_the_loss_of_a_module_may_be_another_one():
    shape = GPTConfig(num_layers=2, num_heads=2, embed_dim=16, max_length=8)
    batch = {"tokens": np.arange(36, dtype=np.int32).reshape(4, 9)}

    def doubled(model, batch):
        return 2 * next_token_loss(model, batch)

    def create():
        from flax import nnx

        return GPT(shape, rngs=nnx.Rngs(0))

    with of_module(next_token_loss, create, ADAM, VERBS) as engine:
        once = engine.forward_backward(batch)
        twice = engine.forward_backward(batch, doubled)
        np.testing.assert_allclose(twice["loss"], 2 * once["loss"], rtol=1e-6)
        norm = engine.optim_step()["grad_norm"]
        np.testing.assert_allclose(norm, 3 * once["grad_norm"], rtol=1e-5)


REFUSED = {
    "needs sums of gradients.*forward_backward: true": (ADAM, {}, "forward_backward"),
    "No gradient was added since the last update": (ADAM, VERBS, "optim_step"),
    "sums gradients.*fp16 or skip_nonfinite": (ADAM, VERBS | {"skip_nonfinite": 3}, ""),
    "reads the value of the loss": (optax.contrib.reduce_on_plateau(), VERBS, ""),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_be_summed_is_refused_by_name(message):
    tx, config, call = REFUSED[message]
    arguments = [draw()] if call == "forward_backward" else []
    with pytest.raises((ValueError, NotImplementedError), match=message):
        with zinf.initialize(loss_fn, init, tx, config) as engine:
            getattr(engine, call)(*arguments)
