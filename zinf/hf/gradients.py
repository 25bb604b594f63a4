"""What torch takes no gradient through, as jax does it.

torchax computes the same numbers inside and outside of `torch.no_grad()`, and some
forms of `detach` return the array as it is. Both would give gradients that torch does
not have, so a model would be trained otherwise.
"""

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any

import jax
import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torchax import default_env
from torchax.interop import jax_view, torch_view
from torchax.tensor import Tensor


def register() -> None:
    """Make `detach` known to torchax; doing so again changes nothing."""
    for name in (torch.ops.aten.detach, torch.detach, torch.Tensor.detach):
        default_env().override_op_definition(name, detach)


def detach(tensor: torch.Tensor) -> torch.Tensor:
    """The same numbers, without a gradient; also of a view."""
    return torch_view(jax.lax.stop_gradient(jax_view(tensor)))


@contextmanager
def as_in_torch() -> Generator[None, None, None]:
    """In the `with` block, values that a module computes in `no_grad` are constants.

    The caller's own `torch.no_grad()` has no effect: jax decides whether there are
    gradients at all.
    """
    with torch.enable_grad(), _Stopping():
        yield


class _Stopping(TorchFunctionMode):
    """Makes results constants while a module computes in `torch.no_grad`.

    Torch has them off in the forward pass of a `torch.autograd.Function` too, whose
    result has a gradient. So what counts is the call that turns them off.

    A view keeps its gradient, because a write to the view must reach its base. What is
    computed from the view is stopped again.
    """

    _is_off = False

    def __torch_function__(
        self,
        func: Callable,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch._C._set_grad_enabled:
            self._is_off = not args[0]
        if torch.is_grad_enabled():
            self._is_off = False
        if not self._is_off:
            return result
        given = {id(x) for x in pytree.tree_leaves((args, kwargs))}

        def stopped(x: Tensor) -> torch.Tensor:
            # An operation in place returns what it was given.
            return x if id(x) in given else detach(x)

        return pytree.tree_map_only(Tensor, stopped, result)
