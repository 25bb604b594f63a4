"""Stacks in pinned host memory, and what machines without enough of it are told."""

import os
import subprocess
import sys
from types import SimpleNamespace

import jax
import numpy as np
import pytest

import zinf
from zinf.core.engine.initialize import tracing_device
from zinf.core.memory.host.pages.limit import (
    AT_ONCE_GIB,
    AT_ONCE_VARIABLE,
    GIB,
    PINNED,
    POOL_GIB,
    POOL_VARIABLE,
    check_pinned,
)
from zinf.core.memory.host.pinned import PinnedStore, Stack
from zinf.core.process import started
from zinf.core.program import ArrayId, ArraySpec, Role
from zinf.core.sharding import ArrayEntry, whole_layout
from zinf.core.step.updates import cpu_device

SHAPE = (4, 3)
NAMES = [ArrayId(Role.PARAM, f"layers/{n}/w") for n in range(2)]
ALONE = ArrayId(Role.PARAM, "head")


def stack(*names: ArrayId) -> Stack:
    mesh = zinf.make_mesh(jax.devices()[:1])
    entry = ArrayEntry(ArraySpec(SHAPE, "float32", 4), whole_layout(SHAPE, mesh))
    return Stack(names, entry)


def test_members_are_written_one_by_one_and_taken_as_one_pinned_array():
    one, other = stack(*NAMES), stack(ALONE)
    store = PinnedStore([one, other], 3 * 4 * 12)
    contents = [np.full(SHAPE, n, np.float32) for n in range(3)]
    for name, content in zip([*NAMES, ALONE], contents, strict=True):
        assert store.contains(name) == (name == NAMES[1])  # The stack is there.
        store.write(name, content).result()
    taken = store.take(one)
    assert taken.shape == (2, *SHAPE) and taken.sharding.memory_kind == PINNED
    np.testing.assert_array_equal(taken, np.stack(contents[:2]))
    assert store.take(other).shape == SHAPE
    store.put(one, jax.device_put(taken + 1, one.sharding))
    for name, content in zip(NAMES, contents[:2], strict=True):
        found = store.read(name).result()
        assert not found.flags.writeable
        np.testing.assert_array_equal(found, content + 1)
    rows = NAMES[1].piece((1, 3))
    store.write(rows, np.zeros((2, 3), np.float32)).result()
    np.testing.assert_array_equal(store.read(rows).result(), np.zeros((2, 3)))
    np.testing.assert_array_equal(store.read(NAMES[0]).result(), contents[0] + 1)
    np.testing.assert_array_equal(store.read(ALONE).result(), contents[2])
    assert store.ledger.used_bytes == one.nbytes + other.nbytes == 3 * 4 * 12
    for wrong in (np.zeros((3, 3), np.float32), np.zeros(SHAPE, np.float64)):
        with pytest.raises(ValueError, match="Free it first"):
            store.write(NAMES[0], wrong)
    with pytest.raises(NotImplementedError, match="one stack with the 0 arrays"):
        store.take(stack(NAMES[0]))
    store.close()
    assert store.ledger.used_bytes == 0


def device(platform, *kinds):
    memories = [SimpleNamespace(kind=kind) for kind in kinds]
    return SimpleNamespace(platform=platform, addressable_memories=lambda: memories)


GPUS = [device("gpu", "device", PINNED)]
POOL_80, AT_ONCE = {POOL_VARIABLE: "80"}, {AT_ONCE_VARIABLE: "true"}
LATE = "was not set when Python started, and a backend .*may have read the old value"


@pytest.mark.parametrize(
    ("at_start", "now", "imported", "pool_gib", "words"),
    [
        ({}, {}, None, POOL_GIB, "is not set. Set it to 66 before Python"),
        (POOL_80, POOL_80, None, 80, "is set to 80. Set it to 82 before Python"),
        # A pool that is allocated at once is smaller.
        (AT_ONCE, AT_ONCE, None, AT_ONCE_GIB, "is not set"),
        (POOL_80 | AT_ONCE, POOL_80 | AT_ONCE, None, 80, "is set to 80."),
        # Set too late for a backend: so much it has in any case.
        ({}, POOL_80, None, POOL_GIB, f"is set to 80 now, but {LATE}. Set it to 66"),
        # A smaller value that may have come too late holds too.
        (POOL_80, {POOL_VARIABLE: "8"}, None, 8, "is set to 8 now, but was set to 80"),
        # zinf was imported after the change, and before a backend started.
        ({}, POOL_80, POOL_80, 80, "is set to 80."),
        # It changed again after the import.
        ({}, {POOL_VARIABLE: "90"}, POOL_80, POOL_GIB, "is set to 90 now, but was not"),
    ],
)
def test_a_budget_above_the_pool_says_which_variable_to_set(
    at_start, now, imported, pool_gib, words, monkeypatch, tmp_path
):
    for name in (POOL_VARIABLE, AT_ONCE_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    for name, value in now.items():
        monkeypatch.setenv(name, value)
    content = b"".join(f"{k}={v}\0".encode() for k, v in at_start.items())
    (tmp_path / "environ").write_bytes(content)
    monkeypatch.setattr(started, "AT_EXEC", tmp_path / "environ")
    monkeypatch.setattr(started, "IMPORTED", imported)
    check_pinned(GPUS, pool_gib * GIB)
    found = f"pool has {pool_gib * GIB:,}: {POOL_VARIABLE} {words}"
    with pytest.raises(ValueError, match=found):
        check_pinned(GPUS, pool_gib * GIB + 1)
    check_pinned([device("tpu", "device", PINNED)], 500 * GIB)
    with pytest.raises(NotImplementedError, match="needs memory of the kind pinned"):
        check_pinned([device("gpu", "device")], 1)


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ("import jax\nset_it()", ("2",)),
        ("import jax\njax.devices()\nset_it()", ("2", "1")),
    ],
    ids=["no backend yet", "backend before"],
)
def test_what_a_backend_can_have_read_is_known_if_it_started_after_zinf(
    lines, expected
):
    code = (
        f"import os\nset_it = lambda: os.environ.update(X='2')\n{lines}\n"
        "import zinf.core.process.started as s\nprint(s.could_have_read('X'))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"X": "1", "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines()[-1] == str(expected)


def test_a_run_without_cpu_devices_says_what_jax_platforms_needs(monkeypatch):
    def refuse(backend):
        raise RuntimeError(f"Unknown backend {backend}")

    gpu = SimpleNamespace(platform="cuda")
    monkeypatch.setattr(jax, "default_backend", lambda: "cuda")
    monkeypatch.setattr("zinf.core.step.updates.local_devices", lambda mesh: [gpu])
    monkeypatch.setattr(jax, "local_devices", refuse)
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    needed = r"Set it to 'cuda,cpu'"
    with pytest.raises(ValueError, match=f"JAX_PLATFORMS is 'cuda'. {needed}"):
        cpu_device(None)
    monkeypatch.delenv("JAX_PLATFORMS")
    with pytest.raises(ValueError, match=f"JAX_PLATFORMS is ''. {needed}"):
        tracing_device(None, "h200:1")
