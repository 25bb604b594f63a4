"""How tokens and vocabulary are cut, and the product of one piece of each."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float


@dataclass(frozen=True)
class Chunks:
    """Sizes of the pieces, and which axis of the weight is the vocabulary."""

    tokens: int
    vocab: int
    vocab_axis: int

    def logits(
        self, x: Float[Array, "tokens dim"], weight: Float[Array, "..."]
    ) -> Float[Array, "tokens vocab"]:
        """`x` times the weight, summed and kept in float32 or better."""
        dimensions = (((1,), (1 - self.vocab_axis,)), ((), ()))
        return lax.dot_general(
            x, weight, dimensions, preferred_element_type=accumulator(x.dtype)
        )

    def of_weight(self, weight: Array, start: Any, size: int) -> Array:
        """The part of the weight for a part of the vocabulary."""
        return lax.dynamic_slice_in_dim(weight, start, size, self.vocab_axis)


def accumulator(dtype: Any) -> Any:
    """The dtype in which logits and sums over many terms are kept."""
    return jnp.promote_types(dtype, jnp.float32)


def for_chunks(
    total: int, size: int, body: Callable[[Any, int, Any], Any], carry: Any
) -> Any:
    """Folds `body(start, size, carry)` over all pieces of `range(total)`.

    The last piece is as short as it has to be and has a program of its own, so that
    nothing is padded or masked and every array is updated in place.
    """
    whole, rest = divmod(total, size)
    if whole == 1:
        carry = body(0, size, carry)
    elif whole:
        carry = jax.lax.fori_loop(0, whole, lambda i, c: body(i * size, size, c), carry)
    return body(whole * size, rest, carry) if rest else carry
