"""A run saves and resumes in every budget that it can train in."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zinf
from zinf.checkpoint import Checkpoints
from zinf.core.program import Tier

MIB = 2**20
WIDTH, DEPTH = 1030, 3
DEVICE_BYTES = 6 * MIB
BATCH = np.linspace(-1, 1, 4 * WIDTH, dtype=np.float32).reshape(4, WIDTH)
# 38 MB of state: three float32 copies of three matrices of 4.2 MB. From almost all of
# it on nvme to all of it on the host, with less than an array to spare.
HOST_MIB = (8, 16, 22, 32, 44)


def loss(params, batch):
    for w in params:
        batch = jnp.tanh(batch @ w)
    return jnp.mean(batch**2)


def engine_in(host_bytes: int, folder, scale: float) -> zinf.Engine:
    shape = (WIDTH, WIDTH)
    params = [jnp.full(shape, scale * (i + 1), jnp.float32) for i in range(DEPTH)]
    budgets = {"device": DEVICE_BYTES, "host": host_bytes, "nvme": [str(folder)]}
    return zinf.initialize(loss, params, optax.adam(1e-3), config={"memory": budgets})


@pytest.mark.parametrize("host_mib", HOST_MIB)
def test_what_trains_in_a_budget_saves_and_resumes_in_it(host_mib, tmp_path):
    engine = engine_in(host_mib * MIB, tmp_path / "nvme", 1e-3)
    engine.step(BATCH)
    saved = [np.array(leaf) for leaf in engine.params()]
    engine.save(tmp_path / "by hand")
    with Checkpoints(tmp_path / "run") as checkpoints:
        checkpoints.save(1, engine)
        after = engine.step(BATCH)["loss"]
        checkpoints.wait()
        for restore in (
            lambda: engine.restore(tmp_path / "by hand"),
            lambda: checkpoints.restore(engine),
        ):
            restore()
            for leaf, expected in zip(engine.params(), saved, strict=True):
                np.testing.assert_array_equal(leaf, expected)
            assert engine.step(BATCH)["loss"] == after
    limits = {Tier.DEVICE: DEVICE_BYTES, Tier.HOST: host_mib * MIB}
    for tier, limit in limits.items():
        assert engine.stores.peak_bytes(tier) <= limit
    engine.close()
