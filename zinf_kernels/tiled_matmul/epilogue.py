"""What is done to a product while it is in float32: bias, activation, residual."""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

ACTIVATIONS = ("relu", "gelu", "silu")


@dataclass(frozen=True)
class Epilogue:
    """activation(product + bias) + residual, rounded to `dtype`."""

    activation: str | None
    dtype: Any

    def __call__(self, product: Any, bias: Any | None, residual: Any | None) -> Any:
        """Of arrays of one shape; computed in the dtype of the product."""
        if bias is not None:
            product = product + bias.astype(product.dtype)
        if self.activation is not None:
            product = activated(self.activation, product)
        if residual is not None:
            product = product + residual.astype(product.dtype)
        return product.astype(self.dtype)


def activated(name: str, x: Any) -> Any:
    """In operations that Mosaic GPU has too; gelu by its tanh form, as in jax.nn."""
    one = np.array(1, x.dtype)
    if name == "relu":
        # Keeps NaNs, which a maximum may not.
        return jnp.where(x < 0, np.array(0, x.dtype), x)
    if name == "silu":
        return x * lax.logistic(x)
    slope, cube = (np.array(c, x.dtype) for c in ((2 / np.pi) ** 0.5, 0.044715))
    half = np.array(0.5, x.dtype)
    return half * x * (one + jnp.tanh(slope * (x + cube * (x * x * x))))
