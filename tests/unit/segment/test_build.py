"""Segments say exactly what they read, compute and differentiate."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zinf.program import ArrayId, Role
from zinf.segment import (
    rest_by_row,
    segment_function,
    segment_loss,
    trace_function,
    trace_loss,
)

WEIGHT = jax.ShapeDtypeStruct((8, 8), jnp.float32)
X = jax.ShapeDtypeStruct((4, 8), jnp.float32)
NBYTES = 8 * 8 * 4


def build(
    loss, params, batch=X, *, max_bytes=NBYTES, frozen=(), splittable=(), **options
):
    source = trace_loss(loss, params, batch, max_remat_bytes=0, **options)
    segmented = segment_loss(
        source, frozen=frozen, splittable=splittable, max_bytes=max_bytes
    )
    check_consistent(segmented.program)
    return segmented


def check_consistent(program):
    """Inputs exist when they are read, and every trained array gets a gradient."""
    known = {*program.batch, *program.consts}
    for segment in program.segments:
        assert known.issuperset(segment.inputs)
        assert set(segment.active_inputs) <= set(segment.inputs)
        known.update(segment.outputs)
    last = program.segments[-1]
    assert last.outputs == program.outputs
    read = {n for s in program.segments for n in s.inputs}
    for segment in program.segments[:-1]:
        assert read.issuperset(segment.outputs)
        assert set(segment.active_outputs) <= set(segment.outputs)
    assert set(program.values) >= known
    names = [s.name for s in program.segments]
    assert len(set(names)) == len(names)
    trained = {a for leaf in program.leaves if leaf.is_trainable for a in leaf.arrays()}
    covered = {a for s in program.segments if s.has_backward for a in s.trained_params}
    assert covered | set(last.trained_params) == trained


def test_segments_are_named_after_their_parameters():
    def loss(params, x):
        for layer in params["blocks"]:
            x = jnp.tanh(x @ layer["w"])
        return x.mean()

    program = build(loss, {"blocks": [{"w": WEIGHT}] * 3}).program
    names = [s.name for s in program.segments]
    assert names == ["blocks/0", "blocks/1", "blocks/2", "segment"]
    assert [s.params for s in program.segments] == [
        *((ArrayId(Role.PARAM, f"blocks/{i}/w"),) for i in range(3)),
        (),  # what is left after the layers
    ]


def test_segments_of_a_stacked_leaf_are_named_by_row():
    def loss(params, x):
        step = lambda c, w: (jnp.tanh(c @ w), None)  # noqa: E731
        return jax.lax.scan(step, x, params["blocks"]["w"])[0].mean()

    stack = jax.ShapeDtypeStruct((3, 8, 8), jnp.float32)
    params = {"blocks": {"w": stack}}
    program = build(loss, params, splittable=["blocks/w"]).program
    layers = program.segments[:3]
    assert [s.name for s in layers] == [f"blocks[{i}]" for i in range(3)]
    (leaf,) = program.leaves
    assert leaf.num_layers == 3
    assert [s.params[0].rows for s in layers] == [(0, 1), (1, 2), (2, 3)]


def test_what_a_segment_reads_and_returns_is_what_crosses_its_cuts():
    def loss(params, x):
        first = jnp.tanh(x @ params["a"])
        second = jnp.tanh(first @ params["b"])
        return (second @ params["c"] + first).mean()

    program = build(loss, dict.fromkeys("abc", WEIGHT)).program
    a, b, c = program.segments
    (first,), (second,) = a.outputs, b.outputs
    assert a.inputs == ("batch/value",)
    assert b.inputs == (first,)
    assert set(c.inputs) == {first, second}
    assert program.values[first].shape == (4, 8)
    assert program.values[program.loss].shape == ()


def test_only_paths_from_a_trained_parameter_to_the_loss_are_active():
    def loss(params, x):
        first = jnp.tanh(x @ params["a"])
        count = (first > 0).sum()
        second = jnp.tanh(first @ params["b"])
        return second.mean() * 2, (count, jnp.tanh(first @ params["c"]))

    params = dict.fromkeys("abc", WEIGHT)
    program = build(loss, params, has_aux=True, frozen=["a"]).program
    for segment in program.segments:
        assert "batch/value" not in segment.active_inputs
    by_path = {a.path: s for s in program.segments for a in s.params}
    assert by_path["a"].active_outputs == ()
    assert not by_path["a"].has_backward
    assert not any(by_path["a"].trainable)
    # `c` feeds an auxiliary output only: its gradient is zero, from the last segment.
    assert ArrayId(Role.PARAM, "c") in program.segments[-1].trained_params


def test_parameters_without_a_use_are_adopted_by_the_last_segment():
    def loss(params, x):
        return jnp.tanh(jnp.tanh(x @ params["a"]) @ params["b"]).mean()

    params = {"a": WEIGHT, "b": WEIGHT, "unused": WEIGHT, "ids": jnp.arange(3)}
    params["ids"] = jax.ShapeDtypeStruct((3,), jnp.int32)
    program = build(loss, params).program
    last = program.segments[-1]
    assert ArrayId(Role.PARAM, "unused") in last.trained_params
    assert all(a.path != "ids" for s in program.segments for a in s.params)
    assert not next(x for x in program.leaves if x.path == "ids").is_trainable


def test_a_stacked_leaf_of_which_some_rows_are_read_trains_them_all():
    def loss(params, x):
        return jnp.tanh(x @ params["w"][0]).mean() + (x @ params["w"][2]).sum()

    stack = jax.ShapeDtypeStruct((3, 8, 8), jnp.float32)
    program = build(loss, {"w": stack}, splittable=["w"]).program
    (leaf,) = program.leaves
    assert leaf.num_layers == 3
    unread = ArrayId(Role.PARAM, "w", (1, 2))
    assert unread in program.segments[-1].trained_params


def test_tied_parameters_are_read_by_every_segment_that_uses_them():
    def loss(params, x):
        x = jnp.tanh(x @ params["table"])
        x = jnp.tanh(x @ params["w"])
        return (x @ params["table"].T).mean()

    program = build(loss, {"table": WEIGHT, "w": WEIGHT}).program
    table = ArrayId(Role.PARAM, "table")
    readers = [s for s in program.segments if table in s.params]
    assert len(readers) == 2
    assert readers[0] is program.segments[0] and readers[1] is program.segments[-1]


def test_a_cast_of_a_parameter_at_the_top_is_made_in_its_own_segment():
    def loss(params, x):
        half = jax.tree.map(lambda w: w.astype(jnp.bfloat16), params)
        x = x.astype(jnp.bfloat16)
        for w in half:
            x = jnp.tanh(x @ w)
        return x.astype(jnp.float32).mean()

    program = build(loss, [WEIGHT] * 3).program
    assert [len(s.params) for s in program.segments] == [0, 1, 1, 1, 0]
    # What crosses the cuts is activations only.
    shapes = {program.values[n].shape for s in program.segments for n in s.inputs}
    assert shapes == {(4, 8)}


LAST = {
    "literal": lambda p, x: jnp.float32(3.0) * 1,
    "of the batch": lambda p, x: x.sum(),
    "input": lambda p, x: x[0, 0],
    "elementwise": lambda p, x: p["a"].astype(jnp.float32)[0, 0] * 2,
    "parameters alone": lambda p, x: (p["a"] ** 2).sum() + (p["b"] ** 2).sum(),
}


@pytest.mark.parametrize("name", LAST)
def test_a_loss_of_little_is_still_a_program(name):
    program = build(LAST[name], {"a": WEIGHT, "b": WEIGHT}).program
    trained = {a.path for a in program.segments[-1].trained_params}
    assert trained | {a.path for s in program.segments for a in s.params} == {"a", "b"}


def test_a_loss_that_is_the_batch_or_a_parameter_is_still_a_program():
    scalar = jax.ShapeDtypeStruct((), jnp.float32)
    program = build(lambda p, x: x, {"a": scalar}, scalar).program
    assert program.segments[-1].inputs == ("batch/value",)
    program = build(lambda p, x: p["a"], {"a": scalar}, scalar).program
    assert program.segments[-1].trained_params == (ArrayId(Role.PARAM, "a"),)


def test_aux_outputs_may_be_inputs_parameters_numbers_or_repeated():
    def loss(params, x):
        y = jnp.tanh(x @ params["a"])
        z = jnp.tanh(y @ params["b"])
        return z.mean(), [x, y, y, 3, params["a"], z.mean()]

    segmented = build(loss, {"a": WEIGHT, "b": WEIGHT}, has_aux=True)
    program = segmented.program
    assert len(program.outputs) == 7 and len(set(program.outputs)) == 7
    shapes = [program.values[n].shape for n in program.outputs[1:]]
    assert shapes == [(4, 8)] * 3 + [(), (8, 8), ()]


def test_closed_over_arrays_are_constants_of_the_program():
    table = np.arange(8 * 8, dtype=np.float32).reshape(8, 8)

    def loss(params, x):
        return (jnp.tanh(x @ table) @ params["a"]).mean()

    segmented = build(loss, {"a": WEIGHT})
    (name,) = segmented.program.consts
    np.testing.assert_array_equal(segmented.consts[name], table)


def test_equal_segments_have_one_body_and_their_flops_are_counted():
    def loss(params, x):
        for w in params:
            x = jnp.tanh(x @ w)
        return x.mean()

    program = build(loss, [WEIGHT] * 5).program
    bodies = [s.body for s in program.segments]
    # The first layer gets no cotangent for the batch, so its backward is another.
    assert len(bodies) == 6 and len(set(bodies[1:5])) == 1
    assert len(set(bodies)) == 3
    assert program.segments[0].flops == 2 * 4 * 8 * 8 + 4 * 8


def test_a_frozen_layer_does_not_share_the_body_of_a_trained_one():
    def loss(params, x):
        for w in params:
            x = jnp.tanh(x @ w)
        return x.mean()

    program = build(loss, [WEIGHT] * 5, frozen=["2"]).program
    bodies = [s.body for s in program.segments]
    assert bodies[1] == bodies[3] != bodies[2]


# Functions that only run forward.


def forward(function, params, batch=X, *, max_bytes=NBYTES, splittable=(), by_row=()):
    named = {"max_remat_bytes": 0, "name": "function"}
    source = trace_function(function, params, batch, **named)
    source = rest_by_row(source, by_row)
    segmented = segment_function(source, splittable=splittable, max_bytes=max_bytes)
    program = segmented.program
    assert not program.is_trained
    made = {name for segment in program.segments for name in segment.outputs}
    assert made.issuperset(program.outputs)
    assert not any(segment.has_backward for segment in program.segments)
    return segmented


def test_each_output_of_a_function_is_made_by_the_segment_that_computes_it():
    def function(params, x):
        hidden = []
        for name in "abc":
            x = jnp.tanh(x @ params[name])
            hidden.append(x)
        return hidden, hidden[1]

    segmented = forward(function, dict.fromkeys("abc", WEIGHT))
    program = segmented.program
    first, second, third, again = program.outputs
    assert again == second
    for segment, output in zip(program.segments, (first, second, third), strict=True):
        assert segment.outputs == (output,)
    # The last segment is equal to the others, so that all share one executable.
    assert len({segment.body for segment in program.segments}) == 1


def test_outputs_that_nothing_computes_are_those_of_the_last_segment():
    def function(params, x):
        y = jnp.tanh(x @ params["a"])
        return x, params["a"], 3, y @ params["b"], y

    program = forward(function, {"a": WEIGHT, "b": WEIGHT}).program
    *_, last = program.segments
    assert program.outputs[:3] == ("out/0", "out/1", "out/2")
    assert {"out/0", "out/1", "out/2", program.outputs[3]} == set(last.outputs)
    shapes = [program.values[name].shape for name in program.outputs]
    assert shapes == [(4, 8), (8, 8), (), (4, 8), (4, 8)]


def test_what_the_outputs_do_not_need_is_not_read():
    def function(params, x):
        y = jnp.tanh(x @ params["a"])
        (y @ params["head"]).sum()
        return y

    program = forward(function, {"a": WEIGHT, "head": WEIGHT}).program
    read = {array.path for segment in program.segments for array in segment.params}
    assert read == {"a"}


def test_a_leaf_that_rests_by_row_is_read_by_row_also_as_a_whole():
    layers = jax.ShapeDtypeStruct((3, 8, 8), jnp.float32)

    def function(params, x):
        return jnp.tanh(x @ params["layers"][1]), params["layers"].sum((1, 2))

    for by_row in ((), ("layers",)):
        options = {"splittable": ("layers",), "by_row": by_row, "max_bytes": None}
        program = forward(function, {"layers": layers}, **options).program
        read = {array for segment in program.segments for array in segment.params}
        rows = {ArrayId(Role.PARAM, "layers", (i, i + 1)) for i in range(3)}
        assert read == (rows if by_row else {ArrayId(Role.PARAM, "layers")})


def test_weights_in_few_bits_are_decoded_in_the_segment_that_reads_them():
    codes = jax.ShapeDtypeStruct((8, 8), jnp.int8)
    scales = jax.ShapeDtypeStruct((8, 1), jnp.uint32)  # The bits of float32 numbers.

    def function(params, x):
        for layer in params:
            scale = jax.lax.bitcast_convert_type(layer["scales"], jnp.float32)
            x = jnp.tanh(x @ (layer["codes"].astype(jnp.float32) * scale))
        return x

    params = [{"codes": codes, "scales": scales}] * 3
    program = forward(function, params, max_bytes=8 * 8 + 8 * 4).program
    read = [{array.path for array in s.params} for s in program.segments]
    assert read == [{f"{i}/codes", f"{i}/scales"} for i in range(3)]
    assert len({segment.body for segment in program.segments}) == 1
