"""How the model state of a step follows from those of its microbatches.

All microbatches start from the state before the step. A running mean of batch
statistics then advances by the mean over the microbatches; a count or a maximum does
not.
"""

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatch
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zinf.core.jaxpr.keys import is_key


def _mean(old: np.ndarray, new: np.ndarray) -> np.ndarray:
    return new.mean(axis=0, dtype=np.float32)


def _sum(old: np.ndarray, new: np.ndarray) -> np.ndarray:
    return old + (new - old).sum(axis=0, dtype=new.dtype)


# Each takes the state before the step, and the new ones with a leading microbatch dim.
COMBINE: Mapping[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "mean": _mean,
    "sum": _sum,
    "max": lambda old, new: new.max(axis=0),
    "min": lambda old, new: new.min(axis=0),
    "last": lambda old, new: new[-1],
}


def combined(rule: str, old: np.ndarray, new: np.ndarray) -> np.ndarray:
    """One model state of a step.

    Args:
        rule: a name of `COMBINE`. "sum" adds what each microbatch added.
        old: the state before the step.
        new: the state after each microbatch, (num_microbatches, *old.shape).
    """
    if len(new) == 1:
        return np.asarray(new[0])
    return np.asarray(COMBINE[rule](old, new)).astype(old.dtype)


def rules_of(
    leaves: Mapping[str, jax.ShapeDtypeStruct],
    given: Mapping[str, str],
    *,
    num_microbatches: int,
) -> dict[str, str]:
    """The rule of each leaf of the model state, by key path.

    Args:
        given: rules by glob pattern over key paths; of several that match, the last one
            counts. Floating-point leaves without a rule are averaged.

    Raises:
        ValueError: a rule is unknown or matches nothing; or, with several microbatches,
            a leaf has no rule or one that its dtype does not allow.
    """
    for pattern, rule in given.items():
        if rule not in COMBINE:
            raise ValueError(
                f"state_rules: the rule of {pattern!r} is {rule!r}; it must be one of "
                f"{', '.join(COMBINE)}."
            )
        if not any(fnmatch(path, pattern) for path in leaves):
            raise ValueError(
                f"state_rules: no leaf of the model state matches {pattern!r}. The "
                f"leaves are {', '.join(leaves) or 'none'}."
            )
    found = {}
    for path, leaf in leaves.items():
        named = [rule for pattern, rule in given.items() if fnmatch(path, pattern)]
        is_float = jnp.issubdtype(leaf.dtype, jnp.floating)
        if named:
            found[path] = named[-1]
        elif is_key(leaf):
            # Every microbatch makes the same new key of the old one.
            found[path] = "last"
        else:
            found[path] = "mean" if is_float else ""
        if num_microbatches > 1:
            _check(path, leaf, found[path], num_microbatches)
    return found


def _check(path: str, leaf: Any, rule: str, num_microbatches: int) -> None:
    if not rule:
        raise ValueError(
            f"The model state {path!r} is {leaf.dtype}, and a step has "
            f"{num_microbatches} microbatches, whose states have no mean. Say how they "
            f"become one: state_rules={{{path!r}: RULE}}, where RULE is sum (of what "
            "each microbatch adds, for a count), max, min or last."
        )
    is_float = jnp.issubdtype(leaf.dtype, jnp.floating)
    if rule == "mean" and not is_float or is_key(leaf) and rule != "last":
        raise ValueError(
            f"state_rules: {path!r} is {leaf.dtype}, and its rule is {rule!r}. Take "
            "another one: sum (what microbatches add), max, min or last."
        )


def combined_tree(
    old: Any, new: Sequence[Any], rules: Mapping[str, str], paths: Sequence[str]
) -> Any:
    """`combined` of each leaf of a pytree, for plain JAX.

    Args:
        old, new: the state before the step, and those after its microbatches.
        paths: the key paths of the leaves, in order.
    """

    def one(path: str, before: Any, *after: Any) -> Any:
        if is_key(before):  # A key has no numbers in numpy; its rule is "last".
            return after[-1]
        stacked = np.stack([np.asarray(x) for x in after])
        return jnp.asarray(combined(rules[path], np.asarray(before), stacked))

    named = jax.tree.unflatten(jax.tree.structure(old), paths)
    return jax.tree.map(one, named, old, *new)
