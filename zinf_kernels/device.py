"""The device that an op will run on, as far as the choice of a kernel depends on it."""

from dataclasses import dataclass
from typing import Any

import jax

HOPPER = (9, 0)
# For devices that are only described. Present devices report it themselves.
CAPABILITIES = {
    "T4": (7, 5),
    "V100": (7, 0),
    "A100": (8, 0),
    "L4": (8, 9),
    "H100": HOPPER,
    "H200": HOPPER,
    "GH200": HOPPER,
    "B200": (10, 0),
}


@dataclass(frozen=True)
class Device:
    """A kind of device; `capability` is CUDA's compute capability, if it has one."""

    platform: str
    kind: str
    num_cores: int
    capability: tuple[int, int] | None = None


def device_for(*arrays: Any) -> Device:
    """The device that a computation on these arrays will run on.

    Under `jax.sharding.use_abstract_mesh` it is the mesh's device, present or not.
    Otherwise it is that of the first array that has one, and the default device for
    arrays being traced. A program that is traced on a machine with an accelerator but
    runs on its CPU has to pass `implementation`, or set `jax.default_device`.
    """
    described = jax.sharding.get_abstract_mesh().abstract_device
    if described is not None:
        return Device(
            "gpu" if described.platform in ("cuda", "gpu") else described.platform,
            described.device_kind,
            described.num_cores or 1,
            _capability_of_kind(described.device_kind),
        )
    for array in arrays:
        if isinstance(array, jax.Array) and not isinstance(array, jax.core.Tracer):
            return device_of(next(iter(array.devices())))
    # A device, the name of a platform, or None. Config is filled in at run time.
    default = jax.config.jax_default_device  # pyrefly: ignore[missing-attribute]
    if default is None or isinstance(default, str):
        default = jax.devices(default)[0]
    return device_of(default)


def is_alone() -> bool:
    """Whether the program being traced runs on one device, or inside `jax.shard_map`.

    Without a mesh, the program may run on all devices that jax sees.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.axis_names:
        return mesh.size == 1 or mesh.are_all_axes_manual
    return mesh.abstract_device is not None or jax.device_count() == 1


def hopper_obstacle(device: Device) -> str | None:
    """Why a kernel that needs Hopper's wgmma and TMA cannot run; None if it can."""
    if device.capability == HOPPER:
        return None
    if device.platform != "gpu":
        return f"it is for GPUs and this is {named(device)}."
    if device.capability is None:
        return f"the compute capability of {device.kind!r} is not known."
    return (
        f"it needs compute capability 9.0 (H100, H200) and {device.kind} has "
        f"{'.'.join(map(str, device.capability))}."
    )


def device_of(device: Any) -> Device:
    """The description of a `jax.Device` for the choice of kernels."""
    if device.platform != "gpu":
        return Device(device.platform, device.device_kind, 1)
    major, minor = map(int, device.compute_capability.split("."))
    return Device("gpu", device.device_kind, device.core_count, (major, minor))


def _capability_of_kind(kind: str) -> tuple[int, int] | None:
    return next((CAPABILITIES[w] for w in kind.split() if w in CAPABILITIES), None)


def named(device: Device) -> str:
    return f"a {device.platform.upper()}"
