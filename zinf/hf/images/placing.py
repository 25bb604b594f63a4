"""Features of images in the places of their tokens, row by row.

`transformers` puts the features of all images of a batch into all image tokens of the
batch, in order, and compares their numbers. Both depend on values. Here each row of a
batch has room for the same number of features, and its image tokens get the first ones,
so shapes do not depend on values. `ImageModel.check` compares the numbers.
"""

import sys
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import torch
from torchax.interop import jax_view, torch_view

# What `transformers` calls to compare numbers that depend on values.
CHECK = "torch_compilable_check"


def place(hidden_BTD: jax.Array, is_image_BT: jax.Array, features: Any) -> jax.Array:
    """`hidden_BTD`, with the features of a row in the place of its image tokens.

    Args:
        features: (..., D), the same number for each row, first those of the first row.
    """
    features_BFD = features.reshape(len(hidden_BTD), -1, hidden_BTD.shape[-1])
    numbers_BT = jnp.cumsum(is_image_BT.astype(jnp.int32), axis=1) - 1
    numbers_BT = jnp.clip(numbers_BT, 0, features_BFD.shape[1] - 1)
    chosen_BTD = jnp.take_along_axis(features_BFD, numbers_BT[..., None], axis=1)
    chosen_BTD = chosen_BTD.astype(hidden_BTD.dtype)
    return jnp.where(is_image_BT[..., None], chosen_BTD, hidden_BTD)


@contextmanager
def replaced(owner: Any, **named: Any) -> Generator[None, None, None]:
    """In the `with` block, attributes of an object have other values."""
    before = {name: vars(owner)[name] for name in named if name in vars(owner)}
    for name, value in named.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name in named:
            if name in before:
                setattr(owner, name, before[name])
            else:
                delattr(owner, name)


@contextmanager
def placing(inner: torch.nn.Module) -> Generator[None, None, None]:
    """In the `with` block, image tokens of each row get the features of that row.

    Args:
        inner: the model below the output head, whose module of Python is patched.
    """
    module = sys.modules[type(inner).__module__]
    text = getattr(inner, "language_model", None)
    with ExitStack() as stack:
        stack.enter_context(replaced(torch.Tensor, masked_scatter=_scattered))
        stack.enter_context(replaced(module, **{CHECK: _unchecked}))
        if hasattr(text, "_deepstack_process"):
            stack.enter_context(replaced(text, _deepstack_process=_added))
        yield


def _unchecked(*_: Any, **__: Any) -> None:
    """Compare nothing: `ImageModel.check` did."""


def _scattered(
    hidden: torch.Tensor, mask: torch.Tensor, features: torch.Tensor
) -> torch.Tensor:
    arrays = jax_view(hidden), jax_view(mask)[..., 0], jax_view(features)
    return torch_view(place(*arrays))


def _added(
    hidden: torch.Tensor, mask: torch.Tensor, features: torch.Tensor
) -> torch.Tensor:
    """States of a layer, with features added at image tokens (Qwen3-VL's DeepStack)."""
    zeros = torch.zeros_like(hidden)
    return hidden + torch_view(place(*map(jax_view, (zeros, mask, features))))
