"""`zinf.verify` finds that zinf trains as plain jax does, and finds it out if not."""

from dataclasses import replace
from functools import partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import yaml

import zinf
from tests.command import run
from tests.robustness.small import BATCH, DIM, draw, init, loss_fn, on_nvme
from zinf.core.optim.decision import Decision, decide
from zinf.core.step.run import streamed
from zinf.core.verification import Check, check_arrays, check_losses
from zinf.core.verification.compare import FACTOR, ULPS
from zinf.core.verification.verify import verify

EPS = float(np.finfo(np.float32).eps)
TX = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2))


def busy_loss(params: Any, state: Any, batch: Any, key: Any, *, train: bool) -> Any:
    """Uses everything that a loss may be given and may return."""
    assert train
    keep = jax.random.bernoulli(key, 0.9, batch["x"].shape)
    dropped = {**batch, "x": jnp.where(keep, batch["x"], 0)}
    mean = 0.9 * state["mean"] + 0.1 * jnp.mean(batch["x"], axis=0)
    loss = loss_fn(params, dropped) + jnp.mean(jnp.square(mean)) * params["scale"]
    return loss, ({"mean": mean, "count": state["count"] + 1}, {"kept": jnp.sum(keep)})


def busy_init() -> dict[str, Any]:
    return {**init(), "scale": jnp.float32(0.5)}


@pytest.mark.slow
def test_all_that_a_loss_may_use_agrees_and_no_file_is_left(tmp_path):
    folder = tmp_path / "made" / "for nvme"
    state = {"mean": jnp.zeros(DIM), "count": jnp.int32(0)}
    found = verify(
        busy_loss,
        busy_init,
        TX,
        on_nvme(folder, gradient_accumulation_steps=2, frozen=["layers/0/w"]),
        batch=draw(),
        num_steps=2,
        has_aux=True,
        rng=jax.random.key(3),
        model_state=state,
        state_rules={"count": "last"},
    )
    assert found
    assert found.execution == "streamed"
    assert list(tmp_path.iterdir()) == []
    assert len(found.losses) == len(found.loss_checks) == 2
    leaves = {leaf.path: leaf for leaf in found.leaves}
    assert leaves["layers/0/w"].gradient is None
    assert leaves["layers/1/w"].gradient.largest > 0
    assert leaves["model_state/mean"].param.largest > 0
    assert leaves["model_state/count"].agrees
    for text in ("They agree: 2 steps streamed", "layers/1/w", "nvme"):
        assert text in repr(found)


def test_the_bounds_are_tight_and_a_checkout_on_a_path_is_said(monkeypatch):
    module = import_module("zinf.core.process.installed")

    def version_of_others(name: str) -> str:
        """As with a checkout on a path, which is not installed."""
        if name == "zinf":
            raise PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(module, "version", version_of_others)
    found = verify(loss_fn, init, optax.sgd(0.1), batch=draw(), num_steps=1)
    assert found.setting[0].startswith("zinf not installed as a package, jax ")
    grads = jax.grad(loss_fn)(init(), draw())
    largest = [float(jnp.max(jnp.abs(g))) for g in jax.tree.leaves(grads)]
    checks = [leaf.gradient for leaf in found.leaves]
    assert [check.largest for check in checks] == pytest.approx(largest, rel=1e-5)
    assert all(check.bound < 1e-4 * check.largest for check in checks)


@pytest.mark.parametrize(
    "config",
    [
        {"execution": "fused", "gradient_clipping": 0.1},
        # A scale that overflows at first: steps are skipped on both sides.
        {"fp16": {"enabled": True, "initial_scale_power": 16, "hysteresis": 1}},
    ],
    ids=["fused", "fp16"],
)
def test_other_ways_to_run_agree(config):
    found = verify(
        lambda p, b: 8 * loss_fn(p, b), init(), TX, config, batch=draw(), num_steps=6
    )
    assert found, repr(found)
    assert found.execution == config.get("execution", "streamed")
    if "fp16" in config:
        losses = [loss for loss, _ in found.losses]
        assert losses[0] == losses[1], "no step was skipped, or nothing is tested"
        assert losses[-1] < losses[0]


def test_an_error_of_a_thousandth_is_found(monkeypatch):
    def wrong(*arguments: Any, **rest: Any) -> Decision:
        right = decide(*arguments, **rest)
        return Decision(right.loss, right.grad_norm, right.factor * 1.001, False)

    monkeypatch.setattr(streamed, "decide", wrong)
    found = verify(loss_fn, init, optax.sgd(0.1), batch=draw(), num_steps=2)
    assert not found
    assert {leaf.path for leaf in found.different} == {x.path for x in found.leaves}
    for leaf in found.leaves:
        check = leaf.gradient
        assert check.difference == pytest.approx(1e-3 * check.largest, rel=1e-2)
    assert "DIFFERS" in repr(found)
    assert "6 results differ by more than rounding: the loss of step 2" in found.verdict


@pytest.mark.slow
def test_what_rounds_in_the_loss_itself_widens_the_bound():
    def in_bfloat16(params: Any, batch: Any) -> jax.Array:
        half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
        return loss_fn(half, batch)

    check = partial(verify, params=init, tx=optax.sgd(0.1), batch=draw(), num_steps=1)
    found, exact = check(in_bfloat16), check(loss_fn)
    assert found, repr(found)
    ratio = 2.0**-7 / EPS
    wide, tight = (x.leaves[-1].gradient.bound for x in (found, exact))
    assert wide > ratio / 100 * tight


def test_what_cannot_be_verified_is_refused_before_it_is_made(monkeypatch):
    def never(*_: Any) -> Any:
        raise AssertionError("a parameter was made")

    module = import_module("zinf.core.verification.verify")
    monkeypatch.setattr(module, "host_memory_bytes", lambda: 10_000)
    monkeypatch.setattr(module, "_initial", never)
    expected = r"on one device: it needs [\d,]+ bytes, and this machine has 10,000"
    with pytest.raises(ValueError, match=expected):
        verify(loss_fn, init, TX, batch=draw())
    with pytest.raises(ValueError, match="num_steps is 0"):
        verify(loss_fn, init, TX, batch=draw(), num_steps=0)
    assert zinf.verify is verify


def test_the_bound_is_of_what_rounding_was_seen_to_do():
    plain = np.float32([1, -4])
    changed = [np.float32([1, -4.5]), np.float32([1.25, -4])]
    check = check_arrays(np.float32([3, -4]), plain, changed, unit=EPS)
    assert (check.largest, check.difference) == (4, 2)
    assert check.bound == FACTOR * 0.5 + ULPS * EPS * 4
    assert check.agrees and check.is_noise
    assert not check_arrays(np.float32([1, np.nan]), plain, changed, unit=EPS).agrees
    nothing = np.float32([np.nan, np.inf])
    assert check_arrays(nothing, nothing, [], unit=EPS).difference == 0
    whole = np.int32([1, 2])
    assert check_arrays(whole, whole, [], unit=EPS).agrees
    assert not check_arrays(whole + 1, whole, [whole + 1], unit=EPS).agrees
    first, second = check_losses([2, 3], [1, 3], [[1.5, 3]])
    assert (first.difference, second.difference) == (1, 0)
    assert second.bound == FACTOR * 0.5 + ULPS * EPS * 3


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    model = {"num_layers": 1, "num_heads": 2, "embed_dim": 8, "max_length": 8}
    settings = {
        "model": model,
        "data": {"sequence_length": 8},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "train_batch_size": BATCH,
    }
    path.write_text(yaml.safe_dump(settings))
    return path


@pytest.mark.slow
def test_the_command_says_what_it_found_by_its_exit_code(config, monkeypatch):
    made = []

    def kept(*arguments: Any, **rest: Any) -> Any:
        made.append(verify(*arguments, **rest))
        return made[-1]

    command = import_module("zinf.cli.verify")
    monkeypatch.setattr(command, "verify", kept)
    right = run("verify", config, "--steps", "2", "--all")
    assert "They agree: 2 steps streamed" in right.output
    assert "more leaves" not in right.output
    wrong = replace(made[0], loss_checks=(Check(1.0, 1.0, 0.5),) * 2)
    monkeypatch.setattr(command, "verify", lambda *_, **__: wrong)
    different = run("verify", config, code=1)
    assert "differ by more than rounding: the loss of step 1" in different.output
