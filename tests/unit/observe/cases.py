"""Metrics of a step, as an engine gives them."""

from typing import Any


def metrics_of(step: int, **changed: Any) -> dict[str, Any]:
    return {
        "step": step,
        "loss": 5.0 - step,
        "grad_norm": 0.5,
        "learning_rate": 1e-3,
        "step_seconds": 2.0,
        "tokens_per_second": 100.0 * step,
        "device_bytes": 10,
        "host_bytes": 20 * step,
        "nvme_bytes": 30,
        "nvme_read_bytes": 1,
        "nvme_write_bytes": 2,
        "h2d_bytes": 3,
        "d2h_bytes": 4,
        "skipped": False,
        **changed,
    }
