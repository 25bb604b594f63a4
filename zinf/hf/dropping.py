"""Layers of a `transformers` model that run on some tokens (arXiv 2211.11586).

The layers are those that `transformers` itself can recompute in backward passes, one
after another in a list. `zinf.random_ltd` shortens what a layer is called with.
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from inspect import signature
from typing import Any

import jax
import torch
import transformers
from torchax.interop import jax_view, torch_view
from transformers.modeling_layers import GradientCheckpointingLayer

from zinf.models.random_ltd import Dims, random_ltd

# The token dims of the arguments of layers, by name. Positions that a layer adds are
# those of the whole row, and so are the windows in masks.
DIMS: dict[str, Dims] = {
    "attention_mask": (2, 3),
    "position_ids": 1,
    "position_embeddings": 1,
}


def layers_of(module: transformers.PreTrainedModel) -> Sequence[torch.nn.Module]:
    """The layers of a decoder, from the first to the last.

    Raises:
        NotImplementedError: they are not one list of layers.
    """
    count = module.config.get_text_config().num_hidden_layers
    # A tower of images may have as many layers.
    for found in module.get_decoder().modules():
        if (
            isinstance(found, torch.nn.ModuleList)
            and len(found) == count
            and all(isinstance(layer, GradientCheckpointingLayer) for layer in found)
        ):
            return found
    raise NotImplementedError(
        f"{type(module).__name__} has no list of its {count} layers, so none of them "
        "can drop tokens. Turn data_efficiency.data_routing.random_ltd off."
    )


@contextmanager
def dropping(
    module: transformers.PreTrainedModel,
    numbers: Sequence[int],
    kept_BSP: jax.Array | None,
) -> Generator[None, None, None]:
    """In the `with` block, some layers of a module run on the kept tokens alone.

    Args:
        numbers: which layers, ascending.
        kept_BSP: the positions of the kept tokens of each of these layers, ascending,
            integers (rows, layers, tokens); None: all layers run on all tokens.

    Raises:
        ValueError: `kept_BSP` is about another number of layers.
        NotImplementedError: when a layer is called: it has an argument with tokens of
            which the meaning is not known.
    """
    if kept_BSP is None:
        yield
        return
    if kept_BSP.ndim != 3 or kept_BSP.shape[1] != len(numbers):
        raise ValueError(
            f"kept has the shape {list(kept_BSP.shape)}; it must be (rows, "
            f"{len(numbers)}, tokens), as {len(numbers)} layers of the model drop "
            "tokens (random_ltd_layers of zinf.hf.load)."
        )
    layers = layers_of(module)
    chosen = [layers[number] for number in numbers]
    try:
        for place, layer in enumerate(chosen):
            # The place is an operand, so that all layers can share one executable.
            kept_BP = jax.lax.dynamic_index_in_dim(kept_BSP, place, 1, keepdims=False)
            layer.forward = _on_kept(layer, kept_BP)
        yield
    finally:
        for layer in chosen:
            # Without this attribute, the method of the class is called again.
            vars(layer).pop("forward", None)


def _on_kept(layer: torch.nn.Module, kept_BP: jax.Array) -> Callable:
    forward = layer.forward
    names = list(signature(forward).parameters)

    def run(*arguments: Any, **keywords: Any) -> Any:
        given = dict(zip(names, arguments, strict=False)) | keywords
        x_BTD = jax_view(given.pop(names[0]))
        tensors = {name: jax_view(value) for name, value in given.items()}
        tensors = {n: v for n, v in tensors.items() if _has_arrays(v)}
        _check_known(layer, tensors, x_BTD.shape[1])
        rest = {name: given[name] for name in given.keys() - tensors.keys()}

        def on_arrays(x_BPD: jax.Array, **shorter: Any) -> Any:
            seen = {name: torch_view(value) for name, value in shorter.items()}
            return jax_view(forward(torch_view(x_BPD), **rest, **seen))

        dims: dict[int | str, Dims] = {n: d for n, d in DIMS.items() if n in tensors}
        return torch_view(random_ltd(on_arrays, kept_BP, dims=dims)(x_BTD, **tensors))

    return run


def _has_arrays(value: Any) -> bool:
    return any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(value))


def _check_known(layer: torch.nn.Module, tensors: dict, length: int) -> None:
    for name in tensors.keys() - DIMS.keys():
        if any(length in leaf.shape for leaf in jax.tree.leaves(tensors[name])):
            raise NotImplementedError(
                f"{type(layer).__name__} is called with {name}, which may have an "
                "entry for each token, and zinf does not know which. Turn "
                "data_efficiency.data_routing.random_ltd off."
            )
