"""Notices about a valid config: what it asks for that has no effect."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from zinf.core.config.arguments import Key
from zinf.core.config.config import Config
from zinf.core.config.messages import Notice, dotted
from zinf.core.config.optimizer import AdamParams, MuonParams
from zinf.core.config.scheduler import (
    LRRangeTestParams,
    OneCycleParams,
    SchedulerParams,
    ShapedWarmupParams,
    WarmupCosineLRParams,
    WarmupDecayLRParams,
    WarmupLRParams,
    WarmupParams,
)
from zinf.core.config.section import Section

ZERO = "zero_optimization"


# Keys that `zinf train` reads and `zinf.initialize` does not.
FOR_TRAIN = (
    *("optimizer", "scheduler", "model", "data", "run"),
    *(
        "tensorboard",
        "csv_monitor",
        "steps_per_print",
        "curriculum_learning",
        "data_efficiency",
    ),
)


def notices(
    config: Config, *, in_python: bool = False, reads_optimizer: bool = False
) -> tuple[str, ...]:
    """What a user should know about a config before it trains, a line each.

    The values chosen for "auto", unsupported keys that were left out, and keys that
    have no effect.

    Args:
        in_python: the config is given to `zinf.initialize`, which does not read the
            keys that its own arguments decide.
        reads_optimizer: it takes the optimizer of the config.
    """
    unread = FOR_TRAIN if in_python else ()
    if reads_optimizer:
        unread = tuple(key for key in unread if key not in ("optimizer", "scheduler"))
    chosen = {k: v for k, v in config.chosen.items() if k[0] not in unread}
    found = [*config.not_done]
    for rule in RULES:
        found.extend(rule(config))
    lines = [chosen_line(chosen)] if chosen else []
    lines += [str(notice) for notice in found if notice.path[0] not in unread]
    given = [key for key in unread if _is_given(config, key)]
    if given:
        lines.append(
            f"{', '.join(given)}: read by zinf train, and not by zinf.initialize, for "
            "which its arguments decide."
        )
    return tuple(lines)


def _is_given(config: Config, key: str) -> bool:
    if key not in config.model_fields_set:
        return False
    value = getattr(config, key)
    return bool(value.model_fields_set) if isinstance(value, Section) else bool(value)


# Combinations of keys, one rule each.


def _unused_folders(config: Config) -> Iterator[Notice]:
    zero = config.zero_optimization
    for key in ("offload_param", "offload_optimizer"):
        section = getattr(zero, key)
        if section and section.nvme_path and section.device not in (None, "nvme"):
            text = f"has no effect, because device is {section.device}"
            yield Notice((ZERO, key, "nvme_path"), f"{text}. Set it to nvme.")


def _no_drive(config: Config) -> Iterator[Notice]:
    given = config.memory.model_fields_set & {"stall_seconds", "checksums"}
    if not config.nvme_paths:
        for key in sorted(given):
            text = "has no effect without an NVMe tier. Give its folders in memory.nvme"
            yield Notice(("memory", key), f"{text}.")


def _pinned_otherwise(config: Config) -> Iterator[Notice]:
    whys = {
        "fused": "nothing rests on the host",
        "offloaded": "all arrays are in pinned memory",
    }
    if config.execution in whys and config.memory.pinned != "auto":
        text = f"has no effect, because execution is {config.execution}"
        yield Notice(("memory", "pinned"), f"{text}: {whys[config.execution]}.")


def _nothing_to_cut(config: Config) -> Iterator[Notice]:
    if config.execution == "fused":
        for key in sorted(config.segment.model_fields_set):
            text = "has no effect, because execution is fused: there are no segments"
            yield Notice(("segment", key), f"{text}.")
    if config.execution == "offloaded" and "remat" in config.segment.model_fields_set:
        text = "has no effect, because execution is offloaded, which recomputes always"
        yield Notice(("segment", "remat"), f"{text}.")


def _scheduled_rate(config: Config) -> Iterator[Notice]:
    params = config.optimizer.params if config.optimizer else None
    scheduled = config.scheduler and _rate_of(config.scheduler.params)
    if not params or not scheduled:
        return
    key, rate = scheduled
    for name in ("lr", "muon_lr", "adam_lr"):
        given = getattr(params, name) if name in params.model_fields_set else None
        if given is not None and given != rate:
            text = f"{given:g} has no effect: scheduler.params.{key} is {rate:g}"
            yield Notice(("optimizer", "params", name), f"{text}, and sets the rate.")


def _always_cold(config: Config) -> Iterator[Notice]:
    params = config.scheduler.params if config.scheduler else None
    if not isinstance(params, WarmupParams):
        return
    num_cold = _cold_steps(params)
    if 0 < config.run.steps <= num_cold:
        text = "the learning rate is 0 in every step, so nothing is learned"
        first = "step has" if num_cold == 1 else f"{num_cold} steps have"
        text += f": the first {first} a rate of 0, and run.steps is {config.run.steps}"
        more = "Take more steps, or a schedule without a warm-up."
        yield Notice(("scheduler", "type"), f"{text}. {more}")


def _replaced_rate(config: Config) -> Iterator[Notice]:
    params = config.optimizer.params if config.optimizer else None
    if (
        isinstance(params, MuonParams)
        and "lr" in params.model_fields_set
        and None not in (params.muon_lr, params.adam_lr)
    ):
        text = "has no effect beside muon_lr and adam_lr, which cover all arrays"
        yield Notice(("optimizer", "params", "lr"), f"{text}.")


def _cycled_betas(config: Config) -> Iterator[Notice]:
    optimizer, scheduler = config.optimizer, config.scheduler
    params = optimizer.params if optimizer else None
    cycle = scheduler.params if scheduler else None
    if (
        isinstance(params, AdamParams)
        and "betas" in params.model_fields_set
        and isinstance(cycle, OneCycleParams)
        and cycle.cycle_momentum
    ):
        text = "has no effect: scheduler OneCycle moves the first, and holds the second"
        path = ("optimizer", "params", "betas")
        yield Notice(path, f"{text} at 0.99, unless cycle_momentum is false.")


def _no_average(config: Config) -> Iterator[Notice]:
    optimizer = config.optimizer
    if optimizer and optimizer.ema is None and optimizer.ema_update_after:
        text = "has no effect without optimizer.ema: no average is kept"
        yield Notice(("optimizer", "ema_update_after"), f"{text}.")


def _skipped_anyway(config: Config) -> Iterator[Notice]:
    if config.fp16.enabled and config.skip_nonfinite:
        text = "has no effect with fp16, whose loss scaling skips steps that overflow"
        yield Notice(("skip_nonfinite",), f"{text}.")


def _no_evaluation(config: Config) -> Iterator[Notice]:
    run = config.run
    if run.evaluate_every is None and "evaluate_batches" in run.model_fields_set:
        text = "has no effect without run.evaluate_every: nothing is evaluated"
        yield Notice(("run", "evaluate_batches"), f"{text}.")


def _cold_steps(params: WarmupParams) -> int:
    """The number of steps at the start of a warm-up whose learning rate is 0."""
    match params:
        case WarmupCosineLRParams() if params.warmup_min_ratio:
            return 1
        case WarmupLRParams() | WarmupDecayLRParams() if params.warmup_min_lr:
            return 0
        case ShapedWarmupParams():
            return 2
    return int(bool(params.warmup_num_steps or params.warmup_ratio))


def _rate_of(params: SchedulerParams) -> tuple[str, float] | None:
    """The key and the value of the learning rate that a scheduler sets, if it does."""
    match params:
        case WarmupLRParams() | WarmupDecayLRParams() if params.warmup_max_lr:
            return "warmup_max_lr", params.warmup_max_lr
        case OneCycleParams():
            return "cycle_max_lr", params.cycle_max_lr
        case LRRangeTestParams():
            return "lr_range_test_min_lr", params.lr_range_test_min_lr
    return None


def _decoupled_decay(config: Config) -> Iterator[Notice]:
    optimizer = config.optimizer
    params = optimizer.params if optimizer and optimizer.type == "AdamW" else None
    if isinstance(params, AdamParams) and not params.adam_w_mode:
        text = "false has no effect: AdamW's decay is decoupled, as in DeepSpeed"
        path = ("optimizer", "params", "adam_w_mode")
        yield Notice(path, f"{text}. For an L2 penalty use type Adam.")


def _switched_off(config: Config) -> Iterator[Notice]:
    """A part of data_efficiency that is on below one that is off."""
    efficiency = config.data_efficiency
    if efficiency is None:
        return
    sampling, routing = efficiency.data_sampling, efficiency.data_routing
    chain = {
        ("data_efficiency",): efficiency.enabled,
        ("data_efficiency", "data_sampling"): sampling.enabled,
        (
            *("data_efficiency", "data_sampling", "curriculum_learning"),
        ): sampling.curriculum_learning.enabled,
        (
            *("data_efficiency", "data_sampling", "dynamic_batching"),
        ): sampling.dynamic_batching.enabled,
        ("data_efficiency", "data_routing"): routing.enabled,
        (
            *("data_efficiency", "data_routing", "random_ltd"),
        ): routing.random_ltd.enabled,
    }
    for path, is_on in chain.items():
        above = [p for p, on in chain.items() if p == path[: len(p)] != path and not on]
        if is_on and above:
            text = f"has no effect, because {'.'.join(above[0])}.enabled is false"
            yield Notice((*path, "enabled"), f"{text}.")


def _fewer_lengths(config: Config) -> Iterator[Notice]:
    lengths, kept = config.lengths, config.kept_tokens
    if lengths is not None:
        levels = lengths.pacing.levels()
        yield from _rounded(lengths.path, "lengths", levels, lengths.buckets)
    if kept is not None:
        path = ("data_efficiency", "data_routing", "random_ltd")
        levels = kept.pacing.levels(first_count=0)
        yield from _rounded(path, "numbers of kept tokens", levels, kept.buckets)


def _counted_alike(config: Config) -> Iterator[Notice]:
    scheduler = config.scheduler
    count = "steps" if scheduler is None else scheduler.count
    drops = config.kept_tokens is not None and count == "layer_tokens"
    if count != "steps" and config.lengths is None and not drops:
        text = f"{count} has no effect: every step has the same number"
        if config.dynamic_batching is not None:
            text = f"{count} has no effect with dynamic_batching"
        yield Notice(("scheduler", "count"), f"{text}, so it counts steps.")


def _rounded(
    path: tuple[str, ...], what: str, levels: Sequence[int], buckets: Sequence[int]
) -> Iterator[Notice]:
    if len(levels) > len(buckets):
        text = f"{len(levels)} {what} are rounded down to {len(buckets)}"
        text = f"{text} ({', '.join(map(str, buckets))}), as each has its own plan"
        yield Notice(path, f"{text}. More: data.max_buckets.")


RULES: tuple[Callable[[Config], Iterator[Notice]], ...] = (
    _unused_folders,
    _no_drive,
    _pinned_otherwise,
    _nothing_to_cut,
    _scheduled_rate,
    _always_cold,
    _replaced_rate,
    _cycled_betas,
    _no_average,
    _skipped_anyway,
    _no_evaluation,
    _decoupled_decay,
    _switched_off,
    _fewer_lengths,
    _counted_alike,
)


def chosen_line(chosen: Mapping[Key, Any]) -> str:
    """One line for all the values that were "auto"."""
    values = [f"{dotted(key)} {shown(value)}" for key, value in chosen.items()]
    return (
        f'"auto" is chosen here: {", ".join(values)}. To choose yourself, give the '
        "key a value, or the arguments of transformers' trainer to "
        "zinf.Config.load(..., arguments=)."
    )


def shown(value: Any) -> str:
    """A number, a flag or a list of them, as written in a config."""
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(shown, value))}]"
    return str(value).lower() if isinstance(value, bool) else f"{value:g}"
