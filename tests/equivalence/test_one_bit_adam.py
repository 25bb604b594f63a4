"""1-bit Adam on eight devices is DeepSpeed's OneBitAdam, written in NumPy."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zinf
from zinf.core.engine.initialize import make_planner
from zinf.core.step.compiled import compiled_runs, step_traffic

DEVICES, STEPS, FREEZE, ROWS = 8, 20, 8, 16
RATE, BETAS, EPS, DECAY = 1e-3, (0.9, 0.999), 1e-8, 0.01


def config(**more: Any) -> dict[str, Any]:
    params = {"lr": RATE, "betas": BETAS, "eps": EPS, "weight_decay": DECAY}
    return {
        "optimizer": {"type": "OneBitAdam", "params": params | {"freeze_step": FREEZE}},
        "mesh": {"fsdp": DEVICES},
        **more,
    }


def init() -> dict[str, jax.Array]:
    random = np.random.default_rng(0)
    shapes = {"bias": (24,), "down": (24, 33), "up": (40, 24)}
    return {
        k: jnp.asarray(random.standard_normal(s, np.float32) * 0.3)
        for k, s in shapes.items()
    }


def loss(params: Any, batch: Any) -> jax.Array:
    hidden = jnp.tanh(batch["x"] @ params["up"] + params["bias"][None])
    return jnp.mean(jnp.square(hidden @ params["down"] - batch["y"]))


def batches() -> list[dict[str, np.ndarray]]:
    random = np.random.default_rng(1)
    shapes = {"x": (ROWS, 40), "y": (ROWS, 33)}
    return [
        {k: random.standard_normal(s, np.float32) for k, s in shapes.items()}
        for _ in range(STEPS)
    ]


def compressed(momenta: np.ndarray, errors: dict[str, np.ndarray]) -> np.ndarray:
    """`NcclBackend.compressed_allreduce` of the momenta of all devices, (devices, n).

    Both errors are replaced.
    """
    count, size = momenta.shape
    divider = count * 8 // np.gcd(count, 8)
    padded = size + -size % (count * divider)
    worker = errors.setdefault("worker", np.zeros((count, padded), np.float32))
    server = errors.setdefault("server", np.zeros((count, padded // count), np.float32))
    sent = np.pad(momenta, [(0, 0), (0, padded - size)]) + worker
    scales = np.linalg.norm(sent, axis=1, keepdims=True) / np.float32(np.sqrt(padded))
    signs = np.where(sent >= 0, np.float32(1), np.float32(-1))
    errors["worker"] = sent - scales * signs
    average = (signs * (scales / count)).sum(0).reshape(count, -1) + server
    size_2 = np.float32(np.sqrt(average.shape[1]))
    scales = np.linalg.norm(average, axis=1, keepdims=True) / size_2
    signs = np.where(average >= 0, np.float32(1), np.float32(-1))
    errors["server"] = average - scales * signs
    return (scales * signs).reshape(-1)[:size]


def emulated() -> tuple[list[float], dict[str, np.ndarray]]:
    """The losses and the last parameters.

    DeepSpeed's first call of `step` makes buffers and updates nothing; here the first
    update is a step of the warm-up, as in the paper.
    """
    params = {k: np.asarray(v) for k, v in init().items()}
    m, v = ({k: np.zeros_like(x) for k, x in params.items()} for _ in range(2))
    errors: dict[str, dict[str, np.ndarray]] = {k: {} for k in params}
    losses = []
    for number, batch in enumerate(batches()):
        losses.append(float(loss(params, batch)))
        own = [
            jax.grad(loss)(params, {k: x[i : i + 2] for k, x in batch.items()})
            for i in range(0, ROWS, 2)
        ]
        for name in params:
            grads = np.stack([np.asarray(g[name]) for g in own])
            mean = grads.mean(0)
            if number < FREEZE:
                v[name] = BETAS[1] * v[name] + (1 - BETAS[1]) * mean**2
            if number < FREEZE or name == "bias":
                m[name] = BETAS[0] * m[name] + (1 - BETAS[0]) * mean
            else:
                momenta = BETAS[0] * m[name] + (1 - BETAS[0]) * grads
                flat = momenta.reshape(DEVICES, -1).astype(np.float32)
                m[name] = compressed(flat, errors[name]).reshape(mean.shape)
            update = m[name] / (np.sqrt(v[name]) + EPS) + DECAY * params[name]
            params[name] = (params[name] - RATE * update).astype(np.float32)
    return losses, params


@pytest.mark.slow
def test_both_phases_are_those_of_deepspeed_and_resume(tmp_path):
    expected, params = emulated()
    found = []
    with zinf.initialize(loss, init, None, config()) as engine:
        for batch in batches()[: FREEZE + 4]:
            found.append(engine.step(batch)["loss"])
        engine.save(tmp_path / "saved")
    with zinf.initialize(loss, init, None, config()) as engine:
        engine.restore(tmp_path / "saved")
        for batch in batches()[FREEZE + 4 :]:
            found.append(engine.step(batch)["loss"])
        last = engine.params()
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    # A number next to zero may get another sign, and its error the opposite one.
    for name, content in params.items():
        error = np.abs(np.asarray(last[name]) - content)
        assert np.mean(error > 1e-6) <= 0.01, name


@pytest.mark.slow
def test_after_the_warm_up_a_sixteenth_of_the_bytes_is_sent():
    dim = 512

    def wide() -> dict[str, jax.Array]:
        return {"w": jnp.ones((dim, dim))}

    def square(params: Any, batch: Any) -> jax.Array:
        return jnp.mean(jnp.square(batch["x"] @ params["w"]))

    batch = {"x": np.ones((ROWS, dim), np.float32)}
    made = make_planner(square, wide, None, config()).plan_batch(batch)
    sent = sum(x.sent_bytes for x in step_traffic(compiled_runs(made)).values())
    all_reduce = 2 * 4 * dim**2 * (DEVICES - 1) / DEVICES
    # One bit in place of 32, and a few scales.
    assert all_reduce / 33 < sent < all_reduce / 31


def test_the_plan_says_which_momenta_go_by_their_signs():
    made = make_planner(loss, init, None, config()).plan_batch(batches()[0])
    assert made.plan.is_fused
    assert (
        "After 8 updates, momenta of 2 leaves are averaged by their signs; as they "
        "are, 1 with one dim or few numbers (bias)."
    ) in made.plan.why


def test_what_it_cannot_be_with_is_refused():
    for more, said in (
        ({"zero_optimization": {"stage": 1}}, "stage is 1. Set it to 0"),
        ({"gradient_clipping": 1.0}, "by its own norm"),
        ({"execution": "streamed"}, "in fused steps"),
        ({"fp16": {"enabled": True}}, "Use bf16 alone"),
        ({"run": {"steps": FREEZE}}, "the run ends at step 8"),
    ):
        with pytest.raises(ValueError, match=said):
            make_planner(loss, init, None, config(**more))
