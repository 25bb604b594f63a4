"""Random layerwise token dropping, for any layer (arXiv 2211.11586).

A layer runs on some tokens of each row, other ones in each layer; the rest pass it by
unchanged. Attention among fewer tokens is cheaper, and training sees each token in most
layers nevertheless.

Shape suffixes: B rows, T tokens in a row, K kept tokens.
"""

from collections.abc import Callable, Mapping
from functools import partial, wraps
from typing import Any

import jax
import jax.numpy as jnp

Dims = int | tuple[int, ...]


def random_ltd(
    layer: Callable,
    kept: jax.Array | None,
    *,
    dims: Mapping[int | str, Dims] | None = None,
) -> Callable:
    """A layer that runs on the kept tokens alone; the others pass it by.

    Args:
        layer: `(x, ...) -> y`, or a tuple that begins with y. x and y are (B, T, ...).
            With K tokens it gets (B, K, ...), and what it returns for them is put in
            their places in x. Other entries of a tuple are returned as they are.
        kept: integers (B, K), the positions of the kept tokens of each row, ascending,
            each once, as `sample_kept` draws them; or (K,), the same for all rows. None
            keeps all tokens, as in evaluation.
        dims: the token dims of the arguments after x, by their number (x is 0) or
            keyword: {"positions": 1, "mask": (2, 3)}. They hold for each array of an
            argument that is a pytree. Arguments that have no token dim may be left out.

    As kept positions are ascending, causal attention stays causal without a mask.

    Raises:
        ValueError: when the layer is called: `kept` is no such array, or has more
            positions than there are tokens; or an argument has a dim of T entries that
            `dims` does not name. Name it with () if it is no token dim.
    """
    if kept is None:
        return layer
    named = {key: _tuple(value) for key, value in (dims or {}).items()}

    @wraps(layer, updated=())
    def on_kept(x: jax.Array, *arguments: Any, **keywords: Any) -> Any:
        _check_kept(kept, x)
        length = x.shape[1]
        given = {**dict(enumerate(arguments, 1)), **keywords}
        for key in named.keys() - given.keys():
            raise ValueError(
                f"dims names the argument {key!r}, which the layer was not called with."
            )
        shorter = {
            key: jax.tree.map(
                partial(_shortened, kept, name=key, dims=named.get(key), length=length),
                value,
            )
            for key, value in given.items()
        }
        rest = [shorter[i] for i in range(1, len(arguments) + 1)]
        after = {key: shorter[key] for key in keywords}
        result = layer(_take(x, kept, 1), *rest, **after)
        if isinstance(result, tuple):
            return (_put(x, kept, result[0]), *result[1:])
        return _put(x, kept, result)

    return on_kept


def sample_kept(key: jax.Array, *, rows: int, length: int, kept: int) -> jax.Array:
    """Positions of `kept` of `length` tokens in each of `rows`, int32, ascending.

    Each choice is equally likely.

    Raises:
        ValueError: `kept` is not between 1 and `length`.
    """
    if not 1 <= kept <= length:
        raise ValueError(
            f"{kept} tokens of {length} cannot be kept. Keep between 1 and {length}."
        )
    order_BT = jnp.argsort(jax.random.uniform(key, (rows, length)), axis=1)
    return jnp.sort(order_BT[:, :kept], axis=1).astype(jnp.int32)


def _tuple(dims: Dims) -> tuple[int, ...]:
    return (dims,) if isinstance(dims, int) else tuple(dims)


def _check_kept(kept: jax.Array, x: jax.Array) -> None:
    shape, dtype = jnp.shape(kept), jnp.result_type(kept)
    if jnp.ndim(x) < 2:
        raise ValueError(
            f"x has shape {list(x.shape)}; it must be (rows, tokens, ...)."
        )
    rows, length = x.shape[:2]
    is_for_rows = shape[:-1] in ((), (rows,))
    if not jnp.issubdtype(dtype, jnp.integer) or not shape or not is_for_rows:
        raise ValueError(
            f"kept is {dtype}{list(shape)}; it must be integers ({rows}, kept) or "
            "(kept,), the positions of the kept tokens."
        )
    if shape[-1] > length:
        raise ValueError(
            f"kept names {shape[-1]} tokens, but a row has {length}. Keep fewer, or "
            "pass None to keep all."
        )


def _shortened(
    kept: jax.Array,
    leaf: Any,
    *,
    name: int | str,
    dims: tuple[int, ...] | None,
    length: int,
) -> Any:
    shape = jnp.shape(leaf)
    if dims is None:
        found = [dim for dim, size in enumerate(shape) if size == length]
        if found:
            raise ValueError(
                f"Argument {name!r} has the shape {list(shape)}, with as many entries "
                f"in dim {', '.join(map(str, found))} as there are tokens. Say in dims "
                f"which are token dims: dims={{{name!r}: {tuple(found)}}}, or () if "
                "none is."
            )
        return leaf
    for dim in dims:
        if dim >= len(shape) or shape[dim] != length:
            raise ValueError(
                f"dims says that dim {dim} of argument {name!r} has the {length} "
                f"tokens, but its shape is {list(shape)}."
            )
        if kept.ndim == 2 and (dim == 0 or shape[0] not in (1, kept.shape[0])):
            raise ValueError(
                f"Argument {name!r} has the shape {list(shape)}, and each row keeps "
                f"other tokens: give it a leading dim of {kept.shape[0]} rows, or of 1."
            )
    for dim in dims:
        leaf = _take(leaf, kept, dim)
    return leaf


def _take(leaf: jax.Array, kept: jax.Array, dim: int) -> jax.Array:
    """The kept entries along a dim; dim 0 has the rows, or 1 entry for all rows."""
    # A position beyond the last token gives NaN, which `_put` keeps.
    if kept.ndim == 1:
        return jnp.take(leaf, kept, axis=dim, mode="fill")
    take = partial(jnp.take, axis=dim - 1, mode="fill")
    if leaf.shape[0] == 1 and kept.shape[0] != 1:
        return jax.vmap(take, in_axes=(None, 0))(leaf[0], kept)
    return jax.vmap(take)(leaf, kept)


def _put(x: jax.Array, kept: jax.Array, new: jax.Array) -> jax.Array:
    if new.shape[:1] + new.shape[2:] != x.shape[:1] + x.shape[2:]:
        raise ValueError(
            f"The layer returned the shape {list(new.shape)} for x of shape "
            f"{list(x.shape)}; tokens that pass it by need the same shape."
        )

    def put(row: jax.Array, places: jax.Array, content: jax.Array) -> jax.Array:
        at = row.at[places]
        return at.set(content.astype(row.dtype), mode="clip", unique_indices=True)

    return jax.vmap(put, in_axes=(0, 0 if kept.ndim == 2 else None, 0))(x, kept, new)
