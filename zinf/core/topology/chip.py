"""Memory, flops and bandwidths of each accelerator and its host, from data sheets.

Bandwidths are bytes per second of one device in one direction. All figures are the
manufacturer's peaks; programs come near them but do not reach them.

Sources:
* TPU: https://cloud.google.com/tpu/docs/v5e, /v5p, /v6e (memory, flops, bandwidth and
  interconnect per chip; memory of the virtual machine with four chips); for v4, /v4 and
  Jouppi et al., "TPU v4", arXiv 2304.01433, table 4. PCIe of TPU hosts: Austin et al.,
  "How to Scale Your Model", https://jax-ml.github.io/scaling-book/tpus, its table.
* GPU: NVIDIA's data sheets of A100, H100, H200 and DGX B200. The sheets add both
  directions of NVLink; half of that is given here. The host and the network are those
  of DGX systems: PCIe x16 of generation 4 (A100) or 5, one HDR (A100) or NDR port for
  each GPU, and the memory of the host divided by its 8 GPUs.
* RTX 4090: NVIDIA's "Ada GPU architecture" (V2.02), appendix A; flops with sums in
  float32. The host is a PC: two cards on PCIe x16 of generation 4, without NVLink, 128
  GiB of memory and Ethernet of 10 gigabit.
"""

from dataclasses import dataclass
from typing import Literal

from zinf_kernels.absent_gpu import GPUS, Gpu

TERA = 10**12
GIGA = 10**9


@dataclass(frozen=True)
class Chip:
    """An accelerator, and its share of its host.

    Attributes:
        interconnect_bytes_per_second: to devices that are reached without a network: by
            the torus of TPUs, or the NVLink (or PCIe) of GPUs on one host.
        network_bytes_per_second: to devices of other hosts; None if the interconnect
            reaches them.
        host_link_bytes_per_second: between device and host memory.
        host_memory_bytes: host memory for each device.
        num_torus_dims: dims of a TPU's torus; None for GPUs.
        max_devices: devices of the largest TPU slice; None for GPUs.
    """

    name: str
    platform: Literal["tpu", "gpu"]
    memory_bytes: int
    flops_per_second: int
    memory_bytes_per_second: int
    interconnect_bytes_per_second: int
    network_bytes_per_second: int | None
    host_link_bytes_per_second: int
    host_memory_bytes: int
    devices_per_host: int
    num_torus_dims: int | None
    max_devices: int | None


def _tpu(
    name: str,
    *,
    memory_gib: int,
    teraflops: int,
    memory_gbps: int,
    interconnect_gbps: int,
    host_link_gbps: int,
    host_memory_gb: int,
    torus: tuple[int, int],
) -> Chip:
    """A row of the table; `torus` is its number of dims, and its most devices."""
    num_torus_dims, max_devices = torus
    return Chip(
        name=name,
        platform="tpu",
        memory_bytes=memory_gib << 30,
        flops_per_second=teraflops * TERA,
        memory_bytes_per_second=memory_gbps * GIGA,
        interconnect_bytes_per_second=interconnect_gbps * GIGA,
        network_bytes_per_second=None,
        host_link_bytes_per_second=host_link_gbps * GIGA,
        host_memory_bytes=host_memory_gb * GIGA // 4,
        devices_per_host=4,
        num_torus_dims=num_torus_dims,
        max_devices=max_devices,
    )


def _gpu(
    name: str,
    gpu: Gpu,
    *,
    nvlink_gbps: int,
    network_gbps: int,
    host_link_gbps: int,
    host_memory_gib: int,
    devices_per_host: int = 8,
) -> Chip:
    return Chip(
        name=name,
        platform="gpu",
        memory_bytes=gpu.memory_bytes,
        flops_per_second=gpu.flops_per_second,
        memory_bytes_per_second=gpu.memory_bytes_per_second,
        interconnect_bytes_per_second=nvlink_gbps * GIGA,
        network_bytes_per_second=network_gbps * GIGA,
        host_link_bytes_per_second=host_link_gbps * GIGA,
        host_memory_bytes=(host_memory_gib << 30) // devices_per_host,
        devices_per_host=devices_per_host,
        num_torus_dims=None,
        max_devices=None,
    )


CHIPS = {
    chip.name: chip
    for chip in (
        _tpu(
            "v4",
            memory_gib=32,
            teraflops=275,
            memory_gbps=1_200,
            interconnect_gbps=300,
            host_link_gbps=16,
            host_memory_gb=407,
            torus=(3, 4_096),
        ),
        _tpu(
            "v5e",
            memory_gib=16,
            teraflops=197,
            memory_gbps=819,
            interconnect_gbps=200,
            host_link_gbps=16,
            host_memory_gb=192,
            torus=(2, 256),
        ),
        _tpu(
            "v5p",
            memory_gib=95,
            teraflops=459,
            memory_gbps=2_765,
            interconnect_gbps=600,
            host_link_gbps=16,
            host_memory_gb=448,
            torus=(3, 6_144),
        ),
        _tpu(
            "v6e",
            memory_gib=32,
            teraflops=918,
            memory_gbps=1_600,
            interconnect_gbps=400,
            host_link_gbps=32,
            host_memory_gb=720,
            torus=(2, 256),
        ),
        _gpu(
            "a100",
            GPUS["A100"],
            nvlink_gbps=300,
            network_gbps=25,
            host_link_gbps=32,
            host_memory_gib=2048,
        ),
        _gpu(
            "h100",
            GPUS["H100"],
            nvlink_gbps=450,
            network_gbps=50,
            host_link_gbps=64,
            host_memory_gib=2048,
        ),
        _gpu(
            "h200",
            GPUS["H200"],
            nvlink_gbps=450,
            network_gbps=50,
            host_link_gbps=64,
            host_memory_gib=2048,
        ),
        _gpu(
            "b200",
            GPUS["B200"],
            nvlink_gbps=900,
            network_gbps=50,
            host_link_gbps=64,
            host_memory_gib=2048,
        ),
        _gpu(
            "rtx4090",
            GPUS["RTX4090"],
            nvlink_gbps=32,
            network_gbps=1,
            host_link_gbps=32,
            host_memory_gib=128,
            devices_per_host=2,
        ),
    )
}
