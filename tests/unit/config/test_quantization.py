"""The section `weight_quantization`, as DeepSpeed spells it."""

import optax
import pytest

import zinf
from zinf.config import Config, report
from zinf.config.messages import ConfigError

GROUPS = {"num_bits": 4, "group_size": 64, "group_dim": 1, "symmetric": False}


def section(**keys):
    return Config.load({"weight_quantization": keys}).weight_quantization


def test_all_linear_layers_or_those_that_a_key_names():
    found = section(quantized_initialization=GROUPS)
    assert found.groups_of("model.layers.0.mlp.up_proj").num_bits == 4
    found = section(post_init_quant={"mlp": {"num_bits": 8}, "q_proj": GROUPS})
    assert found.groups_of("layers.0.mlp.up_proj").num_bits == 8
    assert found.groups_of("layers.0.attention.q_proj").num_bits == 4
    assert found.groups_of("layers.0.attention.v_proj") is None
    with pytest.raises(ValueError, match="'mlp' and 'q_proj' are both in"):
        found.groups_of("mlp.q_proj")


def test_each_key_has_a_line_in_the_report():
    raw = {"weight_quantization": {"post_init_quant": {"mlp": GROUPS}}}
    found = report(raw)
    assert found.is_valid
    assert {str(row.status) for row in found.rows} == {"used"}
    assert len(found.rows) == len(GROUPS)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({}, "says no bits"),
        ({"quantized_initialization": {"num_bits": 3}}, "num_bits"),
        ({"quantized_initialization": GROUPS | {"group_dim": 0}}, "group_dim"),
        ({"quantized_initialization": GROUPS | {"group_size": 7}}, "group_size"),
        ({"post_init_quant": {"mlp": {"bits": 8}}}, "post_init_quant.mlp"),
    ],
)
def test_a_wrong_section_is_refused_by_name(keys, message):
    with pytest.raises(ConfigError, match=message):
        section(**keys)


def test_training_refuses_weights_in_few_bits():
    config = {"weight_quantization": {"quantized_initialization": GROUPS}}
    with pytest.raises(ValueError, match="run and not trained: zinf generate"):
        zinf.initialize(
            lambda params, batch: (params["w"] * batch).sum(),
            {"w": optax.tree.zeros_like([1.0])[0]},
            optax.sgd(0.1),
            config,
        )
