"""Rotary embeddings whose frequencies depend on the length of a sequence.

`transformers` keeps the frequencies of the last call in the module, and compares them
with the values of positions: `dynamic` (NTK) recomputes them beyond the length that the
model was made for, and `longrope` has others beyond `original_max_position_embeddings`.
Here they are a function of the positions of a call, and nothing is kept.

A row has the frequencies of its own last position, as if it were alone. torch takes the
last position of all rows, so there a sequence depends on its neighbours. Both are equal
where the rows of a batch end at one position, as they do without `position_ids`.
Tokens that may be guessed wrong have the frequencies of their own positions.
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jax
import torch
from torchax.interop import jax_view, torch_view
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS, dynamic_rope_update

LONG, DYNAMIC = "longrope", "dynamic"
LIMIT = "original_max_position_embeddings"
_ARE_LAST: ContextVar[bool] = ContextVar("are_last", default=False)


@contextmanager
def each_as_last(are_last: bool) -> Generator[None, None, None]:
    """In the `with` block, tokens are rotated as the last ones, if `are_last`.

    The frequencies of a token then depend on its own position, and not on later tokens.
    """
    token = _ARE_LAST.set(are_last)
    try:
        yield
    finally:
        _ARE_LAST.reset(token)


def make_pure(model: torch.nn.Module) -> None:
    """Let the rotary embeddings of a model compute frequencies and keep none."""
    for module in model.modules():
        if _keeps_frequencies(module):
            module.forward = _by_row(module)


def switch_of(model: torch.nn.Module) -> int | None:
    """Tokens of the longest sequence with the short frequencies of `longrope`.

    None if the model has no such embeddings.
    """
    limits = [
        _settings(module, layer_type)[LIMIT]
        for module in model.modules()
        if _keeps_frequencies(module)
        for layer_type, kind in _kinds(module).items()
        if kind == LONG
    ]
    return min(limits, default=None)


def depends_on_length(model: torch.nn.Module) -> bool:
    """Whether the frequencies of a token depend on the length of its sequence."""
    return any(map(_keeps_frequencies, model.modules()))


def growth_of(config: Any) -> float:
    """How many times longer sequences may be than `max_position_embeddings` says."""
    settings = getattr(config, "rope_parameters", None) or {}
    is_dynamic = settings.get("rope_type") == DYNAMIC
    return float(settings["factor"]) if is_dynamic else 1.0


def _keeps_frequencies(module: torch.nn.Module) -> bool:
    # All functions that the decorator makes have one code.
    code = dynamic_rope_update(lambda: None).__code__
    is_decorated = getattr(type(module).forward, "__code__", None) is code
    return is_decorated and any(
        kind == LONG or DYNAMIC in kind for kind in _kinds(module).values()
    )


def _kinds(module: Any) -> dict[str | None, str]:
    """The kind of the embedding for each type of layers; None: for all layers."""
    kinds = module.rope_type
    return dict(kinds) if isinstance(kinds, dict) else {None: kinds}


def _settings(module: Any, layer_type: str | None) -> Any:
    settings = module.config.rope_parameters
    return settings if layer_type is None else settings[layer_type]


def _by_row(module: Any) -> Callable:
    """The forward pass of an embedding: cosines and sines of positions."""
    undecorated: Callable = getattr(type(module).forward, "__wrapped__")  # noqa: B009

    def turned(
        x: torch.Tensor, position_ids: torch.Tensor, layer_type: str | None
    ) -> Any:
        """Cosines and sines by the frequencies of the largest position of all."""
        named = {} if layer_type is None else {"layer_type": layer_type}
        with _frequencies(module, torch.max(position_ids) + 1, layer_type):
            try:
                return jax_view(undecorated(module, x, position_ids, **named))
            except jax.errors.ConcretizationTypeError as error:
                raise NotImplementedError(
                    f"{type(module).__name__} decides by the values of positions, "
                    "which are not known when a step is compiled. Use a model whose "
                    "rope_type in config.json is another."
                ) from error

    def forward(
        x: torch.Tensor, position_ids: torch.Tensor, layer_type: str | None = None
    ) -> Any:
        if position_ids.ndim != 2:
            # Such as (3, rows, tokens), whose cosines are arranged in many ways.
            return torch_view(turned(x, position_ids, layer_type))

        def of_row(positions_T: jax.Array) -> Any:
            found = turned(x, torch_view(positions_T)[None], layer_type)
            return jax.tree.map(lambda values: values[0], found)

        of_rows = jax.vmap(of_row)
        positions_BT = jax_view(position_ids)
        if not _ARE_LAST.get():
            return torch_view(of_rows(positions_BT))
        found = of_rows(positions_BT.reshape(-1, 1))
        shape = positions_BT.shape
        apart = jax.tree.map(lambda x: x.reshape(*shape, *x.shape[2:]), found)
        return torch_view(apart)

    return forward


@contextmanager
def _frequencies(
    module: Any, length: torch.Tensor, layer_type: str | None
) -> Generator[None, None, None]:
    """In the `with` block, the module has the frequencies for this length."""
    kind = _kinds(module)[layer_type]
    prefix = "" if layer_type is None else f"{layer_type}_"
    name, usual = f"{prefix}inv_freq", getattr(module, f"{prefix}original_inv_freq")
    compute, where = ROPE_INIT_FUNCTIONS.get(kind), {"layer_type": layer_type}
    before = getattr(module, name)
    if kind == LONG:
        limit = _settings(module, layer_type)[LIMIT]
        other, _ = compute(module.config, usual.device, seq_len=limit + 1, **where)
    elif DYNAMIC in kind:
        limit = module.original_max_seq_len
        other, _ = compute(module.config, usual.device, seq_len=length, **where)
    else:
        yield
        return
    setattr(module, name, torch.where(length > limit, other, usual))
    try:
        yield
    finally:
        setattr(module, name, before)
