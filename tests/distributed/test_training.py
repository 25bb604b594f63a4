"""Real processes train as one process with as many devices does."""

import json
import math
from functools import cache
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
    OVERFLOWING,
    OVERFLOWS,
    STEPS,
    fingerprint,
    overflowing,
)
from tests.equivalence.meshes import BOUND, batches, config, init, loss

DEVICES = 4
COUNTS = (2, pytest.param(4, marks=pytest.mark.exhaustive))
STATE_ARRAYS = 3  # of each parameter: itself and two moments
FLOAT_BYTES = 4


@pytest.fixture(scope="module", params=COUNTS)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """`(folder, what each process reported)`."""
    count = request.param
    folder = str(tmp_path_factory.mktemp(f"{count}-processes"))
    save_alone(folder)
    coordinator = f"127.0.0.1:{free_port()}"
    shares = str(DEVICES // count)
    lines = [[coordinator, str(count), str(i), shares, folder] for i in range(count)]
    ended = run_all("training", lines)
    for process in ended:
        assert process.code == 0, process.output
    return folder, [reports(process.output) for process in ended]


def save_alone(folder: str) -> None:
    """A checkpoint by this process, in `alone`, before any step."""
    engine = zinf.initialize(loss, init, optax.adamw(1e-2), config(3, "host", folder))
    engine.prepare(batches(1)[0])
    engine.save(f"{folder}/alone")
    engine.close()


def reports(output: str) -> dict[str, Any]:
    found = {}
    for line in output.splitlines():
        name, start, rest = line.partition("{")
        if start and not name.startswith("["):
            found[name.strip()] = json.loads(start + rest)
    return found


@cache
def alone(stage: int, tier: str, fp16: bool = False) -> dict[str, Any]:
    """The same in this process."""
    mesh = zinf.make_mesh(jax.devices()[:DEVICES])
    settings = config(stage, tier, "") | (FP16 if fp16 else {})
    engine = zinf.initialize(loss, init, optax.adamw(1e-2), settings, mesh=mesh)
    given = batches(STEPS)
    if fp16:
        given = [overflowing(i, b) for i, b in enumerate(given, start=1)]
    metrics = [engine.step(batch) for batch in given]
    found = {k: [m[k] for m in metrics] for k in ("loss", "grad_norm", "skipped")}
    found["evaluated"] = engine.evaluate(given[0])
    engine.close()
    return found


@pytest.mark.slow
def test_processes_give_the_losses_of_one(run):
    _, processes = run
    for stage, tier in CASES[len(processes)]:
        expected = alone(stage, "fused" if tier == "fused" else "device")
        for process in processes:
            found = process[f"{stage} {tier}"]
            for name in ("loss", "grad_norm", "evaluated"):
                np.testing.assert_allclose(found[name], expected[name], rtol=BOUND)


@pytest.mark.slow
def test_every_process_has_the_same_losses_and_parameters(run):
    _, (first, *others) = run
    for stage, tier in CASES[1 + len(others)]:
        case = f"{stage} {tier}"
        for name in ("loss", "grad_norm", "evaluated", "applied", "params"):
            for process in others:
                assert process[case][name] == first[case][name], (case, name)


@pytest.mark.slow
def test_tiers_are_bit_equal(run):
    _, processes = run
    for process in processes:
        on_device, on_nvme, *_ = process.values()
        for name in ("loss", "grad_norm", "applied", "params"):
            assert on_nvme[name] == on_device[name]


@pytest.mark.slow
@pytest.mark.parametrize("run", [OVERFLOWING], indirect=True)
def test_an_overflow_in_one_process_is_skipped_by_all(run):
    _, processes = run
    expected = alone(3, "host", fp16=True)
    assert expected["skipped"][OVERFLOWS - 1]
    assert not all(expected["skipped"])
    for process in processes:
        assert process["fp16"] == processes[0]["fp16"]
        assert process["fp16"]["skipped"] == expected["skipped"]


@pytest.mark.slow
def test_each_process_holds_its_share_of_every_byte(run):
    _, processes = run
    shapes = [x.shape for x in jax.tree.leaves(init())]
    # The last dim is the widest: it is padded so that it divides among the devices.
    padded = [(*s[:-1], -(-s[-1] // DEVICES) * DEVICES) for s in shapes if s]
    shares = sum(map(math.prod, padded)) // len(processes)
    held = STATE_ARRAYS * FLOAT_BYTES * (shares + shapes.count(()))
    for i, process in enumerate(processes):
        _, found, *_ = process.values()
        assert found["peaks"]["NVME"] == held
        assert found["read"] == held
        assert found["files"] == [f"process-{i}" for i in range(len(processes))]
        for case in (f"{stage} {tier}" for stage, tier in CASES[len(processes)]):
            for tier, peak in process[case]["peaks"].items():
                assert peak <= process[case]["planned"][tier]


@pytest.mark.slow
def test_processes_restore_what_one_saved_and_what_they_saved(run):
    _, processes = run
    initial = fingerprint({k: np.asarray(v) for k, v in init().items()})
    for process in processes:
        (found,) = (x for name, x in process.items() if name.endswith("nvme"))
        assert found["restored alone"] == initial != found["params"]
        assert found["restored saved"] == found["params"]


@pytest.mark.slow
def test_processes_read_and_set_one_array(run):
    _, processes = run
    for process in processes:
        (found,) = (x for name, x in process.items() if name.endswith("nvme"))
        assert found["are set"]


@pytest.mark.slow
def test_what_all_saved_one_process_restores_bit_equal(run):
    folder, processes = run
    mesh = zinf.make_mesh(jax.devices()[:1])
    settings = config(0, "device", "")
    engine = zinf.initialize(loss, init, optax.adamw(1e-2), settings, mesh=mesh)
    engine.restore(f"{folder}/saved")
    engine.evaluate(batches(1)[0])
    _, saved, *_ = processes[0].values()
    assert fingerprint(engine.params()) == saved["params"]
    engine.close()
