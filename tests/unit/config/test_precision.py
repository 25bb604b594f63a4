import pytest

from zinf.config import Config, ConfigError, LossScaling


@pytest.mark.parametrize(
    ("raw", "dtype"),
    [
        ({}, "float32"),
        ({"bf16": {"enabled": True}}, "bfloat16"),
        ({"fp16": {"enabled": True}}, "float16"),
        ({"bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}}, "float32"),
        ({"bf16": {"enabled": False}, "fp16": {"enabled": True}}, "float16"),
    ],
)
def test_compute_dtype(raw, dtype):
    assert Config.load(raw).compute_dtype == dtype


def test_both_precisions_at_once_are_refused():
    with pytest.raises(ConfigError, match="both true"):
        Config.load({"bf16": {"enabled": True}, "fp16": {"enabled": True}})


def test_loss_scaling_has_deepspeeds_defaults():
    assert Config.load({"fp16": {"enabled": True}}).loss_scaling == LossScaling(
        initial_scale=2.0**16,
        window=1000,
        hysteresis=2,
        min_scale=1.0,
        dynamic=True,
        consecutive_hysteresis=False,
    )


def test_loss_scaling_follows_the_section():
    section = {
        "enabled": True,
        "loss_scale": 0,
        "initial_scale_power": 8,
        "loss_scale_window": 50,
        "hysteresis": 1,
        "min_loss_scale": 0.25,
        "consecutive_hysteresis": True,
    }
    assert Config.load({"fp16": section}).loss_scaling == LossScaling(
        256.0, 50, 1, 0.25, True, True
    )


def test_a_loss_scale_is_static():
    scaling = Config.load({"fp16": {"enabled": True, "loss_scale": 128}}).loss_scaling
    assert (scaling.initial_scale, scaling.dynamic) == (128.0, False)


def test_only_fp16_scales_the_loss():
    assert Config.load({"bf16": {"enabled": True}}).loss_scaling is None
    assert Config.load({"fp16": {"enabled": False}}).loss_scaling is None


@pytest.mark.parametrize(
    "section",
    [
        {"min_loss_scale": 0},
        {"min_loss_scale": 512, "initial_scale_power": 8},
        {"initial_scale_power": 5000},
        {"loss_scale": -1},
        {"hysteresis": "auto2"},
        {"fp16_master_weights_and_grads": True},
        {"auto_cast": True},
    ],
)
def test_impossible_loss_scaling_is_refused(section):
    with pytest.raises(ConfigError, match="fp16"):
        Config.load({"fp16": {"enabled": True, **section}})


@pytest.mark.parametrize(
    "key", ["bf16_master_weights_and_grads", "bf16_optimizer_states"]
)
def test_state_in_bf16_is_not_silently_fp32(key):
    assert Config.load({"bf16": {"enabled": True, key: False}})
    with pytest.raises(ConfigError, match="not supported yet"):
        Config.load({"bf16": {"enabled": True, key: True}})
