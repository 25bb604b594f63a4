"""The loss of a language model from its last activations, without whole logits."""

from zinf_kernels.cross_entropy.api import (
    Loss,
    cross_entropy,
    obstacles,
    token_losses,
    weighted,
)

__all__ = ["Loss", "cross_entropy", "obstacles", "token_losses", "weighted"]
