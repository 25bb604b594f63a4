"""`execution: auto` between the fused, the offloaded and the streamed step."""

import re
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zinf
from zinf.config import Config
from zinf.initialize import make_planner
from zinf.plan import InfeasibleError, Link, OffloadedStep, Shortage, offloaded_plan
from zinf.plan.cost import Rates
from zinf.prepare import offloaded, sound
from zinf.prepare import planner as planning
from zinf.prepare.choice import faster, in_short, why_not_offloaded
from zinf.prepare.planner import Offloaded
from zinf.program import Tier
from zinf.sharding import axis_rule
from zinf.topology import parse_topology

TX = optax.adamw(1e-2)
ROOM = dict.fromkeys(Tier, 1 << 40)


def init():
    keys = jax.random.split(jax.random.key(0), 4)
    return [{"w": jax.random.normal(k, (6, 6)) * 0.3} for k in keys]


def loss(params, batch):
    x = batch["x"]
    for layer in params:
        x = x + jnp.tanh(x @ layer["w"])
    return jnp.mean(jnp.square(x - batch["y"]))


def batch(seed=0, count=4):
    draw = np.random.default_rng(seed).standard_normal
    return {"x": draw((count, 6), np.float32), "y": draw((count, 6), np.float32)}


def why_not(config=None, *, processes=1, topology=None, mesh=None):
    mesh = mesh or zinf.make_mesh(jax.devices()[:1])
    config = Config.load(config or {})
    rule = axis_rule(mesh, stage=3, min_bytes=0)
    machine = None if topology is None else parse_topology(topology)
    return why_not_offloaded(config, rule, processes, machine)


def nvme(tmp_path, key):
    memory = {"nvme": [str(tmp_path)]}
    return {"zero_optimization": {key: {"device": "nvme"}}, "memory": memory}


def test_what_asks_for_another_way_is_named(tmp_path):
    assert why_not() is None
    assert why_not({"memory": {"pinned": "arrays"}}) is None
    assert why_not(topology="v5p:1x1x1") is None
    zero = {"offload_param": {"device": "cpu"}}
    assert why_not({"zero_optimization": {"stage": 3, **zero}}) is None
    assert "memory.pinned is off" in why_not({"memory": {"pinned": "off"}})
    for key in ("offload_param", "offload_optimizer"):
        config = nvme(tmp_path, key)
        config["zero_optimization"]["stage"] = 3
        assert f"{key} asks for nvme" in why_not(config)
    assert "with 2 processes" in why_not(processes=2)
    assert "with 2 processes" in why_not(topology="v5p:2x2x2")
    assert why_not(topology="h200:8") is None
    assert "with 2 processes" in why_not(topology="h200:16")
    mesh = zinf.make_mesh(jax.devices()[:2], num_seq=2)
    assert "with mesh.seq = 2" in why_not(mesh=mesh)


def plan_of(moved, flops=0):
    rates = Rates(
        link_bytes_per_second=dict.fromkeys(Link, 1.0),
        flops_per_second=1.0,
        overhead_seconds=0.0,
    )
    peaks = {Tier.DEVICE: 1, Tier.HOST: 1}
    return offloaded_plan({}, moved, 1, peaks, ROOM, flops, rates)


def test_bytes_of_late_updates_are_behind_nothing():
    """In the passes 10 bytes go to the device and 4 back, beside 7 flops."""
    assert plan_of(OffloadedStep(10, 4), flops=7).timeline.seconds == 10
    assert plan_of(OffloadedStep(10, 4), flops=12).timeline.seconds == 12
    # Updates move 5 and 3 more, both at once.
    assert plan_of(OffloadedStep(15, 7, 5, 3), flops=12).timeline.seconds == 17


def test_the_faster_step_by_the_same_rates_is_taken_and_the_plan_says_so():
    slow, fast = plan_of(OffloadedStep(10, 4)), plan_of(OffloadedStep(5, 4))
    assert faster(fast, slow) == (
        True,
        "Offloaded, because an offloaded step is predicted to take 5 s, and a streamed "
        "one 10 s.",
    )
    is_faster, why = faster(slow, fast)
    assert not is_faster and why.startswith("Streamed, because")
    plan = replace(fast, why=why)
    assert why in plan.summary() and why in plan._repr_html_()
    assert fast.summary() == plan.summary().replace(f"{why}\n", "")


def test_a_refusal_is_said_with_its_numbers():
    short = {Tier.DEVICE: Shortage(10, 1234, "the offloaded step")}
    found = in_short(InfeasibleError(short, ROOM))
    assert found == (
        "the offloaded step needs 1,234 bytes of the device, whose budget is 10"
    )
    assert in_short(NotImplementedError("It reads tiles.")) == "It reads tiles"


@pytest.fixture
def elsewhere(monkeypatch):
    """The CPU taken for an accelerator: auto has something to choose."""
    monkeypatch.setattr(planning, "computes_elsewhere", lambda mesh: True)
    monkeypatch.setattr(planning, "check_sound", lambda device: None)


def start(**config):
    return zinf.initialize(loss, init, TX, config)


def test_on_an_accelerator_what_fits_the_device_is_fused_and_says_so(elsewhere):
    with start() as engine:
        engine.prepare(batch())
        assert engine.plan.is_fused and "Fused, because" in engine.plan.summary()


def test_on_the_cpu_nothing_is_chosen():
    with start() as engine:
        engine.prepare(batch())
        assert engine.plan.is_fused and engine.plan.why == ""
    with start(zero_optimization={"offload_optimizer": {"device": "cpu"}}) as engine:
        engine.prepare(batch())
        assert not engine.plan.is_one_program and engine.plan.why == ""


@pytest.mark.slow
def test_a_faster_offloaded_step_is_taken_and_later_shapes_and_saves_follow(
    elsewhere, tmp_path, monkeypatch
):
    monkeypatch.setattr(planning, "faster", lambda *plans: (True, "Offloaded here."))
    zero = {"stage": 0, "offload_optimizer": {"device": "cpu"}}
    losses = {}
    with start(zero_optimization=zero) as engine:
        losses["auto"] = [
            engine.step(x)["loss"] for x in (batch(), batch(1, 2), batch(2))
        ]
        assert engine.plan.is_offloaded and engine.plan.why == "Offloaded here."
        shapes = [r.offloaded.plan for r in engine._runners.values()]
        assert len(shapes) == 2 and all(plan.is_offloaded for plan in shapes)
    with start(execution="fused") as engine:
        losses["fused"] = [
            engine.step(x)["loss"] for x in (batch(), batch(1, 2), batch(2))
        ]
    np.testing.assert_allclose(losses["auto"], losses["fused"], rtol=1e-5)


def test_what_does_not_fit_is_streamed_and_the_plan_says_what_was_short(elsewhere):
    # Adam's moments and the parameters of 144 numbers: 1,728 bytes at rest.
    zero = {"stage": 0, "offload_optimizer": {"device": "cpu"}}
    with start(zero_optimization=zero, segment={"max_bytes": 100}) as engine:
        engine.prepare(batch())
        assert not engine.plan.is_one_program
        assert "not offloaded, because" in engine.plan.why
        assert "does not read tiles" in engine.plan.why


def test_a_host_without_room_for_the_state_is_found_before_compiling(
    elsewhere, monkeypatch, tmp_path
):
    monkeypatch.setattr(planning, "compile_offloaded", None)
    # Adam's moments and the parameters of 144 numbers: 1,728 bytes at rest.
    memory = {"host": 1700, "device": 1700, "nvme": [str(tmp_path)]}
    with start(memory=memory) as engine:
        engine.prepare(batch())
        assert "not offloaded, because the state needs" in engine.plan.why
        assert "whose budget is 1,700" in engine.plan.why


def test_what_cannot_be_streamed_is_offloaded(elsewhere, monkeypatch):
    error = InfeasibleError({Tier.HOST: Shortage(1, 2, "a stage")}, ROOM)

    def refuse(*args):
        raise error

    monkeypatch.setattr(planning.Planner, "stream", refuse)
    zero = {"stage": 0, "offload_optimizer": {"device": "cpu"}}
    with start(zero_optimization=zero) as engine:
        engine.prepare(batch())
        assert engine.plan.why == (
            "Offloaded; not streamed, because a stage needs 2 bytes of the host, whose "
            "budget is 1."
        )


@pytest.mark.parametrize("is_short_of_memory", [True, False])
def test_an_error_of_the_compiler_is_a_reason_only_if_memory_ran_out(
    elsewhere, monkeypatch, is_short_of_memory
):
    found = SimpleNamespace(available_bytes=5, needed_bytes=7)
    monkeypatch.setattr(
        planning, "out_of_memory", lambda error: found if is_short_of_memory else None
    )

    def fail(*args, **named):
        raise jax.errors.JaxRuntimeError("INTERNAL: no")

    monkeypatch.setattr(planning, "compile_offloaded", fail)
    zero = {"stage": 0, "offload_optimizer": {"device": "cpu"}}
    with start(zero_optimization=zero) as engine:
        if not is_short_of_memory:
            with pytest.raises(jax.errors.JaxRuntimeError, match="no"):
                engine.prepare(batch())
            return
        engine.prepare(batch())
        assert "needs 7 bytes of the device, whose budget is 5" in engine.plan.why


@pytest.mark.slow
def test_a_device_that_slices_host_arrays_wrongly_is_not_offloaded_to(monkeypatch):
    """As XLA has done for GPUs: the rows of a reversed loop were those of others."""
    monkeypatch.setattr(planning, "computes_elsewhere", lambda mesh: True)
    assert sound.deviation(jax.devices()[0]) < 1e-5
    right = offloaded.row
    monkeypatch.setattr(
        offloaded, "row", lambda stack, n: right(stack, stack.shape[0] - 1 - n)
    )
    sound.deviation.cache_clear()
    message = r"gradients .* differ from those of plain jax by [1-9]\d+\.\d%"
    zero = {"stage": 0, "offload_optimizer": {"device": "cpu"}}
    with start(zero_optimization=zero) as engine:
        engine.prepare(batch())
        assert not engine.plan.is_one_program
        assert re.search(message, engine.plan.why)
    with pytest.raises(NotImplementedError, match=message):
        start(execution="offloaded").prepare(batch())
    sound.deviation.cache_clear()


@pytest.mark.tpu_compiler
@pytest.mark.slow
def test_a_chip_without_room_for_the_state_is_given_the_faster_of_the_two():
    chip = parse_topology("v5e:1x1")
    config = {"execution": "auto", "memory": {"device": "8MiB", "host": "1GiB"}}

    def wide():
        return {"w": jnp.zeros((16, 256, 256))}

    def scanned(params, batch):
        def layer(x, w):
            return x + jnp.tanh(x @ w), None

        return jnp.mean(jax.lax.scan(layer, batch["x"], params["w"])[0])

    planner = make_planner(
        scanned,
        wide,
        TX,
        config,
        mesh=zinf.make_mesh(chip.devices()),
        topology=chip,
    )
    made = planner.plan_batch({"x": jax.ShapeDtypeStruct((8, 256), np.float32)})
    # Both fit: the plan has the predicted seconds of each.
    assert re.search(r"an offloaded step .* s, and a streamed one .* s", made.plan.why)
    assert isinstance(made, Offloaded) == made.plan.why.startswith("Offloaded")
