"""Packages that import on first use are still modules to others."""

import pickle

import zinf
import zinf.ray


def test_a_lazy_package_is_pickled_by_name():
    """A function that uses it may be sent to workers."""
    for package in (zinf, zinf.ray):
        assert pickle.loads(pickle.dumps(package)) is package
