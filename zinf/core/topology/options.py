"""Options with which XLA compiles programs for each kind of devices."""

import logging
from collections.abc import Mapping

import jax

from zinf.core.topology.compiled.memory import EXHAUSTED
from zinf_kernels.absent_gpu import OPTIONS as ABSENT_GPU

logger = logging.getLogger(__name__)
# By default a TPU waits for each all-gather. With both options XLA sends the parts of a
# gather during matmuls that do not need it: of 1T parameters on v5p:8x8x8 90% of the
# bytes, instead of none. Either option alone does nothing.
HIDE_GATHERS: dict[str, bool | str] = {
    "xla_enable_async_all_gather": True,
    "xla_tpu_enable_async_collective_fusion_fuse_all_gather": True,
}
# What a compiler says of an option that it does not know.
UNKNOWN = "No such compile option"


def compile_with(
    lowered: jax.stages.Lowered, options: Mapping[str, bool | str]
) -> jax.stages.Compiled:
    """The executable of a program, with these options.

    `HIDE_GATHERS` saves time and takes memory: a program that does not fit is compiled
    without it, and so is one by a compiler that does not know it.

    Raises:
        jax.errors.JaxRuntimeError: the program does not compile.
    """
    try:
        return lowered.compile(dict(options) or None)
    except jax.errors.JaxRuntimeError as error:
        needed = {n: v for n, v in options.items() if n not in HIDE_GATHERS}
        text = str(error)
        if needed == options or not (EXHAUSTED in text or UNKNOWN in text):
            raise
        why = "does not fit" if EXHAUSTED in text else "needs a newer compiler"
        logger.warning(
            "A program that gathers weights during matmuls %s; it waits for them.", why
        )
        return lowered.compile(needed or None)


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
