"""Promises of `zinf.models.gpt_config`."""

from typing import Any

import pytest

from zinf.models import GPTConfig

VALID = {"num_layers": 2, "num_heads": 4, "embed_dim": 16, "max_length": 8}


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
    ],
)
def test_a_contradiction_is_refused_by_name(
    fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        GPTConfig(**VALID | fields)


def test_unset_sizes_follow_gpt2_and_llama() -> None:
    assert GPTConfig(**VALID).kv_heads == 4
    assert GPTConfig(**VALID).hidden_dim == 4 * 16
    # Llama 7B: 8/3 * 4096 = 10923 rounded up to a multiple of 256.
    llama = GPTConfig(**VALID | {"embed_dim": 4096, "activation": "swiglu"})
    assert llama.hidden_dim == 11008
