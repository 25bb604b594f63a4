"""Exports and imports hold a few parts, however large the model is."""

import subprocess
import sys
import threading
import tracemalloc
from collections.abc import Generator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zinf
from tests.unit.interchange.models import assert_same_trees, on_nvme
from zinf.checkpoint.saved import Saved
from zinf.core.interchange import (
    export_orbax,
    export_safetensors,
    import_orbax,
    import_safetensors,
)
from zinf.core.interchange.orbax_export import COPIES_WRITTEN
from zinf.core.interchange.orbax_import import OrbaxTensors
from zinf.core.interchange.orbax_leaf import CONTEXT
from zinf.core.interchange.outgoing import held_bytes
from zinf.core.interchange.safetensors_files import SafetensorsFiles
from zinf.core.interchange.sources import parameters
from zinf.core.memory import BudgetExceeded
from zinf.core.memory.host.pool import POOL
from zinf.core.memory.nvme.chunk_file import ChunkFile
from zinf.core.memory.nvme.open_file import STAGING_BYTES
from zinf.core.memory.nvme.profile import Profile
from zinf.core.memory.storage_error import StorageError
from zinf.core.process.malloc import anonymous_bytes
from zinf.core.program import ArrayId, Role, Tier

ROOT = Path(__file__).resolve().parents[3]
MIB = 2**20
ROWS, COLUMNS, LAYERS = 4096, 1024, 9
# One embedding, and one row of the stacked leaf. (Parts of other sizes would not use
# each other's memory again at once.)
PART_BYTES = 4 * ROWS * COLUMNS
# What else the process may use meanwhile: threads, headers, the allocator.
SLACK_BYTES = 12 * MIB
PARAM_BYTES = 4 * ROWS * COLUMNS * (LAYERS + 1)


def init(seed: int = 0) -> dict[str, Any]:
    keys = jax.random.split(jax.random.key(seed))
    # Tied: read at both ends. The stacked leaf is frozen.
    return {
        "embed": jax.random.normal(keys[0], (ROWS, COLUMNS)),
        "blocks": jax.random.normal(keys[1], (LAYERS, ROWS, COLUMNS), jnp.float32),
    }


def loss(params: dict[str, Any], batch: dict[str, Any]) -> jax.Array:
    x = params["embed"][batch["tokens"]]
    x = x + params["blocks"][0][batch["tokens"]]
    return jnp.mean(jnp.square(x @ params["embed"].T))


def total(params: dict[str, Any], _: dict[str, Any]) -> jax.Array:
    return sum(jnp.sum(jnp.square(leaf)) for leaf in params.values())


def start(folder: Path, seed: int = 0) -> zinf.Engine:
    config = on_nvme(folder) | {"frozen": ["blocks"]}
    batch = {"tokens": np.arange(4, dtype=np.int32)}
    make = lambda: init(seed)  # noqa: E731
    return zinf.initialize(loss, make, optax.sgd(1e-2), config, batch=batch)


@contextmanager
def memory_below(limit_bytes: int) -> Generator[None, None, None]:
    """Fails if more than that is allocated or resident meanwhile than before."""
    POOL.trim()
    ended, before, peak = threading.Event(), anonymous_bytes(), [0]

    def watch() -> None:
        while not ended.wait(0.001):
            peak[0] = max(peak[0], anonymous_bytes())

    watcher = threading.Thread(target=watch)
    tracemalloc.start()
    watcher.start()
    try:
        yield
        allocated = tracemalloc.get_traced_memory()[1]
    finally:
        ended.set()
        watcher.join()
        tracemalloc.stop()
    assert allocated < limit_bytes
    assert 0 < peak[0] - before < limit_bytes


@contextmanager
def host_room(engine: zinf.Engine, nbytes: int) -> Generator[None, None, None]:
    """Leaves the host tier of an engine this much room, and sees that it was used."""
    ledger = engine.stores[Tier.HOST].ledger
    room, ledger._capacity_bytes = ledger._capacity_bytes, ledger.used_bytes + nbytes
    ledger.reset_peak()
    try:
        yield
        assert ledger.peak_bytes == ledger._capacity_bytes
    finally:
        ledger._capacity_bytes = room


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    made = start(tmp_path_factory.mktemp("engine"))
    yield made
    made.close()


@pytest.mark.parametrize(
    ("dtype", "bytes_each"),
    [(None, 0), pytest.param("bfloat16", 2 + 3, marks=pytest.mark.slow)],
)
def test_an_export_holds_two_parts_and_a_cast_one(dtype, bytes_each, engine, tmp_path):
    held = 2 * PART_BYTES + PART_BYTES // 4 * bytes_each
    assert held_bytes(parameters(engine), dtype) == held
    assert PARAM_BYTES > 2 * (held + SLACK_BYTES)
    with host_room(engine, held), memory_below(held + SLACK_BYTES):
        export_safetensors(engine, tmp_path / "out", dtype=dtype)
    with SafetensorsFiles(tmp_path / "out") as files:
        nbytes = sum(spec.nbytes for spec in files.specs.values())
        assert nbytes == PARAM_BYTES // (2 if dtype else 1)
    if dtype is None:  # A checkpoint takes as little.
        engine.save(tmp_path / "saved")
        with Saved(tmp_path / "saved") as saved, memory_below(held + SLACK_BYTES):
            export_safetensors(saved, tmp_path / "again")


@pytest.mark.slow
def test_an_import_holds_two_parts_and_what_becomes_of_one(engine, tmp_path):
    export_safetensors(engine, tmp_path / "out", max_shard_bytes=PARAM_BYTES // 2)
    held = 2 * PART_BYTES
    with closing(start(tmp_path / "nvme", seed=1)) as other:
        with host_room(other, held), memory_below(held + SLACK_BYTES):
            import_safetensors(other, tmp_path / "out")
        assert_same_trees(other.params(), engine.params())


def test_an_import_has_as_many_writes_under_way_as_the_host_has_room_for(
    tmp_path, monkeypatch
):
    num_leaves, most, numel = 12, 3, 2**16
    nbytes = 4 * numel
    make = lambda: {f"w{i}": jnp.full(numel, i, "float32") for i in range(num_leaves)}  # noqa: E731
    together = threading.Barrier(most, timeout=60)
    lock, counts, write = threading.Lock(), {"now": 0, "most": 0}, ChunkFile.write

    def together_with_others(*arguments: Any) -> None:
        with lock:
            counts["now"] += 1
            counts["most"] = max(counts.values())
        together.wait()  # Breaks, and fails the write, if others are never begun.
        write(*arguments)
        with lock:
            counts["now"] -= 1

    def fail_once(chunk: ChunkFile, *arguments: Any) -> None:
        monkeypatch.setattr(ChunkFile, "write", write)
        raise StorageError(5, "the drive failed")

    config = on_nvme(tmp_path / "nvme") | {"frozen": []}
    batch = {"x": np.zeros(1, np.float32)}
    with zinf.initialize(total, make, optax.sgd(1e-2), config, batch=batch) as engine:
        export_safetensors(engine, tmp_path / "out")
        monkeypatch.setattr(ChunkFile, "write", together_with_others)
        # A part that is read, one that is used, and writes under way.
        with host_room(engine, nbytes * (2 + most - 1)):
            import_safetensors(engine, tmp_path / "out")
        assert counts == {"now": 0, "most": most}
        monkeypatch.setattr(ChunkFile, "write", fail_once)
        with pytest.raises(StorageError, match="the drive failed") as failed:
            import_safetensors(engine, tmp_path / "out")
        assert "initial values" in failed.value.__notes__[0]
        assert_same_trees(engine.params(), make())


def test_an_import_counts_shares_that_are_copies(tmp_path):
    """Leaves that the devices do not divide evenly: each share is padded."""
    numel = 2**22 + 1
    make = lambda: {f"w{i}": jnp.full(numel, i, "float32") for i in range(3)}  # noqa: E731
    config = on_nvme(tmp_path / "nvme") | {"frozen": ["*"], "mesh": {"fsdp": 2}}
    arguments = total, make, optax.sgd(1e-2), config
    batch = {"x": np.zeros((2, 1), np.float32)}
    with zinf.initialize(*arguments, batch=batch) as engine:
        export_safetensors(engine, tmp_path / "out")
        layouts = engine.residents.layouts
        share = layouts.share(ArrayId(Role.PARAM, "w0")).nbytes
        assert share == 4 * (numel + 1)
        # A part that is read, one that is used, and the share of that.
        held = 2 * 4 * numel + share
        with pytest.raises(BudgetExceeded), host_room(engine, held - 1):
            import_safetensors(engine, tmp_path / "out")
        # A copy begins anywhere in a page, so threads that write move it in parts.
        staging = Profile().num_threads * STAGING_BYTES
        with host_room(engine, held), memory_below(held + staging + SLACK_BYTES):
            import_safetensors(engine, tmp_path / "out")
        assert_same_trees(engine.params(), make())


@pytest.mark.slow
def test_orbax_holds_a_few_copies_of_a_part_more(tmp_path):
    """In a process whose malloc is tuned, as that of `zinf checkpoint export` is.

    Orbax writes from threads of its own. Left alone, glibc gives each a heap that keeps
    what was freed, which took 5 to 15 MB more than the limit here.
    """
    code = "import sys; from tests.unit.interchange.test_memory import pass_on; pass_on"
    command = [sys.executable, "-c", f"{code}(sys.argv[1])", str(tmp_path)]
    asked = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert asked.returncode == 0, asked.stderr


def pass_on(folder: str) -> None:
    """Exports to Orbax, imports that, and fails if either takes too much memory."""
    zinf.tune_malloc()
    out, index_bytes = Path(folder), CONTEXT["cache_pool#ocdbt"]["total_bytes_limit"]
    with closing(start(out / "first")) as engine:
        held = (2 + COPIES_WRITTEN) * PART_BYTES
        with host_room(engine, held), memory_below(held + index_bytes + SLACK_BYTES):
            export_orbax(engine, out / "out")
        held = (1 + OrbaxTensors.copies) * PART_BYTES
        with closing(start(out / "second", seed=1)) as other:
            limit_bytes = held + index_bytes + SLACK_BYTES
            with host_room(other, held), memory_below(limit_bytes):
                import_orbax(other, out / "out")
            assert_same_trees(other.params(), engine.params())
