"""The leaves of a program: how each is stored, and which are read by layers."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from zinf.core.jaxpr.compat import Var
from zinf.core.jaxpr.keys import in_words
from zinf.core.program import ArraySpec, Leaf


def array_spec(aval: Any) -> ArraySpec:
    """The stored form of a value: random keys as words, which every tier can hold."""
    aval = in_words(aval)
    return ArraySpec(tuple(aval.shape), str(aval.dtype), aval.dtype.itemsize)


def layer_weights(leaves: Mapping[Var, str]) -> list[Var]:
    """The leaves that are read by the layer that they belong to.

    They are floating-point numbers, and the integers of weights in few bits: codes of
    8 bits and, beside them, scales as words. Other integers are random keys and
    counters.
    """
    in_few_bits = {
        _parent(path)
        for v, path in leaves.items()
        if jnp.issubdtype(v.aval.dtype, jnp.integer) and v.aval.dtype.itemsize == 1
    }
    return [
        v
        for v, path in leaves.items()
        if jnp.issubdtype(v.aval.dtype, jnp.floating) or _parent(path) in in_few_bits
    ]


def _parent(path: str) -> str:
    return path.rpartition("/")[0]


def leaf_of(variable: Var, path: str, is_stacked: bool, is_frozen: bool) -> Leaf:
    is_float = jnp.issubdtype(variable.aval.dtype, jnp.floating)
    num_layers = variable.aval.shape[0] if is_stacked else None
    return Leaf(path, array_spec(variable.aval), is_float and not is_frozen, num_layers)
