"""Executables that are only read say what those that run would say."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from zinf.topology import compile_for, memory, only_read


def mlp(x, up, down):
    hidden = jax.nn.gelu(x @ up)
    return jnp.mean((x + hidden @ down).astype(jnp.float32) ** 2)


def attention(x, up, down):
    query, key = x @ down.T, x @ up
    weights = jax.nn.softmax((query @ key.T).astype(jnp.float32))
    return jnp.sum((weights.astype(x.dtype) @ x).astype(jnp.float32))


def layers(x, up, down):
    def layer(value, _):
        return jnp.tanh(value + jnp.cumsum(value @ up, 0) @ down), None

    return jnp.sum(jax.lax.scan(jax.checkpoint(layer), x, None, length=3)[0])


def lookup(x, up, down):
    rows = jnp.argmax(x @ up, -1)
    return jnp.sum(jnp.sort(down[rows] * x, -1)[:, :8].astype(jnp.float32))


def compiled(loss, dtype):
    # Two devices, so that there are shardings and collectives to read.
    devices = np.array(jax.devices()[:2])
    mesh = Mesh(devices, ("fsdp",), axis_types=(AxisType.Auto,))
    shapes = ((64, 32), (32, 128), (128, 32))
    arguments = [
        jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P("fsdp")))
        for shape in shapes
    ]
    step = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))
    return compile_for(mesh, step.lower(*arguments))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("loss", [mlp, attention, layers, lookup])
def test_executables_that_are_only_read_take_the_memory_of_those_that_run(loss, dtype):
    make = partial(compiled, loss, dtype)
    runs = make()
    with only_read():
        is_read = make()
    assert memory(is_read) == memory(runs)
    assert is_read.output_shardings == runs.output_shardings
    assert is_read.cost_analysis()["flops"] == runs.cost_analysis()["flops"]


def test_only_executables_within_the_context_are_compiled_quickly(monkeypatch):
    asked = []

    class Lowered:
        def compile(self, options):
            asked.append(options)

    mesh = Mesh(np.array(jax.devices()[:1]), ("fsdp",))
    compile_for(mesh, Lowered())
    with only_read():
        compile_for(mesh, Lowered())
    compile_for(mesh, Lowered())
    assert asked[0] is asked[2] is None
    assert asked[1]
