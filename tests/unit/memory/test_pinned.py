"""Stacks in pinned host memory, and what machines without enough of it are told."""

import os
import subprocess
import sys
from types import SimpleNamespace

import jax
import numpy as np
import pytest

import zinf
from zinf import started
from zinf.initialize import tracing_device
from zinf.memory.pages.limit import (
    AT_ONCE_GIB,
    AT_ONCE_VARIABLE,
    GIB,
    PINNED,
    POOL_GIB,
    POOL_VARIABLE,
    check_pinned,
)
from zinf.memory.pinned import PinnedStore, Stack
from zinf.prepare.updates import cpu_device
from zinf.program import ArrayId, Role
from zinf.sharding import whole_layout

SHAPE = (4, 3)
NAMES = [ArrayId(Role.PARAM, f"layers/{n}/w") for n in range(2)]


def stack():
    mesh = zinf.make_mesh(jax.devices()[:1])
    return Stack(tuple(NAMES), whole_layout(SHAPE, mesh), "float32")


def test_members_are_written_one_by_one_and_taken_as_one_pinned_array():
    one = stack()
    store = PinnedStore([one], 2 * 4 * 12)
    assert not store.contains(NAMES[0])
    contents = [np.full(SHAPE, n, np.float32) for n in range(2)]
    for name, content in zip(NAMES, contents, strict=True):
        store.write(name, content).result()
    taken = store.take(one)
    assert taken.shape == (2, *SHAPE) and taken.sharding.memory_kind == PINNED
    np.testing.assert_array_equal(taken, np.stack(contents))
    store.put(one, jax.device_put(taken + 1, one.sharding))
    for name, content in zip(NAMES, contents, strict=True):
        found = store.read(name).result()
        assert not found.flags.writeable
        np.testing.assert_array_equal(found, content + 1)
    rows = NAMES[1].piece((1, 3))
    store.write(rows, np.zeros((2, 3), np.float32)).result()
    np.testing.assert_array_equal(store.read(rows).result(), np.zeros((2, 3)))
    np.testing.assert_array_equal(store.read(NAMES[0]).result(), contents[0] + 1)
    assert store.ledger.used_bytes == one.nbytes == 2 * 4 * 12
    store.close()
    assert store.ledger.used_bytes == 0


def test_other_shapes_and_other_dtypes_are_refused():
    store = PinnedStore([stack()])
    with pytest.raises(ValueError, match="Free it first"):
        store.write(NAMES[0], np.zeros((3, 3), np.float32))
    with pytest.raises(ValueError, match="Free it first"):
        store.write(NAMES[0], np.zeros(SHAPE, np.float64))


def device(platform, *kinds):
    memories = [SimpleNamespace(kind=kind) for kind in kinds]
    return SimpleNamespace(platform=platform, addressable_memories=lambda: memories)


@pytest.fixture
def began(monkeypatch, tmp_path):
    """`began(**variables)`: Python starts with them; jax's backend is up already."""

    def begin(**variables):
        for name in (POOL_VARIABLE, AT_ONCE_VARIABLE):
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        content = b"".join(f"{k}={v}\0".encode() for k, v in variables.items())
        (tmp_path / "environ").write_bytes(content)
        monkeypatch.setattr(started, "AT_EXEC", tmp_path / "environ")
        monkeypatch.setattr(started, "IMPORTED", None)

    return begin


def test_a_budget_above_the_pool_says_which_variable_to_set(began):
    gpus = [device("gpu", "device", PINNED)]
    began()
    check_pinned(gpus, POOL_GIB * GIB)
    with pytest.raises(ValueError, match=rf"{POOL_VARIABLE} is not set. Set it to 66"):
        check_pinned(gpus, POOL_GIB * GIB + 1)
    began(**{POOL_VARIABLE: "80"})
    check_pinned(gpus, 80 * GIB)
    with pytest.raises(ValueError, match=r"is set to 80. Set it to 82 before Python"):
        check_pinned(gpus, 80 * GIB + 1)
    check_pinned([device("tpu", "device", PINNED)], 500 * GIB)


def test_a_pool_that_is_allocated_at_once_is_smaller(began):
    gpus = [device("gpu", "device", PINNED)]
    began(**{AT_ONCE_VARIABLE: "true"})
    check_pinned(gpus, AT_ONCE_GIB * GIB)
    with pytest.raises(ValueError, match=f"has {AT_ONCE_GIB * GIB:,}: {POOL_VARIABLE}"):
        check_pinned(gpus, AT_ONCE_GIB * GIB + 1)
    began(**{AT_ONCE_VARIABLE: "true", POOL_VARIABLE: "80"})
    check_pinned(gpus, 80 * GIB)


def test_a_variable_that_was_set_too_late_for_the_backend_is_found(began, monkeypatch):
    gpus = [device("gpu", "device", PINNED)]
    began()
    monkeypatch.setenv(POOL_VARIABLE, "80")
    check_pinned(gpus, POOL_GIB * GIB)  # so much it has in any case
    with pytest.raises(
        ValueError,
        match=rf"has {POOL_GIB * GIB:,}: {POOL_VARIABLE} is set to 80 now, but was not "
        r"set when Python started, and a backend .*may have read the old value. Set it "
        "to 81 before Python starts",
    ):
        check_pinned(gpus, 80 * GIB)
    # A smaller value that may have come too late holds too.
    began(**{POOL_VARIABLE: "80"})
    monkeypatch.setenv(POOL_VARIABLE, "8")
    with pytest.raises(ValueError, match=f"has {8 * GIB:,}"):
        check_pinned(gpus, 80 * GIB)
    # zinf was imported after the change, and before a backend started.
    began()
    monkeypatch.setenv(POOL_VARIABLE, "80")
    monkeypatch.setattr(started, "IMPORTED", {POOL_VARIABLE: "80"})
    check_pinned(gpus, 80 * GIB)
    # It changed again after the import.
    monkeypatch.setenv(POOL_VARIABLE, "90")
    with pytest.raises(ValueError, match="set to 90 now, but was not set when"):
        check_pinned(gpus, 80 * GIB)


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ("import jax, os\nos.environ['X'] = '2'\nimport zinf.started as s", ("2",)),
        ("import os\nos.environ['X'] = '2'\nimport zinf.started as s", ("2",)),
        (
            "import jax, os\njax.devices()\nos.environ['X'] = '2'\n"
            "import zinf.started as s",
            ("2", "1"),
        ),
        ("import jax\njax.devices()\nimport zinf.started as s", ("1",)),
    ],
    ids=["no backend yet", "no jax yet", "backend before", "never changed"],
)
def test_what_a_backend_can_have_read_is_known_if_it_started_after_zinf(
    lines, expected
):
    code = f"{lines}\nprint(s.could_have_read('X'))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"X": "1", "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines()[-1] == str(expected)


def test_devices_without_pinned_memory_are_named():
    with pytest.raises(NotImplementedError, match="needs memory of the kind pinned"):
        check_pinned([device("gpu", "device")], 1)


def test_a_run_without_cpu_devices_says_what_jax_platforms_needs(monkeypatch):
    def refuse(backend):
        raise RuntimeError(f"Unknown backend {backend}")

    gpu = SimpleNamespace(platform="cuda")
    monkeypatch.setattr(jax, "default_backend", lambda: "cuda")
    monkeypatch.setattr("zinf.prepare.updates.local_devices", lambda mesh: [gpu])
    monkeypatch.setattr(jax, "local_devices", refuse)
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    with pytest.raises(
        ValueError, match=r"JAX_PLATFORMS is 'cuda'. Set it to 'cuda,cpu'"
    ):
        cpu_device(None)
    monkeypatch.delenv("JAX_PLATFORMS")
    with pytest.raises(ValueError, match=r"JAX_PLATFORMS is ''. Set it to 'cuda,cpu'"):
        tracing_device(None, "h200:1")
