"""Absent TPUs, which libtpu describes and compiles for on any machine.

libtpu reads settings from the environment; without them it asks the network which
machine it runs on. Settings that are not yet set are set while libtpu starts and
removed afterwards. libtpu starts once in a process.
"""

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import jax
from jax.experimental import topologies

SETTINGS = {
    # Do not ask a metadata server.
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    # One process at a time may hold the TPUs of a machine; any number may compile.
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    # Any type works; without one libtpu writes a warning to stderr.
    "TPU_ACCELERATOR_TYPE": "v5e-16",
    # Errors only: libtpu would report on stderr that there is no TPU.
    "TPU_MIN_LOG_LEVEL": "3",
    "TPU_STDERR_LOG_LEVEL": "3",
}
LIBRARY = "libtpu"


def tpu_devices(text: str, shape: tuple[int, ...]) -> list[Any]:
    """The chips of a slice, in process order.

    Args:
        text: libtpu's name of the slice, such as "v5p:8x8x8".
        shape: the shape of the torus, in chips.

    Raises:
        NotImplementedError: libtpu is not installed.
        ValueError: libtpu does not support this slice.
    """
    if find_spec(LIBRARY) is None:
        raise NotImplementedError(
            f"The compiler for {text} is not installed; it needs no TPU: "
            f"pip install 'jax[tpu]=={jax.__version__}' (or zinf[tpu-topology])."
        )
    # One device per chip, as in later chips: the two cores of a v4 can be two devices.
    options: dict[str, Any] = {}
    if text.startswith("v4:"):
        options["chip_config_name"] = "megacore"
    if math.prod(shape) == 1:
        options["chips_per_host_bounds"] = (1, 1, 1)
    with _settings():
        try:
            described = topologies.get_topology_desc(
                platform="tpu", topology_name=text, **options
            )
        except jax.errors.JaxRuntimeError as error:
            raise ValueError(
                f"libtpu cannot describe {text}: {error}. Ask for a slice that exists; "
                "if jax has started a TPU in this process, use another process."
            ) from error
    return sorted(described.devices, key=lambda d: (d.process_index, d.id))


@contextmanager
def _settings() -> Iterator[None]:
    added = {name: value for name, value in SETTINGS.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)
