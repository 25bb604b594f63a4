"""What a user may train, and how, gives on a mesh what it gives on one device."""

from typing import Any

import chex
import jax
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh

import zinf
from tests.equivalence.meshes import AWKWARD, batches, init, loss, setting, train
from tests.equivalence.model_state import NORMED
from tests.equivalence.programs import PROGRAMS
from tests.equivalence.test_programs import KEY
from tests.equivalence.training import (
    BOUND,
    ON_DEVICE,
    OPTIMIZERS,
    Run,
    Setting,
    assert_bit_equal,
    mesh_of,
    run_of,
    streamed_config,
)
from tests.equivalence.training import train as train_model
from zinf.core.plan import Link, Transfer
from zinf.core.program import Tier
from zinf.core.segment import named_leaves

slow = pytest.mark.slow
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 8, "hysteresis": 1}}
OVERFLOWS = 2


def start(mesh: Mesh | None, tier: str = "host", **rest: Any) -> zinf.Engine:
    """An engine of the network with awkward leaves."""
    config = setting("8", 3, tier).config(AWKWARD, rest.pop("folder", ""))
    zero = config["zero_optimization"] | rest.pop("zero_optimization", {})
    tx = rest.pop("tx", OPTIMIZERS["adam"])
    config |= {"zero_optimization": zero} | rest
    return zinf.initialize(loss, init, tx, config, mesh=mesh)


def run(engine: zinf.Engine, given: list[Any] | None = None) -> Run:
    with engine:
        metrics = [engine.step(batch) for batch in given or batches()]
        return run_of(metrics, engine.params())


# Of everything a loss may contain, what has to do with where arrays lie.
@pytest.mark.parametrize(
    "name",
    [
        "aux_outputs_of_all_kinds",
        pytest.param("batch_leaves_that_are_scalars_or_unread", marks=slow),
        pytest.param("frozen_leaves_of_several_kinds", marks=slow),
        pytest.param("keys_scanned_along_with_layers", marks=slow),
        pytest.param("stacks_of_stacks_numbers_and_integers", marks=slow),
        pytest.param("tied_embeddings", marks=slow),
    ],
)
def test_a_program_is_that_of_one_device(name):
    (program,) = (p for p in PROGRAMS if p.name == name)
    config = streamed_config(ON_DEVICE, "") | {"persistence_threshold": 1}
    runs = []
    for count in (1, 2):
        engine = zinf.initialize(
            program.loss,
            program.init,
            OPTIMIZERS["adam"],
            config | program.config,
            has_aux=program.has_aux,
            rng=KEY if program.uses_key else None,
            mesh=zinf.make_mesh(jax.devices()[:count]),
        )
        with engine:
            metrics = [engine.step(program.batch) for _ in range(2)]
            losses = [*(m["loss"] for m in metrics), engine.evaluate(program.batch)]
            params = named_leaves(engine.params())
        runs.append((losses, params, metrics[0].get("aux")))
    expected, found = runs
    np.testing.assert_allclose(found[0], expected[0], rtol=BOUND)
    chex.assert_trees_all_close(found[1], expected[1], rtol=1e-7, atol=1e-5)
    chex.assert_trees_all_close(found[2], expected[2], rtol=BOUND, atol=BOUND)


@slow
@pytest.mark.parametrize(
    "tx",
    [
        OPTIMIZERS["adafactor"],
        OPTIMIZERS["muon"],
        optax.chain(optax.add_noise(0.1, 0.5, jax.random.key(1)), optax.sgd(0.1)),
    ],
    ids=["adafactor", "muon", "noise"],
)
def test_optimizers_of_whole_leaves_see_no_padding(tx):
    """A norm, a moment or noise of a padded leaf would be another."""
    found, expected = (run(start(mesh_of(name), tx=tx)) for name in ("4", "1"))
    np.testing.assert_allclose(found.losses, expected.losses, rtol=BOUND)


@slow
def test_an_overflow_of_the_last_device_alone_is_skipped_on_every_mesh():
    given = batches(3)
    given[OVERFLOWS - 1]["y"][-1] *= 1e5
    cases = [("1", "device"), ("2x4", "host"), ("8", "fused")]
    runs = [run(start(mesh_of(m), tier, **FP16), given) for m, tier in cases]
    for found in runs:
        assert found.skipped == (False, True, False)
        # Float16 keeps 11 bits of every value.
        np.testing.assert_allclose(found.losses, runs[0].losses, rtol=2.0**-10)


@slow
def test_model_state_is_that_of_one_device():
    expected, found = (
        train_model(NORMED, Setting(name="accumulation", mesh=mesh))
        for mesh in ("1", "2")
    )
    np.testing.assert_allclose(found.losses, expected.losses, rtol=BOUND)
    for one, other in zip(found.state["layers"], expected.state["layers"], strict=True):
        chex.assert_trees_all_close(one, other, rtol=BOUND, atol=1e-6)
    keys = (jax.random.key_data(r.state["key"]) for r in (found, expected))
    np.testing.assert_array_equal(*keys)


@slow
@pytest.mark.parametrize("size", ["zero_hpz_partition_size", "mics_shard_size"])
def test_groups_of_devices_train_as_one_device(size):
    expected = train("1", 0, "device")
    runs = []
    for tier in ("device", "optimizer on host"):
        engine = start(None, tier, zero_optimization={size: 2})
        assert engine.planner.rule.mesh.shape["replica"] == 4
        runs.append(run(engine))
    np.testing.assert_allclose(runs[0].losses, expected.losses, rtol=BOUND)
    assert_bit_equal(runs[1], runs[0])


@slow
@pytest.mark.parametrize(
    ("names", "shape"), [(("fsdp", "replica"), (2, 4)), (("replica",), (2,))]
)
def test_a_mesh_may_have_some_axes_in_any_order(names, shape):
    devices = np.array(jax.devices()[: np.prod(shape)]).reshape(shape)
    own = Mesh(devices, names, axis_types=(AxisType.Auto,) * len(names))
    found = run(start(own, zero_optimization={"stage": 2}))
    expected = train("1", 0, "device").losses
    np.testing.assert_allclose(found.losses, expected, rtol=BOUND)


@slow
def test_batches_that_do_not_divide_are_refused_and_other_shapes_take_turns():
    def cut(batch: Any, size: int) -> Any:
        return jax.tree.map(lambda x: x[:size], batch)

    with start(mesh_of("8")) as engine:
        with pytest.raises(ValueError, match="10 examples .* 8 data-parallel devices"):
            engine.step(cut(batches(1)[0], 20))
        engine.step(batches(1)[0])
    given = [cut(b, n) for b, n in zip(batches(3), (32, 16, 32), strict=True)]
    found, expected = (run(start(mesh_of(name)), given) for name in ("4", "1"))
    np.testing.assert_allclose(found.losses, expected.losses, rtol=BOUND)


@pytest.mark.parametrize("tier", ["nvme", pytest.param("device", marks=slow)])
def test_what_is_held_and_moved_on_a_mesh_is_what_was_planned(tier, tmp_path):
    with start(mesh_of("2x4"), tier, folder=str(tmp_path)) as engine:
        for batch in batches(2):
            metrics = engine.step(batch)
            plan = engine.last_step.plan
            for held in Tier:
                assert 0 <= metrics[f"{held}_bytes"] <= plan.peak_bytes[held]
                assert plan.peak_bytes[held] <= plan.capacity_bytes[held]
            moved = dict.fromkeys(Link, 0)
            for instruction in plan.instructions:
                if isinstance(instruction.operation, Transfer):
                    moved[instruction.link] += instruction.nbytes
            assert engine.last_step.moved_bytes == moved
            assert metrics["nvme_read_bytes"] == moved[Link.NVME_READ]
            assert (moved[Link.NVME_READ] > 0) == (tier == "nvme")
