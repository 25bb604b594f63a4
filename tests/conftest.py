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
from typing import TYPE_CHECKING

import pytest

from tests.compiled import compile_cache
from tests.golden import Golden
from tests.marks import chromium, seed

if TYPE_CHECKING:
    from tests.runs import Runs

pytest_plugins = ["tests.processor", "tests.garbage"]

assert "jax" not in sys.modules, "jax was imported before its settings were made"

PLATFORM = os.environ.get("ZINF_TEST_PLATFORM", "cpu")
DRIVE = os.environ.get("ZINF_TEST_NVME")

# The optimizer may run on the CPU backend, so a GPU run needs both.
os.environ["JAX_PLATFORMS"] = PLATFORM if PLATFORM == "cpu" else f"{PLATFORM},cpu"
# One thread compiles a program, as two tests run at once: in all a sixth less work.
os.environ["XLA_FLAGS"] = (
    "--xla_force_host_platform_device_count=8 --xla_cpu_parallel_codegen_split_count=1"
)
# A shell's background job ignores SIGINT, and so would each process that a test starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# Where a shell turns bytecode off, each command would compile zinf anew: 0.3 s of 1.9.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# Models of flax, equinox and haiku and all of optax pass with this.
os.environ["JAX_NUMPY_RANK_PROMOTION"] = "raise"

# Tests build the same small models again and again. A compiled program is 4 times as
# fast to read as to compile, and has the same cost and memory analysis. Workers of
# pytest-xdist inherit the folder from the process that starts them, and so do the
# commands that tests start.
if "PYTEST_XDIST_WORKER" not in os.environ:
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(compile_cache())
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
    # Likewise, so that all workers draw the same cases.
    seed()

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
# Folders and files whose tests need an extra, and a module of that extra. They are
# slow, and the README's command, which installs no extra, does not look at them.
EXTRAS = {
    "unit/hf": "torchax",
    "unit/lm_eval": "lm_eval",
    "unit/checkpoint/test_s3.py": "moto",
    "ray": "ray",
}
# Only `.ci/run` has all that tests with these markers need, so they run with the slow.
ALSO_SLOW = ("tpu_compiler", "gpu_compiler", "notebook", "browser")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden",
        action="store_true",
        help="write the golden files anew; read them in the diff",
    )


def pytest_report_header() -> str:
    return f"random cases: ZINF_TEST_SEED={seed()}"


def extra_of(path: Path) -> str | None:
    """A module of the extra that the tests of this file need, or None."""
    tests = Path(__file__).parent
    needs = (extra for name, extra in EXTRAS.items() if within(path, tests / name))
    return next(needs, None)


def within(path: Path, folder: Path) -> bool:
    return path == folder or folder in path.parents


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """True for tests whose extra is absent if only fast tests are asked for."""
    extra = extra_of(collection_path)
    is_fast = "not slow" in config.option.markexpr
    return True if extra and is_fast and find_spec(extra) is None else None


# Before pytest leaves out what `-m` does not choose.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if any(map(item.get_closest_marker, ALSO_SLOW)) or extra_of(item.path):
            item.add_marker(pytest.mark.slow)


def pytest_runtest_setup(item: pytest.Item) -> None:
    for name, (is_there, reason) in NEEDS.items():
        if item.get_closest_marker(name) and not is_there:
            pytest.skip(reason)


@pytest.fixture(scope="session", autouse=True)
def unused_devices_are_said() -> None:
    """What is said once a process is said before any test looks at what is said."""
    from zinf.core.machine.devices import say_unused

    say_unused(8)


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


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Golden:
    """`golden.check("name.txt", text)`: compares with `golden/name.txt` beside it."""
    is_updated = request.config.getoption("--update-golden")
    return Golden(request.path.parent / "golden", is_updated=is_updated)


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> "Runs":
    """Finished runs that tests only read; each is made once, by whoever asks first."""
    # Imports jax, which reads the settings above once.
    from tests.runs import Runs

    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # What the workers of one session share.
    return Runs(folder / "runs")


@pytest.fixture
def own_compile_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Path]:
    """An empty compile cache, for tests that count or time what is compiled."""
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    before = jax.config.jax_compilation_cache_dir
    folder = tmp_path / "compiled"
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(folder))
    jax.config.update("jax_compilation_cache_dir", str(folder))
    compilation_cache.reset_cache()
    yield folder
    jax.config.update("jax_compilation_cache_dir", before)
    compilation_cache.reset_cache()


@pytest.fixture
def starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of plans and rates for the starts within a test.

    In other tests nothing is kept from start to start, as jax was told a folder.
    """
    from zinf.core.step import earlier_plan
    from zinf.core.step.run import calibrate

    folder = tmp_path / "starts"
    for module in (calibrate, earlier_plan):
        monkeypatch.setattr(module, "starts_folder", lambda: folder)
    return folder
