"""Attention of `transformers` models, computed by jax.

`transformers` calls what is registered under `config._attn_implementation`. zinf
registers one function, which is `zinf_kernels.attention`: with soft caps (Gemma 2),
sinks (gpt-oss), dropout, and values of another width than keys (DeepSeek). A mask that
a layer passes on unchanged becomes positions and segments (`masks.py`). Others stay a
mask, such as that of keys that a layer selects for each query (DeepSeek V3.2, GLM 5,
MiniMax M3). An unknown argument is refused by name: a layer that passes it would
compute something else.
"""

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import torch
from torchax import default_env
from torchax.interop import jax_view, torch_view
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from zinf.hf import masks
from zinf.hf.masks import FORM, form_of
from zinf_kernels.attention import attention, multimodal_attention

NAME = "zinf"
# For classes that torch's own attention does not do for: they compute with the mask,
# and expect numbers, as of the eager attention (DeepSeek V4 appends some).
ADDING = "zinf_adding"
# Arguments that change no number: the mask, the rotated queries or the cache already
# have what they say, or they are for other kernels, or ask for other outputs.
HARMLESS = frozenset(
    ("cache", "past_key_values", "cache_position", "use_cache", "sliding_window")
    + ("position_ids", "deterministic", "return_dict", "logits_to_keep")
    + ("num_items_in_batch", "output_router_logits", "output_hidden_states")
)
# Samples of a row, (batch, tokens), and whether a mask hides padding besides.
Segments = tuple[jax.Array, bool]
_SEGMENTS: ContextVar[Segments | None] = ContextVar("segments", default=None)
# Which tokens of queries and of keys are of images, for multi-modal causal attention.
Images = tuple[jax.Array, jax.Array]
_IMAGES: ContextVar[Images | None] = ContextVar("images", default=None)


def register() -> None:
    """Make the attention known to `transformers`; doing so again changes nothing."""
    masks.register()
    for name, mask in ((NAME, boolean_mask), (ADDING, adding_mask)):
        AttentionInterface.register(name, attend)
        AttentionMaskInterface.register(name, mask)


@contextmanager
def within_segments(
    segment_ids: jax.Array | None, *, is_padded: bool
) -> Generator[None, None, None]:
    """In the `with` block, no token sees a token of another segment.

    Args:
        segment_ids: (batch, tokens); None: all tokens of a row are one sample's.
        is_padded: whether the mask of the batch hides tokens; else it is of ones.
    """
    token = _SEGMENTS.set(None if segment_ids is None else (segment_ids, is_padded))
    try:
        yield
    finally:
        _SEGMENTS.reset(token)


@contextmanager
def apart_from_images(images: Images | None) -> Generator[None, None, None]:
    """In the `with` block, causal attention has a softmax of its own for images.

    See `zinf_kernels.attention.multimodal`.

    Args:
        images: True for tokens of images, (batch, queries) and (batch, keys); None:
            images are as text.
    """
    token = _IMAGES.set(images)
    try:
        yield
    finally:
        _IMAGES.reset(token)


def boolean_mask(**named: Any) -> torch.Tensor | None:
    """The mask of a layer, True where a query sees a key; None for a causal one."""
    # With a mask of padding, the choice would depend on its values.
    may_skip = named.pop("allow_is_causal_skip", True)
    segments, is_padded = _SEGMENTS.get() or (None, True)
    may_skip = may_skip and named.get("attention_mask") is None and segments is None
    if named.get("use_vmap") and masks.are_of_indices(named["mask_function"]):
        named["use_vmap"] = False
    mask = sdpa_mask(**_by_row(named), allow_is_causal_skip=may_skip)
    if mask is None:
        return None
    if segments is not None:
        is_same = segments[:, None, :, None] == segments[:, None, None, :]
        mask = torch_view(jnp.logical_and(jax_view(mask), is_same))
    if not is_padded:
        named["attention_mask"] = None
    setattr(mask, FORM, form_of(**named, segment_ids=segments))
    return mask


def _by_row(named: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `sdpa_mask` where each row has its own `q_offset`, (B, 1).

    `transformers` takes one number for all rows.
    """
    offset, function = named.get("q_offset", 0), named["mask_function"]
    if not getattr(offset, "shape", ()):
        return dict(named)

    def moved(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return function(batch, head, query + offset[batch, 0], key)

    return {**named, "q_offset": 0, "mask_function": moved}


def adding_mask(*, dtype: torch.dtype = torch.float32, **named: Any) -> Any:
    """The mask of a layer as numbers that are added to scores: 0, or the lowest."""
    mask = boolean_mask(**named | {"allow_is_causal_skip": False})
    if mask is None:
        return None
    added = torch.where(mask, torch.zeros((), dtype=dtype), torch.finfo(dtype).min)
    setattr(added, FORM, getattr(mask, FORM, None))
    return added


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    indices: torch.Tensor | None = None,
    block_indices: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Attention with the arguments and the result of `transformers`' own functions.

    Args:
        query, key, value: (batch, heads, tokens, width); keys and values may have fewer
            heads.
        attention_mask: booleans, True where a query sees a key, or numbers that are
            added to the scores.
        softcap: scores are `softcap * tanh(score / softcap)`.
        s_aux: a score per head that takes part in the softmax without a value.
        position_bias: numbers that are added to the scores.
        indices: (batch, tokens, count), the keys that each query sees, if the mask lets
            it see them.
        block_indices: (batch, groups of heads, tokens, count), the same of blocks of
            `module.indexer.block_size` keys; -1 is none.
        others: arguments without a meaning here, all in `HARMLESS` or None or False.

    Returns:
        (batch, tokens, heads, width), and None for the weights.

    Raises:
        NotImplementedError: an argument is unknown.
    """
    _refuse_unknown(module, others)
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    given = (query, key, value, s_aux, position_bias)
    q, k, v, sinks, bias = (jax_view(x) for x in given)
    selected = None
    if indices is not None or block_indices is not None:
        heads_keys = q.shape[1], k.shape[2]
        selected = _selected(module, indices, block_indices, *heads_keys)
    lengths = q.shape[2], k.shape[2]
    seen = _seen(attention_mask, selected, lengths, is_causal=is_causal)
    if bias is not None:
        seen["bias"] = bias + seen["bias"] if "bias" in seen else bias
    if scaling is not None and not isinstance(scaling, int | float):
        q, scaling = q * jax_view(scaling), 1.0
    dtype = jnp.result_type(q, k, v)
    images, attends = _IMAGES.get(), attention
    if images is not None and getattr(module, "is_causal", True):
        _check_apart(module, seen, sinks)
        del seen["causal"]
        attends = partial(multimodal_attention, q_images=images[0], k_images=images[1])
    out_BTND = attends(
        *(x.astype(dtype).swapaxes(1, 2) for x in (q, k, v)),
        sinks=sinks,
        scale=scaling,
        soft_cap=softcap,
        dropout=dropout,
        dropout_key=default_env().get_and_rotate_prng_key() if dropout else None,
        **seen,
    )
    return torch_view(out_BTND.astype(v.dtype)), None


def _check_apart(module: torch.nn.Module, seen: Any, sinks: Any) -> None:
    """Refuse a layer in which images have no softmax of their own."""
    if not seen.get("causal") or sinks is not None:
        what = "sinks" if sinks is not None else "a mask that is not causal alone"
        raise NotImplementedError(
            f"{type(module).__name__} has {what}, so multi-modal causal attention "
            "(model.multimodal_attention) is not defined there. Turn it off."
        )


def _refuse_unknown(module: torch.nn.Module, others: Mapping[str, Any]) -> None:
    for name, value in others.items():
        if name not in HARMLESS and value is not None and value is not False:
            raise NotImplementedError(
                f"{type(module).__name__} passes {name!r} to its attention, which zinf "
                "does not know: its results would differ from those of transformers. "
                "Use a model of another architecture, or tell us of this one."
            )


def _seen(
    attention_mask: torch.Tensor | None,
    selected: jax.Array | None,
    lengths: tuple[int, int],
    *,
    is_causal: bool,
) -> dict[str, Any]:
    """The keys that each query sees, as arguments of `zinf_kernels.attention`.

    Args:
        selected: of these keys, those that the layer selects; None selects all.
        lengths: numbers of queries and of keys.
    """
    form = getattr(attention_mask, FORM, None)
    if form is not None and selected is None:
        return form.operands(*lengths)
    mask = jax_view(attention_mask)
    is_causal = is_causal and mask is None and lengths[0] > 1
    if selected is None:
        return {"causal": is_causal} | ({} if mask is None else _mask(mask))
    if is_causal:
        mask = jnp.tri(*lengths, dtype=bool)[None, None]
    if mask is None:
        return {"mask": selected}
    if mask.dtype == jnp.bool_:
        return {"mask": jnp.logical_and(mask, selected)}
    return {"bias": jnp.where(selected, mask, jnp.finfo(mask.dtype).min)}


def _mask(mask: jax.Array) -> dict[str, jax.Array]:
    return {"mask" if mask.dtype == jnp.bool_ else "bias": mask}


def _selected(
    module: torch.nn.Module,
    indices: torch.Tensor | None,
    block_indices: torch.Tensor | None,
    num_heads: int,
    num_keys: int,
) -> jax.Array:
    """Which keys a layer selects for each query: (batch, 1 or heads, tokens, keys)."""
    if block_indices is None:
        return _among(jax_view(indices), num_keys)[:, None]
    blocks, size = jax_view(block_indices), module.indexer.block_size
    seen = jnp.repeat(_among(blocks, -(-num_keys // size)), size, axis=-1)
    return jnp.repeat(seen[..., :num_keys], num_heads // blocks.shape[1], axis=1)


def _among(indices: jax.Array, count: int) -> jax.Array:
    """Whether each number below `count` is in the last dim of `indices`, bool."""
    # Numbers outside, such as -1, are dropped: a negative index would count backwards.
    places = jnp.where(indices < 0, count, indices)
    flat = places.reshape(-1, places.shape[-1])
    rows = jnp.arange(flat.shape[0])[:, None]
    found = (
        jnp.zeros((flat.shape[0], count), bool).at[rows, flat].set(True, mode="drop")
    )
    return found.reshape(*indices.shape[:-1], count)
