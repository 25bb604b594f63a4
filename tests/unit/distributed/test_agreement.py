"""What differs between processes, in words; and what a fingerprint is made of."""

import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from zinf.distributed import Alone
from zinf.distributed.agreement import differences, flat, processes
from zinf.distributed.digests import BLOCK_BYTES, MOST_NAMED, PART, Digests
from zinf.distributed.fingerprint import code_fingerprint


def test_equal_values_have_no_differences():
    assert differences([{"jax": "1", "seed": 0}] * 3) is None


def test_each_difference_names_both_values_and_their_processes():
    values = [{"jax": "1", "seed": 0}, {"jax": "2", "seed": 0}, {"jax": "1"}]
    assert differences(values) == (
        "  jax: 1 on processes 0, 2; 2 on process 1\n"
        "  seed: 0 on processes 0-1; nothing on process 2"
    )


def test_many_processes_are_named_briefly_and_a_tree_leaf_by_leaf():
    assert processes([3]) == "process 3"
    assert processes([2, 0]) == "processes 0, 2"
    assert processes([5, 1, 2, 0]) == "processes 0-2, 5"
    tree = {"a": {"b": 1, "c": {"d": [2]}}, "e": None}
    assert flat(tree) == {"a.b": 1, "a.c.d": [2], "e": None}


def test_the_code_of_one_tree_has_one_fingerprint_with_every_version():
    found = code_fingerprint()
    assert found == code_fingerprint()
    assert {"jax", "jaxlib", "numpy", "optax", "python", "zinf source"} == found.keys()


class Pair(Alone):
    """One of two threads that exchange values as processes do."""

    count = 2

    def __init__(self, index: int, given: dict[int, Any], meeting: threading.Barrier):
        self.number, self.given, self.meeting = index, given, meeting

    def gather(self, name: str, value: Any, timeout: float | None = None) -> list[Any]:
        self.given[self.number] = value
        self.meeting.wait(30)
        values = [self.given[0], self.given[1]]
        self.meeting.wait(30)
        return values


def told_apart(*both: Mapping[str, np.ndarray]) -> list[str]:
    """What each of two processes says of the arrays that both begin with."""
    given, meeting = {}, threading.Barrier(2)

    def begin(index: int) -> str:
        digests = Digests(Pair(index, given, meeting))
        for name, array in both[index].items():
            digests.add(name, array)
        try:
            digests.agree()
        except ValueError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(begin, range(2)))


def test_initial_values_that_differ_in_any_bit_are_named_up_to_a_few():
    large = np.zeros((BLOCK_BYTES // 4 // 1000 + 1, 2000), np.float32)
    here = {"scalar": np.float32(1), "rows": large[:, ::2], "none": np.ones((0, 3))}
    there = here | {"rows": large[:, ::2].copy()}  # The same, in memory of its own.
    assert told_apart(here, there) == ["", ""]
    there["rows"][-1, -1] = -0.0
    for other in ({"scalar": np.int32(1)}, {"none": np.ones((0, 4))}, there):
        first, second = told_apart(here, here | other)
        assert first == second and "1 of 3 initial values differ" in first
    names = [f"w{n}" for n in range(2 * PART + 1)]
    zeros = dict.fromkeys(names, np.zeros(1))
    # Those at the ends of messages, and two more than are named.
    odd = [names[i] for i in (0, 1, 2, PART - 1, PART, 2 * PART - 1, 2 * PART)]
    first, _ = told_apart(zeros, zeros | dict.fromkeys(odd, np.ones(1)))
    assert f"{len(odd)} of {len(names)} initial values differ" in first
    assert [name for name in names if f"\n  {name}: " in first] == odd[:MOST_NAMED]
    assert f"and {len(odd) - MOST_NAMED} more" in first
