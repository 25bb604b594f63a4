"""The optax transform and schedule that a config asks for.

Parameters mean what they mean in torch and DeepSpeed. Clipping is not part of the
transform: it couples all leaves, so the engine does it (`gradient_clipping`).
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
import optax.contrib

from zinf.core.config import Config
from zinf.core.config.optimizer import (
    AdafactorParams,
    AdagradParams,
    AdamParams,
    GaLoreParams,
    LambParams,
    LionParams,
    MuonParams,
    OneBitAdamParams,
    OneBitLambParams,
    Optimizer,
    OptimizerParams,
    SGDParams,
    ZeroOneAdamParams,
)
from zinf.core.config.pace import Pace, counted_steps
from zinf.core.config.scheduler import OneCycleParams
from zinf.core.optim.average import with_ema, with_reference
from zinf.core.optim.transforms.compressed import (
    scale_by_frozen_adam,
    scale_by_frozen_lamb,
    scale_by_zero_one_adam,
)
from zinf.core.optim.transforms.rules import (
    scale_by_adagrad,
    scale_by_clipped_trust_ratio,
    scale_by_muon,
)
from zinf.core.optim.transforms.schedules import beta_of, schedule_of
from zinf.core.optim.transforms.small_state import (
    scale_by_adam_8bit,
    scale_by_adam_bfloat16,
)
from zinf.core.sharding.local_steps import LocalSteps
from zinf.core.sharding.signs import Momenta

ONE_CYCLE_SECOND_BETA = 0.99  # what DeepSpeed's OneCycle sets beside the moving beta
NOT_HIDDEN = ("embed", "lm_head")
MOMENTS: dict[str, Callable[..., optax.GradientTransformation]] = {
    "float32": optax.scale_by_adam,
    "bfloat16": scale_by_adam_bfloat16,
    "8bit": scale_by_adam_8bit,
}


def build_schedule(
    config: Config, scale: optax.Schedule | None = None
) -> optax.Schedule:
    """The learning rate as a function of the number of updates done.

    Args:
        scale: what it is multiplied by, as a function of the same number.

    Raises:
        ValueError: the config has no optimizer.
    """
    return _schedule(config, _optimizer(config).params.lr, scale)


def build_optimizer(
    config: Config, scale: optax.Schedule | None = None
) -> optax.GradientTransformation:
    """The config's optimizer with its schedule and its averages, without clipping.

    Args:
        scale: see `build_schedule`.

    Raises:
        ValueError: the config has no optimizer.
    """
    optimizer = _optimizer(config)
    kept = []
    if optimizer.ema is not None:
        kept.append(with_ema(optimizer.ema, update_after=optimizer.ema_update_after))
    if config.syncs_reference:
        grpo = config.grpo
        every = grpo.ref_model_sync_steps
        kept.append(with_reference(grpo.ref_model_mixup_alpha, every=every))
    tx = _without_average(config, optimizer, scale)
    return optax.chain(tx, *kept) if kept else tx


def _without_average(
    config: Config, optimizer: Optimizer, scale: optax.Schedule | None
) -> optax.GradientTransformation:
    schedule = build_schedule(config, scale)
    match params := optimizer.params:
        case AdamParams():
            is_decoupled = optimizer.type == "AdamW" or params.adam_w_mode
            rule = _adam(params, config)
            return _chain(rule, params, schedule, is_decoupled=is_decoupled)
        case OneBitAdamParams():
            b1, b2 = params.betas
            momenta = Momenta(optimizer.type, b1, params.freeze_step)
            rule = scale_by_frozen_adam(momenta, b2, eps=params.eps)
            return _chain(rule, params, schedule)
        case OneBitLambParams():
            return _one_bit_lamb(params, schedule)
        case ZeroOneAdamParams():
            return _zero_one_adam(params, schedule)
        case SGDParams():
            has_momentum = params.momentum > 0
            trace = optax.trace(params.momentum, nesterov=params.nesterov)
            rule = trace if has_momentum else optax.identity()
            return _chain(rule, params, schedule, is_decoupled=False)
        case LionParams():
            rule = optax.scale_by_lion(*params.betas)
            return _chain(rule, params, schedule)
        case AdagradParams():
            initial = params.initial_accumulator_value
            rule = scale_by_adagrad(eps=params.eps, initial=initial)
            return _chain(rule, params, schedule, is_decoupled=False)
        case AdafactorParams():
            return _adafactor(params, schedule)
        case GaLoreParams():
            return optax.contrib.galore(
                schedule,
                params.rank,
                params.update_proj_gap,
                params.scale,
                optax.scale_by_adam(*params.betas, eps=params.eps),
                params.weight_decay,
            )
        case LambParams():
            return _lamb(params, schedule)
        case MuonParams():
            return _muon(params, config, scale)
    raise AssertionError(f"no transform for {optimizer.type}")


def _optimizer(config: Config) -> Optimizer:
    if config.optimizer is None:
        raise ValueError(
            "The config has no optimizer. Add one, such as "
            "optimizer: {type: AdamW, params: {lr: 3e-4}}."
        )
    return config.optimizer


def _schedule(
    config: Config, lr: float, scale: optax.Schedule | None
) -> optax.Schedule:
    schedule = _unscaled(config, lr)
    if scale is None:
        return schedule
    return lambda count: schedule(count) * scale(count)


def _unscaled(config: Config, lr: float) -> optax.Schedule:
    scheduler = config.scheduler.params if config.scheduler else None
    schedule = schedule_of(scheduler, lr=lr, num_steps=config.run.steps)
    if config.scheduler is None or config.scheduler.count == "steps":
        return schedule
    steps, counted = _counted(config, config.scheduler.count == "layer_tokens")

    def by_tokens(count: jax.typing.ArrayLike) -> jax.typing.ArrayLike:
        after = jnp.maximum(jnp.asarray(count) - steps[-1], 0)
        return schedule(jnp.interp(count, jnp.array(steps), jnp.array(counted)) + after)

    return by_tokens


def _counted(config: Config, by_layer: bool) -> tuple[list[float], list[float]]:
    lengths, kept, most = config.lengths, config.kept_tokens, config.data.max_buckets
    pace, share = None, 0.0
    if by_layer and kept is not None and config.num_layers:
        pace = Pace.of(kept.pacing, most, first=0)
        share = len(kept.layers) / config.num_layers
    steps, counted = counted_steps(
        config.run.steps,
        longest=config.sequence_length,
        length=None if lengths is None else Pace.of(lengths.pacing, most),
        reshapes=lengths is not None and lengths.reshapes,
        kept=pace,
        share=share,
        rows=config.batch_size or 1,
    )
    return [float(step) for step in steps], counted


def _chain(
    rule: optax.GradientTransformation,
    params: OptimizerParams,
    schedule: optax.Schedule,
    *,
    is_decoupled: bool = True,
) -> optax.GradientTransformation:
    """`rule` with weight decay after it (decoupled) or before it (L2 penalty)."""
    steps = [rule]
    if params.weight_decay:
        decay = optax.add_decayed_weights(params.weight_decay)
        steps.insert(1 if is_decoupled else 0, decay)
    return optax.chain(*steps, optax.scale_by_learning_rate(schedule))


def _adam(params: AdamParams, config: Config) -> optax.GradientTransformation:
    scheduler = config.scheduler.params if config.scheduler else None
    if isinstance(scheduler, OneCycleParams) and scheduler.cycle_momentum:
        moving = optax.inject_hyperparams(
            optax.scale_by_adam, static_args=("b2", "eps", "eps_root")
        )
        beta = beta_of(scheduler)
        return moving(b1=beta, b2=ONE_CYCLE_SECOND_BETA, eps=params.eps)
    rule = MOMENTS[params.moments]
    return rule(*params.betas, eps=params.eps)


def _adafactor(
    params: AdafactorParams, schedule: optax.Schedule
) -> optax.GradientTransformation:
    return optax.adafactor(
        schedule,
        min_dim_size_to_factor=params.min_dim_size_to_factor,
        decay_rate=params.decay_rate,
        clipping_threshold=params.clipping_threshold,
        momentum=params.momentum,
        multiply_by_parameter_scale=params.multiply_by_parameter_scale,
        weight_decay_rate=params.weight_decay or None,
    )


def _lamb(params: LambParams, schedule: optax.Schedule) -> optax.GradientTransformation:
    eps, eps_root = (0.0, params.eps) if params.eps_inside_sqrt else (params.eps, 0.0)
    adam = optax.scale_by_adam(*params.betas, eps=eps, eps_root=eps_root)
    trust = scale_by_clipped_trust_ratio(
        smallest=params.min_coeff, largest=params.max_coeff
    )
    decay = optax.add_decayed_weights(params.weight_decay)
    return optax.chain(adam, decay, trust, optax.scale_by_learning_rate(schedule))


def _one_bit_lamb(
    params: OneBitLambParams, schedule: optax.Schedule
) -> optax.GradientTransformation:
    b1, b2 = params.betas
    rule = scale_by_frozen_lamb(
        Momenta("OneBitLamb", b1, params.freeze_step),
        b2,
        eps=params.eps,
        weight_decay=params.weight_decay,
        coefficients=(params.min_coeff, params.max_coeff),
        coeff_beta=params.coeff_beta,
        factors=(params.factor_min, params.factor_max),
        factor_threshold=params.factor_threshold,
    )
    return optax.chain(rule, optax.scale_by_learning_rate(schedule))


def _zero_one_adam(
    params: ZeroOneAdamParams, schedule: optax.Schedule
) -> optax.GradientTransformation:
    b1, b2 = params.betas
    steps = LocalSteps(
        "ZeroOneAdam",
        b1,
        params.eps,
        params.weight_decay,
        params.var_freeze_step,
        params.var_update_scaler,
        params.local_step_scaler,
        params.local_step_clipper,
    )
    rule = scale_by_zero_one_adam(steps, b2, eps=params.eps)
    return _chain(rule, params, schedule)


def _muon(
    params: MuonParams, config: Config, scale: optax.Schedule | None
) -> optax.GradientTransformation:
    matrices = scale_by_muon(beta=params.momentum, num_iterations=params.ns_steps)
    others = optax.scale_by_adam(*params.betas, eps=params.eps)
    matrix_lr = params.lr if params.muon_lr is None else params.muon_lr
    other_lr = params.lr if params.adam_lr is None else params.adam_lr
    return optax.partition(
        {
            "muon": _chain(matrices, params, _schedule(config, matrix_lr, scale)),
            "adam": _chain(
                others,
                params,
                _schedule(config, other_lr, scale),
                is_decoupled=params.adam_w_mode,
            ),
        },
        _muon_labels,
    )


def _muon_labels(params: optax.Params) -> optax.Params:
    """Muon for the matrices of hidden layers, Adam for embeddings and all the rest."""

    def label(path: tuple, leaf: jax.Array) -> str:
        name = jax.tree_util.keystr(path).lower()
        is_hidden = not any(word in name for word in NOT_HIDDEN)
        return "muon" if leaf.ndim == 2 and is_hidden else "adam"

    return jax.tree_util.tree_map_with_path(label, params)
