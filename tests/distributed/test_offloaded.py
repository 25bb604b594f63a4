"""Two processes run the offloaded step as one process with two devices does."""

import jax
import optax
import pytest

import zinf
from tests.distributed.offloaded import STEPS, settings
from tests.distributed.processes import free_port, run_all
from tests.distributed.test_training import reports
from tests.distributed.training import fingerprint
from tests.equivalence.meshes import batches, init, loss


@pytest.mark.slow
def test_two_processes_give_the_losses_norms_and_parameters_of_one():
    coordinator = f"127.0.0.1:{free_port()}"
    ended = run_all("offloaded", [[coordinator, "2", str(i)] for i in range(2)])
    for process in ended:
        assert process.code == 0, process.output
    mesh = zinf.make_mesh(jax.devices()[:2])
    engine = zinf.initialize(loss, init, optax.adamw(1e-2), settings(), mesh=mesh)
    metrics = [engine.step(batch) for batch in batches(STEPS)]
    expected = {k: [m[k] for m in metrics] for k in ("loss", "grad_norm")}
    expected["params"] = fingerprint(engine.params())
    engine.close()
    # The same executable runs, and sums of two are the same in any order.
    for process in ended:
        assert reports(process.output)["offloaded"] == expected
