"""Options with which XLA compiles programs for each kind of devices."""

from zinf_kernels.absent_gpu import OPTIONS as ABSENT_GPU

# By default a TPU waits for each all-gather. With both options XLA sends the parts of a
# gather during matmuls that do not need it: of 1T parameters on v5p:8x8x8 90% of the
# bytes, instead of none. Either option alone does nothing.
HIDE_GATHERS: dict[str, bool | str] = {
    "xla_enable_async_all_gather": True,
    "xla_tpu_enable_async_collective_fusion_fuse_all_gather": True,
}


def options_for(
    platform: str, *, num_devices: int, is_present: bool
) -> dict[str, bool | str]:
    """The options for a program over some devices of a platform, such as "tpu".

    A program that is only read has the options of one that runs, so that the plan and
    the machine agree. Absent GPUs need one more: without a device XLA cannot time
    kernels.
    """
    if platform == "tpu" and num_devices > 1:
        return dict(HIDE_GATHERS)
    if platform == "gpu" and not is_present:
        return dict(ABSENT_GPU)
    return {}
