"""Section of gpu_check.py: the machine, its versions, and modules that zinf needs."""

import os
import platform
import shutil
import subprocess
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from gpu_rows import GIB, Rows, Setting

# Modules that zinf imports in addition to jax. Without those of the first line zinf
# cannot be imported at all; zinf_kernels needs only numpy and numba.
IMPORTS = (
    *("pydantic", "yaml", "grain", "orbax.checkpoint", "tensorstore", "xxhash"),
    *("numba", "flax", "optax", "rich", "tqdm", "tensorboardX", "typer"),
)
VERSIONS = ("jax", "jaxlib", "flax", "optax", "numpy", "numba", "tensorstore")
GPU_QUERY = (
    "name,driver_version,memory.total,pcie.link.gen.gpumax,pcie.link.gen.current,"
    "pcie.link.width.current,clocks.max.sm"
)


def run(setting: Setting, rows: Rows) -> None:
    rows.add("python", platform.python_version())
    for name in VERSIONS:
        try:
            rows.add(name, version(name))
        except PackageNotFoundError:
            rows.skip(name, "not installed")
    _host(setting, rows)
    _imports(rows)
    rows.attempt("nvidia-smi", lambda: _nvidia_smi(rows))
    rows.attempt("device", lambda: _device(rows))


def _host(setting: Setting, rows: Rows) -> None:
    cpu = Path("/proc/cpuinfo").read_text()
    models = [x.split(":")[1].strip() for x in cpu.splitlines() if "model name" in x]
    rows.add("processor", models[0] if models else platform.processor())
    rows.add("kernel", platform.release())
    rows.add("cores", len(os.sched_getaffinity(0)))
    rows.add("memory", memory_bytes() / GIB, "GiB", "as the kernel says now")
    rows.add("memory to use", setting.ram_bytes / GIB, "GiB")
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.exists():
        rows.add("memory limit of the cgroup", limit.read_text().strip(), "B")
    huge = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if huge.exists():
        rows.add("huge pages", huge.read_text().strip())
    usage = shutil.disk_usage(setting.folder)
    rows.add("drive free", usage.free / GIB, "GiB", f"of {usage.total / GIB:.0f} GiB")


def memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _imports(rows: Rows) -> None:
    missing = [name for name in IMPORTS if not _is_there(name)]
    rows.add("missing modules", ", ".join(missing) or "none")
    for name in ("zinf", "zinf_kernels"):

        def attempt(name: str = name) -> None:
            import_module(name)
            rows.add(f"import {name}", "works")

        rows.attempt(f"import {name}", attempt)


def _is_there(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ImportError:  # a parent package is missing
        return False


def _nvidia_smi(rows: Rows) -> None:
    command = ["nvidia-smi", f"--query-gpu={GPU_QUERY}", "--format=csv,noheader"]
    answer = subprocess.run(
        command, capture_output=True, text=True, timeout=20, check=True
    )
    values = answer.stdout.splitlines()[0].split(",")
    for name, value in zip(GPU_QUERY.split(","), values, strict=True):
        rows.add(f"nvidia-smi {name}", value.strip())


def _device(rows: Rows) -> None:
    """The device as jax sees it, and which version-dependent names this jax has."""
    jax = import_module("jax")
    device = jax.devices()[0]
    rows.add("device", device.device_kind)
    rows.add("platform", device.platform)
    rows.add("platform version", device.client.platform_version.splitlines()[0])
    kinds = [memory.kind for memory in device.addressable_memories()]
    rows.add("memory kinds", ", ".join(kinds))
    stats = device.memory_stats() or {}
    rows.add("device memory", stats.get("bytes_limit", 0) / GIB, "GiB", "jax's limit")
    names = [n for n in dir(device.client) if "dma" in n or "pinned" in n]
    rows.add("names of the client", ", ".join(names) or "none")
    names = dir(import_module("jax.experimental.compute_on"))
    found = [n for n in names if n.startswith("compute_on")]
    rows.add("compute_on", ", ".join(found))
    core = import_module("jax.extend.core")
    rows.add("ClosedJaxpr is Jaxpr", core.ClosedJaxpr is core.Jaxpr)
