"""`zinf.initialize`: from what a user has to an engine."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import optax

from zinf.config import Config
from zinf.engine import Engine
from zinf.executor.batch import batch_spec
from zinf.executor.prepare import Planner
from zinf.memory import share_heap
from zinf.optim.separate import separate
from zinf.plan import Plan
from zinf.segment.problem import make_problem

ConfigSource = Config | Mapping[str, Any] | str | Path | None


def initialize(
    loss_fn: Callable,
    params: Any,
    tx: optax.GradientTransformation,
    config: ConfigSource = None,
    *,
    has_aux: bool = False,
    rng: jax.Array | None = None,
    model_state: Any = None,
    batch: Any = None,
    device: jax.Device | None = None,
) -> Engine:
    """Prepares training of `params` under `loss_fn`, wherever its bytes have to rest.

    Args:
        loss_fn: a pure function `(params, batch) -> loss`, one floating-point number;
            with `rng`, `(params, batch, key)`; with `has_aux`, it returns
            `(loss, aux)`. With `model_state` (batch statistics, counters) it is
            `(params, model_state, batch[, key])` and returns `(loss, new_model_state)`,
            or `(loss, (new_model_state, aux))`.
        params: a pytree of arrays, or a function of no arguments that returns one: then
            each leaf is made on its own and the model is never whole in memory.
        tx: any optax transform whose update of a leaf depends on that leaf alone.
        config: a dict, a YAML or JSON file, or a `zinf.Config`.
        rng: the key of step i (from 0) is `jax.random.fold_in(rng, i)`, folded again
            with the number of the microbatch when there are several.
        batch: an example, or its shapes; given, the plan is made and all state is put
            in place now, otherwise at the first step.
        device: where segments run; the first of `jax.devices()` by default.

    Raises:
        ValueError: with what was asked, found, and to change: a coupled optimizer, a
            leaf that is not an array, an unknown config key, a batch that does not
            divide, budgets that no plan keeps (`InfeasibleError`).
        StorageError: a folder of the nvme tier cannot be used, or has too little room.
    """
    share_heap()
    planner = make_planner(
        loss_fn,
        params,
        tx,
        config,
        has_aux=has_aux,
        rng=rng,
        model_state=model_state,
        device=device,
    )
    engine = Engine(planner, rng)
    if batch is not None:
        engine.prepare(batch)
    return engine


def plan_only(
    loss_fn: Callable, params: Any, *rest: Any, batch: Any, **kw: Any
) -> Plan:
    """The plan that `initialize` would follow, without making anything."""
    planner = make_planner(loss_fn, params, *rest, **kw)
    return planner.plan(batch_spec(batch, planner.config.num_microbatches)).plan


def make_planner(
    loss_fn: Callable,
    params: Any,
    tx: optax.GradientTransformation,
    config: ConfigSource = None,
    *,
    has_aux: bool = False,
    rng: jax.Array | None = None,
    model_state: Any = None,
    device: jax.Device | None = None,
) -> Planner:
    """The arguments of `initialize` as something that plans steps."""
    config = Config.load(config)
    problem = make_problem(
        loss_fn,
        params,
        model_state=model_state,
        has_aux=has_aux,
        frozen=config.frozen,
        compute_dtype=config.compute_dtype,
    )
    separated = separate(tx, problem.abstract_params, trainable=problem.trainable)
    key = None if rng is None else jax.eval_shape(lambda: rng)
    return Planner(problem, separated, config, device or jax.devices()[0], key)
