"""What surrounds the user's loss while it is traced."""

import jax
import jax.numpy as jnp
import optax
import pytest

from zinf import make_mesh
from zinf.initialize import make_planner, tracing_device
from zinf.jax_modes import Modes
from zinf.topology import CHIPS, Topology

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
