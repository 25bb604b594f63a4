"""Structured sparsity: whole groups of weights become 0 together, and can be removed.

The weights of a unit of an LSTM, the rows of its gates and the columns that read it,
are a group (Intrinsic Sparse Structures, https://arxiv.org/abs/1709.05027). A group of
norm n shrinks by the factor max(0, 1 - rate * strength / n) after each update, which is
the proximal step of the penalty strength * n.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

# Keeps the factor of a group of zeros finite.
LEAST = 1e-30


@dataclass(frozen=True)
class Member:
    """Where the groups of a set lie in a leaf.

    Attributes:
        path: of the leaf, as `jax.tree_util.keystr(simple=True, separator="/")` has it.
        dim: whose entry i belongs to group i, modulo the number of groups; so the rows
            of four gates, one behind the other, belong to the groups of their units.
    """

    path: str
    dim: int


# Of each set of groups, how many there are and where they lie.
Sets = Mapping[str, tuple[int, Sequence[Member]]]


def group_lasso(
    rate: float, strength: float, groups: Sets
) -> optax.GradientTransformation:
    """Shrink groups of weights after an update; chained last.

    Groups with members in several leaves couple these, and `zinf.initialize` refuses
    transforms that do: it is for training by optax alone.

    Args:
        rate: the learning rate of the transforms before.
        strength: of the penalty: the sum of the norms of all groups, times this.
        groups: sets by name; a leaf may be in several, along different dims.

    Raises:
        ValueError: when the state is made: a leaf is absent, or its dim is no multiple
            of the number of groups.
    """

    def init(params: Any) -> optax.EmptyState:
        _check(_leaves(params), groups)
        return optax.EmptyState()

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        if params is None:
            raise ValueError(
                "group_lasso needs the parameters: tx.update(g, s, params)."
            )
        moved = optax.apply_updates(params, updates)
        leaves = _leaves(moved)
        for count, members in groups.values():
            norms = jnp.sqrt(_squares(leaves, count, members))
            factors = jnp.maximum(0, 1 - rate * strength / jnp.maximum(norms, LEAST))
            for member in members:
                leaf = leaves[member.path]
                leaves[member.path] = leaf * _along(factors, leaf.ndim, member, leaf)
        shrunk = jax.tree.unflatten(jax.tree.structure(params), leaves.values())
        return jax.tree.map(lambda new, old: new - old, shrunk, params), state

    return optax.GradientTransformation(init, update)


def vanished(params: Any, groups: Sets) -> dict[str, np.ndarray]:
    """The groups of each set whose weights are all 0, ascending."""
    leaves = _leaves(params)
    return {
        name: np.flatnonzero(np.asarray(_squares(leaves, count, members)) == 0)
        for name, (count, members) in groups.items()
    }


def without(params: Any, groups: Sets, gone: Mapping[str, Iterable[int]]) -> Any:
    """The parameters without some groups: smaller leaves, in the same tree.

    Args:
        gone: of each set, the groups to remove; see `vanished`.
    """
    leaves = _leaves(params)
    for name, (count, members) in groups.items():
        stays = np.setdiff1d(np.arange(count), [*gone.get(name, ())])
        for member in members:
            leaf = leaves[member.path]
            blocks = leaf.shape[member.dim] // count
            kept = (np.arange(blocks)[:, None] * count + stays).reshape(-1)
            leaves[member.path] = jnp.take(leaf, kept, axis=member.dim)
    return jax.tree.unflatten(jax.tree.structure(params), leaves.values())


def _leaves(tree: Any) -> dict[str, jax.Array]:
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def _squares(
    leaves: Mapping[str, jax.Array], count: int, members: Sequence[Member]
) -> jax.Array:
    """The sum of squares of each group, float32 (count,)."""
    total = jnp.zeros(count, jnp.float32)
    for member in members:
        rows = jnp.moveaxis(leaves[member.path], member.dim, 0).astype(jnp.float32)
        total += jnp.square(rows.reshape(-1, count, *rows.shape[1:])).sum(
            axis=(0, *range(2, rows.ndim + 1))
        )
    return total


def _along(factors: jax.Array, ndim: int, member: Member, leaf: jax.Array) -> jax.Array:
    """The factors of groups as an array that multiplies a leaf."""
    size = leaf.shape[member.dim]
    shape = [1] * ndim
    shape[member.dim] = size
    return jnp.tile(factors, size // len(factors)).reshape(shape).astype(leaf.dtype)


def _check(leaves: Mapping[str, jax.Array], groups: Sets) -> None:
    for name, (count, members) in groups.items():
        for path, dim in ((member.path, member.dim) for member in members):
            if path not in leaves:
                raise ValueError(
                    f"The groups {name!r} have a member {path!r}, and there is no such "
                    f"parameter. There are {', '.join(leaves)}."
                )
            shape = leaves[path].shape
            if not -len(shape) <= dim < len(shape) or shape[dim] % count:
                raise ValueError(
                    f"The {count} groups {name!r} lie along dim {dim} of {path!r}, "
                    f"which has the shape {list(shape)}: no multiple of {count}."
                )
