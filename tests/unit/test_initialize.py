"""What surrounds the user's loss while it is traced."""

import jax
import jax.numpy as jnp
import optax
import pytest

import zinf
from zinf import make_mesh
from zinf.core.config import Config
from zinf.core.engine.initialize import make_planner, tracing_device
from zinf.core.optim.transforms.factory import build_schedule
from zinf.core.process.jax_modes import Modes
from zinf.core.topology import CHIPS, Topology

ABSENT = Topology("h200:1", CHIPS["h200"], (1,))


@pytest.mark.parametrize(("topology", "is_cpu"), [(None, None), (ABSENT, True)])
def test_a_loss_is_traced_as_on_a_cpu_for_a_machine_that_is_not_there(topology, is_cpu):
    """So no layer in it chooses a kernel of a GPU that happens to be here."""
    seen = []

    def loss(params, batch):
        # Config is filled in at run time.
        seen.append(jax.config.jax_default_device)
        return jnp.sum(params["w"] * batch)

    mesh = make_mesh(jax.devices()[:1])
    planner = make_planner(
        loss, {"w": jnp.ones(4)}, optax.sgd(0.1), mesh=mesh, topology=topology
    )
    planner.trace(jax.ShapeDtypeStruct((4,), jnp.float32))
    device = None if is_cpu is None else jax.local_devices(backend="cpu")[0]
    assert seen == [device] and tracing_device(mesh, topology) == device


def test_functions_of_the_user_see_the_default_device_of_the_modes():
    device = jax.devices()[-1]
    modes = Modes(False, "standard", False, device)
    found = modes.of_user(lambda: jax.config.jax_default_device)()
    assert found == device != jax.config.jax_default_device


def test_without_a_transform_the_optimizer_of_the_config_trains(caplog):
    """With its schedule; nothing says that these keys have no effect."""

    def loss(params, batch):
        return jnp.sum(batch @ params["w"])

    params, batch = {"w": jnp.ones(4)}, jnp.ones((2, 4))
    decay = {"total_num_steps": 4, "warmup_num_steps": 2, "warmup_type": "linear"}
    config = {
        "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": decay | {"warmup_max_lr": "auto"},
        },
    }
    with zinf.initialize(loss, params, None, config) as engine:
        rates = [engine.step(batch)["learning_rate"] for _ in range(4)]
        found = engine.params()["w"]
    schedule = build_schedule(Config.load(config))
    assert rates == [float(schedule(count)) for count in range(4)] and max(rates) > 0
    assert found.tolist() == pytest.approx([1 - 2 * sum(rates)] * 4)
    assert not caplog.records
    with pytest.raises(ValueError, match="tx is None, and the config has no optimizer"):
        zinf.initialize(loss, params, None, {})
