"""Reads and writes one array of a run, by the path of its leaf and its kind.

The counterparts in DeepSpeed are `safe_get_full_fp32_param`,
`safe_get_full_optimizer_state` and the functions `safe_set_...`.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zinf.core.config.nearest import did_you_mean
from zinf.core.jaxpr.keys import from_words, is_key, to_words
from zinf.core.memory import Residents
from zinf.core.optim.separate import State
from zinf.core.problem.problem import ParamSpec
from zinf.core.program import ArrayId, Role
from zinf.core.segment import NOTHING, Instead, StateArray
from zinf.core.step.planner import Planner

MASTER, COMPUTE, GRADIENT = "master", "compute", "gradient"


def check_path(planner: Planner, path: str) -> None:
    """Raise ValueError, with the most similar path, unless `path` names a leaf."""
    paths = planner.problem.params
    if path not in paths:
        raise ValueError(
            f"There is no parameter {path!r}.{did_you_mean(path, paths)} There are "
            f"{len(paths)}, such as {next(iter(paths))!r}: paths are key paths joined "
            "by '/', and those of model state begin with 'model_state/'."
        )


def array_of(planner: Planner, path: str, kind: str) -> ArrayId:
    """The persistent array of a leaf and a kind.

    Raises:
        ValueError: there is no such leaf, or it has no such kind. The message lists the
            kinds that it has.
    """
    check_path(planner, path)
    found = {
        MASTER: planner.problem.params[path].updated(),
        COMPUTE: ArrayId(Role.PARAM, path),
        **_states(planner, path),
    }
    if kind not in found:
        kinds = [*found, GRADIENT]
        raise ValueError(
            f"The parameter {path!r} has no {kind!r}.{did_you_mean(kind, kinds)} It "
            f"has {', '.join(map(repr, kinds))}."
        )
    return found[kind]


def averages_of(planner: Planner, kind: str) -> dict[str, State]:
    """The averages of a kind, such as "ema", by the path of their leaf.

    Raises:
        ValueError: no leaf has such an average.
    """
    known = planner.separated.averages()
    if kind not in known:
        has = f"It has {', '.join(map(repr, known))}." if known else "It has none."
        raise ValueError(
            f"The optimizer keeps no average of the weights that is called {kind!r}. "
            f"{has} zinf.with_ema, chained last, or optimizer.ema in the config makes "
            "'ema'."
        )
    return known[kind]


def instead_of(planner: Planner, kind: str) -> Instead:
    """What is read in place of parameters, to compute with weights of a kind.

    Raises:
        ValueError: see `averages_of`.
    """
    if kind == MASTER:
        return NOTHING
    return {
        path: StateArray(state.slot, str(state.spec.dtype))
        for path, state in averages_of(planner, kind).items()
    }


def _states(planner: Planner, path: str) -> dict[str, ArrayId]:
    """The optimizer state arrays of a leaf by optax's names, such as "mu"."""
    return {
        name: state.array(path)
        for leaf in planner.separated.leaves
        if leaf.path == path
        for name, state in leaf.named_states().items()
    }


def read_named(
    planner: Planner, residents: Residents, path: str, kind: str
) -> np.ndarray | Any:
    """A copy of the whole array on the host. A random key is returned as a key."""
    array = array_of(planner, path, kind)
    content = np.array(residents.read(array))
    spec = planner.problem.params[path]
    return from_words(content, spec.given) if kind in (MASTER, COMPUTE) else content


def writes_of(
    planner: Planner, residents: Residents, path: str, value: Any, kind: str
) -> dict[ArrayId, np.ndarray]:
    """The arrays to write in order to set an array of a leaf to `value`.

    Raises:
        ValueError: the leaf or kind is unknown, the kind cannot be set, the shape or
            the kind of number differs, or the compute copy would overflow.
    """
    if kind in (COMPUTE, GRADIENT):
        check_path(planner, path)
        why = "is made from the master" if kind == COMPUTE else "is made by each step"
        raise ValueError(
            f"The {kind} array of {path!r} {why}, so that setting it would not last. "
            "Set kind='master': the compute copy is set with it."
        )
    array = array_of(planner, path, kind)
    spec, wanted = planner.problem.params[path], residents.specs[array]
    given = value if isinstance(value, jax.Array) else np.asarray(value)
    if kind == MASTER and is_key(spec.given) and is_key(given):
        given = to_words(given)
    content = _checked(given, f"{kind} {path!r}", wanted.shape, jnp.dtype(wanted.dtype))
    writes = {array: content}
    copy = spec.copy()
    if kind == MASTER and copy is not None:
        writes[copy] = _compute_copy(content, spec)
    return writes


def _checked(
    given: Any, name: str, shape: tuple[int, ...], dtype: np.dtype
) -> np.ndarray:
    if given.shape != shape:
        raise ValueError(
            f"The value for the {name} has shape {list(given.shape)}; the array has "
            f"shape {list(shape)}. Give the whole array."
        )
    order = (np.bool_, np.integer, np.floating, np.complexfloating)
    rank = [jnp.issubdtype(given.dtype, kind) for kind in order]
    own = [jnp.issubdtype(dtype, kind) for kind in order]
    if True not in rank or rank.index(True) > own.index(True):
        raise ValueError(
            f"The value for the {name} is {given.dtype}; the array is {dtype}, which "
            "does not hold such numbers. Convert it first."
        )
    # A copy, because a store may keep this memory, and the caller may change its own.
    return np.array(given, dtype=dtype)


def _compute_copy(master: np.ndarray, spec: ParamSpec) -> np.ndarray:
    with np.errstate(over="ignore"):
        copy = master.astype(spec.compute.dtype)
    lost = np.isfinite(master) & ~np.isfinite(copy.astype(np.float32))
    if lost.any():
        raise ValueError(
            f"The value for the master {spec.path!r} has {int(lost.sum())} numbers of "
            f"up to {np.abs(master[lost]).max():g}, which are infinite in "
            f"{spec.compute.dtype}, in which the loss reads it. Nothing was set."
        )
    return copy
