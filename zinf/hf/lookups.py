"""Look-ups of `transformers` models, such as those of embeddings, as jax reads rows.

torchax gives a look-up whose embedding has a `padding_idx` a derivative rule of its
own. zinf never cuts a rule, so the whole table would be on the device at once, and its
gradient whole beside it.
"""

import jax
import jax.numpy as jnp
import torch
from torchax import default_env
from torchax.interop import jax_view, torch_view

NO_PADDING = -1


def register() -> None:
    """Make the look-up known to torchax; doing so again changes nothing."""
    default_env().override_op_definition(torch.ops.aten.embedding, look_up)


def look_up(
    weight: torch.Tensor,
    indices: torch.Tensor,
    padding_idx: int = NO_PADDING,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> torch.Tensor:
    """The rows of a table, with the arguments of torch's own function.

    Args:
        weight: (rows, width).
        indices: integers of any shape.
        padding_idx: a look-up of this row gives no gradient; -1 if there is none.
        sparse: of the gradient in torch; here without meaning.

    Returns:
        (*shape of `indices`, width), in the dtype of `weight`. A row that the table
        lacks is NaN.

    Raises:
        NotImplementedError: gradients are to be scaled by how often a row is read.
    """
    if scale_grad_by_freq:
        raise NotImplementedError(
            "An embedding has scale_grad_by_freq, and zinf does not scale gradients by "
            "how often a row is read. Set it to False."
        )
    numbers = jax_view(indices)
    rows = jnp.take(jax_view(weight), numbers, axis=0)
    if padding_idx != NO_PADDING:
        is_padding = jnp.expand_dims(numbers == padding_idx, -1)
        rows = jnp.where(is_padding, jax.lax.stop_gradient(rows), rows)
    return torch_view(rows)
