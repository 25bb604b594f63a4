"""A change of dtype is exact, rounded to nearest, or an error."""

import ml_dtypes
import numpy as np
import pytest

from zinf.interchange.rounding import is_exact, rounded

ONE = np.float32(1)
STEP = np.float32(2**-7)  # from 1 to the next bfloat16


@pytest.mark.parametrize(
    ("source", "target", "expected"),
    [
        ("bfloat16", "float32", True),
        ("float16", "float32", True),
        ("float32", "float64", True),
        ("float8_e4m3fn", "bfloat16", True),
        ("int32", "int32", True),
        ("float32", "bfloat16", False),
        ("float16", "bfloat16", False),
        ("bfloat16", "float16", False),
        ("int32", "int64", False),
        ("int32", "float64", False),
        ("bool", "uint8", False),
        ("complex64", "float64", False),
    ],
)
def test_only_a_wider_float_holds_every_value(source, target, expected):
    assert is_exact(source, target) is expected


def test_values_go_to_the_nearest_and_ties_to_even():
    values = np.array([0.25, 0.5, 0.75, 1.5, 2.25], np.float32) * STEP + ONE
    nearest = np.array([0, 0, 1, 2, 2], np.float32) * STEP + ONE
    found = rounded(values, "bfloat16", name="x")
    assert found.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(found.astype(np.float32), nearest)


def test_the_same_dtype_is_the_same_array():
    values = np.ones(3, np.float32)
    assert rounded(values, "float32", name="x") is values


def test_infinities_and_nan_stay_what_they_are():
    values = np.array([np.inf, -np.inf, np.nan, 1], np.float32)
    found = rounded(values, "float16", name="x").astype(np.float32)
    np.testing.assert_array_equal(found, values)


@pytest.mark.parametrize(
    ("value", "dtype", "limit"),
    [(7e4, "float16", "65504"), (3.4e38, "bfloat16", "3.38953e+38")],
)
def test_a_value_beyond_the_range_is_refused_by_name(value, dtype, limit):
    values = np.array([1, -value], np.float32)
    with pytest.raises(ValueError) as refused:
        rounded(values, dtype, name="embed")
    assert "'embed'" in str(refused.value) and limit in str(refused.value)
