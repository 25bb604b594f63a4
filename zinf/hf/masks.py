"""Masks of `transformers` models, as positions and segments of tokens.

`transformers` says which keys a query sees by a function of their numbers, and makes a
mask of T x T elements of it. The functions that it puts together are few: causal,
windows, chunks, packed samples, padding. What they say is kept here as positions and
segments, for an attention that holds no T x T array. A function of another kind has no
such form, and its mask is used.
"""

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from inspect import getclosurevars
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from torchax.interop import jax_view
from transformers import masking_utils

# An attribute of a mask tensor. A model that changes the mask makes another tensor.
FORM = "zinf_form"
# The id of keys that no query sees; no segment has it.
NEVER = int(np.iinfo(np.int32).min)
# Whether the positions of a call are those that a module counts by itself.
_ARE_COUNTED: ContextVar[bool] = ContextVar("are_counted", default=False)
_find_samples = masking_utils.find_packed_sequence_indices


def _samples(position_ids: Any) -> Any:
    """Samples in one row, as `transformers` finds them by positions; None: one."""
    return None if _ARE_COUNTED.get() else _find_samples(position_ids)


def register() -> None:
    """Let `counted_positions` have its effect; doing so again changes nothing."""
    masking_utils.find_packed_sequence_indices = _samples


@contextmanager
def counted_positions(are_counted: bool) -> Generator[None, None, None]:
    """In the `with` block, positions begin no new sample if `are_counted`.

    `transformers` looks for samples in the positions that a module counts too. A trace
    has no values to see there that these are 0, 1, 2, ..., and each query would get a
    position and a segment, which not all kernels of attention take.
    """
    token = _ARE_COUNTED.set(are_counted)
    try:
        yield
    finally:
        _ARE_COUNTED.reset(token)


@dataclass(frozen=True)
class Form:
    """A mask as settings of `zinf_kernels.attention`.

    Attributes:
        looks_back: the window hides earlier keys alone.
        q_positions, k_positions: int32 (1 or batch, tokens); None: from 0.
        segments: pairs of ids of queries and keys, (1 or batch, tokens) each: a query
            sees keys with equal ids in all pairs. All but the first are less than twice
            the number of keys.
        hidden: keys that no query sees, booleans (1 or batch, tokens); None: none.
    """

    causal: bool = False
    window: int | None = None
    looks_back: bool = False
    q_positions: jax.Array | None = None
    k_positions: jax.Array | None = None
    segments: tuple[tuple[jax.Array, jax.Array], ...] = ()
    hidden: jax.Array | None = None

    def operands(self, num_queries: int, num_keys: int) -> dict[str, Any]:
        """Arguments of `zinf_kernels.attention.attention`."""
        window = self.window
        if window is not None and window >= num_keys:
            window = None
        given: dict[str, Any] = {"causal": self.causal, "window": window}
        if (self.causal or window is not None) and self.q_positions is not None:
            given |= {"q_positions": self.q_positions, "k_positions": self.k_positions}
        segments = self.segments
        is_alike = all(q is k for q, k in segments) and self.hidden is None
        if self.hidden is not None and not segments:
            zeros = (jnp.zeros((1, n), jnp.int32) for n in (num_queries, num_keys))
            segments = (tuple(zeros),)
        if not segments:
            return given
        q_ids, k_ids = segments[0]
        for more_q, more_k in segments[1:]:
            q_ids = q_ids * (2 * num_keys + 2) + more_q
            k_ids = k_ids * (2 * num_keys + 2) + more_k
        q_ids = q_ids.astype(jnp.int32)
        if is_alike and num_queries == num_keys:
            return given | {"q_segments": q_ids, "k_segments": q_ids}
        if self.hidden is not None:
            k_ids = jnp.where(self.hidden, NEVER, k_ids)
        return given | {"q_segments": q_ids, "k_segments": k_ids.astype(jnp.int32)}


def form_of(
    *,
    q_length: int,
    kv_length: int,
    mask_function: Callable,
    q_offset: Any = 0,
    kv_offset: Any = 0,
    attention_mask: Any = None,
    segment_ids: jax.Array | None = None,
    **_: Any,
) -> Form | None:
    """The form of a mask from the arguments of `transformers.masking_utils.sdpa_mask`.

    Args:
        segment_ids: (batch, tokens) of zinf's own packing, or None.

    Returns:
        None if the function has no form.
    """
    numbers = (
        jnp.arange(q_length, dtype=jnp.int32)[None] + _array(q_offset),
        jnp.arange(kv_length, dtype=jnp.int32)[None] + _array(kv_offset),
    )
    form = _read(mask_function, Form(), numbers)
    if form is None or (form.looks_back and not form.causal):
        return None
    if segment_ids is not None:
        form = replace(form, segments=((segment_ids, segment_ids), *form.segments))
    if attention_mask is not None:
        form = replace(form, hidden=_hidden(jax_view(attention_mask), numbers[1]))
    has_offset = not (_is_zero(q_offset) and _is_zero(kv_offset))
    if has_offset and form.q_positions is None:
        form = replace(form, q_positions=numbers[0], k_positions=numbers[1])
    return form


def _hidden(mask: jax.Array, k_numbers: jax.Array) -> jax.Array:
    """Keys that a padding mask (batch, tokens) leaves out, bool (batch, keys)."""
    is_token = jnp.take(mask != 0, k_numbers[0], axis=1, mode="fill", fill_value=False)
    return jnp.logical_not(is_token)


def _read(
    function: Callable, form: Form, numbers: tuple[jax.Array, jax.Array]
) -> Form | None:
    """The form with what a mask function says added; None if it is unknown.

    Args:
        numbers: the numbers of queries and of keys that the function is called with.
    """
    if function is masking_utils.causal_mask_function:
        return replace(form, causal=True)
    if function is masking_utils.bidirectional_mask_function:
        return form
    kind = getattr(function, "__qualname__", "").partition(".")[0]
    reader = READERS.get(kind)
    is_theirs = getattr(function, "__module__", "") == masking_utils.__name__
    if reader is None or not is_theirs:
        return None
    return reader(getclosurevars(function).nonlocals, form, numbers)


def are_of_indices(function: Callable) -> bool:
    """Whether a mask function takes arrays of numbers of queries and keys as it is.

    So are all that `transformers` puts together itself. torch's `vmap`, which it uses
    for some of them, does not index jax arrays.
    """
    held = getclosurevars(function).nonlocals
    parts = held.get("mask_functions", ())
    is_theirs = getattr(function, "__module__", "") == masking_utils.__name__
    return is_theirs and all(map(are_of_indices, parts))


def _read_all(held: Mapping[str, Any], form: Form, numbers: Any) -> Form | None:
    found: Form | None = form
    for function in held["mask_functions"]:
        found = None if found is None else _read(function, found, numbers)
    return found


def _read_window(held: Mapping[str, Any], form: Form, numbers: Any) -> Form | None:
    del numbers
    return replace(_with_window(form, int(held["sliding_window"])), looks_back=True)


def _with_window(form: Form, window: int) -> Form:
    return replace(form, window=min(window, form.window or window))


def _read_both_sides(held: Mapping[str, Any], form: Form, numbers: Any) -> Form | None:
    del numbers
    return _with_window(form, int(held["sliding_window"]) + 1)


def _read_chunks(held: Mapping[str, Any], form: Form, numbers: Any) -> Form | None:
    left = jax_view(held["left_padding"])[:, None]
    chunks = tuple((n - left) // held["chunk_size"] for n in numbers)
    # Chunks of left padding are negative.
    q_ids, k_ids = (c + numbers[1].shape[1] for c in chunks)
    return replace(form, segments=(*form.segments, (q_ids, k_ids)))


def _read_packed(held: Mapping[str, Any], form: Form, numbers: Any) -> Form | None:
    del numbers
    ids = jax_view(held["packed_sequence_mask"])
    return replace(form, segments=(*form.segments, (ids, ids)))


def _read_remapped(held: Mapping[str, Any], form: Form, numbers: Any) -> Form | None:
    del numbers
    positions = jax_view(held["position_ids"]).astype(jnp.int32)
    if form.causal or form.window is not None:
        return None  # Said of other positions.
    form = replace(form, q_positions=positions, k_positions=positions)
    return _read(held["mask_function"], form, (positions, positions))


READERS: Mapping[str, Callable[..., Form | None]] = {
    "and_masks": _read_all,
    "sliding_window_overlay": _read_window,
    "sliding_window_bidirectional_overlay": _read_both_sides,
    "chunked_overlay": _read_chunks,
    "packed_sequence_mask_function": _read_packed,
    "remap_positions_for_packed_sequence": _read_remapped,
}


def _array(offset: Any) -> Any:
    return jax_view(offset) if hasattr(offset, "shape") else offset


def _is_zero(offset: Any) -> bool:
    return isinstance(offset, int) and offset == 0
