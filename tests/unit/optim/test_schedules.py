"""DeepSpeed's schedules, step by step as its scheduler classes compute them."""

import math

import jax
import numpy as np
import pytest

from zinf.config import Config
from zinf.optim.factory import build_schedule
from zinf.optim.schedules import beta_of

LR = 0.02
NUM_STEPS = 40


def learning_rates(kind, params, **more):
    raw = {
        "optimizer": {"type": "AdamW", "params": {"lr": LR}},
        "scheduler": {"type": kind, "params": params},
        **more,
    }
    schedule = jax.jit(build_schedule(Config.load(raw)))
    return [float(schedule(count)) for count in range(NUM_STEPS)]


def check(kind, params, initial, after):
    """`initial` is set by the constructor; each later update uses `after(i)`.

    `i` is last_batch_iteration, 0 once the first update is done.
    """
    expected = [initial, *(after(i) for i in range(NUM_STEPS - 1))]
    np.testing.assert_allclose(learning_rates(kind, params), expected, 1e-5, 1e-8)


def warm(i, steps, kind):
    if kind == "log":
        return math.log(i + 1) / math.log(steps)
    return i / steps


@pytest.mark.parametrize("kind", ["log", "linear"])
@pytest.mark.parametrize("steps", [1, 2, 10])
def test_warmup_lr(kind, steps):
    params = {
        "warmup_min_lr": 0.001,
        "warmup_max_lr": 0.01,
        "warmup_num_steps": steps,
        "warmup_type": kind,
    }
    num_warm = max(2, steps)

    def after(i):
        gamma = warm(i, num_warm, kind) if i < num_warm else 1.0
        return 0.001 + (0.01 - 0.001) * gamma

    check("WarmupLR", params, 0.001, after)


@pytest.mark.parametrize(("kind", "peak"), [("WarmupLR", LR), ("WarmupDecayLR", 0.001)])
def test_a_warmup_reaches_the_optimizers_lr_or_a_peak_of_its_own(kind, peak):
    params = {"warmup_num_steps": 5, "total_num_steps": 30}
    if kind == "WarmupLR":
        del params["total_num_steps"]
    assert max(learning_rates(kind, params)) == pytest.approx(peak)
    params["warmup_max_lr"] = "auto"
    assert max(learning_rates(kind, params)) == pytest.approx(LR)


@pytest.mark.parametrize(("steps", "total"), [(10, 30), (2, 40), (10, 10)])
def test_warmup_decay_lr(steps, total):
    params = {
        "warmup_min_lr": 0.001,
        "warmup_max_lr": 0.01,
        "warmup_num_steps": steps,
        "total_num_steps": total,
    }

    def after(i):
        if i < steps:
            gamma = warm(i, steps, "log")
        else:
            gamma = max(0.0, (total - i) / max(1.0, total - steps))
        return 0.001 + (0.01 - 0.001) * gamma

    check("WarmupDecayLR", params, 0.001, after)


@pytest.mark.parametrize(
    ("steps", "total", "lowest"), [(10, 30, 0.0), (2, 38, 0.1), (10, 10, 0.1)]
)
def test_warmup_cosine_lr(steps, total, lowest):
    params = {
        "warmup_min_ratio": lowest,
        "cos_min_ratio": 0.05,
        "warmup_num_steps": steps,
        "total_num_steps": total,
        "warmup_type": "linear",
    }

    def after(i):
        if i < steps:
            return LR * (lowest + (1 - lowest) * warm(i, steps, "linear"))
        progress = min(1.0, (i - steps + 1) / max(1, total - steps))
        cosine = (1 + math.cos(math.pi * progress)) / 2
        return LR * max(0.0, 0.05 + 0.95 * cosine)

    check("WarmupCosineLR", params, 0.0, after)


def test_a_decay_ends_with_the_run_unless_told():
    params = {"warmup_num_steps": 4}
    given = learning_rates("WarmupCosineLR", {**params, "total_num_steps": 20})
    assert learning_rates("WarmupCosineLR", params, run={"steps": 20}) == given


def one_cycle(p):
    """The rate and the beta of each step, by the formulas of DeepSpeed's OneCycle."""
    low, high = p["cycle_min_lr"], p["cycle_max_lr"]
    first = p["cycle_first_step_size"]
    total = first + p.get("cycle_second_step_size", first)
    for i in range(NUM_STEPS - 1):
        if i < total:
            ratio, x = first / total, (i + 1) / total % 1
            factor, stairs = x / ratio, p.get("cycle_first_stair_count", 0)
            if x > ratio:
                factor = (x - 1) / (ratio - 1)
                stairs = p.get("cycle_second_stair_count", stairs)
            scale = math.floor(factor * stairs + 1e-9) / stairs if stairs else factor
            yield low + (high - low) * scale, 0.9 - (0.9 - 0.8) * scale
        else:
            decay = p["decay_step_size"]
            interval = (i - total + 1) / decay if decay else 0
            growth = 1 + p.get("decay_mom_rate", 0) * interval
            yield low / (1 + p.get("decay_lr_rate", 0) * interval), 0.9 * growth


CYCLES = [
    {"cycle_first_step_size": 10},
    {"cycle_first_step_size": 10, "decay_step_size": 5, "decay_lr_rate": 0.5},
    {"cycle_first_step_size": 7, "cycle_second_step_size": 13, "decay_mom_rate": 0.01},
    {"cycle_first_step_size": 9, "cycle_first_stair_count": 3},
    {
        "cycle_first_step_size": 6,
        "cycle_second_step_size": 12,
        "cycle_first_stair_count": 2,
        "cycle_second_stair_count": 4,
        "decay_step_size": 2,
        "decay_lr_rate": 0.1,
        "decay_mom_rate": 0.001,
    },
]


@pytest.mark.parametrize("params", CYCLES)
def test_one_cycle_moves_the_rate_and_the_first_beta_against_it(params):
    params = {"decay_step_size": 0, **params, "cycle_min_lr": 0.01, "cycle_max_lr": 0.1}
    expected = [(0.01, 0.8), *one_cycle(params)]
    scheduler = Config.load({"scheduler": {"type": "OneCycle", "params": params}})
    beta = beta_of(scheduler.scheduler.params)
    betas = [float(beta(count)) for count in range(NUM_STEPS)]
    found = [*zip(learning_rates("OneCycle", params), betas, strict=True)]
    np.testing.assert_allclose(found, expected, 1e-5)


@pytest.mark.parametrize("is_staircase", [False, True])
def test_lr_range_test(is_staircase):
    params = {
        "lr_range_test_min_lr": 0.01,
        "lr_range_test_step_size": 7,
        "lr_range_test_step_rate": 2.0,
        "lr_range_test_staircase": is_staircase,
    }

    def after(i):
        interval = (i + 1) / 7
        return 0.01 * (1 + 2.0 * (math.floor(interval) if is_staircase else interval))

    check("LRRangeTest", params, 0.01, after)


def test_without_a_scheduler_the_learning_rate_is_constant():
    raw = {"optimizer": {"type": "AdamW", "params": {"lr": LR}}}
    schedule = build_schedule(Config.load(raw))
    assert {float(schedule(count)) for count in (0, 1, 1000)} == {LR}
