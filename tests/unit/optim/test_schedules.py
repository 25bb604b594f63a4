"""Schedules, step by step as those of DeepSpeed and transformers compute them."""

import math

import jax
import numpy as np
import pytest

from zinf.core.config import Config
from zinf.core.optim.transforms.factory import build_schedule
from zinf.core.optim.transforms.schedules import beta_of

LR = 0.02
NUM_STEPS = 40
LIMITS = {"warmup_min_lr": 0.001, "warmup_max_lr": 0.01}


def learning_rates(kind, params, **more):
    raw = {
        "optimizer": {"type": "AdamW", "params": {"lr": LR}},
        "scheduler": {"type": kind, "params": params},
        **more,
    }
    schedule = jax.jit(build_schedule(Config.load(raw)))
    return [float(schedule(count)) for count in range(NUM_STEPS)]


# The constructor sets a first rate; each later update uses these of
# last_batch_iteration, 0 once the first update is done.


def warm(i, steps, kind):
    return math.log(i + 1) / math.log(steps) if kind == "log" else i / steps


def warmup(i, p):
    num_warm, kind = max(2, p["warmup_num_steps"]), p["warmup_type"]
    gamma = warm(i, num_warm, kind) if i < num_warm else 1.0
    return 0.001 + (0.01 - 0.001) * gamma


def warmup_decay(i, p):
    steps, total = p["warmup_num_steps"], p["total_num_steps"]
    gamma = max(0.0, (total - i) / max(1.0, total - steps))
    if i < steps:
        gamma = warm(i, steps, "log")
    return 0.001 + (0.01 - 0.001) * gamma


def warmup_cosine(i, p):
    steps, lowest = p["warmup_num_steps"], p["warmup_min_ratio"]
    if i < steps:
        return LR * (lowest + (1 - lowest) * warm(i, steps, "linear"))
    progress = min(1.0, (i - steps + 1) / max(1, p["total_num_steps"] - steps))
    cosine = (1 + math.cos(math.pi * progress)) / 2
    return LR * max(0.0, 0.05 + 0.95 * cosine)


def range_test(i, p):
    interval = (i + 1) / 7
    is_staircase = p["lr_range_test_staircase"]
    return 0.01 * (1 + 2.0 * (math.floor(interval) if is_staircase else interval))


def numbered(steps, total=None, lowest=None):
    numbers = {"warmup_num_steps": steps}
    numbers |= {} if total is None else {"total_num_steps": total}
    return numbers | ({} if lowest is None else {"warmup_min_ratio": lowest})


COSINE = {"cos_min_ratio": 0.05, "warmup_type": "linear"}
RANGE = {
    "lr_range_test_min_lr": 0.01,
    "lr_range_test_step_size": 7,
    "lr_range_test_step_rate": 2.0,
}
# The scheduler, its first rate, the later ones, and parameters.
SCHEDULES = [
    *(
        ("WarmupLR", 0.001, warmup, {**LIMITS, **numbered(steps), "warmup_type": kind})
        for kind in ("log", "linear")
        for steps in (1, 2, 10)
    ),
    *(
        ("WarmupDecayLR", 0.001, warmup_decay, LIMITS | numbered(*numbers))
        for numbers in ((10, 30), (2, 40), (10, 10))
    ),
    *(
        ("WarmupCosineLR", 0.0, warmup_cosine, COSINE | numbered(*numbers))
        for numbers in ((10, 30, 0.0), (2, 38, 0.1), (10, 10, 0.1))
    ),
    *(
        ("LRRangeTest", 0.01, range_test, {**RANGE, "lr_range_test_staircase": stairs})
        for stairs in (False, True)
    ),
]


@pytest.mark.parametrize(("kind", "initial", "after", "params"), SCHEDULES)
def test_rates_are_those_of_deepspeed(kind, initial, after, params):
    expected = [initial, *(after(i, params) for i in range(NUM_STEPS - 1))]
    np.testing.assert_allclose(learning_rates(kind, params), expected, 1e-5, 1e-8)


@pytest.mark.parametrize(("kind", "peak"), [("WarmupLR", LR), ("WarmupDecayLR", 0.001)])
def test_a_warmup_reaches_the_optimizers_lr_or_a_peak_of_its_own(kind, peak):
    params = numbered(5, 30 if kind == "WarmupDecayLR" else None)
    assert max(learning_rates(kind, params)) == pytest.approx(peak)
    params["warmup_max_lr"] = "auto"
    assert max(learning_rates(kind, params)) == pytest.approx(LR)


def test_a_decay_ends_with_the_run_unless_told():
    given = learning_rates("WarmupCosineLR", numbered(4, 20))
    assert learning_rates("WarmupCosineLR", numbered(4), run={"steps": 20}) == given


@pytest.mark.parametrize("num_warm", [0, 1, 4])
@pytest.mark.parametrize("kind", ["linear", "cosine", "constant_with_warmup"])
def test_rates_are_those_of_transformers(kind, num_warm):
    torch, transformers = map(pytest.importorskip, ("torch", "transformers"))
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=LR)
    schedule = transformers.get_scheduler(kind, optimizer, num_warm, NUM_STEPS)
    expected = []
    for _ in range(NUM_STEPS):
        expected += schedule.get_last_lr()
        optimizer.step()
        schedule.step()
    run = {"steps": NUM_STEPS}
    for key, value in (("num_steps", num_warm), ("ratio", (num_warm - 0.5) / 40)):
        params = {f"warmup_{key}": max(0, value)}
        rates = learning_rates(kind, params, run=run)
        np.testing.assert_allclose(rates, expected, 1e-5, 1e-8)


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


def test_without_a_scheduler_the_learning_rate_is_constant():
    raw = {"optimizer": {"type": "AdamW", "params": {"lr": LR}}}
    schedule = build_schedule(Config.load(raw))
    assert {float(schedule(count)) for count in (0, 1, 1000)} == {LR}
