"""Configs of engines whose arrays rest away from the device."""

from pathlib import Path
from typing import Any


def stage_3(params: str, states: str | None = None) -> dict[str, Any]:
    """`zero_optimization` with parameters on one tier and optimizer state on another.

    Args:
        params: DeepSpeed's name of a tier: none, cpu or nvme.
        states: likewise; by default that of the parameters.
    """
    return {
        "stage": 3,
        "offload_param": {"device": params},
        "offload_optimizer": {"device": states or params},
    }


def streamed(
    tier: str, folder: Path | str | None = None, **settings: Any
) -> dict[str, Any]:
    """Segments are streamed, all arrays rest on a tier, and no residuals are kept.

    Args:
        folder: where the NVMe tier is, if there is one.
        settings: other keys of the config, or other values of those here.
    """
    return {
        "execution": "streamed",
        "segment": {"remat": "always"},
        "zero_optimization": stage_3(tier),
        "persistence_threshold": 1,
        "memory": {} if folder is None else {"nvme": [str(folder)]},
        **settings,
    }
