"""A gradient that is larger than what the host has left comes over by row."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zinf
from tests.equivalence.training import streamed_config
from zinf.core.plan import Transfer
from zinf.core.program import Role, Tier
from zinf.core.step import updates

ROWS, COLUMNS = 1024, 128
MATRIX_BYTES = 4 * ROWS * COLUMNS
BLOCK_BYTES = MATRIX_BYTES // 16


def loss(params: Any, batch: jax.Array) -> jax.Array:
    return jnp.mean(jnp.square(batch @ params["kernel"] - 1))


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(updates, "BLOCK_BYTES", BLOCK_BYTES)


def train(folder: Any, host: int) -> tuple[list[dict[str, Any]], set[Any]]:
    """Metrics of three steps, and what is moved from the device in each."""
    config = streamed_config(("nvme", "nvme"), str(folder))
    config["memory"] |= {"host": host}
    random = np.random.default_rng(0)
    init = {"kernel": random.normal(size=(ROWS, COLUMNS)).astype("f4")}
    engine = zinf.initialize(loss, init, optax.adam(1e-2), config)
    batch = random.normal(size=(4, ROWS)).astype("f4")
    metrics = [engine.step(batch) for _ in range(3)]
    moved = {
        array
        for x in engine.last_step.plan.instructions
        if isinstance(x.operation, Transfer) and x.operation.source == Tier.DEVICE
        for array in x.operation.arrays
        if array.role == Role.GRADIENT
    }
    engine.close()
    return metrics, moved


def test_with_little_of_the_host_gradients_come_by_row(tmp_path):
    # The kernel passes through; its gradient and blocks of three arrays of state would
    # not. (In a quarter more than the kernel they would.)
    host = MATRIX_BYTES + MATRIX_BYTES // 8
    expected, wholes = train(tmp_path / "ample", 64 * MATRIX_BYTES)
    metrics, rows = train(tmp_path / "tight", host)
    assert {a.rows for a in wholes} == {None}
    assert len(rows) >= 4 and None not in {a.rows for a in rows}
    assert all(m["host_bytes"] <= host for m in metrics)
    assert [m["loss"] for m in metrics] == [m["loss"] for m in expected]
