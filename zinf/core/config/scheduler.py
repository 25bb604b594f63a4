"""The `scheduler` section: DeepSpeed's schedules and those of `transformers`.

A warm-up of DeepSpeed (`WarmupLR`, `WarmupDecayLR`, `WarmupCosineLR`) has its lowest
rate, by default 0, in its first two steps; one of `transformers` (`linear`, `cosine`,
`constant_with_warmup`) in its first step only.
"""

from typing import Annotated, Literal

from pydantic import BeforeValidator, SerializeAsAny

from zinf.core.config.scalar import (
    Count,
    Flag,
    Fraction,
    NonNegative,
    Number,
    Whole,
)
from zinf.core.config.section import Section
from zinf.core.config.status import Auto
from zinf.core.config.typed import TypedSection
from zinf.core.config.unread import TABLE

# "auto" means the optimizer's learning rate; an absent key may mean another one.
OptimizerLR = BeforeValidator(lambda value: None if value == "auto" else value)


class SchedulerParams(Section):
    """What all schedules take."""

    UNREAD = TABLE["scheduler.params"]


class LRRangeTestParams(SchedulerParams):
    """A rising learning rate, to find the largest that trains."""

    lr_range_test_min_lr: Auto[NonNegative] = 1e-3
    """Learning rate of the first step."""

    lr_range_test_step_size: Auto[Count] = 2000
    """Steps per interval."""

    lr_range_test_step_rate: Auto[NonNegative] = 1.0
    """Growth per interval, relative to lr_range_test_min_lr."""

    lr_range_test_staircase: Auto[Flag] = False
    """Grow at the end of each interval instead of each step."""


class OneCycleParams(SchedulerParams):
    """One cycle up and down, then decay (https://arxiv.org/abs/1803.09820)."""

    cycle_min_lr: NonNegative
    """Learning rate at both ends of the cycle."""

    cycle_max_lr: NonNegative
    """Learning rate at the peak."""

    cycle_first_step_size: Auto[Count] = 2000
    """Steps from the minimum to the peak."""

    cycle_second_step_size: Auto[Count | None] = None
    """Steps from the peak to the minimum; as many as the first half when absent."""

    cycle_first_stair_count: Auto[Whole] = 0
    """Stairs in the first half; 0 is continuous."""

    cycle_second_stair_count: Auto[Whole | None] = None
    """Stairs in the second half; as many as in the first when absent."""

    decay_step_size: Auto[Whole] = 0
    """Steps per decay interval after the cycle; 0 is no decay."""

    decay_lr_rate: Auto[NonNegative] = 0.0
    """The learning rate is divided by 1 + this times the decay intervals."""

    cycle_momentum: Auto[Flag] = True
    """Lower Adam's first beta as the learning rate rises; the second is 0.99."""

    cycle_min_mom: Auto[Fraction] = 0.8
    """First beta at the peak."""

    cycle_max_mom: Auto[Fraction] = 0.9
    """First beta at both ends of the cycle."""

    decay_mom_rate: Auto[Number] = 0.0
    """Growth of the first beta per decay interval."""


class WarmupParams(SchedulerParams):
    """What all warm-ups take."""

    warmup_num_steps: Auto[Whole] = 0
    """Steps of warm-up."""

    warmup_ratio: Fraction | None = None
    """Share of all steps in place of warmup_num_steps, rounded up."""


class DecayParams(WarmupParams):
    """What all schedules take that end at some step."""

    total_num_steps: Auto[Count | None] = None
    """Steps until the end of the decay; run.steps when absent."""


class ShapedWarmupParams(WarmupParams):
    """What the warm-ups of DeepSpeed take. The first two steps have the same rate."""

    warmup_num_steps: Auto[Whole] = 1000
    """Steps of warm-up; fewer than 2 are 2, as in DeepSpeed."""

    warmup_type: Auto[Literal["log", "linear"]] = "log"
    """Shape of the warm-up: logarithmic or linear in the step."""


class WarmupLRParams(ShapedWarmupParams):
    """Warm up, then stay."""

    warmup_min_lr: Auto[NonNegative] = 0.0
    """Learning rate of the first two steps."""

    warmup_max_lr: Annotated[NonNegative | None, OptimizerLR] = None
    """Learning rate after the warm-up; the optimizer's lr when absent or auto."""


class WarmupDecayLRParams(ShapedWarmupParams, DecayParams):
    """Warm up, then fall linearly to zero."""

    warmup_min_lr: Auto[NonNegative] = 0.0
    """Learning rate of the first two steps."""

    warmup_max_lr: Annotated[NonNegative | None, OptimizerLR] = 1e-3
    """Learning rate after the warm-up; the optimizer's lr when auto."""


class WarmupCosineLRParams(ShapedWarmupParams, DecayParams):
    """Warm up, then fall along a half cosine. Scales the optimizer's lr."""

    warmup_min_ratio: Auto[NonNegative] = 0.0
    """Share of the learning rate at the second step; the first has a rate of 0."""

    cos_min_ratio: Auto[NonNegative] = 1e-4
    """Share of the learning rate at the end."""


class LinearParams(DecayParams):
    """As in transformers: warm up from 0, then fall linearly to zero."""


class CosineParams(DecayParams):
    """As in transformers: warm up from 0, then fall to zero along a half cosine."""


class ConstantWithWarmupParams(WarmupParams):
    """As in transformers: warm up from 0, then stay."""


class Scheduler(TypedSection):
    """The learning rate as a function of the step; the optimizer's lr when absent."""

    KNOWN = {
        "WarmupLR": WarmupLRParams,
        "WarmupDecayLR": WarmupDecayLRParams,
        "WarmupCosineLR": WarmupCosineLRParams,
        "OneCycle": OneCycleParams,
        "LRRangeTest": LRRangeTestParams,
        "linear": LinearParams,
        "cosine": CosineParams,
        "constant_with_warmup": ConstantWithWarmupParams,
    }
    ANY = SchedulerParams

    params: SerializeAsAny[SchedulerParams]
    """The parameters of that type."""

    count: Literal["steps", "tokens", "layer_tokens"] = "steps"
    """What the schedule counts. tokens: a step of a curriculum counts as much as its
    tokens are of those of a whole step. layer_tokens: so, summed over the layers, of
    which some drop tokens."""
