"""Which way updates take on the host."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from zinf.optim import host_updates, separate
from zinf.optim.chunked import CHUNK_NUMEL, ChunkedUpdate
from zinf.optim.in_place import InPlaceUpdate
from zinf.optim.looped import LoopedUpdate
from zinf.optim.update import Unit

CPU = jax.devices("cpu")[0]
SMALL, LARGE = (8, 8), (CHUNK_NUMEL + 1,)
EXPONENTIAL = optax.stateless(lambda g, _: jax.tree.map(jnp.exp, g))


@pytest.mark.parametrize(
    ("tx", "shape", "way"),
    [
        (optax.adamw(0.1), SMALL, InPlaceUpdate),
        (optax.lion(0.1), SMALL, LoopedUpdate),
        (optax.rmsprop(0.1), LARGE, LoopedUpdate),
        (EXPONENTIAL, LARGE, ChunkedUpdate),
        (EXPONENTIAL, SMALL, type(None)),
        (optax.lamb(0.1), SMALL, type(None)),
    ],
    ids=["adamw", "lion", "rmsprop", "exp_large", "exp_small", "lamb"],
)
def test_updates_take_the_fastest_way_that_serves(tx, shape, way):
    separated = separate(tx, {"w": jax.ShapeDtypeStruct(shape, np.float32)})
    unit = Unit(0, shape, np.float32)
    (found,) = host_updates(separated, [unit], device=CPU)
    assert type(found) is way
