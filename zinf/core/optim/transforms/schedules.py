"""The learning-rate schedules of DeepSpeed and `transformers` as optax schedules.

The formulas are those of `deepspeed/runtime/lr_schedules.py` (0.19.6), and for
`linear`, `cosine` and `constant_with_warmup` of `transformers/optimization.py`.

[Note: count] optax calls a schedule with the number of updates done. DeepSpeed steps
its scheduler after each update, so update `count` uses the rate at
`last_batch_iteration = count - 1`, and the first update uses the rate that the
constructor set. A warm-up of DeepSpeed so has its lowest rate (by default 0) in the
first two updates. One of `transformers` has 0 in the first only.
"""

from math import ceil

import jax
import jax.numpy as jnp
import optax

from zinf.core.config.scheduler import (
    ConstantWithWarmupParams,
    CosineParams,
    DecayParams,
    LinearParams,
    LRRangeTestParams,
    OneCycleParams,
    SchedulerParams,
    ShapedWarmupParams,
    WarmupCosineLRParams,
    WarmupDecayLRParams,
    WarmupLRParams,
    WarmupParams,
)

Count = jax.typing.ArrayLike


def schedule_of(
    params: SchedulerParams | None, *, lr: float, num_steps: int
) -> optax.Schedule:
    """The learning rate as a function of the number of updates done.

    Args:
        params: the parameters of a scheduler; None for a constant `lr`.
        lr: the optimizer's learning rate.
        num_steps: the end of a decay whose parameters do not give one.
    """
    if isinstance(params, DecayParams):
        num_steps = params.total_num_steps or num_steps
    if isinstance(params, WarmupParams) and params.warmup_ratio is not None:
        num_warm = ceil(params.warmup_ratio * num_steps)
        params = params.model_copy(update={"warmup_num_steps": num_warm})
    match params:
        case None:
            return optax.constant_schedule(lr)
        case WarmupLRParams():
            return _warmup(params, lr)
        case WarmupDecayLRParams():
            return _warmup_decay(params, lr, num_steps)
        case WarmupCosineLRParams():
            return _warmup_cosine(params, lr, num_steps)
        case OneCycleParams():
            return _one_cycle(params)
        case LRRangeTestParams():
            return _range_test(params)
        case LinearParams() | CosineParams() | ConstantWithWarmupParams():
            return _transformers(params, lr, num_steps)
    raise AssertionError(f"no schedule for {type(params).__name__}")


def beta_of(params: OneCycleParams) -> optax.Schedule:
    """The first beta of Adam that OneCycle moves against the learning rate."""
    low, high = params.cycle_min_mom, params.cycle_max_mom
    has_decay = params.decay_step_size > 0 and params.decay_mom_rate != 0

    def beta(count: Count) -> jax.Array:
        cycle = high - (high - low) * _height(params, count)
        growth = 1 + params.decay_mom_rate * _intervals(params, count)
        after = high * growth if has_decay else high
        # DeepSpeed's constructor sets the lowest beta, although a cycle starts highest.
        started = jnp.where(jnp.asarray(count) <= _cycle_steps(params), cycle, after)
        return jnp.where(count == 0, low, started)

    return beta


def _warmup(params: WarmupLRParams, lr: float) -> optax.Schedule:
    low, high = params.warmup_min_lr, _highest(params, lr)
    return lambda count: low + (high - low) * _warmth(params, _iteration(count))


def _warmup_decay(
    params: WarmupDecayLRParams, lr: float, num_steps: int
) -> optax.Schedule:
    low, high = params.warmup_min_lr, _highest(params, lr)
    num_warm = _warm_steps(params)

    def schedule(count: Count) -> jax.Array:
        iteration = _iteration(count)
        left = (num_steps - iteration) / max(1, num_steps - num_warm)
        warmth = _warmth(params, iteration)
        share = jnp.where(iteration < num_warm, warmth, jnp.maximum(left, 0))
        return low + (high - low) * share

    return schedule


def _warmup_cosine(
    params: WarmupCosineLRParams, lr: float, num_steps: int
) -> optax.Schedule:
    num_warm = _warm_steps(params)
    lowest, last = params.warmup_min_ratio, params.cos_min_ratio

    def schedule(count: Count) -> jax.Array:
        iteration = _iteration(count)
        warm = lowest + (1 - lowest) * _warmth(params, iteration)
        progress = (iteration - num_warm + 1) / max(1, num_steps - num_warm)
        cosine = (1 + jnp.cos(jnp.pi * jnp.minimum(progress, 1))) / 2
        share = jnp.where(iteration < num_warm, warm, last + (1 - last) * cosine)
        # Before its first step DeepSpeed's scheduler returns 0, whatever the lowest.
        return jnp.where(count == 0, 0.0, lr * share)

    return schedule


def _one_cycle(params: OneCycleParams) -> optax.Schedule:
    low, high = params.cycle_min_lr, params.cycle_max_lr
    rate = params.decay_lr_rate if params.decay_step_size else 0.0

    def schedule(count: Count) -> jax.Array:
        cycle = low + (high - low) * _height(params, count)
        after = low / (1 + rate * _intervals(params, count))
        return jnp.where(jnp.asarray(count) <= _cycle_steps(params), cycle, after)

    return schedule


def _range_test(params: LRRangeTestParams) -> optax.Schedule:
    def schedule(count: Count) -> jax.Array:
        intervals = jnp.asarray(count) / params.lr_range_test_step_size
        if params.lr_range_test_staircase:
            intervals = jnp.floor(intervals)
        growth = 1 + params.lr_range_test_step_rate * intervals
        return params.lr_range_test_min_lr * growth

    return schedule


def _transformers(
    params: LinearParams | CosineParams | ConstantWithWarmupParams,
    lr: float,
    num_steps: int,
) -> optax.Schedule:
    num_warm = params.warmup_num_steps

    def schedule(count: Count) -> jax.Array:
        step = jnp.asarray(count)
        progress = (step - num_warm) / max(1, num_steps - num_warm)
        progress = jnp.minimum(progress, 1)
        match params:
            case LinearParams():
                share = 1 - progress
            case CosineParams():
                share = (1 + jnp.cos(jnp.pi * progress)) / 2
            case _:
                share = jnp.ones_like(progress)
        return lr * jnp.where(step < num_warm, step / max(1, num_warm), share)

    return schedule


def _highest(params: WarmupLRParams | WarmupDecayLRParams, lr: float) -> float:
    return lr if params.warmup_max_lr is None else params.warmup_max_lr


def _iteration(count: Count) -> jax.Array:
    """DeepSpeed's `last_batch_iteration`, see [Note: count]; both -1 and 0 are cold."""
    return jnp.maximum(jnp.asarray(count) - 1, 0)


def _warm_steps(params: ShapedWarmupParams) -> int:
    return max(2, params.warmup_num_steps)


def _warmth(params: ShapedWarmupParams, iteration: jax.Array) -> jax.Array:
    """Progress of the warm-up, 0 to 1."""
    num_warm = _warm_steps(params)
    if params.warmup_type == "linear":
        share = iteration / num_warm
    else:
        share = jnp.log(iteration + 1.0) / jnp.log(float(num_warm))
    return jnp.where(iteration < num_warm, share, 1.0)


def _halves(params: OneCycleParams) -> tuple[int, int]:
    first = params.cycle_first_step_size
    return first, params.cycle_second_step_size or first


def _cycle_steps(params: OneCycleParams) -> int:
    return sum(_halves(params))


def _height(params: OneCycleParams, count: Count) -> jax.Array:
    """Height within the cycle, 0 at both ends and 1 at the peak, in stairs if asked."""
    first, second = _halves(params)
    num_stairs = params.cycle_first_stair_count
    others = params.cycle_second_stair_count
    position = jnp.asarray(count) % (first + second)
    rise = _stairs(position, first, num_stairs)
    fall = _stairs(
        first + second - position, second, num_stairs if others is None else others
    )
    return jnp.where(position <= first, rise, fall)


def _stairs(steps: jax.Array, num_steps: int, num_stairs: int) -> jax.Array:
    if num_stairs == 0:
        return steps / num_steps
    return jnp.floor(steps * num_stairs / num_steps) / num_stairs


def _intervals(params: OneCycleParams, count: Count) -> jax.Array:
    """Decay intervals since the end of the cycle."""
    since = jnp.asarray(count) - _cycle_steps(params)
    return since / max(1, params.decay_step_size)
