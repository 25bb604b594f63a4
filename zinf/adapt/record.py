"""Sums over the inputs of linear layers, which an engine makes as it makes gradients.

The sum of x^T x over all inputs x of a layer is what GPTQ needs to round its weights.
Here it is the gradient of an array that the loss does not depend on. So the engine adds
it up over microbatches and steps, and keeps it on any tier, like other gradients.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from zinf.adapt.adapted import ADAPTER, BASE, Adapted, Layout
from zinf.adapt.contraction import Contraction, Found, find_contractions
from zinf.adapt.rewrite import Rewriter
from zinf.adapt.weight import WEIGHT, Target, Weight, frozen_view, whole
from zinf.core.config.adapter import Adapter
from zinf.core.jaxpr.dims import Shape, union
from zinf.core.jaxpr.walk import apply, with_dtype
from zinf.core.problem.leafwise import abstract_leaves
from zinf.core.problem.source import named_leaves

GRAM = "gram"


def contractions_of(loss_fn: Callable, params: Any, *, batch: Any) -> Found:
    """What a loss does with its parameters.

    Args:
        params: a pytree, or a function that makes one.
        batch: an example, or its shapes.
    """
    abstract = abstract_leaves(params)
    shapes = {p: tuple(x.shape) for p, x in named_leaves(abstract).items()}
    return find_contractions(jax.make_jaxpr(loss_fn)(abstract, batch), shapes)


def is_matrix(contraction: Contraction) -> bool:
    """Whether a parameter is the matrix of one linear layer, and no stack of them."""
    several = contraction.stack or contraction.batch
    return not several and len(contraction.inputs) == len(contraction.outputs) == 1


def recording(
    loss_fn: Callable, params: Callable[[], Any], found: Found, paths: Iterable[str]
) -> Adapted:
    """A loss whose gradients are sums over the inputs of some of its linear layers.

    In an engine with `optax.sgd(-1.0)` the array "adapter/PATH/gram" becomes the sum of
    x^T x over all inputs x of all steps, float32 [inputs, inputs]. The weights are
    frozen.

    Args:
        found: of `contractions_of`.
        paths: of matrices; see `is_matrix`.
    """
    specs = named_leaves(abstract_leaves(params))
    arrays = {}
    for path in paths:
        (dim,) = found.contractions[path].inputs
        inputs = specs[path].shape[dim]
        arrays[path] = {GRAM: (inputs, inputs)}
    return beside(partial(_Recording, loss_fn), params, found, arrays)


def beside(
    loss_of: Callable[[Mapping[str, Target]], Callable],
    params: Callable[[], Any],
    found: Found,
    arrays: Mapping[str, Mapping[str, Shape]],
) -> Adapted:
    """A loss over frozen weights, with trained arrays beside some of them.

    Args:
        loss_of: makes the loss, from the weights that have arrays, by path.
        found: of `contractions_of`.
        arrays: by the path of a weight, the shapes of its arrays by name. They are in
            float32, and 0 at first.
    """
    abstract = abstract_leaves(params)
    specs = named_leaves(abstract)
    targets: dict[str, Target] = {
        path: _Beside(
            path=path,
            shape=tuple(specs[path].shape),
            dtype=str(specs[path].dtype),
            contraction=found.contractions[path],
            arrays=own,
        )
        for path, own in arrays.items()
    }

    def make() -> dict[str, Any]:
        zeros = {
            path: {name: jnp.zeros(shape) for name, shape in own.items()}
            for path, own in arrays.items()
        }
        return {BASE: params(), ADAPTER: zeros}

    return Adapted(
        loss_fn=loss_of(targets),
        eval_loss_fn=None,
        params=make,
        frozen=(f"{BASE}/*",),
        targets=targets,
        saved=(),
        adapter=Adapter(),
        layout=Layout(specs, jax.tree.structure(abstract), targets, frozenset()),
        loaded={
            path: {n: np.broadcast_to(np.float32(0), x) for n, x in own.items()}
            for path, own in arrays.items()
        },
    )


@dataclass(frozen=True, kw_only=True)
class _Beside(Target):
    """A matrix that has no adapter beside it, but other arrays.

    Attributes:
        arrays: their shapes by name.
    """

    arrays: Mapping[str, Shape]

    @property
    def factor_shapes(self) -> dict[str, Shape]:
        return dict(self.arrays)


@dataclass(frozen=True)
class _Recording:
    """A loss of `{"base": weights, "adapter": {path: {"gram": sum}}}`."""

    loss_fn: Callable
    targets: Mapping[str, Target]

    def __call__(self, params: Any, *rest: Any) -> Any:
        base, sums = params[BASE], params[ADAPTER]
        closed, result = jax.make_jaxpr(self.loss_fn, return_shape=True)(base, *rest)
        values = [
            whole(self.targets[path], {WEIGHT: leaf, **sums[path]}, str(leaf.dtype))
            if path in self.targets
            else leaf
            for path, leaf in named_leaves(base).items()
        ]
        found = _Recorder(0.0, None).arrays(closed, [*values, *jax.tree.leaves(rest)])
        return jax.tree.unflatten(jax.tree.structure(result), found)


class _Recorder(Rewriter):
    """Evaluates a loss as it is, and has the inputs of some weights recorded."""

    def dot(self, equation: Any, values: list[Any]) -> Any:
        side = 0 if isinstance(values[0], Weight) else 1
        weight, x = values[side], with_dtype(values[1 - side])
        contract, batch = equation.params["dimension_numbers"]
        inputs = union(weight.dims, contract[side])
        if batch[side] or tuple(inputs) != weight.target.contraction.inputs:
            return None
        given = [x, x]
        given[side] = frozen_view(weight)
        (product,) = apply(equation, given)
        (dim,) = contract[1 - side]
        rows = jnp.moveaxis(x, dim, -1).reshape(-1, x.shape[dim])
        return _recorded(product, rows, weight.parts[GRAM])


@jax.custom_vjp
def _recorded(product: Any, rows: Any, gram: Any) -> Any:
    """The product itself; its derivative to `gram` is rows^T rows.

    Args:
        rows: the inputs of the layer, [tokens, inputs].
        gram: float32 [inputs, inputs].
    """
    return product


def _forward(product: Any, rows: Any, gram: Any) -> tuple[Any, Any]:
    return product, rows


def _backward(rows: Any, cotangent: Any) -> tuple[Any, Any, Any]:
    numbers = rows.astype(jnp.float32)
    contract = ((0,), (0,)), ((), ())
    precision = lax.Precision.HIGHEST
    gram = lax.dot_general(numbers, numbers, contract, precision=precision)
    return cotangent, jnp.zeros_like(rows), gram


_recorded.defvjp(_forward, _backward)
