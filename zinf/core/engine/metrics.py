"""The metrics that a step reports."""

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np

from zinf.core.engine.scalars import Scalars
from zinf.core.memory import Stores
from zinf.core.plan import show_bytes, show_seconds
from zinf.core.program import MOVING, Tier
from zinf.core.step.batch import count_tokens, has_tokens
from zinf.core.step.run.outcome import Outcome
from zinf.core.step.run.runner import AbstractRunner
from zinf.core.text.tables import html_table


class StepMetrics(dict[str, Any]):
    """The metrics of a step: a dict, also a pytree, that is printed with units."""

    def __repr__(self) -> str:
        shown = (f"{name}={_shown(name, value)}" for name, value in self.items())
        return f"StepMetrics({', '.join(shown)})"

    def _repr_html_(self) -> str:
        rows = [(name, _shown(name, value)) for name, value in self.items()]
        return html_table(rows, numbers=(1,))


def _shown(name: str, value: Any) -> str:
    if isinstance(value, int) and name.endswith("_bytes"):
        return show_bytes(value)
    if isinstance(value, float) and name.endswith("_seconds"):
        return show_seconds(value)
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:.4g}"
    return str(value)


def _flatten(metrics: StepMetrics) -> tuple[list[tuple[Any, Any]], tuple[str, ...]]:
    names = tuple(sorted(metrics))
    return [(jax.tree_util.DictKey(name), metrics[name]) for name in names], names


def _unflatten(names: tuple[str, ...], values: Iterable[Any]) -> StepMetrics:
    return StepMetrics(zip(names, values, strict=True))


# Without this jax.tree.map treats a subclass of dict as a leaf.
jax.tree_util.register_pytree_with_keys(StepMetrics, _flatten, _unflatten)


def step_metrics(
    outcome: Outcome,
    runner: AbstractRunner,
    scalars: Scalars,
    stores: Stores,
    advanced: Sequence[np.ndarray],
    seconds: float,
    plan_seconds: float,
) -> StepMetrics:
    """Metrics of the latest step; see `Engine.step`.

    Args:
        scalars: they do not count this step yet.
        advanced: the optimizer's shared state after the step.
        seconds: how long the step took, with `plan_seconds`, for which it waited for
            its plan.
    """
    updated = update_metrics(outcome, scalars, advanced)
    return joined(pass_metrics(outcome, runner, stores, seconds, plan_seconds), updated)


def pass_metrics(
    outcome: Outcome,
    runner: AbstractRunner,
    stores: Stores,
    seconds: float,
    plan_seconds: float,
) -> StepMetrics:
    """Metrics of what ran on a batch."""
    num_tokens = count_tokens(runner.spec, runner.num_microbatches)
    metrics = StepMetrics(loss=outcome.loss)
    metrics |= moved_metrics(outcome, stores, seconds)
    metrics |= {
        "plan_seconds": plan_seconds,
        "tokens_per_second": num_tokens / seconds,
    }
    if not has_tokens(runner.spec):
        metrics["samples_per_second"] = metrics["tokens_per_second"]
    aux = (outcome.extra or {}).get("aux")
    if aux is not None:
        several = runner.num_microbatches > 1
        metrics["aux"] = aux if several else jax.tree.map(lambda x: x[0], aux)
    return metrics


def moved_metrics(outcome: Outcome, stores: Stores, seconds: float) -> dict[str, Any]:
    """Seconds, the most bytes on each tier, and the bytes that moved."""
    return {
        "step_seconds": seconds,
        **{f"{tier}_bytes": stores.peak_bytes(tier) for tier in Tier},
        **{link.metric: outcome.moved_bytes.get(link, 0) for link in MOVING},
    }


def update_metrics(
    outcome: Outcome, scalars: Scalars, advanced: Sequence[np.ndarray]
) -> StepMetrics:
    """Metrics of an update, which `scalars` do not count yet."""
    metrics = StepMetrics(
        step=scalars.num_steps + 1,
        grad_norm=outcome.grad_norm,
        learning_rate=scalars.learning_rate(advanced),
        skipped=outcome.skips,
    )
    if scalars.may_skip:
        metrics["num_skipped"] = scalars.num_skipped + outcome.skips
    if scalars.is_scaled:
        metrics["loss_scale"] = scalars.loss_scale
    return metrics


def joined(passed: StepMetrics, updated: StepMetrics) -> StepMetrics:
    """The metrics of a step from those of what ran on its batch and of its update.

    Where both have seconds and bytes, they ran one after the other.
    """
    first = ("step", "loss", "grad_norm", "learning_rate")
    both = {**passed, **updated}
    metrics = StepMetrics({name: both[name] for name in first} | both)
    if "step_seconds" not in updated:
        return metrics
    for tier in Tier:
        name = f"{tier}_bytes"
        metrics[name] = max(passed[name], updated[name])
    for name in ("step_seconds", *(link.metric for link in MOVING)):
        metrics[name] = passed[name] + updated[name]
    share = passed["step_seconds"] / metrics["step_seconds"]
    for name in ("tokens_per_second", "samples_per_second"):
        if name in passed:
            metrics[name] = passed[name] * share
    return metrics
