"""Functions of torch with a derivative of their own, as jax's.

The backward pass of a `torch.autograd.Function` may differ from the derivative of its
forward pass: RecurrentGemma bounds that of a square root, which is infinite at 0, and
Phi-3.5-MoE estimates that of a choice. torchax runs the forward pass alone.
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torchax.interop import jax_view, torch_view
from torchax.tensor import Tensor
from torchax.view import View

Entering = Callable[[], AbstractContextManager]


class _Context:
    """What a forward pass leaves for its backward pass, as torch's `ctx`."""

    saved_tensors: tuple[torch.Tensor, ...] = ()

    def save_for_backward(self, *tensors: torch.Tensor) -> None:
        self.saved_tensors = tensors

    def mark_non_differentiable(self, *_: torch.Tensor) -> None:
        """Does nothing: such outputs have no part in the backward pass anyway."""


@contextmanager
def own_derivatives(entering: Entering) -> Generator[None, None, None]:
    """In the `with` block, each `torch.autograd.Function` has its own backward pass.

    Args:
        entering: a context in which torch tensors are jax arrays. jax asks for the
            derivative after the `with` block.
    """
    original = vars(torch.autograd.Function)["apply"]

    def apply(kind: Any, *given: Any) -> Any:
        if not any(isinstance(x, Tensor | View) for x in given):
            return original.__func__(kind, *given)
        return _applied(kind, given, entering)

    torch.autograd.Function.apply = classmethod(apply)
    try:
        yield
    finally:
        torch.autograd.Function.apply = original


def _applied(kind: Any, given: Sequence[Any], entering: Entering) -> Any:
    """The result of a `torch.autograd.Function`, with its own backward pass for jax."""
    places = [i for i, x in enumerate(given) if isinstance(x, Tensor | View)]
    attributes: dict[str, Any] = {}

    def forward(*arrays: jax.Array) -> tuple[Any, Any]:
        filled, context = list(given), _Context()
        for place, array in zip(places, arrays, strict=True):
            filled[place] = torch_view(array)
        result = _forward(kind, context, filled)
        kept = vars(context)
        attributes.update({n: x for n, x in kept.items() if not _has_arrays(x)})
        arrays_kept = {n: jax_view(x) for n, x in kept.items() if _has_arrays(x)}
        return jax_view(result), (arrays_kept, arrays)

    @jax.custom_vjp
    def run(*arrays: jax.Array) -> Any:
        return forward(*arrays)[0]

    def later_forward(*arrays: jax.Array) -> tuple[Any, Any]:
        with entering():
            return forward(*arrays)

    def backward(residuals: Any, cotangents: Any) -> tuple[Any, ...]:
        kept, arrays = residuals
        with entering():
            context = _Context()
            vars(context).update(attributes | torch_view(kept))
            several = cotangents if isinstance(cotangents, tuple) else (cotangents,)
            found = kind.backward(context, *torch_view(several))
            found = found if isinstance(found, tuple) else (found,)
            return tuple(
                _cotangent(found[place], array)
                for place, array in zip(places, arrays, strict=True)
            )

    run.defvjp(later_forward, backward)
    return torch_view(run(*(jax_view(given[place]) for place in places)))


def _forward(kind: Any, context: _Context, given: Sequence[Any]) -> Any:
    """The forward pass, in either of the forms that torch has."""
    if kind.setup_context is torch.autograd.Function.setup_context:
        return kind.forward(context, *given)
    result = kind.forward(*given)
    kind.setup_context(context, tuple(given), result)
    return result


def _has_arrays(value: Any) -> bool:
    leaves = jax.tree.leaves(value)
    return any(isinstance(leaf, Tensor | View) for leaf in leaves)


def _cotangent(found: torch.Tensor | None, array: jax.Array) -> Any:
    """The cotangent of `array` for jax, from torch's gradient, which may be None."""
    if not jnp.issubdtype(array.dtype, jnp.inexact):
        return np.zeros(array.shape, jax.dtypes.float0)
    if found is None:
        return jnp.zeros_like(array)
    return jax_view(found).astype(array.dtype)
