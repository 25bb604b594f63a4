"""Gradients that leave a program as one partial sum for each of eight devices."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from zinf.core.jaxpr import inline_all, trace
from zinf.core.segment.parts import PartialSums
from zinf.core.sharding.mesh import FSDP, make_mesh

ROWS, DIM, COUNT = 16, 8, 8
Loss = Callable[[dict[str, Any], dict[str, Any]], jax.Array]


def dense(params, batch):
    return jnp.tanh(batch["x"] @ params["w"]).sum()


def masked_mean(params, batch):
    """A mean over the examples of all devices, of which each has other ones."""
    squares = jnp.square(batch["x"] @ params["w"]).sum(-1)
    return (squares * batch["mask"]).sum() / batch["mask"].sum()


def batch_norm(params, batch):
    x = batch["x"] @ params["w"]
    mean, variance = x.mean(0, keepdims=True), x.var(0, keepdims=True)
    return jnp.tanh((x - mean) / jnp.sqrt(variance + 1e-5)).sum()


def twice(params, batch):
    """A table that is looked up, and is the head too."""
    x = params["w"][batch["tokens"]]
    return jax.nn.logsumexp(jnp.tanh(x) @ params["w"].T, axis=-1).sum()


def by_row(params, batch):
    """Rows of a leaf that is stacked over layers."""
    x = batch["x"]
    for i in range(2):
        x = jnp.tanh(x @ params["stack"][i])
    return x.sum()


def mixed_positions(params, batch):
    """Positions of an example are mixed, and merged with examples before products."""
    x_BTD = batch["x"].reshape(ROWS, 2, DIM // 2) @ params["half"]
    mixed_BTD = jax.nn.softmax(x_BTD @ jnp.swapaxes(x_BTD, 1, 2)) @ x_BTD
    return jnp.square(mixed_BTD.reshape(2 * ROWS, DIM // 2) @ params["half"]).mean()


def narrow(params, batch):
    x = batch["x"].astype(jnp.bfloat16) @ params["w"].astype(jnp.bfloat16)
    return x.astype(jnp.float32).sum()


def printed(params, batch):
    """With an equation that has no results."""
    x = batch["x"] @ params["w"]
    jax.debug.callback(lambda _: None, x)
    return jnp.tanh(x).sum()


def loop(params, batch):
    """What a loop makes is not looked into."""
    return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), batch["x"], params)[0]


CASES: dict[str, Loss] = {
    f.__name__: f
    for f in (
        *(dense, masked_mean, batch_norm, twice, by_row, mixed_positions),
        *(narrow, printed),
    )
}


def arrays() -> tuple[dict[str, Any], dict[str, Any]]:
    random = np.random.default_rng(0)

    def normal(*shape):
        return jnp.asarray(random.standard_normal(shape, np.float32))

    params = {
        "half": normal(DIM // 2, DIM // 2),
        "stack": normal(2, DIM, DIM),
        "w": normal(DIM, DIM),
    }
    batch = {
        "mask": jnp.asarray([0.0, *random.random(ROWS - 1)], jnp.float32),
        "tokens": jnp.asarray(random.integers(0, DIM, ROWS)),
        "x": normal(ROWS, DIM),
    }
    return params, batch


def partial_sums(loss: Loss, path: str) -> tuple[PartialSums, list[Any]]:
    """The gradient of one leaf alone."""
    params, batch = arrays()

    def gradient(leaf, batch):
        return jax.grad(lambda x: loss(params | {path: x}, batch))(leaf)

    graph = inline_all(trace(gradient, params[path], batch)[0])
    seeds = dict.fromkeys(graph.invars[1:], 0)
    return PartialSums(graph, seeds, [0], COUNT), [params[path], *batch.values()]


@pytest.mark.parametrize("name", CASES)
def test_parts_add_up_to_the_gradient(name):
    loss = CASES[name]
    params, batch = arrays()
    path = {"by_row": "stack", "mixed_positions": "half"}.get(name, "w")
    sums, arguments = partial_sums(loss, path)
    assert sums.numbers == {0}
    mesh = make_mesh(jax.devices()[:COUNT])
    sharding = NamedSharding(mesh, PartitionSpec(FSDP))
    (parts,) = jax.jit(lambda *given: sums.run(given, sharding))(*arguments)
    expected = jax.grad(loss)(params, batch)[path]
    assert parts.shape == (COUNT, *expected.shape)
    # Devices have other parts, unless they have equal tokens.
    assert len({part.tobytes() for part in np.asarray(parts, np.float32)}) > COUNT / 2
    # Sums of eight in another order; a part in bfloat16 is rounded by 2^-9 of itself.
    bound = 2.0**-9 * COUNT if name == "narrow" else 2.0**-20
    error = jnp.linalg.norm(parts.astype(jnp.float32).sum(0) - expected)
    assert error <= bound * jnp.linalg.norm(expected)


def test_what_is_no_sum_over_examples_stays_whole():
    def in_loop(params, batch):
        return jnp.sum(loop(params["stack"], batch))

    def of_params(params, batch):
        return jnp.square(params["w"]).sum() + batch["x"].sum()

    def squared_sum(params, batch):
        return jnp.square((batch["x"] @ params["w"]).sum(0)).sum()

    assert not partial_sums(in_loop, "stack")[0].numbers
    assert not partial_sums(of_params, "w")[0].numbers
    # The sum that is squared is whole; the gradient is a sum over examples again.
    assert partial_sums(squared_sum, "w")[0].numbers
