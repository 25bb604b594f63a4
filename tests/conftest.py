"""What every test runs on: 8 virtual CPU devices, or a GPU when one is asked for.

All of it is set through the environment, so that a command started by a test gets it
too, and before jax is imported, because jax reads it only once.
"""

import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.marks import chromium

assert "jax" not in sys.modules, "jax was imported before its settings were made"

PLATFORM = os.environ.get("ZINF_TEST_PLATFORM", "cpu")
DRIVE = os.environ.get("ZINF_TEST_NVME")

# The optimizer may run on the CPU backend, so a GPU run needs both.
os.environ["JAX_PLATFORMS"] = PLATFORM if PLATFORM == "cpu" else f"{PLATFORM},cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
# A shell's background job ignores SIGINT, and so would each process that a test starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# Models of flax, equinox and haiku and all of optax pass with this.
os.environ["JAX_NUMPY_RANK_PROMOTION"] = "raise"

# Tests build the same small models again and again. A compiled program is 4 times as
# fast to read as to compile, and has the same cost and memory analysis. One folder
# serves the whole session: workers of pytest-xdist inherit it from the process that
# starts them, and so do the commands that tests start. It is new in each session:
# nothing that an older tree compiled can reach a test.
if "PYTEST_XDIST_WORKER" not in os.environ:
    compiled = tempfile.TemporaryDirectory(prefix="zinf-compiled-")
    os.environ["JAX_COMPILATION_CACHE_DIR"] = compiled.name
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"

# What a marker needs, whether it is there, and how to get it.
NEEDS = {
    "gpu": (PLATFORM != "cpu", "needs a GPU: set ZINF_TEST_PLATFORM=cuda"),
    "nvme": (DRIVE is not None, "needs a real drive: set ZINF_TEST_NVME to a folder"),
    "tpu_compiler": (
        find_spec("libtpu") is not None,
        "needs the TPU compiler: pip install '.[tpu-topology]'",
    ),
    "gpu_compiler": (
        find_spec("jax_cuda13_plugin") is not None,
        "needs the GPU compiler: pip install '.[gpu-topology]'",
    ),
    "notebook": (
        find_spec("nbclient") is not None and find_spec("ipykernel") is not None,
        "needs Jupyter: pip install '.[notebooks]'",
    ),
    "browser": (chromium() is not None, "needs a browser: apt-get install chromium"),
}
# Only `.ci/run` has all that tests with these markers need, so they run with the slow.
ALSO_SLOW = ("tpu_compiler", "gpu_compiler", "notebook", "browser")


def pytest_unconfigure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        compiled.cleanup()


# Before pytest leaves out what `-m` does not choose.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    sampled: dict[str, list[pytest.Item]] = {}
    for item in items:
        if any(item.get_closest_marker(name) for name in ALSO_SLOW):
            item.add_marker(pytest.mark.slow)
        if item.get_closest_marker("sampled") and not item.get_closest_marker("slow"):
            sampled.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for cases in sampled.values():
        leave_fast(cases, cases[0].get_closest_marker("sampled").args[0])


def leave_fast(cases: list[pytest.Item], count: int) -> None:
    """Marks all but `count` cases as slow; those that stay are spread evenly."""
    fast = {i * len(cases) // count for i in range(count)}
    for i, item in enumerate(cases):
        if i not in fast:
            item.add_marker(pytest.mark.slow)


def pytest_runtest_setup(item: pytest.Item) -> None:
    for name, (is_there, reason) in NEEDS.items():
        if item.get_closest_marker(name) and not is_there:
            pytest.skip(reason)


@pytest.fixture
def tmp_nvme(tmp_path: Path) -> Iterator[Path]:
    """A fresh folder for an NVMe tier, on the drive under test if one is named."""
    if DRIVE is None:
        folder = tmp_path / "nvme"
        folder.mkdir()
        yield folder
    else:
        with tempfile.TemporaryDirectory(dir=DRIVE) as name:
            yield Path(name)
