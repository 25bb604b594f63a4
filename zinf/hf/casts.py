"""Casts and copies whose other tensor is a view, which torchax cannot read in them."""

import jax.numpy as jnp
import torch
from torchax import default_env
from torchax.interop import jax_view
from torchax.tensor import Tensor
from torchax.view import View


def register() -> None:
    """Make them known to torchax; doing so again changes nothing."""
    copy = torch.ops.aten.copy_
    default_env().override_op_definition(copy, copy_into, is_view_op=True)
    Tensor.type_as = type_as


def type_as(tensor: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """The same numbers in the dtype of `other`; torchax changes `tensor` itself."""
    return tensor.to(other.dtype)


def copy_into(
    target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False
) -> torch.Tensor:
    """`target` with the numbers of `source`, with the arguments of torch."""
    if source.device.type == "cpu":
        source = default_env().to_xla(source)
    given = jnp.broadcast_to(jax_view(source), target.shape)
    if isinstance(target, View):
        target.update(given)
    else:
        target._elem = given.astype(jax_view(target).dtype)
    return target
