"""Sizes of the models of DeepSpeed-MoE (https://arxiv.org/abs/2201.05596, table 2)."""

import pytest

from zinf.models import GPTConfig, num_parameters

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
def test_parameters_are_those_of_the_paper(
    embed_dim: int, num_experts: tuple[int, ...], is_residual: bool, billions: float
) -> None:
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
