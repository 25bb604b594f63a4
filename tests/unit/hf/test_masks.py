"""Masks of `transformers` as positions and segments: the same keys are seen."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torchax.interop import jax_view, torch_view
from transformers import masking_utils as theirs

from tests.unit.hf.architectures import config_of
from tests.unit.hf.models import llama, save
from zinf import hf
from zinf.hf.call import in_torch
from zinf.hf.masks import Form, form_of
from zinf_kernels.attention import Operands, Spec, choosing
from zinf_kernels.attention.spec import is_seen

B, T, S = 2, 9, 9


def tensor(values: Any) -> torch.Tensor:
    return torch_view(jnp.asarray(values))


def dense(form: Form, num_queries: int, num_keys: int) -> np.ndarray:
    """The mask of T x S elements that a form stands for."""
    settings = form.operands(num_queries, num_keys)
    names = {n: settings.pop(n) for n in ("causal", "window")}
    shapes = {"q": (B, num_queries, 1, 1), "k": (B, num_keys, 1, 1)}
    arrays = {n: jnp.zeros(s) for n, s in shapes.items()} | settings
    seen = is_seen(Spec(scale=1.0, **names), arrays | {"v": arrays["k"]})
    shape = B, 1, num_queries, num_keys
    return np.ones(shape) if seen is None else np.broadcast_to(seen, shape)


PADDED = np.array([[0, 0, 1, 1, 1, 1, 1, 1, 1], [1] * 9])
PACKED = np.array([[0, 1, 2, 0, 1, 2, 3, 4, 0], [0, 1, 0, 1, 0, 1, 0, 1, 2]])
IDS = np.array([[0, 0, 0, 1, 1, 1, 1, 1, 2], [0, 0, 1, 1, 2, 2, 3, 3, 3]])
CASES: dict[str, Any] = {
    "causal": lambda: (theirs.causal_mask_function, {}),
    "both sides": lambda: (theirs.bidirectional_mask_function, {}),
    "window": lambda: (theirs.sliding_window_causal_mask_function(3), {}),
    "window of all": lambda: (theirs.sliding_window_causal_mask_function(30), {}),
    "window, both sides": lambda: (
        theirs.sliding_window_bidirectional_mask_function(2),
        {},
    ),
    "chunks": lambda: (theirs.chunked_causal_mask_function(4, tensor([0, 2])), {}),
    "padding": lambda: (theirs.causal_mask_function, {"attention_mask": PADDED}),
    "padding and chunks": lambda: (
        theirs.chunked_causal_mask_function(4, tensor([2, 0])),
        {"attention_mask": PADDED},
    ),
    "packed": lambda: (
        theirs.and_masks(
            theirs.remap_positions_for_packed_sequence(
                theirs.sliding_window_causal_mask_function(2), tensor(PACKED)
            ),
            theirs.packed_sequence_mask_function(tensor(IDS)),
        ),
        {},
    ),
    "later queries": lambda: (
        theirs.causal_mask_function,
        {"q_length": 2, "q_offset": 5},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_form_lets_the_same_keys_be_seen_as_the_mask(name):
    with in_torch():
        function, options = CASES[name]()
        options = {"q_length": T, "kv_length": S, "mask_function": function} | options
        if "attention_mask" in options:
            options["attention_mask"] = tensor(options["attention_mask"] != 0)
        mask = jax_view(
            theirs.sdpa_mask(
                batch_size=B, allow_is_causal_skip=False, device="jax", **options
            )
        )
        form = form_of(**options)
        assert form is not None
        found = dense(form, options["q_length"], S)
    np.testing.assert_array_equal(np.broadcast_to(mask, found.shape), found)


def test_samples_of_one_row_and_padding_are_joined():
    with in_torch():
        options = {"q_length": T, "kv_length": S, "attention_mask": tensor(PADDED)}
        chunks = theirs.chunked_causal_mask_function(4, tensor([2, 0]))
        form = form_of(**options, mask_function=chunks, segment_ids=jnp.asarray(IDS))
        alone = form_of(**options, mask_function=chunks)
        assert form is not None and alone is not None
        same = IDS[:, None, :, None] == IDS[:, None, None, :]
        np.testing.assert_array_equal(dense(form, T, S), dense(alone, T, S) & same)


def test_a_function_that_is_unknown_has_no_form():
    functions = (
        lambda batch, head, q, k: k <= q,
        theirs.or_masks(
            theirs.causal_mask_function, theirs.bidirectional_mask_function
        ),
        theirs.sliding_window_overlay(3),  # earlier keys alone, later ones are seen
        theirs.blockwise_overlay(torch.zeros(2, 9)),
    )
    for function in functions:
        assert form_of(q_length=T, kv_length=S, mask_function=function) is None


def test_an_attention_gets_what_a_batch_says_and_no_more(tmp_path):
    """What it has beside queries, keys and values decides which kernels can take it."""
    save(llama(), tmp_path)
    model = hf.load(tmp_path)
    params = {n: jax.ShapeDtypeStruct(s.shape, s.dtype) for n, s in model.specs.items()}
    ids = jax.ShapeDtypeStruct((2, 8), jnp.int32)
    seen: list[set[str]] = []
    apart: list[bool] = []

    def look(spec: Spec, operands: Operands) -> str:
        assert spec.causal and spec.window is None
        seen.append({*operands} - {"q", "k", "v"})
        apart.append(spec.keys_apart)
        return "blocks"

    segments = {"q_segments", "k_segments"}
    positions = {"q_positions", "k_positions"}
    expected = {
        (): set(),
        ("attention_mask",): segments,
        ("segment_ids",): segments,
        # Samples that begin anew with their positions, as transformers has them.
        ("position_ids",): segments | positions,
    }
    for keys, operands in expected.items():
        seen.clear()
        with choosing(look):
            jax.eval_shape(
                model.logits, params, dict.fromkeys(("input_ids", *keys), ids)
            )
        assert seen == [operands] * 2, keys
        # Padding is in a segment of no query, and samples are in those of their own.
        assert apart[-1] == (keys == ("attention_mask",)), keys


CAPPED, SINKS = {"soft_cap": 50.0}, {"sinks"}
NEAR = {"window": 4}


@pytest.mark.parametrize(
    ("name", "layers", "operands"),
    [
        ("gemma2", [NEAR | CAPPED, CAPPED], set()),
        ("gemma3_text", [NEAR, NEAR], set()),
        ("gpt_oss", [NEAR, {}], SINKS),
        ("qwen3", [{}, {}], set()),
        ("qwen3_moe", [{}, {}], set()),
    ],
)
def test_each_layer_is_one_attention_with_its_window_cap_and_sinks(
    name, layers, operands, tmp_path
):
    config_of(name).save_pretrained(tmp_path)
    model = hf.load(tmp_path)
    ids = jax.ShapeDtypeStruct((2, 11), jnp.int32)
    seen = []

    def look(spec: Spec, given: Operands) -> str:
        seen.append((spec, {*given} - {"q", "k", "v"}))
        return "blocks"

    with choosing(look):
        closed = jax.make_jaxpr(model.logits)(model.zeros(), {"input_ids": ids})
    scale = seen[0][0].scale
    plain = Spec(scale=scale, implementation="auto", causal=True)
    expected = [replace(plain, **layer) for layer in layers]
    assert seen == [(spec, operands) for spec in expected]
    # No layer computes scores of its own beside them.
    products = [e for e in closed.eqns if e.primitive.name == "dot_general"]
    assert products
    assert not [e for e in products if e.outvars[0].aval.shape[-2:] == (11, 11)]
