"""The figures that a step reports."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from zinf.executor.batch import count_tokens
from zinf.executor.outcome import Outcome
from zinf.executor.runner import AbstractRunner
from zinf.executor.scalars import Scalars
from zinf.memory import Stores
from zinf.plan import Link
from zinf.program import Tier

TRAFFIC = {
    "nvme_read_bytes": Link.NVME_READ,
    "nvme_write_bytes": Link.NVME_WRITE,
    "h2d_bytes": Link.H2D,
    "d2h_bytes": Link.D2H,
}


def step_metrics(
    outcome: Outcome,
    runner: AbstractRunner,
    scalars: Scalars,
    stores: Stores,
    advanced: Sequence[np.ndarray],
    seconds: float,
) -> dict[str, Any]:
    """Metrics of the step that `scalars` are about to count; see `Engine.step`.

    Args:
        advanced: the optimizer's shared state after the step.
    """
    num_tokens = count_tokens(runner.spec, runner.num_microbatches)
    metrics = {
        "step": scalars.num_steps + 1,
        "loss": outcome.loss,
        "grad_norm": outcome.grad_norm,
        "learning_rate": scalars.learning_rate(advanced),
        "step_seconds": seconds,
        "tokens_per_second": num_tokens / seconds,
        **{f"{tier}_bytes": stores.peak_bytes(tier) for tier in Tier},
        **{name: outcome.moved_bytes.get(link, 0) for name, link in TRAFFIC.items()},
        "skipped": outcome.skips,
    }
    if scalars.is_scaled:
        metrics["loss_scale"] = scalars.loss_scale
    aux = (outcome.extra or {}).get("aux")
    if aux is not None:
        several = runner.num_microbatches > 1
        metrics["aux"] = aux if several else jax.tree.map(lambda x: x[0], aux)
    return metrics
