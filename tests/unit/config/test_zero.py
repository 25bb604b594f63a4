from pathlib import Path

import pytest

from zinf.config import Config, ConfigError
from zinf.program import Tier

OFFLOADED = {"cpu": Tier.HOST, "nvme": Tier.NVME}


def loaded(zero, **more):
    return Config.load({"zero_optimization": zero, **more})


@pytest.mark.parametrize(
    ("device", "tier"),
    [("none", Tier.DEVICE), ("cpu", Tier.HOST), ("nvme", Tier.NVME), ("auto", None)],
)
def test_offload_devices_are_tiers(device, tier):
    section = {"device": device, "nvme_path": "drive"}
    config = loaded(
        {"stage": 3, "offload_param": section, "offload_optimizer": section}
    )
    assert config.param_tier is tier
    assert config.optimizer_tier is tier


def test_an_offload_section_without_a_device_is_placed_by_budget():
    config = loaded({"stage": 3, "offload_param": {"pin_memory": True}})
    assert config.param_tier is None


@pytest.mark.parametrize(
    ("zero", "memory", "pinned"),
    [
        ({}, {}, "auto"),
        ({"offload_param": {"pin_memory": True}}, {}, "auto"),
        ({"offload_param": {"pin_memory": "auto"}}, {}, "auto"),
        ({"offload_param": {"pin_memory": False}}, {}, "off"),
        ({"cpu_offload_use_pin_memory": False}, {}, "off"),
        (
            {
                "offload_param": {"pin_memory": False},
                "offload_optimizer": {"pin_memory": True},
            },
            {},
            "auto",
        ),
        ({"offload_param": {"pin_memory": True}}, {"pinned": "arrays"}, "arrays"),
        (
            {"offload_param": {"pin_memory": True}},
            {"pinned": "registered"},
            "registered",
        ),
        ({"offload_param": {"pin_memory": False}}, {"pinned": "auto"}, "auto"),
        ({}, {"pinned": False}, "off"),  # what YAML makes of a bare off
    ],
)
def test_pin_memory_of_any_section_decides_unless_memory_pinned_does(
    zero, memory, pinned
):
    assert loaded(zero, memory=memory).pinned == pinned


@pytest.mark.parametrize(
    ("asks", "pinned"), [(True, "off"), (False, "arrays"), (False, "registered")]
)
def test_memory_that_is_pinned_and_not_pinned_is_refused(asks, pinned):
    section = {"offload_optimizer": {"pin_memory": asks}}
    with pytest.raises(ConfigError, match=rf"memory.pinned: .*is {pinned}, but pin_"):
        loaded(section, memory={"pinned": pinned})


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("device", OFFLOADED)
def test_any_stage_goes_with_any_tier(stage, device):
    section = {"device": device, "nvme_path": "drive"}
    config = loaded(
        {"stage": stage, "offload_param": section, "offload_optimizer": section}
    )
    assert config.stage == stage
    assert (config.param_tier, config.optimizer_tier) == (OFFLOADED[device],) * 2


def test_groups_of_devices_are_given_once():
    assert not loaded({"mics_shard_size": 4}).gathers_in_group
    assert loaded({"zero_hpz_partition_size": 8}).gathers_in_group
    with pytest.raises(ConfigError, match="mics_shard_size: .*so does zero"):
        loaded({"mics_shard_size": 4, "zero_hpz_partition_size": 4})
    with pytest.raises(ConfigError, match="mics_shard_size: .*so does the mesh"):
        loaded({"mics_shard_size": 4}, mesh={"replica": 2})
    with pytest.raises(ConfigError, match="mics_shard_size: .*so does the mesh"):
        loaded({"mics_shard_size": 4}, mesh={"tensor": 2})


def test_devices_that_divide_weights_are_not_counted_in_two_ways():
    with pytest.raises(ConfigError, match="autotp_size: 4 is not mesh.tensor, 2"):
        loaded({}, mesh={"tensor": 2}, tensor_parallel={"autotp_size": 4})
    loaded({}, mesh={"tensor": 4}, tensor_parallel={"autotp_size": 4})


def test_nvme_needs_a_folder_from_somewhere():
    zero = {"stage": 3, "offload_param": {"device": "nvme"}}
    with pytest.raises(ConfigError, match="offload_param.nvme_path.*memory.nvme"):
        loaded(zero)
    assert loaded(zero, memory={"nvme": ["a"]}).nvme_paths == (Path("a"),)


def test_a_single_folder_may_be_given_without_a_list():
    assert loaded({}, memory={"nvme": "a"}).nvme_paths == (Path("a"),)


def test_no_folder_is_written_as_null_too():
    assert loaded({}, memory={"nvme": None}).nvme_paths == ()


def test_the_folders_of_both_sections_make_the_tier():
    zero = {
        "stage": 3,
        "offload_param": {"device": "nvme", "nvme_path": "a"},
        "offload_optimizer": {"device": "nvme", "nvme_path": "b"},
    }
    assert loaded(zero).nvme_paths == (Path("a"), Path("b"))
    zero["offload_optimizer"]["nvme_path"] = "a"
    assert loaded(zero).nvme_paths == (Path("a"),)


def test_two_opinions_on_the_folder_are_refused():
    zero = {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "a"}}
    with pytest.raises(ConfigError, match="a is not among memory.nvme"):
        loaded(zero, memory={"nvme": ["b"]})
    assert loaded(zero, memory={"nvme": ["b", "a"]}).nvme_paths == (
        Path("b"),
        Path("a"),
    )


def test_a_folder_given_twice_is_refused():
    with pytest.raises(ConfigError, match="memory.nvme: names a folder twice: a"):
        loaded({}, memory={"nvme": ["a", "b", "a"]})


def test_home_folders_are_expanded(monkeypatch):
    monkeypatch.setenv("HOME", "/somewhere")
    assert loaded({}, memory={"nvme": ["~/x"]}).nvme_paths == (Path("/somewhere/x"),)


def test_old_names_of_offload_are_understood():
    config = loaded({"stage": 3, "cpu_offload": True, "cpu_offload_param": True})
    assert (config.param_tier, config.optimizer_tier) == (Tier.HOST, Tier.HOST)
    assert loaded({"stage": 2, "cpu_offload": False}).optimizer_tier is None
    with pytest.raises(ConfigError, match="cpu_offload: is the old name"):
        loaded({"stage": 2, "cpu_offload": True, "offload_optimizer": {}})


@pytest.mark.parametrize(("flag", "stage"), [(True, 1), (False, 0)])
def test_a_flag_is_the_old_form_of_the_section(flag, stage):
    assert loaded(flag).zero_optimization.stage == stage


@pytest.mark.parametrize(
    "key",
    [
        "zero_quantized_nontrainable_weights",
        "zero_quantized_gradients",
    ],
)
def test_what_would_change_the_numerics_is_refused_unless_off(key):
    assert loaded({key: False})
    with pytest.raises(ConfigError, match=f"{key}: not supported yet"):
        loaded({key: True})


def test_weights_are_quantized_at_stage_3_only():
    assert loaded({"stage": 3, "zero_quantized_weights": True}).quantizes_weights
    assert not loaded({"zero_quantized_weights": False}).quantizes_weights
    with pytest.raises(ConfigError, match="zero_quantized_weights: .* stage 2"):
        loaded({"stage": 2, "zero_quantized_weights": True})


def test_zenflow_is_refused_unless_empty():
    assert loaded({"zenflow": None})
    with pytest.raises(ConfigError, match="zenflow: not supported yet"):
        loaded({"zenflow": {"topk_ratio": 0.1}})
