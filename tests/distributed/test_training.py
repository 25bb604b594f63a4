"""Real processes train as one process with as many devices does."""

import json
import math
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest

import zinf
from tests.distributed.processes import free_port, run_all
from tests.distributed.training import (
    CASES,
    FP16,
    MESHED,
    OVERFLOWS,
    PROCESSES,
    SIGNED,
    STEPS,
    WEIGHTED_MICROBATCHES,
    fingerprint,
    meshed,
    overflowing,
    quantized,
    signed,
)
from tests.equivalence import weighted
from tests.equivalence.meshes import BOUND, batches, config, init, loss

DEVICES = 4
STATE_ARRAYS = 3  # of each parameter: itself and two moments
FLOAT_BYTES = 4
# All of them look at the same two processes.
pytestmark = pytest.mark.slow


def run(num_devices: int, folder: Path, part: str = "all") -> list[dict[str, Any]]:
    """What each process reported of a part of `training.PARTS`, by case."""
    at, local = f"127.0.0.1:{free_port()}", str(num_devices // PROCESSES)
    lines = [[at, str(i), local, str(folder), part] for i in range(PROCESSES)]
    ended = run_all("training", lines)
    for process in ended:
        assert process.code == 0, process.output
    return [reports(process.output) for process in ended]


def reports(output: str) -> dict[str, Any]:
    found = {}
    for line in output.splitlines():
        name, start, rest = line.partition('{"')
        if start and not name.startswith("["):
            found[name.strip()] = json.loads(start + rest)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a checkpoint by this process, in `alone`, before any step."""
    made = tmp_path_factory.mktemp("processes")
    settings = config(3, "host", str(made))
    engine = zinf.initialize(loss, init, optax.adamw(1e-2), settings)
    engine.prepare(batches(1)[0])
    engine.save(f"{made}/alone")
    engine.close()
    return made


@pytest.fixture(scope="module")
def processes(folder: Path) -> list[dict[str, Any]]:
    return run(DEVICES, folder)


def alone(
    settings: dict[str, Any], num_devices: int = DEVICES, *, overflows: bool = False
) -> dict[str, Any]:
    """The same in this process."""
    mesh = zinf.make_mesh(jax.devices()[:num_devices])
    engine = zinf.initialize(loss, init, optax.adamw(1e-2), settings, mesh=mesh)
    given = batches(STEPS)
    if overflows:
        given = [overflowing(i, b) for i, b in enumerate(given, start=1)]
    metrics = [engine.step(batch) for batch in given]
    found = {k: [m.get(k) for m in metrics] for k in ("loss", "grad_norm", "skipped")}
    found |= {"params": fingerprint(engine.params())}
    if not overflows:
        found["evaluated"] = engine.evaluate(given[0])
    engine.close()
    return found


def test_processes_give_the_losses_of_one_and_all_the_same(processes):
    for stage, tier in CASES:
        expected = alone(config(stage, "fused" if tier == "fused" else "device", ""))
        case = f"{stage} {tier}"
        for name in ("loss", "grad_norm", "evaluated", "applied", "params"):
            first = processes[0][case][name]
            assert [process[case][name] for process in processes] == [first] * PROCESSES
            if name in ("loss", "grad_norm", "evaluated"):
                np.testing.assert_allclose(first, expected[name], rtol=BOUND)


def test_tiers_are_bit_equal(processes):
    for process in processes:
        for name in ("loss", "grad_norm", "applied", "params"):
            assert process["3 nvme"][name] == process["3 device"][name]


def test_an_overflow_in_one_process_is_skipped_by_all(processes):
    expected = alone(config(3, "host", "") | FP16, overflows=True)["skipped"]
    assert expected[OVERFLOWS - 1] and not all(expected)
    for process in processes:
        assert process["fp16"] == processes[0]["fp16"]
        assert process["fp16"]["skipped"] == expected


def test_every_token_of_a_step_counts_alike_in_whichever_process(processes):
    """As in the mean over the whole batch, which is far from that of processes."""
    batch = weighted.batch()
    expected, gradient = jax.value_and_grad(weighted.whole_mean)(
        weighted.WEIGHTS, batch
    )
    new = jax.tree.map(lambda x, y: x - y, weighted.WEIGHTS, gradient)
    after = weighted.loss(new, batch)
    for number in map(str, WEIGHTED_MICROBATCHES):
        first = processes[0]["weighted"][number]
        assert [p["weighted"][number] for p in processes] == [first] * PROCESSES
        np.testing.assert_allclose(first["loss"], expected, rtol=weighted.RTOL)
        for name, found in first["gradient"].items():
            np.testing.assert_allclose(found, gradient[name], rtol=1e-5, atol=1e-6)
        total, weight = first["evaluated"]
        assert weight == weighted.COUNTS.sum()
        np.testing.assert_allclose(total / weight, after.mean, rtol=1e-5)


@pytest.mark.parametrize("case", ["quantized", "in groups"])
def test_numbers_are_exchanged_between_processes_as_between_groups(processes, case):
    mesh = zinf.make_mesh(jax.devices()[:DEVICES], num_replicas=PROCESSES)
    expected = quantized(mesh, holds_copies=case == "in groups")
    for found in (process[case] for process in processes):
        assert found["params"] == expected["params"]
        # Of scalars over devices, sums are in another order.
        for name in ("loss", "grad_norm"):
            np.testing.assert_allclose(found[name], expected[name], rtol=BOUND)


def test_each_process_holds_its_share_of_every_byte(processes):
    shapes = [x.shape for x in jax.tree.leaves(init())]
    # The last dim is the widest: it is padded so that it divides among the devices.
    padded = [(*s[:-1], -(-s[-1] // DEVICES) * DEVICES) for s in shapes if s]
    shares = sum(map(math.prod, padded)) // PROCESSES
    held = STATE_ARRAYS * FLOAT_BYTES * (shares + shapes.count(()))
    for process in processes:
        found = process["3 nvme"]
        assert found["peaks"]["NVME"] == found["read"] == held
        assert found["files"] == [f"process-{i}" for i in range(PROCESSES)]
        for case in (f"{stage} {tier}" for stage, tier in CASES):
            for tier, peak in process[case]["peaks"].items():
                assert peak <= process[case]["planned"][tier]


def test_processes_set_arrays_and_restore_what_one_saved_and_what_they_saved(
    processes, folder
):
    initial = fingerprint({k: np.asarray(v) for k, v in init().items()})
    for found in (process["3 nvme"] for process in processes):
        assert found["restored alone"] == initial != found["params"]
        assert found["restored saved"] == found["params"]
        assert found["are set"]
    # And so does one process with one device.
    mesh = zinf.make_mesh(jax.devices()[:1])
    settings = config(0, "device", "")
    engine = zinf.initialize(loss, init, optax.adamw(1e-2), settings, mesh=mesh)
    engine.restore(folder / "saved")
    engine.evaluate(batches(1)[0])
    assert fingerprint(engine.params()) == processes[0]["3 nvme"]["params"]
    engine.close()


def test_signs_go_between_processes_as_between_devices_to_the_bit(tmp_path):
    """With a restore, and of what two processes saved in one."""
    mesh = zinf.make_mesh(jax.devices()[:PROCESSES])
    for process in run(PROCESSES, tmp_path, "signed"):
        for kind in SIGNED:
            assert process[kind] == signed(kind, mesh, f"{tmp_path}/{kind}")


def test_each_axis_divides_over_processes_as_over_devices(tmp_path):
    """To rounding: what adds up over processes does so in another order."""
    first, second = run(DEVICES, tmp_path, "meshed")
    assert first == second
    for case in MESHED:
        expected, found = meshed(*case), first[" ".join(map(str, case))]
        for name in ("loss", "grad_norm"):
            np.testing.assert_allclose(found[name], expected[name], rtol=BOUND)
