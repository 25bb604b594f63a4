"""Leaves and tensors are matched by name and dtype; what does not match is named."""

import ml_dtypes
import numpy as np
import pytest

from tests.golden import Golden
from zinf.core.interchange.names import Terms, match, named
from zinf.core.interchange.rounding import is_exact, rounded
from zinf.core.program import ArraySpec

MATRIX, ROW = ArraySpec((2, 3), "float32", 4), ArraySpec((3,), "float32", 4)
WIDE, INTEGERS = ArraySpec((3,), "float64", 8), ArraySpec((3,), "int32", 4)
LEAVES = {"a/w": MATRIX, "a/b": ROW}
NAMES = {"a/w": "a.w", "a/b": "a.b"}


def test_names_are_dotted_paths_or_what_is_given():
    assert named(LEAVES, None) == NAMES
    assert named(LEAVES, {"a/w": "weight"}) == {"a/w": "weight", "a/b": "a.b"}
    assert named(LEAVES, lambda path: f"model/{path}")["a/b"] == "model/a/b"


def test_what_matches_is_found_and_the_rest_kept_ignored_or_rounded_if_allowed():
    narrow = {"a.b": ROW, "a.w": ArraySpec((2, 3), "bfloat16", 2)}
    assert match(LEAVES, narrow, NAMES, Terms()) == NAMES
    terms = Terms(keep=["*/b"], ignore=["head.*"])
    more = {"a.w": MATRIX, "head.w": MATRIX}
    assert match(LEAVES, more, NAMES, terms) == {"a/w": "a.w"}
    wide = {"a.w": MATRIX, "a.b": WIDE}
    assert match(LEAVES, wide, NAMES, Terms(may_round=True)) == NAMES


def test_what_does_not_match_is_named_at_once(golden: Golden):
    many = {str(i): ROW for i in range(100)}
    texts = []
    mistakes = [
        (lambda: named(["a/b", "a.b"], None)),
        (lambda: named(LEAVES, lambda path: "x")),
        (lambda: named(LEAVES, {"a/c": "c"})),
        (lambda: match(LEAVES, {"a.w": ROW, "c": ROW}, NAMES, Terms())),
        (lambda: match(LEAVES, {"a.w": MATRIX, "a.b": WIDE}, NAMES, Terms())),
        # Integers are never rounded.
        *(
            (lambda t=t: match(LEAVES, {"a.w": MATRIX, "a.b": INTEGERS}, NAMES, t))
            for t in (Terms(), Terms(may_round=True))
        ),
        (
            lambda: match(
                many, dict.fromkeys(many, MATRIX), {p: p for p in many}, Terms()
            )
        ),
        (lambda: match(many, {}, {p: p for p in many}, Terms())),
    ]
    for mistake in mistakes:
        with pytest.raises(ValueError) as refused:
            mistake()
        texts.append(str(refused.value))
    golden.check("matching.txt", "\n\n".join(texts))


EXACT = (
    ("bfloat16", "float32"),
    ("float16", "float32"),
    ("float32", "float64"),
    ("float8_e4m3fn", "bfloat16"),
    ("int32", "int32"),
)
INEXACT = (
    *(("float32", "bfloat16"), ("float16", "bfloat16"), ("bfloat16", "float16")),
    *(("int32", "int64"), ("int32", "float64"), ("bool", "uint8")),
    *(("complex64", "float64"), ("float8_e5m2", "float8_e4m3fn")),
)


def test_only_a_wider_float_holds_every_value():
    assert all(is_exact(*pair) for pair in EXACT)
    assert not any(is_exact(*pair) for pair in INEXACT)


def test_values_go_to_the_nearest_and_ties_to_even():
    one, step = np.float32(1), np.float32(2**-7)  # from 1 to the next bfloat16
    values = np.array([0.25, 0.5, 0.75, 1.5, 2.25], np.float32) * step + one
    nearest = np.array([0, 0, 1, 2, 2], np.float32) * step + one
    found = rounded(values, "bfloat16", name="x")
    assert found.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(found.astype(np.float32), nearest)
    assert rounded(values, "float32", name="x") is values
    unlimited = np.array([np.inf, -np.inf, np.nan, 1], np.float32)
    kept = rounded(unlimited, "float16", name="x").astype(np.float32)
    np.testing.assert_array_equal(kept, unlimited)


@pytest.mark.parametrize(
    ("value", "dtype", "words"),
    [
        (7e4, "float16", "'embed' holds 70000, and float16 goes up to 65504"),
        (3.4e38, "bfloat16", r"bfloat16 goes up to 3.38953e\+38"),
    ],
)
def test_a_value_beyond_the_range_is_refused_by_name(value, dtype, words):
    with pytest.raises(ValueError, match=words):
        rounded(np.array([1, -value], np.float32), dtype, name="embed")
