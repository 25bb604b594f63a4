"""Terms that all packages share, and packages themselves, are one object each."""

import copy
import pickle
from dataclasses import replace

import zinf
import zinf.ray
from zinf.core.program import ArrayId, Role


def test_equal_names_are_one_object():
    name = ArrayId(Role.STATE, "blocks/0/kernel", rows=(0, 4), slot=1)
    assert ArrayId(Role("state"), "blocks/0/kernel", (0, 4), None, 1) is name
    assert replace(name, slot=0) is not name
    assert replace(replace(name, slot=0), slot=1) is name
    assert name.whole.piece((0, 4)) is name
    assert copy.deepcopy(name) is name
    assert pickle.loads(pickle.dumps(name)) is name


def test_a_lazy_package_is_pickled_by_name():
    """A function that uses the package may be sent to workers."""
    for package in (zinf, zinf.ray):
        assert pickle.loads(pickle.dumps(package)) is package
