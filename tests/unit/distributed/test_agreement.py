"""What differs between processes, in words; and what a fingerprint is made of."""

import pytest

from zinf.distributed.agreement import differences, flat, processes
from zinf.distributed.fingerprint import code_fingerprint


def test_equal_values_have_no_differences():
    assert differences([{"jax": "1", "seed": 0}] * 3) is None


def test_each_difference_names_both_values_and_their_processes():
    values = [{"jax": "1", "seed": 0}, {"jax": "2", "seed": 0}, {"jax": "1"}]
    assert differences(values) == (
        "  jax: 1 on processes 0, 2; 2 on process 1\n"
        "  seed: 0 on processes 0-1; nothing on process 2"
    )


@pytest.mark.parametrize(
    ("indices", "text"),
    [
        ([3], "process 3"),
        ([2, 0], "processes 0, 2"),
        ([5, 1, 2, 0], "processes 0-2, 5"),
    ],
)
def test_many_processes_are_named_briefly(indices, text):
    assert processes(indices) == text


def test_a_tree_is_told_apart_leaf_by_leaf():
    tree = {"a": {"b": 1, "c": {"d": [2]}}, "e": None}
    assert flat(tree) == {"a.b": 1, "a.c.d": [2], "e": None}


def test_the_code_of_one_tree_has_one_fingerprint_with_every_version():
    found = code_fingerprint()
    assert found == code_fingerprint()
    assert {"jax", "jaxlib", "numpy", "optax", "python", "zinf source"} == found.keys()
