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
from zinf.core.config import Config
from zinf.core.engine.initialize import make_planner
from zinf.core.plan import (
    InfeasibleError,
    Link,
    OffloadedStep,
    Shortage,
    offloaded_plan,
)
from zinf.core.plan.cost import Rates
from zinf.core.program import Tier
from zinf.core.sharding import axis_rule
from zinf.core.step import choice, fuse, offload, setup
from zinf.core.step.choice import faster, in_short, why_not_offloaded
from zinf.core.step.run.offloaded import Offloaded
from zinf.core.step.whole import sound, transfers
from zinf.core.topology import parse_topology

TX = optax.adamw(1e-2)
ROOM = dict.fromkeys(Tier, 1 << 40)
ON_HOST = {"zero_optimization": {"stage": 0, "offload_optimizer": {"device": "cpu"}}}


def init():
    return [{"w": jnp.eye(6) * 0.3}] * 4


def loss(params, batch):
    x = batch["x"]
    for layer in params:
        x = x + jnp.tanh(x @ layer["w"])
    return jnp.mean(jnp.square(x - batch["y"]))


def batch():
    return dict.fromkeys("xy", np.ones((4, 6), np.float32))


def test_what_asks_for_another_way_is_named(tmp_path):
    def why_not(config=None, *, processes=1, topology=None, mesh=None):
        mesh = mesh or zinf.make_mesh(jax.devices()[:1])
        rule = axis_rule(mesh, stage=3, min_bytes=0)
        machine = None if topology is None else parse_topology(topology)
        return why_not_offloaded(Config.load(config or {}), rule, processes, machine)

    def zero(key, device):
        return {"zero_optimization": {"stage": 3, key: {"device": device}}}

    allowed = {"memory": {"pinned": "arrays"}}, zero("offload_param", "cpu"), None
    assert [why_not(config) for config in allowed] == [None] * 3
    assert why_not(topology="v5p:1x1x1") is why_not(topology="h200:8") is None
    assert "memory.pinned is off" in why_not({"memory": {"pinned": "off"}})
    drive = {"memory": {"nvme": [str(tmp_path)]}}
    for key in ("offload_param", "offload_optimizer"):
        assert f"{key} asks for nvme" in why_not(zero(key, "nvme") | drive)
    for machines in (
        {"processes": 2},
        {"topology": "v5p:2x2x2"},
        {"topology": "h200:16"},
    ):
        assert "with 2 processes" in why_not(**machines)
    mesh = zinf.make_mesh(jax.devices()[:2], num_seq=2)
    assert "with mesh.seq = 2" in why_not(mesh=mesh)


def plan_of(moved, flops=0):
    links = dict.fromkeys(Link, 1.0)
    rates = Rates(links, flops_per_second=1.0, overhead_seconds=0.0)
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
    why = (
        "Offloaded, because an offloaded step is predicted to take 5 s, and a streamed "
        "one 10 s."
    )
    assert faster(fast, slow) == (True, why)
    assert faster(slow, fast)[0] is False
    plan = replace(fast, why=why)
    assert why in plan._repr_html_()
    assert fast.summary() == plan.summary().replace(f"{why}\n", "") != plan.summary()


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
    monkeypatch.setattr(setup.Setup, "computes_elsewhere", True)
    monkeypatch.setattr(offload, "check_sound", lambda device: None)


def planned(**config):
    with zinf.initialize(loss, init, TX, config) as engine:
        engine.prepare(batch())
        return engine.plan


def test_on_an_accelerator_what_fits_the_device_is_fused_and_says_so(elsewhere):
    plan = planned()
    assert plan.is_fused and "Fused, because" in plan.summary()


def test_on_the_cpu_nothing_is_chosen():
    plan = planned(**ON_HOST)
    assert not plan.is_one_program and plan.why == ""


def test_what_does_not_fit_is_streamed_and_the_plan_says_what_was_short(elsewhere):
    plan = planned(**ON_HOST, segment={"max_bytes": 100})
    assert not plan.is_one_program
    assert "not offloaded, because" in plan.why
    assert "does not read tiles" in plan.why


def test_a_host_without_room_for_the_state_is_found_before_compiling(
    elsewhere, monkeypatch, tmp_path
):
    monkeypatch.setattr(offload, "compile_offloaded", None)
    # Adam's moments and the parameters of 144 numbers: 1,728 bytes at rest.
    memory = {"host": 1700, "device": 1700, "nvme": [str(tmp_path)]}
    plan = planned(memory=memory)
    assert "not offloaded, because the state needs" in plan.why
    assert "whose budget is 1,700" in plan.why


def test_what_cannot_be_streamed_is_offloaded(elsewhere, monkeypatch):
    def refuse(*args):
        raise InfeasibleError({Tier.HOST: Shortage(1, 2, "a stage")}, ROOM)

    monkeypatch.setattr(choice, "stream", refuse)
    assert planned(**ON_HOST).why == (
        "Offloaded; not streamed, because a stage needs 2 bytes of the host, whose "
        "budget is 1."
    )


# What a compiler may say: its own failure, whose first line is enough, and the room
# that it lacks, in words that are known or not.
BROKEN = "INTERNAL: Expected instruction to have shape equal to f32[3]\nHLO\npages"
SAID = "its compiler fails with 'INTERNAL: Expected instruction to have shape equal to"


def broken(*args, **named):
    raise jax.errors.JaxRuntimeError(BROKEN)


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (BROKEN, SAID),
        ("RESOURCE_EXHAUSTED: so to say", "a way that is not known"),
    ],
)
def test_what_the_compiler_says_of_one_step_is_why_another_is_taken(
    error, why, elsewhere, monkeypatch
):
    def fail(*args, **named):
        raise jax.errors.JaxRuntimeError(error)

    monkeypatch.setattr(offload, "compile_offloaded", fail)
    plan = planned(**ON_HOST)
    assert not plan.is_one_program
    assert plan.why.startswith("Streamed; not offloaded, because ")
    assert why in plan.why and "pages" not in plan.why
    monkeypatch.setattr(fuse, "compile_fused", fail)
    found = planned().why
    assert found.startswith("Not fused, because ") and found.count(why) == 2


def test_a_compiler_without_room_is_a_reason_with_its_numbers(elsewhere, monkeypatch):
    monkeypatch.setattr(offload, "compile_offloaded", broken)
    short = SimpleNamespace(available_bytes=5, needed_bytes=7)
    monkeypatch.setattr(setup, "out_of_memory", lambda error: short)
    why = planned(**ON_HOST).why
    assert "needs 7 bytes of the device, whose budget is 5" in why


def test_on_the_cpu_a_fused_step_that_does_not_compile_is_streamed(monkeypatch):
    monkeypatch.setattr(fuse, "compile_fused", broken)
    plan = planned()
    assert not plan.is_one_program
    assert plan.why.startswith("Not fused, because " + SAID)
    with pytest.raises(jax.errors.JaxRuntimeError, match="pages"):
        planned(execution="fused")


def test_a_streamed_step_that_does_not_compile_leaves_the_offloaded_one(
    elsewhere, monkeypatch
):
    monkeypatch.setattr(choice, "stream", broken)
    assert planned(**ON_HOST).why.startswith(f"Offloaded; not streamed, because {SAID}")


def test_if_no_step_compiles_the_error_names_each(elsewhere, monkeypatch):
    monkeypatch.setattr(fuse, "compile_fused", broken)
    monkeypatch.setattr(offload, "compile_offloaded", broken)
    monkeypatch.setattr(choice, "stream", broken)
    words = [f"Not {form}, because {SAID}" for form in ("fused", "offloaded")]
    with pytest.raises(NotImplementedError, match=".*".join(words)) as failed:
        planned()
    assert f"Not streamed, because {SAID}" in str(failed.value)
    # With nothing else to try, the compiler's own error says more.
    with pytest.raises(jax.errors.JaxRuntimeError, match="pages"):
        planned(execution="streamed")


@pytest.mark.slow
def test_a_device_that_slices_host_arrays_wrongly_is_not_offloaded_to(monkeypatch):
    """As XLA has done for GPUs: the rows of a reversed loop were those of others."""
    monkeypatch.setattr(setup.Setup, "computes_elsewhere", True)
    assert sound.deviation(jax.devices()[0]) < 1e-5
    right = transfers.row
    monkeypatch.setattr(
        transfers, "row", lambda stack, n: right(stack, stack.shape[0] - 1 - n)
    )
    sound.deviation.cache_clear()
    message = r"gradients .* differ from those of plain jax by [1-9]\d+\.\d%"
    plan = planned(**ON_HOST)
    assert not plan.is_one_program
    assert re.search(message, plan.why)
    with pytest.raises(NotImplementedError, match=message):
        planned(execution="offloaded")
    sound.deviation.cache_clear()


@pytest.mark.tpu_compiler
def test_a_chip_without_room_for_the_state_is_given_the_faster_of_the_two():
    chip = parse_topology("v5e:1x1")
    config = {"execution": "auto", "memory": {"device": "8MiB", "host": "1GiB"}}

    def scanned(params, batch):
        layer = lambda x, w: (x + jnp.tanh(x @ w), None)  # noqa: E731
        return jnp.mean(jax.lax.scan(layer, batch["x"], params["w"])[0])

    wide = lambda: {"w": jnp.zeros((16, 256, 256))}  # noqa: E731
    where = {"mesh": zinf.make_mesh(chip.devices()), "topology": chip}
    planner = make_planner(scanned, wide, TX, config, **where)
    made = planner.plan_batch({"x": jax.ShapeDtypeStruct((8, 256), np.float32)})
    # Both fit: the plan has the predicted seconds of each.
    assert re.search(r"an offloaded step .* s, and a streamed one .* s", made.plan.why)
    assert isinstance(made, Offloaded) == made.plan.why.startswith("Offloaded")
