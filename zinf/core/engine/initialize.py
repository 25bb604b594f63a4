"""`zinf.initialize`: makes an engine from a loss, parameters, optimizer and config."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import optax
from jax.sharding import Mesh

from zinf.core.config import Config, notices
from zinf.core.config.rules import compressed_violations
from zinf.core.engine.engine import Engine
from zinf.core.machine.devices import on_devices
from zinf.core.optim.separate import Separated, separate
from zinf.core.optim.transforms.compressed import compression_of
from zinf.core.optim.transforms.factory import build_optimizer
from zinf.core.plan import Plan
from zinf.core.problem.arguments import check_arguments
from zinf.core.problem.problem import Problem, make_problem
from zinf.core.problem.user_loss import UserLoss
from zinf.core.process.jax_modes import Modes
from zinf.core.sharding import (
    AbstractCompression,
    AxisRule,
    Blocks,
    Nibbles,
    axis_rule,
)
from zinf.core.sharding.axes import rewritten
from zinf.core.sharding.mesh import TENSOR, axis_size, first_cpu, local_devices
from zinf.core.step.attention import AttentionRows, place_of, with_rows
from zinf.core.step.planner import Planner
from zinf.core.step.run.calibrate import measure_rates
from zinf.core.topology import Topology
from zinf.distributed import AbstractGroup, Alone
from zinf_kernels.absent_gpu import GPUS
from zinf_kernels.device import Device, device_of

logger = logging.getLogger(__name__)

ConfigSource = Config | Mapping[str, Any] | str | Path | None


def initialize(
    loss_fn: Callable,
    params: Any,
    tx: optax.GradientTransformation | None,
    config: ConfigSource = None,
    *,
    has_aux: bool = False,
    eval_loss_fn: Callable | None = None,
    rng: jax.Array | None = None,
    model_state: Any = None,
    state_rules: Mapping[str, str] | None = None,
    batch: Any = None,
    mesh: Mesh | None = None,
    group: AbstractGroup | None = None,
) -> Engine:
    """Prepare training of `params` under `loss_fn`, with state on any tiers.

    No setting of the process is changed. zinf overrides a surrounding `jax.set_mesh`
    and `jax.transfer_guard`, and strict dtype promotion except in `loss_fn` and in
    functions that make parameters. An engine keeps 64 bits enabled that is made with
    them. `zinf.tune_malloc()`, called before jax makes an array, saves memory on Linux.

    Args:
        loss_fn: a pure function `(params, batch) -> loss`, one floating-point number;
            with `rng`, `(params, batch, key)`; with `has_aux`, it returns
            `(loss, aux)`. With `model_state` (batch statistics, counters) it is
            `(params, model_state, batch[, key])` and returns `(loss, new_model_state)`,
            or `(loss, (new_model_state, aux))`. If it has a parameter `train`, it is
            called with `train=True` in training and `train=False` by `evaluate`.
            The loss of a step is the mean over its microbatches, which have equally
            many samples. A mean over something else, such as tokens with a label, is
            returned as `zinf.Weighted(total, weight)`: then the loss of a step is the
            sum of totals over the sum of weights, of all microbatches and processes.
        params: a pytree of arrays, or a function of no arguments that returns one: then
            each leaf is made on its own and the model is never whole in memory.
        tx: any optax transform whose update of a leaf depends only on that leaf, and
            on the loss if it takes `value=` (the loss of the step, float32).
            `optax.clip_by_global_norm` at the beginning of a chain, or of the chain of
            some leaves (`optax.partition`, `optax.masked`), is allowed too: zinf clips
            as optax does. None takes the optimizer and the scheduler of the config.
        config: a dict, a YAML or JSON file, or a `zinf.Config`. Settings without
            effect, and the values chosen for "auto", are logged as warnings.
        eval_loss_fn: the function that `evaluate` computes instead of `loss_fn`, such
            as the loss without dropout. It takes the arguments of `loss_fn`, with or
            without the key, and returns the loss, alone or first in a tuple. Without
            it, and without `train`, `evaluate` computes `loss_fn` as training does,
            with dropout.
        rng: the key of step i (from 0) is `jax.random.fold_in(rng, i)`, folded again
            with the number of the microbatch if there are several.
        state_rules: how the model states of a step's microbatches, which all start from
            the same state, become one: "mean", "sum" (of what each adds), "max", "min"
            or "last", by glob pattern over key paths, such as {"count": "sum"}.
            Floating-point leaves without a rule are averaged and random keys are those
            of the last microbatch; with several microbatches others need a rule.
        batch: an example, or its shapes. If given, the plan is made and all state is
            placed now, otherwise at the first step.
        mesh: the devices that train, as `zinf.make_mesh(devices)` arranges them: axes
            of `zinf.mesh.AXES`, in any order. The default is what `mesh` in the config
            asks for, or else all accelerators. If there are several processes, each
            gives its own part of every batch.
        group: the processes that train together, from `zinf.distributed.join`; without
            it this process is the only one.

    Raises:
        ValueError: the message says what was asked, what was found and what to change.
            Causes are a coupled optimizer, a leaf that is not an array, an unknown
            config key, a batch that cannot be divided, budgets that no plan keeps
            (`InfeasibleError`), processes of one `group` that begin with different
            values, and `jax.disable_jit`.
        StorageError: a folder of the nvme tier cannot be used, or has too little space.
    """
    user = {"has_aux": has_aux, "eval_loss_fn": eval_loss_fn}
    state = {"model_state": model_state, "state_rules": state_rules}
    where = {"rng": rng, "mesh": mesh, "group": group}
    planner = make_planner(loss_fn, params, tx, config, **user, **state, **where)
    engine = Engine(measuring(planner), rng)
    if batch is not None:
        engine.prepare(batch)
    return engine


def measuring(planner: Planner) -> Planner:
    """The planner of an engine: it measures the rates that it plans by, if asked to."""
    if planner.config.rates != "measured":
        return planner
    if planner.group.count > 1:
        logger.info("Several processes plan by fixed rates; none are measured.")
        return planner
    return replace(planner, measure=measure_rates)


def plan_only(
    loss_fn: Callable,
    params: Any,
    tx: optax.GradientTransformation | None,
    config: ConfigSource = None,
    *,
    batch: Any,
    **named: Any,
) -> Plan:
    """The plan that `initialize` would make; makes no parameter and opens no store.

    Takes the arguments of `initialize`, in the same order. `batch` is required: an
    example, or its shapes.
    """
    planner = make_planner(loss_fn, params, tx, config, **named)
    return planner.plan_batch(batch).plan


def optimizer_of(
    config: ConfigSource,
) -> tuple[optax.GradientTransformation, Config]:
    """The optimizer that a config asks for, and the config."""
    config = Config.load(config)
    if config.optimizer is None:
        raise ValueError(
            "tx is None, and the config has no optimizer. Give a transform of optax, "
            "such as optax.adamw(3e-4), or set optimizer: {type: AdamW, params: {lr: "
            "3e-4}} in the config."
        )
    return build_optimizer(config), config


def make_planner(
    loss_fn: Callable,
    params: Any,
    tx: optax.GradientTransformation | None,
    config: ConfigSource = None,
    *,
    rng: jax.Array | None = None,
    mesh: Mesh | None = None,
    group: AbstractGroup | None = None,
    topology: Topology | None = None,
    **named: Any,
) -> Planner:
    """A planner for the arguments of `initialize`.

    Args:
        topology: the machine of `mesh`, if steps are only compiled for it and not run.
        named: the others that describe the loss; see `UserLoss`.
    """
    is_of_config, user = tx is None, UserLoss(loss_fn, params, **named)
    if tx is None:
        tx, config = optimizer_of(config)
    has_state = user.model_state is not None
    check_arguments(loss_fn, params, tx, has_state=has_state, rng=rng)
    modes = Modes.current()
    config, mesh = on_devices(config, mesh)
    _refuse_sections(config)
    _refuse_slots(config, mesh)
    modes = replace(modes, default_device=tracing_device(mesh, topology))
    if not config.is_told and (group is None or group.is_first):
        for line in notices(config, in_python=True, reads_optimizer=is_of_config):
            logger.warning(line)
    rule = axis_rule(
        mesh,
        stage=config.stage,
        min_bytes=config.persistence_bytes,
        gathers_in_group=config.gathers_in_group,
        encoding=Blocks() if config.quantizes_weights else None,
        cuts_experts=_cuts_experts(config, mesh),
        gradient_encoding=_gradient_encoding(config),
        compression=_compression(tx, config, is_of_config),
    )
    with modes.own():
        problem = make_problem(
            user,
            num_microbatches=config.num_microbatches,
            frozen=config.frozen,
            compute_dtype=config.compute_dtype,
            averages_microbatches=config.loss_average == "microbatches",
            sums_gradients=config.forward_backward,
            modes=modes,
        )
        device, is_absent = kernel_device(mesh, topology), topology is not None
        place = place_of(rule, device)
        rows = AttentionRows(device, config.attention, place, is_absent)
        problem = _on_mesh(problem, rule, rows)
        separated = separate(tx, problem.abstract_params, trainable=problem.trainable)
        key = None if rng is None else jax.eval_shape(lambda: rng)
    group = _alone() if group is None else group
    if config.forward_backward:
        _check_sums(separated, rule, group)
    return Planner(problem, separated, config, rule, key, rows, group, topology)


def _check_sums(separated: Separated, rule: AxisRule, group: AbstractGroup) -> None:
    """Refuse what gradients are not summed for over several batches yet."""
    found = {
        "an optimizer that reads the value of the loss": separated.reads_loss,
        "an optimizer that sends signs": rule.compression is not None,
        f"{group.count} processes": group.count > 1,
    }
    for what in (what for what, is_so in found.items() if is_so):
        raise NotImplementedError(
            f"forward_backward sums gradients of several batches, and this run has "
            f"{what}, which does not work yet. Leave forward_backward out of the "
            "config, and use engine.step."
        )


def _compression(
    tx: optax.GradientTransformation, config: Config, is_of_config: bool
) -> AbstractCompression | None:
    """What the optimizer sends by its signs; None: it sends gradients as they are.

    Raises:
        ValueError: a transform that was given in Python cannot be with the config.
    """
    found = compression_of(tx)
    if found is not None and not is_of_config:
        asked = found.name, found.warm_up, found.largest_stage
        for _, text in compressed_violations(config, *asked):
            raise ValueError(f"The optimizer of this engine: {text}")
    return found


def _gradient_encoding(config: Config) -> Nibbles | None:
    """What parts of gradients are sent as; None leaves sums over devices to XLA."""
    if not config.quantizes_gradients:
        return None
    feedback = config.zero_optimization.zeropp_loco_param
    return Nibbles(err_beta=None if feedback is None else feedback.err_beta)


def _refuse_sections(config: Config) -> None:
    """Refuse sections that only commands read: in Python a function does their job."""
    if config.adapter is not None:
        raise ValueError(
            "The config has an adapter section, and in Python adapters are made first: "
            "adapted = zinf.adapt.lora(loss_fn, params, batch=batch, r=8), then "
            "zinf.initialize(adapted.loss_fn, adapted.params, tx, "
            "adapted.config(config))."
        )
    if config.weight_quantization is not None:
        raise ValueError(
            "The config has a weight_quantization section, and such weights are run "
            "and not trained: zinf generate, zinf evaluate, zinf.hf.open_model, or "
            "zinf.adapt.quantize in Python. Remove it; to train adapters over weights "
            "in few bits, set adapter.quantize_base."
        )


def _refuse_slots(config: Config, mesh: Mesh) -> None:
    """Refuse experts on demand on several devices, where all experts are read."""
    if config.expert_bytes and mesh.size > 1:
        raise NotImplementedError(
            f"memory.experts is {config.expert_bytes:,} bytes of slots for experts "
            f"that tokens choose, and the mesh has {mesh.size} devices. Their tokens "
            "choose different experts, and all devices would have the same slots. "
            "Remove memory.experts: then all experts are read. Or use one device."
        )


def _alone() -> AbstractGroup:
    """The group of one process.

    Raises:
        ValueError: jax runs several.
    """
    if jax.process_count() > 1:
        raise ValueError(
            f"jax runs {jax.process_count()} processes, and zinf was given none of "
            "them. Start with `group = zinf.distributed.join(...)` in place of "
            "jax.distributed.initialize, and pass group= to zinf.initialize."
        )
    return Alone()


def _cuts_experts(config: Config, mesh: Mesh) -> bool:
    """Whether devices along `tensor` divide each expert.

    Raises:
        ValueError: the config asks for another number of devices than the mesh has.
    """
    asked = config.expert_parallel.expert_tensor_parallel_size or 1
    count = axis_size(mesh, (TENSOR,))
    if asked not in (1, count):
        raise ValueError(
            f"expert_parallel.expert_tensor_parallel_size is {asked}, and {count} "
            "devices divide the weights around experts (mesh.tensor, or "
            "tensor_parallel.autotp_size). Make it the same number, or 1, which leaves "
            "experts whole."
        )
    return asked > 1


def _on_mesh(problem: Problem, rule: AxisRule, rows: AttentionRows) -> Problem:
    """A problem with its functions rewritten for the mesh of a rule, to be traced."""

    def divided(function: Callable, *, is_loss: bool = True) -> Callable:
        return rewritten(with_rows(function, rows), rule, is_loss=is_loss)

    evaluation = problem.evaluation_loss
    return replace(
        problem,
        loss=divided(problem.loss),
        evaluation_loss=None if evaluation is None else divided(evaluation),
        bound=lambda function: divided(problem.bound(function), is_loss=False),
        loss_of=lambda loss, has_aux: divided(problem.loss_of(loss, has_aux)),
    )


def kernel_device(mesh: Mesh, topology: Topology | None) -> Device:
    """The device that kernels are chosen for, present or not."""
    if topology is not None:
        gpu = GPUS.get(topology.chip.name.upper())
        if gpu is not None:
            return gpu.device
        return Device(topology.chip.platform, topology.chip.name, 1)
    return device_of(local_devices(mesh)[0])


def tracing_device(mesh: Mesh, topology: Topology | None) -> jax.Device | None:
    """The default device while a loss is traced; None for jax's own.

    Layers choose kernels by this device (`zinf.tiling`). A step that is planned for
    another machine is traced as on a CPU, without kernels.
    """
    if topology is not None:
        return first_cpu()
    first = local_devices(mesh)[0]
    return None if first.platform == jax.default_backend() else first
