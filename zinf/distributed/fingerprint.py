"""What this process runs: package versions, a hash of zinf's source, and devices."""

import hashlib
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax

import zinf_kernels

PACKAGES = ("jax", "jaxlib", "numpy", "optax")


def code_fingerprint() -> dict[str, str]:
    """Versions and a hash of zinf's own source; touches no device."""
    found = {name: version(name) for name in PACKAGES}
    found["python"] = ".".join(platform.python_version_tuple()[:2])
    return {**found, "zinf source": _source_hash()}


def device_fingerprint() -> dict[str, Any]:
    """Platform, number and kind of this process's devices; starts jax's backend."""
    return {
        "platform": jax.default_backend(),
        "devices per process": jax.local_device_count(),
        "device kind": jax.local_devices()[0].device_kind,
    }


def _source_hash() -> str:
    total = hashlib.sha256()
    for root in (Path(__file__).parents[1], Path(zinf_kernels.__file__).parent):
        for file in sorted(root.rglob("*.py")):
            total.update(f"{root.name}/{file.relative_to(root).as_posix()}\0".encode())
            total.update(file.read_bytes())
    return total.hexdigest()[:12]
