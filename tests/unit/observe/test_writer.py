"""Metrics become plain numbers that JSON can express."""

import json
import math

import jax.numpy as jnp
import numpy as np

from zinf.observe.writer import numbers


def test_numbers_keep_their_order_and_kind():
    metrics = {"step": 1, "loss": np.float32(0.5), "skipped": False, "rate": None}
    found = numbers(metrics)
    assert list(found.items()) == [
        ("step", 1),
        ("loss", 0.5),
        ("skipped", False),
        ("rate", None),
    ]
    assert [type(x) for x in found.values()] == [int, float, bool, type(None)]


def test_auxiliary_outputs_are_named_by_their_path():
    aux = {"accuracy": jnp.float32(0.25), "parts": (np.int32(3), jnp.ones((1,)))}
    assert numbers({"aux": aux}) == {
        "aux/accuracy": 0.25,
        "aux/parts/0": 3,
        "aux/parts/1": 1.0,
    }


def test_large_arrays_are_left_out():
    assert numbers({"aux": {"logits": np.zeros((2, 3))}}) == {}


def test_what_json_cannot_express_is_null():
    found = numbers({"loss": math.inf, "grad_norm": math.nan, "a": -math.inf})
    assert json.dumps(found, allow_nan=False)
    assert found == {"loss": None, "grad_norm": None, "a": None}
