"""Every optimizer against its definition in torch or DeepSpeed, written in numpy."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from zinf.core.config import Config, notices
from zinf.core.config.optimizer import Optimizer
from zinf.core.optim.separate import separate
from zinf.core.optim.transforms.factory import build_optimizer, build_schedule

STEPS = 12
LR = 0.05
SHAPES = {"kernel": (6, 4), "bias": (4,)}
NO_DECAY = {"weight_decay": 0.0}


def arrays(seed):
    rng = np.random.default_rng(seed)
    return {k: rng.normal(size=s).astype(np.float32) for k, s in SHAPES.items()}


def trained(raw):
    return trained_with(build_optimizer(Config.load(raw)))


def trained_with(tx):
    params = jax.tree.map(jnp.asarray, arrays(0))
    state = tx.init(params)

    @jax.jit
    def step(params, state, gradient):
        updates, state = tx.update(gradient, state, params)
        return optax.apply_updates(params, updates), state

    for number in range(1, 1 + STEPS):
        params, state = step(params, state, arrays(number))
    return params


def expected(rule):
    """Each leaf after `rule(param, grad, memory, step)`, in float64; step is from 1."""
    params = {key: value.astype(np.float64) for key, value in arrays(0).items()}
    memory = {key: {} for key in params}
    for step in range(1, STEPS + 1):
        for key, gradient in arrays(step).items():
            gradient = gradient.astype(np.float64)
            params[key] = rule(params[key], gradient, memory[key], step)
    return params


def config(kind, **params):
    return {"optimizer": {"type": kind, "params": {"lr": LR, **params}}}


def assert_close(found, wanted, rtol=2e-4):
    chex.assert_trees_all_close(found, wanted, rtol=rtol, atol=1e-5)


def adam_direction(g, memory, step, *, b1=0.9, b2=0.999, eps=1e-8):
    memory["m"] = b1 * memory.get("m", 0) + (1 - b1) * g
    memory["v"] = b2 * memory.get("v", 0) + (1 - b2) * g * g
    mean = memory["m"] / (1 - b1**step)
    return mean / (np.sqrt(memory["v"] / (1 - b2**step)) + eps)


def decoupled_adam(p, g, memory, step):
    return p * (1 - LR * 0.1) - LR * adam_direction(g, memory, step)


def penalised_adam(p, g, memory, step):
    return p - LR * adam_direction(g + 0.1 * p, memory, step)


def other_betas(p, g, memory, step):
    return p - LR * adam_direction(g, memory, step, b1=0.5, b2=0.7, eps=0.1)


def sgd(momentum, is_nesterov):
    """As in torch."""

    def rule(p, g, memory, step):
        g = g + 0.1 * p
        memory["b"] = g if step == 1 else momentum * memory["b"] + g
        return p - LR * (g + momentum * memory["b"] if is_nesterov else memory["b"])

    return rule


def lion(p, g, memory, step):
    """As in DeepSpeed."""
    m = memory.get("m", np.zeros_like(g))
    memory["m"] = 0.99 * m + 0.01 * g
    return p * (1 - LR * 0.1) - LR * np.sign(0.9 * m + 0.1 * g)


def adagrad(p, g, memory, step):
    """As in torch."""
    g = g + 0.1 * p
    memory["s"] = memory.get("s", 0) + g * g
    return p - LR * g / (np.sqrt(memory["s"]) + 1e-10)


def lamb(smallest, largest, is_inside):
    """As in DeepSpeed, which clips the trust ratio."""

    def rule(p, g, memory, step):
        direction = adam_direction(g, memory, step, eps=1e-3)
        if is_inside:
            mean = memory["m"] / (1 - 0.9**step)
            direction = mean / np.sqrt(memory["v"] / (1 - 0.999**step) + 1e-3)
        direction = direction + 0.1 * p
        ratio = np.linalg.norm(p) / np.linalg.norm(direction)
        return p - LR * np.clip(ratio, smallest, largest) * direction

    coefficients = {"min_coeff": smallest, "max_coeff": largest}
    params = {"eps": 1e-3, "eps_inside_sqrt": is_inside, **coefficients}
    return "Lamb", params, None, {}, rule


def orthogonal(x):
    a, b, c = 3.4445, -4.7750, 2.0315
    x = x / (np.linalg.norm(x) + 1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


def muon(p, g, memory, step):
    if p.ndim != 2:
        return p * (1 - 0.2 * 0.1) - 0.2 * adam_direction(g, memory, step)
    memory["m"] = 0.9 * memory.get("m", 0) + 0.1 * g
    # Weights in torch are (out, in), kernels in JAX (in, out).
    ahead = (0.9 * memory["m"] + 0.1 * g).T
    scale = max(1, ahead.shape[0] / ahead.shape[1]) ** 0.5
    return p * (1 - 0.3 * 0.1) - 0.3 * scale * orthogonal(ahead).T


def warmed(p, g, memory, step):
    return p - LR * min(1, max(step - 2, 0) / 4) * g


def cycled(p, g, memory, step):
    height = 1 - abs((step - 1) % 8 - 4) / 4 if step <= 9 else 0
    beta = 0.8 if step == 1 else 0.9 - 0.1 * height
    return p - LR * adam_direction(g, memory, step, b1=beta, b2=0.99)


def still(p, g, memory, step):
    return p - LR * adam_direction(g, memory, step)


CYCLE = {"cycle_min_lr": LR, "cycle_max_lr": LR, "cycle_first_step_size": 4}
MUON = {"momentum": 0.9, "muon_lr": 0.3, "adam_lr": 0.2}
WARMUP = {"warmup_num_steps": 4, "warmup_type": "linear"}
# Optimizer, its parameters, the scheduler and its parameters, and the definition.
DEFINITIONS = [
    ("Adam", {}, None, {}, decoupled_adam),
    ("Adam", {"adam_w_mode": False, "torch_adam": True}, None, {}, penalised_adam),
    ("AdamW", {"adam_w_mode": False}, None, {}, decoupled_adam),
    ("AdamW", {**NO_DECAY, "betas": [0.5, 0.7], "eps": 0.1}, None, {}, other_betas),
    ("SGD", {}, None, {}, sgd(0.0, False)),
    ("SGD", {"momentum": 0.9}, None, {}, sgd(0.9, False)),
    ("SGD", {"momentum": 0.9, "nesterov": True}, None, {}, sgd(0.9, True)),
    ("Lion", {}, None, {}, lion),
    ("Adagrad", {}, None, {}, adagrad),
    lamb(0.01, 10.0, is_inside=True),
    lamb(0.01, 0.3, is_inside=False),
    lamb(2, 4, is_inside=False),
    ("Muon", MUON, None, {}, muon),
    ("SGD", NO_DECAY, "WarmupLR", WARMUP, warmed),
    ("Adam", NO_DECAY, "OneCycle", CYCLE, cycled),
    ("Adam", NO_DECAY, "OneCycle", {**CYCLE, "cycle_momentum": False}, still),
]


@pytest.mark.parametrize(("kind", "params", "scheduler", "given", "rule"), DEFINITIONS)
def test_an_optimizer_is_its_definition(kind, params, scheduler, given, rule):
    raw = config(kind, **{"weight_decay": 0.1, **params})
    if scheduler:
        raw["scheduler"] = {"type": scheduler, "params": given}
    # Muon's iterations magnify rounding.
    assert_close(trained(raw), expected(rule), rtol=1e-3 if kind == "Muon" else 2e-4)


def first_update(kind, gradient, **more):
    """What a first update adds to zeros."""
    tx = build_optimizer(Config.load({**config(kind), **more}))
    zeros = jax.tree.map(jnp.zeros_like, gradient)
    return tx.update(gradient, tx.init(zeros), zeros)[0]


def test_first_updates_of_zeros():
    # With eps below the root Adagrad would move by 0.1 lr.
    moved = first_update("Adagrad", {"x": jnp.full(3, 1e-6)})
    np.testing.assert_allclose(moved["x"], -LR, 1e-3)
    # Adam's first direction is the sign of the gradient, and Lamb's ratio is then 1.
    gradient = jnp.array([-2.0, 0.1])
    moved = first_update("Lamb", {"x": gradient})
    np.testing.assert_allclose(moved["x"], -LR * np.sign(gradient), 1e-4)
    # Muon leaves embeddings to Adam.
    ones = jnp.ones((6, 4))
    moved = first_update("Muon", {"token_embedding": ones, "kernel": ones})
    np.testing.assert_allclose(moved["token_embedding"], -LR, 1e-4)
    assert abs(moved["kernel"]).max() < LR / 2
    # Clipping is left to the engine.
    moved = first_update("SGD", {"x": jnp.ones(3)}, gradient_clipping=1e-3)
    np.testing.assert_allclose(moved["x"], -LR, 1e-6)


WHOLE = ("Lamb", "OneBitLamb", "Muon", "Adafactor", "GaLore")


def kernel_of(raw):
    separated = separate(build_optimizer(Config.load(raw)), arrays(0))
    assert {leaf.path for leaf in separated.leaves} == set(SHAPES)
    return next(leaf for leaf in separated.leaves if leaf.path == "kernel")


@pytest.mark.parametrize("optimizer", sorted(Optimizer.KNOWN))
def test_every_optimizer_is_separable_per_leaf(optimizer):
    cycle = {"cycle_min_lr": 0.01, "cycle_max_lr": 0.1}
    # The others have a beta that moves with the rate.
    if optimizer in ("Lamb", "Lion", "Adafactor", "GaLore"):
        cycle["cycle_momentum"] = False
    raw = config(optimizer, weight_decay=0.1)
    kernel = kernel_of({**raw, "scheduler": {"type": "OneCycle", "params": cycle}})
    assert kernel.is_elementwise is (optimizer not in WHOLE)


def test_adafactor_is_that_of_optax_and_keeps_rows_and_columns_of_a_matrix():
    raw = config("Adafactor", min_dim_size_to_factor=4)
    sizes = [state.spec.size for state in kernel_of(raw).states]
    # Six rows, four columns, and a placeholder for the whole second moment.
    assert sorted(sizes)[-2:] == [4, 6] and sum(sizes) <= 11
    with_optax = optax.adafactor(LR, min_dim_size_to_factor=4)
    assert_close(trained(raw), trained_with(with_optax))


def test_galore_keeps_moments_of_the_projected_matrix():
    states = kernel_of(config("GaLore", rank=2)).states
    # The projection of (6, 4) to rank 2, and two moments of the projected gradient.
    assert sum(state.spec.size for state in states) <= 4 * 2 + 2 * (2 * 6)


@pytest.mark.parametrize("build", [build_optimizer, build_schedule])
def test_a_config_without_optimizer_is_told_what_to_add(build):
    with pytest.raises(ValueError, match="optimizer: {type: AdamW"):
        build(Config.load({}))


def test_a_schedule_that_counts_tokens_is_late_by_what_a_curriculum_left_out():
    """4 steps of a quarter, 4 of a half, then whole ones: step 8 counts 1 + 2."""
    params = {"warmup_num_steps": 3, "total_num_steps": 12, "warmup_max_lr": LR}
    raw = {
        **config("SGD"),
        "scheduler": {"type": "WarmupDecayLR", "params": params},
        "run": {"steps": 20},
    }
    curriculum = {
        "enabled": True,
        "min_difficulty": 64,
        "max_difficulty": 256,
        "schedule_type": "fixed_discrete",
        "schedule_config": {"difficulty": [64, 128, 256], "max_step": [4, 8]},
    }
    by_steps = build_schedule(Config.load(raw))
    raw["scheduler"]["count"] = "tokens"
    alike = build_schedule(Config.load(raw))
    by_tokens = build_schedule(Config.load({**raw, "curriculum_learning": curriculum}))
    for step in (0, 1, 3, 4, 5, 8, 9, 12, 24):
        counted = min(step, 4) / 4 + min(max(step - 4, 0), 4) / 2 + max(step - 8, 0)
        np.testing.assert_allclose(by_tokens(step), by_steps(counted), rtol=1e-6)
        np.testing.assert_allclose(alike(step), by_steps(step), rtol=1e-6)


def test_a_schedule_that_counts_tokens_of_layers_knows_those_that_drop_some():
    steps = {"require_steps": 10**9, "seq_per_step": 64}
    schedule = {"min_value": 64, "max_value": 256, "schedule_type": "fixed_linear"}
    schedule["schedule_config"] = steps
    dropping = {"random_ltd_layer_id": [1, 2], "random_ltd_schedule": schedule}
    routing = {"enabled": True, "random_ltd": {"enabled": True, **dropping}}
    raw = {
        **config("SGD"),
        "scheduler": {"type": "WarmupLR", "params": {"warmup_type": "linear"}},
        "data_efficiency": {"enabled": True, "data_routing": routing},
        "model": {"num_layers": 4, "num_heads": 1, "embed_dim": 8, "max_length": 256},
        "run": {"steps": 100},
    }
    by_steps = build_schedule(Config.load(raw))
    by_tokens = build_schedule(Config.load(raw, ["scheduler.count=layer_tokens"]))
    # Two of four layers run on a quarter of the tokens: 5/8 of a step.
    np.testing.assert_allclose(by_tokens(80), by_steps(50), rtol=1e-5)
    lines = notices(Config.load(raw, ["scheduler.count=tokens"]))
    assert [n for n in lines if "scheduler.count: tokens has no effect" in n]


def test_the_average_of_a_config_begins_after_so_many_updates():
    raw = {"optimizer": {"type": "SGD", "params": {"lr": LR}, "ema": 0.9}}
    raw["optimizer"]["ema_update_after"] = 2
    tx = build_optimizer(Config.load(raw))
    params = jax.tree.map(jnp.asarray, arrays(0))
    state = tx.init(params)
    average = weights = arrays(0)
    for number in range(4):
        updates, state = tx.update(arrays(number), state, params)
        params = optax.apply_updates(params, updates)
        weights = {k: w - LR * arrays(number)[k] for k, w in weights.items()}
        d = 0.9 if number >= 2 else 0.0
        average = {k: d * average[k] + (1 - d) * w for k, w in weights.items()}
        assert_close(state[-1].ema, average)
    # A leaf in 16 bits is averaged in 32.
    half = {"w": jnp.ones(3, jnp.bfloat16)}
    assert tx.init(half)[-1].ema["w"].dtype == jnp.float32
