"""Attention as one equation of a traced program.

The equation says what is computed, and its parameter `spec` names the implementation
too. It is differentiated, batched and lowered as the function of that implementation.
Programs that are cut, divided into rows or sharded see one equation, whose operands
have known dims, and not the products, loops or kernels inside. An attention that holds
its scores ("xla", "reference") is traced as the products that it is.
"""

from collections.abc import Sequence
from functools import partial
from importlib import import_module
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from zinf_kernels.attention.spec import Operands, Spec, shape_of

attention_p = Primitive("attention")
WITH_SCORES = ("xla", "reference")


def bind(spec: Spec, operands: Operands) -> jax.Array:
    """The attention as one equation; the result is (B, T, N, V), of `v`'s dtype."""
    names = tuple(operands)
    if spec.implementation in WITH_SCORES:
        return compute(*operands.values(), spec=spec, names=names)
    return attention_p.bind(*operands.values(), spec=spec, names=names)


def compute(*arrays: Any, spec: Spec, names: tuple[str, ...]) -> jax.Array:
    """What the equation computes, by the implementation that its spec names."""
    operands = dict(zip(names, arrays, strict=True))
    # Imported late: Pallas takes 1.4 s to import, and most programs never need it.
    module = import_module(f"zinf_kernels.attention.{spec.implementation}")
    return module.attention(spec, operands)


def _abstract(*avals: Any, spec: Spec, names: tuple[str, ...]) -> Any:
    del spec
    q, _, v = (avals[names.index(name)] for name in "qkv")
    return q.update(shape=(*q.shape[:3], v.shape[3]), dtype=v.dtype, weak_type=False)


def _jvp(
    primals: Sequence[Any], tangents: Sequence[Any], **params: Any
) -> tuple[Any, Any]:
    tangents = tuple(_tangent(x, t) for x, t in zip(primals, tangents, strict=True))
    return jax.jvp(partial(compute, **params), tuple(primals), tangents)


def _tangent(primal: Any, tangent: Any) -> Any:
    if not jnp.issubdtype(primal.dtype, jnp.inexact):
        return np.zeros(primal.shape, jax.dtypes.float0)
    return ad.instantiate_zeros(tangent)


def _batch(
    arrays: Sequence[Any], dims: Sequence[int | None], *, spec: Spec, names: Any
) -> tuple[Any, int]:
    """Examples of a mapped dim are further examples of the batch."""
    size = next(a.shape[d] for a, d in zip(arrays, dims, strict=True) if d is not None)
    is_mapped = {n for n, d in zip(names, dims, strict=True) if d is not None}
    if is_mapped & {"sinks", "dropout_key"}:
        function = partial(compute, spec=spec, names=names)
        return jax.vmap(function, in_axes=tuple(dims))(*arrays), 0
    moved = {
        name: a if d is None else jnp.moveaxis(a, d, 0)
        for name, a, d in zip(names, arrays, dims, strict=True)
    }
    batch = moved["q"].shape[1 if "q" in is_mapped else 0]
    operands = {
        name: _merged(x, name, name in is_mapped, size, batch)
        for name, x in moved.items()
    }
    out = bind(spec, operands)
    return out.reshape(size, batch, *out.shape[1:]), 0


def _merged(x: Any, name: str, is_mapped: bool, size: int, batch: int) -> Any:
    """(size, b, ...) as (size * batch, ...); what has one example for all stays."""
    if name in ("sinks", "dropout_key"):
        return x
    if not is_mapped:
        if x.shape[0] == 1 and name not in ("q", "k", "v"):
            return x  # The same for all examples.
        x = jnp.broadcast_to(x[None], (size, *x.shape))
    x = jnp.broadcast_to(x, (size, batch, *x.shape[2:]))
    return x.reshape(size * batch, *x.shape[2:])


def attention_flops(spec: Spec, operands: Operands) -> int:
    """Floating-point operations of both products forward.

    Pairs count that causality and a window allow. Segments are not known while a
    program is traced: all of a sequence counts as one.
    """
    batch, queries, keys, heads, _, width, value_width = shape_of(operands)
    pairs = queries * keys
    is_square = queries == keys and "q_positions" not in operands
    if is_square and spec.causal:
        window = min(spec.window or keys, keys)
        pairs = window * (window + 1) // 2 + (queries - window) * window
    return 2 * batch * heads * pairs * (width + value_width)


attention_p.def_abstract_eval(_abstract)
attention_p.def_impl(
    lambda *arrays, **params: jax.jit(partial(compute, **params))(*arrays)
)
ad.primitive_jvps[attention_p] = _jvp
batching.primitive_batchers[attention_p] = _batch
mlir.register_lowering(attention_p, mlir.lower_fun(compute, multiple_results=False))
