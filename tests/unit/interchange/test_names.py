"""Leaves and tensors are matched by name, and all that does not match is named."""

import pytest

from zinf.interchange.names import Terms, match, named
from zinf.program import ArraySpec

MATRIX, ROW = ArraySpec((2, 3), "float32", 4), ArraySpec((3,), "float32", 4)
LEAVES = {"a/w": MATRIX, "a/b": ROW}
NAMES = {"a/w": "a.w", "a/b": "a.b"}


def test_names_are_dotted_paths_or_what_is_given():
    assert named(LEAVES, None) == NAMES
    assert named(LEAVES, {"a/w": "weight"}) == {"a/w": "weight", "a/b": "a.b"}
    assert named(LEAVES, lambda path: f"model/{path}")["a/b"] == "model/a/b"


def test_two_leaves_of_one_name_are_refused():
    with pytest.raises(ValueError, match=r"'a/b' and 'a\.b' would both be .* 'a\.b'"):
        named(["a/b", "a.b"], None)
    with pytest.raises(ValueError, match="'a/w' and 'a/b' would both be"):
        named(LEAVES, lambda path: "x")


def test_a_name_for_a_leaf_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match="names has a/c, and there is no such leaf"):
        named(LEAVES, {"a/c": "c"})


def test_what_matches_is_found():
    tensors = {"a.b": ROW, "a.w": ArraySpec((2, 3), "bfloat16", 2)}
    assert match(LEAVES, tensors, NAMES, Terms()) == NAMES


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"a.w": MATRIX}, "no tensor for 1 leaves: 'a/b' (as 'a.b')"),
        ({"a.w": MATRIX, "a.b": ROW, "c": ROW}, "1 tensors of no leaf: 'c'"),
        ({"a.w": MATRIX, "a.b": MATRIX}, "'a/b' is [3] here and [2, 3] there"),
        (
            {"a.w": MATRIX, "a.b": ArraySpec((3,), "float64", 8)},
            "'a/b' is float32 here and float64 there",
        ),
        (
            {"a.w": MATRIX, "a.b": ArraySpec((3,), "int32", 4)},
            "'a/b' is float32 here and int32 there",
        ),
    ],
)
def test_what_does_not_match_is_named(tensors, words):
    with pytest.raises(ValueError) as refused:
        match(LEAVES, tensors, NAMES, Terms())
    assert words in str(refused.value)
    assert "Nothing was overwritten" in str(refused.value)


def test_all_that_does_not_match_is_named_at_once():
    with pytest.raises(ValueError) as refused:
        match(LEAVES, {"a.w": ROW, "c": ROW}, NAMES, Terms())
    for words in ("'a/b'", "'c'", "'a/w' is"):
        assert words in str(refused.value)


def test_leaves_may_be_kept_and_tensors_ignored_by_pattern():
    tensors = {"a.w": MATRIX, "head.w": MATRIX}
    terms = Terms(keep=["*/b"], ignore=["head.*"])
    assert match(LEAVES, tensors, NAMES, terms) == {"a/w": "a.w"}


def test_rounding_is_allowed_between_floats_alone():
    wide = {"a.w": MATRIX, "a.b": ArraySpec((3,), "float64", 8)}
    assert match(LEAVES, wide, NAMES, Terms(may_round=True)) == NAMES
    integers = {"a.w": MATRIX, "a.b": ArraySpec((3,), "int32", 4)}
    with pytest.raises(ValueError, match="int32 there"):
        match(LEAVES, integers, NAMES, Terms(may_round=True))


def test_many_problems_are_counted_but_not_all_shown():
    leaves = {str(i): ROW for i in range(100)}
    tensors = dict.fromkeys(leaves, MATRIX)
    with pytest.raises(ValueError, match="and 92 more") as refused:
        match(leaves, tensors, {path: path for path in leaves}, Terms())
    assert len(str(refused.value).splitlines()) < 15
