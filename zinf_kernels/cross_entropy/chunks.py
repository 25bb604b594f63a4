"""How tokens and vocabulary are cut, and the matmul of one piece of each."""

from dataclasses import dataclass
from typing import Any

from jaxtyping import Array, Float

from zinf_kernels.pieces import matmul, part


@dataclass(frozen=True)
class Chunks:
    """Sizes of the pieces, and which axis of the weight is the vocabulary."""

    tokens: int = 2048
    vocab: int = 8192
    vocab_axis: int = 1

    def logits(
        self, x: Float[Array, "tokens dim"], weight: Float[Array, "..."]
    ) -> Float[Array, "tokens vocab"]:
        """`x` times the weight, summed and kept in float32 or better."""
        return matmul(x, weight, (1, 1 - self.vocab_axis))

    def of_weight(self, weight: Array, start: Any, size: int) -> Array:
        """The part of the weight for a part of the vocabulary."""
        return part(weight, start, size, self.vocab_axis)
