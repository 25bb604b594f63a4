"""How the dims of a value that was reshaped belong to the dims of a parameter.

A value derived from a parameter by casts, transposes and reshapes has, for each of its
dims, the dims of the parameter that it consists of. Dims of size 1 are left out.
"""

from collections.abc import Sequence

Dims = tuple[tuple[int, ...], ...]
Shape = tuple[int, ...]


def own_dims(shape: Shape) -> Dims:
    """The dims of the parameter itself."""
    return tuple((i,) if size != 1 else () for i, size in enumerate(shape))


def transposed(dims: Dims, permutation: Sequence[int]) -> Dims:
    return tuple(dims[i] for i in permutation)


def reshaped(dims: Dims, shape: Shape, new: Shape) -> Dims | None:
    """The dims after a reshape to `new`; None if a dim of the parameter is cut.

    Args:
        shape: the shape of the parameter.
    """
    left = [i for group in dims for i in group]
    found: list[tuple[int, ...]] = []
    for size in new:
        group: list[int] = []
        product = 1
        while product < size and left:
            product *= shape[left[0]]
            group.append(left.pop(0))
        if product != size:
            return None
        found.append(tuple(group))
    return None if left else tuple(found)


def broadcast(dims: Dims, old: Shape, new: Shape, places: Sequence[int]) -> Dims | None:
    """The dims after `broadcast_in_dim`; None if an entry is repeated."""
    found: list[tuple[int, ...]] = [()] * len(new)
    for dim, place in enumerate(places):
        if old[dim] != new[place]:
            return None
        found[place] = dims[dim]
    added = set(range(len(new))) - set(places)
    return None if any(new[i] != 1 for i in added) else tuple(found)


def without(dims: Dims, removed: Sequence[int]) -> Dims:
    return tuple(group for i, group in enumerate(dims) if i not in removed)


def union(dims: Dims, chosen: Sequence[int]) -> tuple[int, ...]:
    """The parameter's dims in some dims of the value, in their order."""
    return tuple(i for dim in chosen for i in dims[dim])
