"""The first state of an adapted model, made of a base that is read in parts."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zinf.adapt import lora, quantize
from zinf.adapt.state import FirstState
from zinf.core.interchange.names import Terms
from zinf.core.interchange.tensors import AbstractTensors, boxes
from zinf.core.problem.source import named_leaves
from zinf.core.program import ArraySpec

LAYERS, WIDTH = 3, 12
# Stacked layers, a matrix whose rows do not fill blocks, and a table.
SHAPES = {
    "embed": (20, WIDTH),
    "layers": (LAYERS, WIDTH, WIDTH),
    "out": (7, WIDTH),
    "scale": (WIDTH,),
}


class Held(AbstractTensors):
    """Arrays in memory that are read a few rows at a time."""

    def __init__(self, arrays, rows=2):
        self.arrays, self.rows = arrays, rows
        self.specs = {
            name: ArraySpec(x.shape, x.dtype.name, x.itemsize)
            for name, x in arrays.items()
        }

    def block(self, name):
        return (self.rows, *self.specs[name].shape[1:])

    def read(self, name, box):
        return np.ascontiguousarray(self.arrays[name][tuple(slice(*b) for b in box)])


def base():
    random = np.random.default_rng(0)
    return {n: np.float32(random.normal(size=s)) for n, s in SHAPES.items()}


def loss(params, batch):
    x = params["embed"].at[batch].get(mode="clip") * params["scale"][None]
    x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params["layers"])
    return jnp.mean(jnp.square(x @ params["out"].T))


def adapted(**options):
    batch = np.arange(5, dtype=np.int32)
    return lora(loss, base(), batch=batch, r=2, **options)


def assert_made_in_memory(made, rows):
    """What is read in parts, of a base that is read some rows at a time."""
    wanted = {p: np.asarray(x) for p, x in named_leaves(made.params).items()}
    state = FirstState(made, Held(base(), rows), Terms())
    assert state.specs.keys() == wanted.keys()
    for name, spec in state.specs.items():
        found = np.zeros(spec.shape, spec.dtype)
        for box in boxes(spec.shape, state.block(name)):
            found[tuple(slice(*b) for b in box)] = state.read(name, box)
        if name.endswith("magnitude_vector"):
            # The squares of a row are summed alone, perhaps in another order.
            np.testing.assert_allclose(found, wanted[name], rtol=3e-7, err_msg=name)
        else:
            assert np.array_equal(found, wanted[name]), name


@pytest.mark.parametrize(
    "options",
    [
        {"use_dora": True, "modules_to_save": ["scale"]},
        {"quantize_base": "nf4", "quantize_block": 16, "use_dora": True},
        {"quantize_base": "int8", "quantize_block": 10, "init_lora_weights": False},
    ],
    ids=["dora", "nf4", "int8"],
)
def test_read_in_parts_it_is_what_is_made_in_memory(options):
    for rows in (2, 20):
        assert_made_in_memory(adapted(**options), rows)


def test_codes_without_adapters_are_encoded_as_they_are_read():
    batch = np.arange(5, dtype=np.int32)
    named = {"batch": batch, "group_size": 10, "num_bits": 4}
    assert_made_in_memory(quantize(loss, base(), **named), 2)


def test_parts_of_codes_may_begin_anywhere():
    made = adapted(quantize_base="nf4", quantize_block=16)
    state = FirstState(made, Held(base()), Terms())
    name = "base/out/codes"
    count, width = state.specs[name].shape
    assert count * 16 > 7 * WIDTH  # The last block is filled up.
    whole = state.read(name, ((0, count), (0, width)))
    for row in range(count):
        part = state.read(name, ((row, row + 1), (0, width)))
        assert np.array_equal(part[0], whole[row])


def test_a_base_that_lacks_a_parameter_is_refused_by_its_own_name():
    arrays = base()
    arrays["layers"] = arrays["layers"][:2]
    del arrays["out"]
    with pytest.raises(ValueError, match=r"'out'.*\n.*'layers' is \[3, 12, 12\] here"):
        FirstState(adapted(), Held(arrays), Terms())


def test_a_leaf_that_is_trained_whole_begins_as_a_loaded_adapter_has_it():
    loaded = {"scale": np.arange(WIDTH, dtype=np.float32)}
    made = replace(adapted(modules_to_save=["scale"]), loaded=loaded)
    state = FirstState(made, Held(base()), Terms())
    np.testing.assert_array_equal(state.read("adapter/scale", ((2, 5),)), [2, 3, 4])
