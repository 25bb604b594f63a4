"""A step of one program, with its state in pinned host memory, trains like the others.

On the CPU all memory kinds are one memory. So these tests show the numbers, the stacks
and the way of the arrays in and out of them; what such a program holds and moves on an
accelerator is shown by the TPU compiler (`tests/unit/step/test_offloaded.py`).
"""

import jax
import numpy as np
import optax
import pytest

import zinf
from tests.equivalence.training import OFFLOADED, mesh_of
from zinf.core.optim.decision import NonFiniteError
from zinf.core.program import Tier
from zinf.core.segment import named_leaves
from zinf.core.sharding import axis_rule
from zinf.core.step.whole.offloaded import check_offloadable

# As in test_reference, which has the numbers of plain JAX; test_meshes those of meshes.
TOLERANCE = 1e-5
slow = pytest.mark.slow


def init():
    keys = jax.random.split(jax.random.key(0), 4)
    layers = [
        {"w": jax.random.normal(k, (6, 6)) * 0.3, "b": jax.numpy.zeros(6)} for k in keys
    ]
    return {"layers": layers, "out": jax.random.normal(keys[0], (6, 3))}


def loss(params, batch):
    x = batch["x"]
    for layer in params["layers"]:
        x = x + jax.numpy.tanh(x @ layer["w"] + layer["b"][None])
    return jax.numpy.mean(jax.numpy.square(x @ params["out"] - batch["y"]))


def batch(seed=0, count=4):
    random = np.random.default_rng(seed)
    draw = random.standard_normal
    return {"x": draw((count, 6), np.float32), "y": draw((count, 3), np.float32)}


def start(execution, **config):
    settings = {"execution": execution, **config}
    return zinf.initialize(loss, init, optax.adamw(1e-2), settings)


def assert_same_leaves(found, wanted):
    """Each leaf to within 1e-5 of its largest entry."""
    assert found.keys() == wanted.keys()
    for path, leaf in wanted.items():
        atol = TOLERANCE * np.max(np.abs(leaf))
        np.testing.assert_allclose(found[path], leaf, rtol=0, atol=atol, err_msg=path)


# In float16 the first step overflows, and is skipped.
ON_EIGHT = {
    "clipped": {"gradient_accumulation_steps": 2, "gradient_clipping": 0.05},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 17, "hysteresis": 1}},
    "frozen": {"frozen": ["layers/1/*", "out"]},
}


@slow
@pytest.mark.parametrize("name", ON_EIGHT)
def test_steps_on_eight_devices_are_those_of_the_fused_step(name, tmp_path):
    """A checkpoint of the offloaded ones goes on streamed, on one device, and back."""
    settings = {**ON_EIGHT[name], "zero_optimization": {"stage": 3}}
    metrics, params = {}, {}
    for execution in ("fused", OFFLOADED):
        config = {"execution": execution, "persistence_threshold": 1, **settings}
        given = loss, init, optax.adamw(1e-2), config
        with zinf.initialize(*given, mesh=mesh_of("8")) as engine:
            metrics[execution] = [engine.step(batch(n, 16)) for n in range(4)]
            params[execution] = named_leaves(engine.params())
            if execution == OFFLOADED:
                engine.save(tmp_path / "saved")
                after = [engine.step(batch(n, 16))["loss"] for n in (4, 5)]
    # A value of float16 that the two programs round to different sides.
    bound = 2.0**-10 if name == "fp16" else TOLERANCE
    losses, skipped = (
        {e: [m[k] for m in each] for e, each in metrics.items()}
        for k in ("loss", "skipped")
    )
    np.testing.assert_allclose(losses[OFFLOADED], losses["fused"], rtol=bound)
    assert skipped[OFFLOADED] == skipped["fused"]
    assert any(skipped["fused"]) == (name == "fp16")
    if name == "frozen":
        for path in ("out", "layers/1/w"):
            start_value = named_leaves(init())[path]
            np.testing.assert_array_equal(params[OFFLOADED][path], start_value)
    with start("streamed", **settings) as engine:
        engine.restore(tmp_path / "saved")
        found = [engine.step(batch(4, 16))["loss"]]
        engine.save(tmp_path / "second")
    with start(OFFLOADED, **settings) as engine:
        engine.restore(tmp_path / "second")
        found.append(engine.step(batch(5, 16))["loss"])
    np.testing.assert_allclose(found, after, rtol=bound)


@slow
def test_equal_layers_rest_in_stacks_and_run_as_one_loop():
    with start(OFFLOADED) as engine:
        metrics = engine.step(batch())
        program = engine._runners.current.program
        shapes = sorted(stack.shape for stack in program.stacks)
        # The first layer reads the batch, which gets no cotangent: another body. Each
        # is there three times: the parameter and two moments of Adam.
        first, out = [(6,), (6, 6)], (6, 3)
        assert shapes == sorted([(3, 6), (3, 6, 6), *first, out] * 3)
        assert program.num_loops == 1
        assert len(engine.plan.instructions) == 1
        assert "within the program" in engine.plan.summary()
        for tier in (Tier.DEVICE, Tier.HOST):
            assert 0 < metrics[f"{tier}_bytes"] <= engine.plan.peak_bytes[tier]


def run_of(engine):
    """The losses of three steps, the parameters after them, and the program."""
    with engine:
        losses = [engine.step(batch(n))["loss"] for n in range(3)]
        return losses, named_leaves(engine.params()), engine._runners.current.program


@slow
def test_without_clipping_layers_are_updated_in_the_backward_pass():
    """So their gradients never go to the host, and their parameters move once less."""
    found, params, early = run_of(start(OFFLOADED))
    # The norm stays far below the bound, so that only the order differs.
    wanted, expected, late = run_of(start(OFFLOADED, gradient_clipping=1e6))
    assert early.updates_in_passes and not late.updates_in_passes
    np.testing.assert_allclose(found, wanted, rtol=TOLERANCE)
    assert_same_leaves(params, expected)
    layers = 3 * 6 * 6 * 4  # matrices of the loop; their vectors move as one stack
    assert late.moved.h2d_bytes - early.moved.h2d_bytes == 2 * layers
    assert late.moved.d2h_bytes - early.moved.d2h_bytes == layers
    # Each layer's gradient, parameters and two moments wait for the norm.
    assert late.moved.late_h2d_bytes - early.moved.late_h2d_bytes == 4 * layers
    assert late.moved.late_d2h_bytes - early.moved.late_d2h_bytes == 3 * layers
    # A device with room for one layer's state only updates after the backward pass.
    assert late.device_bytes < early.device_bytes
    small = start(OFFLOADED, memory={"device": early.device_bytes - 1})
    found, _, again = run_of(small)
    assert not again.updates_in_passes
    np.testing.assert_allclose(found, wanted, rtol=TOLERANCE)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({}, "Some arrays are updated"),
        ({"gradient_clipping": 1.0}, "Nothing was updated"),
    ],
    ids=["early", "clipped"],
)
def test_a_gradient_that_is_not_finite_says_what_it_left(config, says):
    def breaks(params, batch):
        x = batch["x"]
        for layer in params["layers"]:
            # The gradient of sqrt at 0 is inf, and 0 times that is nan.
            x = x + jax.numpy.tanh(x @ layer["w"]) + (0.0 * layer["w"].sum()) ** 0.5
        return jax.numpy.mean(jax.numpy.square(x @ params["out"] - batch["y"]))

    settings = {"execution": OFFLOADED, **config}
    with zinf.initialize(breaks, init, optax.adamw(1e-2), settings) as engine:
        with pytest.raises(NonFiniteError, match=f"norm is nan .*{says}"):
            engine.step(batch())


def test_a_loss_that_is_not_finite_updates_nothing_in_any_pass():
    with start(OFFLOADED) as engine:
        engine.step(batch())
        before = engine.get("layers/1/w"), engine.get("out")
        broken = batch() | {"y": np.full((4, 3), np.inf, np.float32)}
        with pytest.raises(NonFiniteError, match="Nothing was updated"):
            engine.step(broken)
        assert np.array_equal(engine.get("layers/1/w"), before[0])
        assert np.array_equal(engine.get("out"), before[1])


def test_a_member_of_a_stack_is_read_set_and_evaluated_like_any_array():
    value = np.full((6, 6), 0.25, np.float32)
    losses = {}
    for execution in ("fused", OFFLOADED):
        with start(execution) as engine:
            engine.step(batch())
            before = engine.get("layers/1/w")
            engine.set("layers/2/w", value)
            assert np.array_equal(engine.get("layers/2/w"), value)
            assert np.array_equal(engine.get("layers/1/w"), before)
            losses[execution] = engine.evaluate(batch(1)), engine.step(batch(1))["loss"]
            assert not np.array_equal(engine.get("layers/1/w"), before)
    np.testing.assert_allclose(losses[OFFLOADED], losses["fused"], rtol=TOLERANCE)


@slow
def test_batches_of_another_shape_use_the_same_stacks():
    losses = {}
    for execution in ("fused", OFFLOADED):
        with start(execution) as engine:
            small = {name: x[:2] for name, x in batch(1).items()}
            taken = [engine.step(x)["loss"] for x in (batch(), small, batch(2))]
            losses[execution] = taken
    np.testing.assert_allclose(losses[OFFLOADED], losses["fused"], rtol=TOLERANCE)


def test_a_budget_that_is_too_small_is_refused_by_name():
    with pytest.raises(ValueError, match=r"host budget .* the offloaded step"):
        start(OFFLOADED, memory={"host": "1KiB"}).step(batch())


def test_what_cannot_be_offloaded_yet_is_refused_by_name():
    zero = {"offload_optimizer": {"device": "nvme"}}
    with pytest.raises(ValueError, match="offloaded keeps everything in pinned host"):
        start(OFFLOADED, zero_optimization=zero, memory={"nvme": ["x"]})
    with pytest.raises(
        NotImplementedError, match="does not work yet with mesh.seq = 2"
    ):
        start(OFFLOADED, mesh={"seq": 2}).step(batch())
    divided = axis_rule(
        zinf.make_mesh(jax.devices()[:2], num_tensor=2), stage=0, min_bytes=0
    )
    with pytest.raises(
        NotImplementedError, match="does not work yet with mesh.tensor = 2"
    ):
        check_offloadable(divided)
    with pytest.raises(NotImplementedError, match=r"does not read tiles, and layers"):
        start(OFFLOADED, segment={"max_bytes": 100}).step(batch())
