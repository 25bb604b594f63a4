import itertools

import pytest

from zinf.config import BatchSizes, Config, ConfigError, batch_sizes

KEYS = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
)
# 48 samples = 4 per device and microbatch x 3 microbatches x 4 devices
SIZES = dict(zip(KEYS, (48, 4, 3), strict=True))


@pytest.mark.parametrize("given", [*itertools.combinations(KEYS, 2), KEYS])
def test_any_two_sizes_imply_the_third(given):
    config = Config.load({key: SIZES[key] for key in given}, world_size=4)
    assert config.batch_size == 48
    assert config.microbatch_size == 4
    assert config.num_microbatches == 3


def test_the_batch_alone_is_one_microbatch():
    assert batch_sizes(32, None, None, world_size=2) == BatchSizes(32, 16, 1)


def test_the_microbatch_alone_is_the_batch():
    assert batch_sizes(None, 8, None, world_size=2) == BatchSizes(16, 8, 1)


def test_accumulation_alone_leaves_the_sizes_to_the_first_batch():
    assert batch_sizes(None, None, 4) == BatchSizes(None, None, 4)
    assert batch_sizes(None, None, None) == BatchSizes(None, None, 1)


def test_sizes_that_do_not_multiply_name_the_product_and_the_devices_they_are_for():
    with pytest.raises(ConfigError) as error:
        Config.load(SIZES)
    assert "4 x 3 x 1 = 12, not 48" in str(error.value)
    assert "right on 4 devices" in str(error.value)


@pytest.mark.parametrize(
    "sizes",
    [(10, 4, None), (10, None, 3), (1, None, 4), (10, 20, None), (7, 2, 3)],
)
def test_sizes_that_do_not_divide_are_refused(sizes):
    given = {key: size for key, size in zip(KEYS, sizes, strict=True) if size}
    with pytest.raises(ConfigError, match="train_batch_size"):
        Config.load(given)


def test_a_batch_that_does_not_divide_over_the_devices_is_refused():
    with pytest.raises(ConfigError, match="make|Make"):
        Config.load({"train_batch_size": 10}, world_size=4)


@pytest.mark.parametrize("value", [0, -1, 1.5, "4", True])
@pytest.mark.parametrize("key", KEYS)
def test_sizes_are_positive_whole_numbers(key, value):
    with pytest.raises(ConfigError, match=key):
        Config.load({key: value})


def test_a_config_keeps_the_number_of_devices_it_was_loaded_for():
    config = Config.load(SIZES, world_size=4)
    assert Config.load(config) is config
    assert Config.load(config, ["run.seed=1"]).batch_size == 48
    with pytest.raises(ConfigError, match="12, not 48"):
        Config.load(config, world_size=1)


def test_auto_sizes_are_as_if_absent():
    config = Config.load({**dict.fromkeys(KEYS, "auto"), KEYS[1]: 4})
    assert (config.batch_size, config.num_microbatches) == (4, 1)
