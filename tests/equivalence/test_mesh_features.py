"""What a user may train, and how, gives on a mesh what it gives on one device."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import chex
import jax
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh

import zinf
from tests.equivalence import meshes, test_model_state
from tests.equivalence.meshes import BOUND, ONE, batches, init, loss, mesh
from tests.equivalence.programs import PROGRAMS
from tests.marks import slow_except
from zinf.plan import Link, Transfer
from zinf.program import Tier
from zinf.segment import named_leaves

ADAM = optax.adamw(1e-2)
KEY = jax.random.key(11, impl="unsafe_rbg")
# Of everything a loss may contain, what has to do with where arrays lie.
NAMES = {
    "an_encoder_and_a_decoder",
    "aux_outputs_of_all_kinds",
    "batch_leaves_that_are_scalars_or_unread",
    "frozen_leaves_of_several_kinds",
    "keys_scanned_along_with_layers",
    "stacks_of_stacks_numbers_and_integers",
    "tied_embeddings",
}
FAST = {"aux_outputs_of_all_kinds"}
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 8, "hysteresis": 1}}
OVERFLOWS = 3


def start(on: Mesh | None, *, tier: str = "host", stage: int = 3, **rest: Any) -> Any:
    """An engine of the network with awkward leaves."""
    settings = meshes.config(stage, tier, rest.pop("folder", "")) | rest
    return zinf.initialize(loss, init, ADAM, settings, mesh=on)


def assert_close(found: Sequence[Any], expected: Sequence[Any]) -> None:
    np.testing.assert_allclose(found, expected, rtol=BOUND)


@pytest.mark.parametrize(
    "program",
    slow_except(
        [p for p in PROGRAMS if p.name in FAST],
        [p for p in PROGRAMS if p.name in NAMES],
    ),
    ids=lambda p: p.name,
)
def test_a_program_is_that_of_one_device(program):
    def train(num_devices: int) -> tuple[list[float], Any, Any]:
        engine = zinf.initialize(
            program.loss,
            program.init,
            ADAM,
            {
                "execution": "streamed",
                "zero_optimization": {"stage": 3},
                "persistence_threshold": 1,
                "segment": {"remat": "always"},
                **program.config,
            },
            has_aux=program.has_aux,
            rng=KEY if program.uses_key else None,
            mesh=zinf.make_mesh(jax.devices()[:num_devices]),
        )
        metrics = [engine.step(program.batch) for _ in range(2)]
        losses = [*(m["loss"] for m in metrics), engine.evaluate(program.batch)]
        params = named_leaves(engine.params())
        engine.close()
        return losses, params, metrics[0].get("aux")

    expected, found = train(1), train(2)
    assert_close(found[0], expected[0])
    chex.assert_trees_all_close(found[1], expected[1], rtol=1e-7, atol=1e-5)
    chex.assert_trees_all_close(found[2], expected[2], rtol=BOUND, atol=BOUND)


def test_every_name_is_of_a_program():
    assert {p.name for p in PROGRAMS} >= NAMES


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "tier"),
    [("adafactor", "host"), ("muon", "device"), ("noise", "host")],
)
def test_optimizers_of_whole_leaves_see_no_padding(optimizer, tier):
    """A norm, a moment or noise of a padded leaf would be another."""
    tx = {
        "adafactor": optax.adafactor(3e-3, min_dim_size_to_factor=4),
        "muon": optax.contrib.muon(3e-3),
        "noise": optax.chain(
            optax.add_noise(0.1, 0.5, jax.random.key(1)), optax.sgd(0.1)
        ),
    }[optimizer]

    def train(name: str) -> list[float]:
        settings = meshes.config(3, tier, "")
        engine = zinf.initialize(loss, init, tx, settings, mesh=mesh(name))
        losses = [engine.step(batch)["loss"] for batch in batches(4)]
        engine.close()
        return losses

    assert_close(train("4"), train(ONE))


@pytest.mark.slow
def test_an_overflow_is_skipped_on_every_mesh():
    def train(name: str, tier: str) -> list[list[Any]]:
        engine = start(mesh(name), tier=tier, **FP16)
        metrics = []
        for number, batch in enumerate(batches(4), start=1):
            if number == OVERFLOWS:
                # In the part of the last device alone.
                y = batch["y"].copy()
                y[-1] *= 1e5
                batch = batch | {"y": y}
            metrics.append(engine.step(batch))
        engine.close()
        return [[m[k] for m in metrics] for k in ("skipped", "loss_scale", "loss")]

    expected = train(ONE, "device")
    assert expected[0][OVERFLOWS - 1]
    assert not all(expected[0])
    for name, tier in (("2x4", "host"), ("8", "fused")):
        found = train(name, tier)
        assert found[:2] == expected[:2]
        # Float16 keeps 11 bits of every value.
        np.testing.assert_allclose(found[2], expected[2], rtol=2.0**-10)


@pytest.mark.slow
def test_model_state_is_that_of_one_device():
    given = np.random.default_rng(0).standard_normal((3, 8, test_model_state.DIM))

    def train(num_devices: int) -> tuple[list[float], Any]:
        engine = zinf.initialize(
            test_model_state.loss,
            test_model_state.init,
            test_model_state.TX,
            {"execution": "streamed", "zero_optimization": {"stage": 3}},
            model_state=test_model_state.initial_state,
            mesh=zinf.make_mesh(jax.devices()[:num_devices]),
        )
        losses = [engine.step(b.astype(np.float32))["loss"] for b in given]
        state = test_model_state.plain(engine.model_state())
        engine.close()
        return losses, state

    expected, found = train(1), train(4)
    assert_close(found[0], expected[0])
    chex.assert_trees_all_close(found[1], expected[1], rtol=BOUND, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "size",
    slow_except(
        ["zero_hpz_partition_size"], ["zero_hpz_partition_size", "mics_shard_size"]
    ),
)
def test_groups_of_devices_train_as_one_device(size):
    expected = meshes.train(ONE, 0, "device")
    runs = []
    for tier in ("device", "optimizer on host"):
        settings = meshes.config(3, tier, "")
        settings["zero_optimization"] |= {size: 2}
        engine = zinf.initialize(loss, init, ADAM, settings)
        assert engine.planner.rule.mesh.shape["replica"] == 4
        runs.append([engine.step(batch)["loss"] for batch in batches()])
        engine.close()
    assert_close(runs[0], expected.losses)
    assert runs[1] == runs[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("names", "shape"),
    [(("fsdp",), (4,)), (("fsdp", "replica"), (2, 4)), (("replica",), (2,))],
)
def test_a_mesh_may_have_some_axes_in_any_order(names, shape):
    devices = np.array(jax.devices()[: np.prod(shape)]).reshape(shape)
    own = Mesh(devices, names, axis_types=(AxisType.Auto,) * len(names))
    engine = start(own, tier="optimizer on host", stage=2)
    losses = [engine.step(batch)["loss"] for batch in batches()]
    engine.close()
    assert_close(losses, meshes.train(ONE, 0, "device").losses)


@pytest.mark.slow
def test_a_batch_that_does_not_divide_is_refused():
    engine = start(mesh("8"))
    odd = jax.tree.map(lambda x: x[:20], batches(1)[0])
    with pytest.raises(ValueError, match="10 examples .* 8 data-parallel devices"):
        engine.step(odd)
    engine.step(batches(1)[0])
    engine.close()


@pytest.mark.slow
def test_batches_of_several_shapes_take_turns():
    def train(name: str) -> list[float]:
        engine = start(mesh(name))
        sizes = (32, 16, 32, 16)
        pairs = zip(sizes, batches(len(sizes)), strict=True)
        cut = [jax.tree.map(lambda x, n=n: x[:n], batch) for n, batch in pairs]
        losses = [engine.step(batch)["loss"] for batch in cut]
        engine.close()
        return losses

    assert_close(train("4"), train(ONE))


@pytest.mark.parametrize(
    "tier", slow_except(["nvme"], ["device", "optimizer on host", "nvme"])
)
def test_what_is_held_and_moved_on_a_mesh_is_what_was_planned(tier, tmp_path):
    engine = start(mesh("2x4"), tier=tier, folder=str(tmp_path))
    for batch in batches(2):
        metrics = engine.step(batch)
        plan = engine.last_step.plan
        for tier_ in Tier:
            assert 0 <= metrics[f"{tier_}_bytes"] <= plan.peak_bytes[tier_]
            assert plan.peak_bytes[tier_] <= plan.capacity_bytes[tier_]
        moved = dict.fromkeys(Link, 0)
        for instruction in plan.instructions:
            if isinstance(instruction.operation, Transfer):
                moved[instruction.link] += instruction.nbytes
        assert engine.last_step.moved_bytes == moved
        assert metrics["nvme_read_bytes"] == moved[Link.NVME_READ]
    engine.close()


@pytest.mark.slow
def test_a_run_is_saved_and_restored_on_any_mesh_stage_and_tier(tmp_path: Path):
    cases = [
        ("8", 3, "nvme"),
        (ONE, 0, "device"),
        ("2", 1, "optimizer on host"),
        ("4x2", 2, "host"),
        ("8", 3, "fused"),
    ]
    last = None
    for number, (name, stage, tier) in enumerate(cases):
        folder = str(tmp_path / f"nvme {number}")
        engine = start(mesh(name), tier=tier, stage=stage, folder=folder)
        if last is None:
            engine.step(batches(1)[0])
        else:
            engine.restore(last[0])
            engine.evaluate(batches(1)[0])
        specs = engine.residents.specs
        state = {a: np.array(engine.residents.read(a)) for a in specs}
        if last is not None:
            assert state.keys() == last[1].keys()
            for array, content in state.items():
                np.testing.assert_array_equal(content, last[1][array], str(array))
        last = tmp_path / f"saved {number}", state
        engine.save(last[0])
        engine.close()
