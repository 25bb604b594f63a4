"""A GPT whose MLPs are experts: `GPTConfig.num_experts`."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zinf
from zinf.models import (
    GPTConfig,
    flops_per_token,
    init_and_loss,
    num_parameters,
)
from zinf.optim.decision import NonFiniteError

DENSE = GPTConfig(num_layers=2, num_heads=2, embed_dim=16, max_length=8, vocab_size=32)
PYRAMID = dataclasses.replace(
    DENSE,
    num_experts=(2, 4),
    residual_experts=True,
    capacity_factor=1.0,
    expert_splits=2,
)
BATCH = {"tokens": np.random.default_rng(0).integers(0, 32, (4, 9), np.int32)}


def with_experts(num_experts, **options) -> GPTConfig:
    return dataclasses.replace(DENSE, num_experts=num_experts, **options)


@pytest.mark.slow
def test_one_expert_that_takes_all_is_a_dense_mlp() -> None:
    config = with_experts(1)
    init, loss = init_and_loss(config, seed=0)
    params = init()
    dense = jax.tree.map(lambda x: x, params)
    for i in range(DENSE.num_layers):
        block = dense["blocks"][i]
        block["mlp"] = jax.tree.map(lambda w: w[0], block["mlp"]["experts"])
    _, dense_loss = init_and_loss(DENSE, seed=0)
    # One expert has a balancing loss of one, whatever it is given.
    wanted = jax.jit(dense_loss)(dense, BATCH) + config.aux_loss_coefficient
    np.testing.assert_allclose(jax.jit(loss)(params, BATCH), wanted, rtol=1e-6)


def test_parameters_and_flops_are_counted_by_what_a_token_passes() -> None:
    expert = 2 * 16 * 64 + 64 + 16
    router = 16
    added = 2 * (3 * expert + 4 * router)
    assert num_parameters(with_experts(4)) == num_parameters(DENSE) + added
    # A token passes one expert, as it passes a dense MLP, and the router.
    passed = flops_per_token(DENSE) + 6 * 2 * 4 * router
    assert flops_per_token(with_experts(4)) == passed
    twice = flops_per_token(with_experts(4, experts_per_token=2))
    assert twice == passed + 6 * 2 * expert


@pytest.mark.exhaustive
def test_a_pyramid_of_residual_experts_trains_the_same_on_all_tiers(tmp_path) -> None:
    init, loss = init_and_loss(PYRAMID, seed=0)

    def losses(config: dict) -> list[float]:
        with zinf.initialize(loss, init, optax.adam(1e-2), config) as engine:
            return [engine.step(BATCH)["loss"] for _ in range(3)]

    streamed = {"execution": "streamed", "segment": {"remat": "always"}}
    on_nvme = {"nvme": [str(tmp_path)], "device": "1MiB", "host": "1MiB"}
    on_device = losses(streamed)
    assert on_device == losses({**streamed, "memory": on_nvme})
    assert on_device[-1] < on_device[0]


@pytest.mark.exhaustive
def test_experts_larger_than_the_device_train_in_pieces(tmp_path) -> None:
    config = with_experts(8, mlp_dim=1024)
    one_layer = 8 * (2 * 16 * 1024 + 1024 + 16) * 4
    device = one_layer * 3 // 4
    memory = {"nvme": [str(tmp_path)], "device": device, "host": "8MiB"}

    def losses(splits: int, **memory) -> list[float]:
        init, loss = init_and_loss(
            dataclasses.replace(config, expert_splits=splits), seed=0
        )
        tx = optax.sgd(0.1)
        with zinf.initialize(loss, init, tx, {"memory": memory}) as engine:
            return [engine.step(BATCH)["loss"] for _ in range(2)]

    with pytest.raises(ValueError, match="The device budget is"):
        losses(1, **memory)
    np.testing.assert_allclose(losses(8, **memory), losses(1), rtol=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_experts": (2,)}, "1 numbers, but there are 2 layers"),
        ({"num_experts": -1}, "num_experts is -1"),
        ({"num_experts": 2, "experts_per_token": 3}, "experts_per_token is 3"),
        ({"num_experts": 4, "expert_splits": 3}, "expert_splits is 3"),
        ({"num_experts": 4, "scan_layers": True}, "scan_layers"),
        ({"num_experts": 4, "capacity_factor": 0.0}, "capacity_factor is 0.0"),
    ],
)
def test_a_shape_that_cannot_be_is_refused(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(DENSE, **options)


@pytest.mark.slow
def test_nan_logits_of_a_router_are_an_error_and_no_update() -> None:
    init, loss = init_and_loss(with_experts(2), seed=0)

    def spoiled() -> dict:
        params = init()
        mlp = params["blocks"][0]["mlp"]
        mlp["router_kernel"] = mlp["router_kernel"].at[0, 0].set(jnp.nan)
        return params

    with zinf.initialize(loss, spoiled, optax.sgd(0.1)) as engine:
        with pytest.raises(NonFiniteError):
            engine.step(BATCH)


def test_what_remat_saves_is_refused_without_remat():
    with pytest.raises(ValueError, match="remat is off"):
        GPTConfig(
            num_layers=1,
            num_heads=2,
            embed_dim=8,
            vocab_size=16,
            max_length=4,
            communication_aware_remat=True,
        )
