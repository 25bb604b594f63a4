"""Which implementation an attention has: asked for, or by a trial; the plan says so."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh

import zinf
from tests.unit.refusals import refusals
from zinf.core.step.attention import AttentionRows
from zinf_kernels.attention import Operands, Spec, attention, blocks, cudnn, triton
from zinf_kernels.attention.place import Place
from zinf_kernels.device import Device

H100 = Device("gpu", "NVIDIA H100", 132, (9, 0))
CPU = Device("cpu", "cpu", 1)
CAUSAL = Spec(scale=0.125, causal=True)


def shapes(
    num_tokens: int = 8192, dtype: Any = jnp.bfloat16, width: int = 64
) -> Operands:
    shape = jax.ShapeDtypeStruct((2, num_tokens, 4, width), dtype)
    return dict.fromkeys("qkv", shape)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What stands in place of the kernels of a GPU, by name; `blocks` at first."""
    functions = {"cudnn": blocks.attention, "triton": blocks.attention}
    modules = {"cudnn": cudnn, "triton": triton}
    for name, module in modules.items():

        def run(spec: Spec, operands: Operands, name: str = name) -> jax.Array:
            return functions[name](spec, operands)

        monkeypatch.setattr(module, "attention", run)
    monkeypatch.setattr("zinf.core.step.attention.TRIAL_TOKENS", 64)
    return functions


def late(spec: Spec, operands: Operands) -> jax.Array:
    """Sees one later token."""
    moved = operands | {"q_positions": jnp.arange(1, 65)[None]}
    return blocks.attention(spec, moved)


def rounded(spec: Spec, operands: Operands) -> jax.Array:
    return blocks.attention(spec, operands) * jnp.bfloat16(1.01)


def broken(spec: Spec, operands: Operands) -> jax.Array:
    raise RuntimeError("no cuDNN\nmore")


def test_a_kernel_is_taken_only_if_a_trial_gives_the_numbers_of_blocks(kernels):
    rows = AttentionRows(H100)
    assert rows(CAUSAL, shapes()) == "cudnn" and not rows.refused
    expected = {late: "triton", rounded: "cudnn", broken: "triton"}
    for function, name in expected.items():
        kernels["cudnn"] = function
        assert AttentionRows(H100)(CAUSAL, shapes()) == name, function
    kernels["triton"] = late
    rows = AttentionRows(H100)
    assert rows(CAUSAL, shapes()) == "blocks"
    assert rows.refused.keys() == {"cudnn", "triton"}


def test_why_a_kernel_was_refused(kernels, golden, caplog):
    kernels.update(cudnn=broken, triton=late)
    AttentionRows(H100)(CAUSAL, shapes())
    messages = [record.getMessage() for record in caplog.records]
    assert messages[0].endswith("on this device (RuntimeError: no cuDNN).")
    assert "triton: the result differs from plain JAX by" in messages[1]
    wrong = {
        name: lambda asked=name: AttentionRows(H100, asked)(CAUSAL, shapes())
        for name in ("cudnn", "splash")
    }
    here = {
        f"{name} on a CPU": lambda asked=name: AttentionRows(CPU, asked)(
            CAUSAL, shapes()
        )
        for name in ("cudnn", "pallas")
    }
    wide = shapes(dtype=jnp.float32)
    here["cudnn in float32"] = lambda: AttentionRows(H100, "cudnn")(CAUSAL, wide)
    capped = replace(CAUSAL, soft_cap=30.0)
    here["cudnn with a cap"] = lambda: AttentionRows(H100, "cudnn")(capped, shapes())
    for width in (192, 100):
        here[f"cudnn with a width of {width}"] = lambda width=width: AttentionRows(
            H100, "cudnn"
        )(CAUSAL, shapes(width=width))
    golden.check("attention_errors.txt", refusals(wrong | here))


def test_a_kernel_for_an_absent_device_has_to_compile(kernels):
    assert AttentionRows(H100, is_absent=True)(CAUSAL, shapes()) == "cudnn"
    kernels["cudnn"] = broken
    assert AttentionRows(H100, is_absent=True)(CAUSAL, shapes()) == "triton"


@pytest.mark.parametrize(
    ("examples", "heads", "name"),
    [(2, 4, "triton"), (4, 2, "blocks"), (1, 8, "blocks")],
)
def test_a_kernel_runs_on_the_examples_and_heads_of_each_device(
    examples, heads, name, kernels
):
    """Of two examples with four heads, if the devices divide them evenly."""
    kernels["cudnn"] = broken
    mesh = AbstractMesh((examples, heads), ("fsdp", "seq"))
    place = Place("gpu", mesh, ("fsdp",), ("seq",))
    assert AttentionRows(H100, place=place)(CAUSAL, shapes()) == name


def test_scores_that_devices_divide_are_small_sooner():
    # 2 x 4 x 8192^2 scores of 4 bytes are 2 GiB, 64 MiB for each of 32 devices.
    place = Place("cpu", AbstractMesh((32,), ("fsdp",)), ("fsdp",))
    assert AttentionRows(CPU, place=place)(CAUSAL, shapes()) == "xla"


def loss(params: dict[str, jax.Array], batch: jax.Array) -> jax.Array:
    q = (batch @ params["w"]).reshape(*batch.shape[:2], 2, 4)
    return (attention(q, q, q, causal=True) ** 2).mean()


def test_the_config_says_how_attention_is_computed_and_the_plan_too():
    params = {"w": jnp.eye(8)}
    batch = np.random.default_rng(0).standard_normal((2, 32, 8)).astype("f4")
    losses = {}
    for asked in ("auto", "blocks", "xla"):
        config = {"train_batch_size": 2, "model": {"attention": asked}}
        with zinf.initialize(loss, params, optax.sgd(0.1), config) as engine:
            losses[asked] = float(engine.step(batch)["loss"])
            said = "Attention of 2x32x2x4 by blocks: model.attention of the config."
            assert (said in str(engine.plan)) == (asked == "blocks")
    assert losses["auto"] == losses["xla"]
    assert losses["blocks"] == pytest.approx(losses["xla"], rel=1e-6)
    config = {"train_batch_size": 2, "model": {"attention": "cudnn"}}
    with (
        pytest.raises(ValueError, match="'cudnn', and it cannot .*: it is for GPUs"),
        zinf.initialize(loss, params, optax.sgd(0.1), config) as engine,
    ):
        engine.step(batch)
