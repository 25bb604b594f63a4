"""Compiles for GPUs that are not there, to machine code, on any machine.

The compiled program never runs: it shows that a program compiles, and how much memory
it needs. Compiling takes the wheels `jax-cuda13-plugin` and `jax-cuda13-pjrt` of jax's
own version, without the CUDA libraries; Pallas also takes `ptxas`, from a CUDA toolkit
or a wheel.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import (
    AbstractDevice,
    AbstractMesh,
    AxisType,
    Mesh,
    NamedSharding,
    SingleDeviceSharding,
)

from zinf_kernels.device import Device

PLUGIN = "jax_cuda13_plugin"
# Autotuning would run what it compiles.
OPTIONS: dict[str, bool | str] = {"xla_gpu_autotune_level": "0"}
# Without it jax asks CUDA's libraries for their versions as it finds the plugin. Where
# they are absent it prints a traceback, and has no compiler for GPUs afterwards.
SKIPS_LIBRARIES = "JAX_SKIP_CUDA_CONSTRAINTS_CHECK"


@dataclass(frozen=True)
class Gpu:
    """The facts about a GPU that compilers need, from NVIDIA's data sheets and CUDA.

    `flops_per_second` is the data sheet's for dense matmuls of bfloat16. Only lower
    bounds of times use it.
    """

    kind: str
    capability: tuple[int, int]
    cores: int
    memory_bytes: int
    memory_bytes_per_second: int
    flops_per_second: int
    cache_bytes: int
    clock_ghz: float
    shared_bytes_per_core: int
    shared_bytes_per_block: int
    lanes_per_core: int = 128
    threads_per_core: int = 2048

    @property
    def device(self) -> Device:
        return Device("gpu", self.kind, self.cores, self.capability)


HOPPER_SHARED = {"shared_bytes_per_core": 233472, "shared_bytes_per_block": 232448}
GPUS = {
    "H100": Gpu(
        "NVIDIA H100 80GB HBM3",
        (9, 0),
        132,
        80 << 30,
        3_350 * 10**9,
        989 * 10**12,
        50 << 20,
        1.98,
        **HOPPER_SHARED,
    ),
    "H200": Gpu(
        "NVIDIA H200",
        (9, 0),
        132,
        141 << 30,
        4_800 * 10**9,
        989 * 10**12,
        50 << 20,
        1.98,
        **HOPPER_SHARED,
    ),
    "A100": Gpu(
        "NVIDIA A100-SXM4-80GB",
        (8, 0),
        108,
        80 << 30,
        2_039 * 10**9,
        312 * 10**12,
        40 << 20,
        1.41,
        shared_bytes_per_core=167936,
        shared_bytes_per_block=166912,
        lanes_per_core=64,
    ),
    "B200": Gpu(
        "NVIDIA B200",
        (10, 0),
        148,
        180 << 30,
        8_000 * 10**9,
        2_250 * 10**12,
        126 << 20,
        1.97,
        **HOPPER_SHARED,
    ),
    "RTX4090": Gpu(
        "NVIDIA GeForce RTX 4090",
        (8, 9),
        128,
        24 << 30,
        1_008 * 10**9,
        165 * 10**12,
        72 << 20,
        2.52,
        shared_bytes_per_core=102400,
        shared_bytes_per_block=101376,
        threads_per_core=1536,
    ),
    "T4": Gpu(
        "Tesla T4",
        (7, 5),
        40,
        16 << 30,
        320 * 10**9,
        65 * 10**12,
        4 << 20,
        1.59,
        shared_bytes_per_core=65536,
        shared_bytes_per_block=65536,
        lanes_per_core=64,
        threads_per_core=1024,
    ),
}


def compile_for(gpu: Gpu, function: Callable[..., Any], *args: Any) -> Any:
    """`jax.jit(function)` compiled for one such GPU (`jax.stages.Compiled`).

    Args:
        gpu: one of `GPUS`.
        function: what to compile; ops of this package choose implementations for `gpu`.
        args: arrays or `jax.ShapeDtypeStruct`s, in any pytrees.

    Raises:
        NotImplementedError: the compiler is not installed; the message says what to do.
    """
    (device,) = absent_devices(gpu)
    sharding = SingleDeviceSharding(device)

    def there(x: Any) -> Any:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    described = AbstractDevice(
        device_kind=gpu.kind, num_cores=gpu.cores, platform="cuda"
    )
    mesh = AbstractMesh((), (), abstract_device=described)
    with jax.sharding.use_abstract_mesh(mesh):
        lowered = jax.jit(function).lower(*jax.tree.map(there, args))
        return lowered.compile(OPTIONS)


def compile_over(
    gpu: Gpu, function: Callable[..., Any], *args: Any, specs: Any, num_devices: int
) -> Any:
    """`jax.shard_map` of a function, compiled for several such GPUs.

    Args:
        specs: a `PartitionSpec` for each argument and for the result, on axis "device".
    """
    devices = absent_devices(gpu, devices_per_host=num_devices)
    mesh = Mesh(np.array(devices), ("device",), axis_types=(AxisType.Auto,))
    *ins, outs = specs
    mapped = jax.shard_map(function, mesh=mesh, in_specs=tuple(ins), out_specs=outs)
    there = [
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))
        for x, spec in zip(args, ins, strict=True)
    ]
    return jax.jit(mapped).lower(*there).compile(OPTIONS)


def why_not() -> str | None:
    """Why nothing can be compiled for a GPU here, or None if it can."""
    if find_spec(PLUGIN) is not None:
        return None
    version = jax.__version__
    return (
        "The compiler for GPUs is not installed; it needs no CUDA libraries: "
        f"pip install --no-deps jax-cuda13-plugin=={version} jax-cuda13-pjrt=={version}"
    )


def absent_devices(
    gpu: Gpu, *, num_hosts: int = 1, devices_per_host: int = 1
) -> list[Any]:
    """Descriptions of such GPUs, host by host: for shardings of programs that never
    run.

    Raises:
        NotImplementedError: the compiler is not installed, or jax has begun without it;
            the message says what to do.
    """
    reason = why_not()
    if reason:
        raise NotImplementedError(reason)
    return list(_topology(gpu, num_hosts, devices_per_host).devices)


@cache
def _topology(gpu: Gpu, num_hosts: int, devices_per_host: int) -> Any:
    try:
        with _without_libraries():
            return topologies.get_topology_desc(
                platform="cuda",
                topology=f"1x{num_hosts}x{devices_per_host}",
                target_config=_description(gpu),
            )
    except NotImplementedError as error:
        raise NotImplementedError(
            "jax has begun without its compiler for GPUs, as it found no CUDA "
            "libraries. Set JAX_PLATFORMS=cpu for this process, and start it again."
        ) from error


@contextmanager
def _without_libraries() -> Iterator[None]:
    """In the `with` block, jax registers its CUDA plugin without CUDA's libraries."""
    if SKIPS_LIBRARIES in os.environ:
        yield
        return
    os.environ[SKIPS_LIBRARIES] = "1"
    try:
        yield
    finally:
        del os.environ[SKIPS_LIBRARIES]


def _description(gpu: Gpu) -> str:
    """XLA's GpuTargetConfigProto in text."""
    major, minor = gpu.capability
    return f"""
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {gpu.shared_bytes_per_core}
  threads_per_core_limit: {gpu.threads_per_core}
  core_count: {gpu.cores}
  fpus_per_core: {gpu.lanes_per_core}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {gpu.memory_bytes_per_second}
  l2_cache_size: {gpu.cache_bytes}
  clock_rate_ghz: {gpu.clock_ghz}
  device_memory_size: {gpu.memory_bytes}
  shared_memory_per_block_optin: {gpu.shared_bytes_per_block}
  cuda_compute_capability {{ major: {major} minor: {minor} }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 12 }}
runtime_version {{ major: 13 minor: 0 patch: 0 }}
device_description_str: "{gpu.kind}"
"""
