"""Promises of `zinf.models.gpt_config`, and sizes of models that papers name."""

from typing import Any

import pytest

from zinf.models import GPTConfig, flops_per_token, num_parameters

VALID = {"num_layers": 2, "num_heads": 4, "embed_dim": 16, "max_length": 8}
EXPERTS = {"num_experts": 4}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"norm": "batchnorm"},
            "norm is 'batchnorm'; it must be one of layernorm, rms",
        ),
        ({"activation": "relu"}, "activation is 'relu'"),
        ({"position": "alibi"}, "position is 'alibi'"),
        ({"num_layers": 0}, "num_layers is 0"),
        ({"num_kv_heads": 0}, "kv_heads is 0"),
        ({"mlp_dim": 0}, "hidden_dim is 0"),
        ({"embed_dim": 18}, "embed_dim 18 is not a multiple of num_heads 4"),
        ({"num_kv_heads": 3}, "num_heads 4 is not a multiple of num_kv_heads 3"),
        ({"position": "rope", "embed_dim": 12}, "a head has 3 entries"),
        ({"dropout": 1.0}, r"dropout is 1.0; it must be in \[0, 1\)"),
        ({"dropout": -0.1}, r"dropout is -0.1"),
        ({"communication_aware_remat": True}, "remat is off"),
        ({"num_experts": (2,)}, "1 numbers, but there are 2 layers"),
        ({"num_experts": -1}, "num_experts is -1"),
        ({"num_experts": (0, 2), "experts_per_token": 3}, "experts_per_token is 3"),
        (EXPERTS | {"experts_per_token": 0}, "experts_per_token is 0"),
        (EXPERTS | {"expert_splits": 3}, "expert_splits is 3"),
        (EXPERTS | {"scan_layers": True}, "scan_layers"),
        (EXPERTS | {"capacity_factor": 0.0}, "capacity_factor is 0.0"),
        (EXPERTS | {"routing_group_size": 0}, "routing_group_size is 0"),
        ({"random_ltd_layers": (2,)}, "has 2, but the layers are 0 to 1"),
        ({"random_ltd_layers": (-1,)}, "has -1, but the layers are 0 to 1"),
        ({"random_ltd_layers": (1, 0)}, "must be ascending"),
        ({"random_ltd_layers": (1, 1)}, "must be ascending, each once"),
        ({"random_ltd_layers": (1,), "scan_layers": True}, "Turn scan_layers off"),
    ],
)
def test_a_contradiction_is_refused_by_name(
    fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        GPTConfig(**VALID | fields)


def test_the_least_that_is_valid_is_accepted() -> None:
    least = dict.fromkeys(("num_layers", "num_heads", "max_length", "vocab_size"), 1)
    GPTConfig(**least, embed_dim=1, mlp_dim=1, num_kv_heads=1, dropout=0.0)
    GPTConfig(**VALID, num_experts=(0, 2), experts_per_token=2, expert_splits=2)
    GPTConfig(**VALID, **EXPERTS, routing_group_size=1, random_ltd_layers=(0, 1))


def test_unset_sizes_follow_gpt2_and_llama() -> None:
    assert GPTConfig(**VALID).kv_heads == 4
    assert GPTConfig(**VALID).hidden_dim == 4 * 16
    # Llama 7B: 8/3 * 4096 = 10923 rounded up to a multiple of 256.
    llama = GPTConfig(**VALID | {"embed_dim": 4096, "activation": "swiglu"})
    assert llama.hidden_dim == 11008


NUM_LAYERS = 24
MOE = (0, 128)  # Every other layer has experts.


def pyramid(first: int, last: int) -> tuple[int, ...]:
    """PR-MoE, section 4.1: more experts in the last two layers that have some."""
    counts = [first] * (NUM_LAYERS // 2 - 2) + [last] * 2
    return tuple(n for count in counts for n in (0, count))


@pytest.mark.parametrize(
    ("embed_dim", "num_experts", "is_residual", "billions"),
    [
        (1024, MOE * (NUM_LAYERS // 2), False, 13),
        (1024, pyramid(32, 64), True, 4.0),
        (2048, MOE * (NUM_LAYERS // 2), False, 52),
        (2048, pyramid(64, 128), True, 31),
    ],
    ids=["350M+MoE-128", "350M+PR-MoE-32/64", "1.3B+MoE-128", "1.3B+PR-MoE-64/128"],
)
def test_parameters_are_those_of_deepspeed_moe(
    embed_dim: int, num_experts: tuple[int, ...], is_residual: bool, billions: float
) -> None:
    """https://arxiv.org/abs/2201.05596, table 2."""
    config = GPTConfig(
        num_layers=NUM_LAYERS,
        num_heads=16,
        embed_dim=embed_dim,
        vocab_size=50_304,
        max_length=2048,
        num_experts=num_experts,
        residual_experts=is_residual,
    )
    # The paper gives two digits.
    assert num_parameters(config) == pytest.approx(billions * 1e9, rel=0.03)


def test_flops_are_six_per_multiplied_parameter_plus_attention() -> None:
    # Equal outside the tables, so that the untied model multiplies as much as the tied.
    tied = GPTConfig(**VALID, vocab_size=32)
    untied = GPTConfig(**VALID, vocab_size=32, tied_embeddings=False)
    assert num_parameters(untied) - num_parameters(tied) == 32 * 16
    assert flops_per_token(untied) == flops_per_token(tied)
    multiplied = num_parameters(tied) - 8 * 16  # without the position table
    attention = 12 * 2 * 4 * 4 * 8  # 12 LNHT
    assert flops_per_token(tied) == 6 * multiplied + attention


def test_parameters_and_flops_are_counted_by_what_a_token_passes() -> None:
    dense, four = GPTConfig(**VALID), GPTConfig(**VALID, num_experts=4)
    expert = 2 * 16 * 64 + 64 + 16
    router = 16
    added = 2 * (3 * expert + 4 * router)
    assert num_parameters(four) == num_parameters(dense) + added
    # A token passes one expert, as it passes a dense MLP, and the router.
    passed = flops_per_token(dense) + 6 * 2 * 4 * router
    assert flops_per_token(four) == passed
    two = GPTConfig(**VALID, num_experts=4, experts_per_token=2)
    assert flops_per_token(two) == passed + 6 * 2 * expert
