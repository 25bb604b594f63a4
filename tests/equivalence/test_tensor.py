"""With weights divided over devices: what each device holds, and what is refused."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zinf
from tests.equivalence.networks import ATTENTION, COLUMNS, LAYERS, ROWS, UNITS, WIDTH
from tests.equivalence.training import (
    BOTH,
    BOUND,
    FUSED,
    OPTIMIZERS,
    Setting,
    mesh_of,
    train,
)
from zinf.core.engine.initialize import make_planner
from zinf.core.program import ArrayId, Role, Tier

# `test_meshes` has the numbers of meshes, stages and tiers.
QUANTIZED = ("zero_optimization.zero_quantized_weights", True)
BATCH = ATTENTION.batches(1, 2)[0]


# A group of 4 devices, of which 2 divide weights, has all parameters (ZeRO++'s hpZ).
@pytest.mark.slow
def test_groups_that_keep_parameters_may_divide_weights():
    more = (("zero_optimization.zero_hpz_partition_size", 4),)
    expected = train(ATTENTION, Setting(FUSED, BOTH, stage=0))
    found = train(ATTENTION, Setting(FUSED, BOTH, "T+D+R", more=more))
    assert found.deviation(expected) <= BOUND


# Each part of a weight is rounded by at most 1/254 of its largest number (ZeRO++'s
# qwZ). The bound is that of `test_quantized_weights`, of a wider network.
@pytest.mark.slow
def test_weights_that_are_divided_may_be_gathered_as_integers():
    expected = train(ATTENTION, Setting(FUSED, BOTH, stage=0))
    found = train(ATTENTION, Setting(name=BOTH, mesh="T+D+R", more=(QUANTIZED,)))
    # Beyond what the order of sums does.
    assert BOUND < found.deviation(expected) <= 2e-3


def test_all_arrays_of_a_weight_are_cut_as_it_is_and_zero_cuts_them_further():
    config = {
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3},
        "persistence_threshold": 1,
    }
    mesh = mesh_of("T+D")
    planner = make_planner(
        ATTENTION.loss, ATTENTION.init, OPTIMIZERS["adam"], config, mesh=mesh
    )
    layouts = planner.layouts(planner.trace(planner.batch_spec(BATCH)))
    roles = {a.role for a in layouts.arrays if a.path == "layer 0/up"}
    assert roles == {Role.PARAM, Role.MASTER, Role.STATE}
    gradients = [ArrayId(Role.GRADIENT, path) for path in layouts.gradients]
    for array in (*layouts.arrays, *gradients):
        layout = layouts.of(array)
        name = array.path.rsplit("/", 1)[-1]
        shape = list(layout.shape)
        if array.path.startswith("layer") and name in (*COLUMNS, *ROWS):
            tensor_dim = 1 if name in COLUMNS else 0
            shape[tensor_dim] //= 4  # Along `tensor`,
            assert layout.computed.shard_shape(layout.shape) == tuple(shape), array
            shape[1 - tensor_dim] //= 2  # and ZeRO along `fsdp`.
            assert layout.device_shape == tuple(shape), array
        elif name == "bias":
            assert layout.device_shape == (UNITS // 4,), array
        else:
            # ZeRO divides other leaves among all devices. A scalar is whole.
            assert layout.computed.is_fully_replicated, array
            parts = np.prod(layout.padded) // np.prod(layout.device_shape)
            assert parts == (8 if layout.shape else 1), array


@pytest.mark.slow
def test_a_plan_counts_the_bytes_of_the_cut():
    config = Setting(stage=0, name=BOTH).config(ATTENTION, "")
    arguments = ATTENTION.loss, ATTENTION.init, OPTIMIZERS["adam"], config
    whole, cut = (
        zinf.plan_only(*arguments, batch=BATCH, mesh=mesh_of(name))
        for name in ("4", "T")
    )
    divided = LAYERS * (4 * WIDTH * WIDTH + 2 * WIDTH * UNITS + UNITS)
    # Three of four parts of each weight and of its two moments are on other devices.
    saved = 3 * 4 * divided * 3 // 4
    resident = [plan.home_bytes[Tier.DEVICE] for plan in (whole, cut)]
    assert resident[0] - resident[1] == saved


def test_a_model_without_weights_to_divide_is_refused():
    def flat(params: Any, batch: Any) -> jax.Array:
        return jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2)

    params = {"w": jnp.zeros((WIDTH, 3))}
    with zinf.initialize(flat, params, optax.sgd(1.0), mesh=mesh_of("T")) as engine:
        with pytest.raises(ValueError, match="none of this model's can be divided: w"):
            engine.step(BATCH)


def test_a_config_asks_for_a_tensor_axis_in_two_spellings():
    for section in ({"mesh": {"tensor": 4}}, {"tensor_parallel": {"autotp_size": 4}}):
        config = {"zero_optimization": {"stage": 1}, "persistence_threshold": 1}
        with ATTENTION.start(optax.sgd(1.0), config | section) as engine:
            sizes = engine.planner.rule.mesh.shape
            assert (sizes["tensor"], sizes["fsdp"]) == (4, 2)
