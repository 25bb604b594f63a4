"""Multi-modal causal attention: text and images have a softmax each.

DeepSpeed-VisualChat (arXiv:2309.14327, section 3.2), where features of images come from
an encoder. A token of an image sees itself alone. A token of text sees the text up to
itself in one softmax, and all images before it in another one; its result is the sum of
both. With sums over tokens s up to t that are of text, or of images:

    of text:      out_t = sum softmax(q_t k_s) v_s + sum softmax(q_t k_s) v_s
    of an image:  out_t = v_t

The code beside the paper differs in two places. There tokens of images see earlier text
too, and the second sum of a text before any image is the mean of all values before it;
here, as the paper has it, the first is not so, and the second is 0.

Each sum is an attention in which keys of the other kind are in a segment of no query.
Any implementation computes it that takes keys with segments of their own.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from zinf_kernels.attention.api import attention
from zinf_kernels.attention.spec import Spec, is_seen

# The segment of keys that no query sees; no query has it.
HIDDEN = int(np.iinfo(np.int32).min)
# Folded into the key of dropout for images.
IMAGES = 0x494D


def multimodal_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K V"],
    *,
    q_images: Bool[Array, "#B T"],
    k_images: Bool[Array, "#B S"] | None = None,
    q_segments: Int[Array, "#B T"] | None = None,
    k_segments: Int[Array, "#B S"] | None = None,
    dropout_key: Any = None,
    **options: Any,
) -> Float[Array, "B T N V"]:
    """See above; differentiable as `attention` is.

    Args:
        q, k, v: as of `attention`.
        q_images, k_images: True for tokens of images. `k_images` are `q_images` if
            there are as many keys as queries: then key i is that of query i.
        options: the other arguments of `attention`, without sinks: `causal` is meant.

    Raises:
        ValueError: there are sinks, which would be in two sums; or see `attention`.
    """
    if options.get("sinks") is not None:
        raise ValueError(
            "sinks take part in one softmax, and multi-modal causal attention has two. "
            "Leave sinks or q_images out."
        )
    if k_images is None:
        k_images = q_images
    if q_segments is None and k_segments is None:
        q_segments = jnp.zeros((1, q.shape[1]), jnp.int32)
        k_segments = jnp.zeros((1, k.shape[1]), jnp.int32)
    if k_segments is None and q.shape[1] == k.shape[1]:
        k_segments = q_segments
    if q_segments is None or k_segments is None:
        raise ValueError(
            f"Segments of queries and of keys go together, and {q.shape[1]} queries "
            f"meet {k.shape[1]} keys. Pass q_segments and k_segments."
        )
    options |= {"causal": True}

    def seeing(is_seen_BS: jax.Array) -> dict[str, Any]:
        ids = jnp.where(is_seen_BS, k_segments, HIDDEN)
        return {"q_segments": q_segments, "k_segments": ids.astype(jnp.int32)}

    of_text, of_images = seeing(~k_images), seeing(k_images)
    text = attention(q, k, v, **of_text, dropout_key=dropout_key, **options)
    if dropout_key is not None:
        dropout_key = jax.random.fold_in(dropout_key, IMAGES)
    images = attention(q, k, v, **of_images, dropout_key=dropout_key, **options)
    arrays = {n: x for n, x in options.items() if n.endswith(("positions", "mask"))}
    arrays = {n: x for n, x in arrays.items() if x is not None}
    spec = Spec(scale=1.0, causal=True, window=options.get("window"))
    seen = is_seen(spec, {"q": q, "k": k, "v": v} | of_images | arrays)
    assert seen is not None, "it is causal"
    # What an attention gives a query that sees no key has no meaning.
    sees_some = seen.any(-1).swapaxes(1, 2)[..., None]
    both = text + jnp.where(sees_some, images, jnp.zeros((), v.dtype))
    return jnp.where(q_images[..., None, None], _own(q, k, v, options), both)


def _own(
    q: jax.Array, k: jax.Array, v: jax.Array, options: dict[str, Any]
) -> jax.Array:
    """The value at the place of each query, (B, T, N, V)."""
    if q.shape[1] == k.shape[1]:
        return jnp.repeat(v, q.shape[2] // v.shape[2], axis=2)
    names = ("q_positions", "k_positions", "implementation")
    given = {name: options[name] for name in names if name in options}
    return attention(q, k, v, causal=True, window=1, **given)
