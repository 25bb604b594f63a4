"""Sizes of batches and of memory, for all numbers."""

from decimal import Decimal

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from zinf.core.config import Config, ConfigError, batch_sizes, parse_size
from zinf.core.config.size import UNITS

KEYS = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
)
counts = st.integers(1, 9)
repeatable = settings(derandomize=True, deadline=None, database=None, max_examples=60)


@repeatable
@given(counts, counts, counts, st.tuples(*[st.booleans()] * 3))
def test_any_two_sizes_imply_the_third(
    microbatch: int, accumulation: int, devices: int, is_given: tuple[bool, ...]
) -> None:
    """With one size alone there is no accumulation, or the first batch decides."""
    assume(any(is_given))
    if sum(is_given) == 1 and not is_given[2]:
        accumulation = 1
    batch = microbatch * accumulation * devices
    sizes = (batch, microbatch, accumulation)
    raw = {k: size for k, size, x in zip(KEYS, sizes, is_given, strict=True) if x}
    config = Config.load(raw, world_size=devices)
    found = config.batch_size, config.microbatch_size, config.num_microbatches
    is_alone = raw.keys() == {KEYS[2]}
    assert found == ((None, None, accumulation) if is_alone else sizes)


@repeatable
@given(st.integers(1, 30), st.none() | counts, st.none() | counts, counts)
def test_sizes_are_refused_if_and_only_if_they_do_not_multiply(
    batch: int, microbatch: int | None, accumulation: int | None, devices: int
) -> None:
    raw = dict(zip(KEYS, (batch, microbatch, accumulation), strict=True))
    raw = {key: size for key, size in raw.items() if size is not None}
    is_right = batch % ((microbatch or 1) * (accumulation or 1) * devices) == 0
    if microbatch and accumulation:
        is_right = batch == microbatch * accumulation * devices
    if is_right:
        Config.load(raw, world_size=devices)
        return
    with pytest.raises(ConfigError) as error:
        Config.load(raw, world_size=devices)
    (problem,) = error.value.problems
    assert problem.path == ("train_batch_size",)
    others = (microbatch or 0) * (accumulation or 0)
    on_others = f"right on {batch // others} devices" if others else "devices.)"
    assert (on_others in problem.text) == (bool(others) and batch % others == 0)


MESHES = [
    ({}, 1),
    ({"mesh": {"fsdp": 4}}, 4),
    ({"mesh": {"fsdp": 4, "replica": 2, "expert": 3}}, 24),
    # Devices of these axes have the same examples.
    ({"mesh": {"fsdp": 2, "seq": 4, "tensor": 8}}, 2),
    ({"mesh": {"replica": 2}}, 1),  # Of all devices; how many is not known here.
]


@pytest.mark.parametrize(("raw", "devices"), MESHES)
def test_the_samples_of_a_step_count_the_devices_of_the_mesh(
    raw: dict[str, object], devices: int
) -> None:
    config = Config.load({"train_micro_batch_size_per_gpu": 32, **raw})
    assert (config.world_size, config.batch_size) == (devices, 32 * devices)
    batch = 32 * devices
    assert Config.load({"train_batch_size": batch, **raw}).microbatch_size == 32


def test_without_sizes_the_first_batch_decides() -> None:
    found = batch_sizes(None, None, None)
    assert (found.batch, found.microbatch, found.num_microbatches) == (None, None, 1)


@repeatable
@given(
    st.integers(0, 2**40) | st.decimals(0, 2**20, places=3),
    st.sampled_from([*UNITS, *map(str.lower, UNITS), ""]),
    st.sampled_from(["", " ", "  "]),
)
@example(2**53 + 1, "", "")
def test_a_number_and_a_unit_are_bytes_exactly_or_refused(
    number: int | Decimal, unit: str, space: str
) -> None:
    powers = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4, "p": 5}
    letters = unit.lower().removesuffix("b")
    base = 1024 if letters.endswith("i") else 1000
    nbytes = Decimal(number) * base ** powers[letters.removesuffix("i")]
    text = f"{space}{number}{space}{unit}{space}"
    if nbytes == int(nbytes):
        assert parse_size(text) == nbytes
    else:
        with pytest.raises(ValueError, match="not a whole number"):
            parse_size(text)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("12 GX", "unknown unit 'GX'. Did you mean 'GB'?"),
        ("12 GiBs", "Did you mean 'GiB'?"),
        ("12G", "unknown unit 'G'"),
        *((text, "not a size") for text in ("-5GiB", "GiB", "", "1e9", "١٢ GiB")),
        *((number, "not a whole number") for number in (1.5, float("inf"))),
        (float("nan"), "not a whole number"),
        (True, "not a size"),
        ([1], "not a size"),
    ],
)
def test_what_is_no_size_is_refused(value: object, words: str) -> None:
    with pytest.raises(ValueError) as error:
        parse_size(value)
    assert words in str(error.value)


def test_numbers_are_bytes() -> None:
    assert (parse_size(4096), parse_size(1e9)) == (4096, 10**9)
