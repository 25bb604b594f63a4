"""`cross_entropy`: every case against exact arithmetic, and what it takes of memory."""

from functools import partial
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from tests.marks import slow
from tests.unit.refusals import refusals
from zinf_kernels.cross_entropy import (
    Loss,
    cross_entropy,
    mosaic_gpu,
    token_losses,
    weighted,
)
from zinf_kernels.cross_entropy.cases import Case, cases, kernel_cases
from zinf_kernels.cross_entropy.chunks import Chunks
from zinf_kernels.interpreter import IS_OLD, LOCKS_UP, interpreted
from zinf_kernels.tiles import Tiles

CASES = {case.name: case for case in cases()}
EVEN = CASES["even"]
# Small ones: the interpreter is slow.
TILES = Tiles(m=64, n=64, k=64)

# Half a unit in the last place of 1. Short dtypes round the gradient by logits, and the
# result, and their products are exact in float32.
UNIT = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
# Sums of up to 101 terms and exponentials of logits that are off by as much as sums of
# 32 products are, all in float32: well under 1000 units.
SUMS = 1000 * 2.0**-24


def exact(case: Case, arrays: Any) -> dict[str, Any]:
    """Sum, weight and gradients in float64, and what the gradients are sums of."""
    shapes = (-1, case.dim), arrays[1].shape, (-1,), (-1,)
    wide = [np.asarray(a, np.float64) for a in arrays]
    x, weight, labels, weights = (
        a.reshape(s) for a, s in zip(wide, shapes, strict=True)
    )
    weight = weight if case.vocab_axis else weight.T
    logits = x @ weight
    lse = np.log(np.exp(logits).sum(axis=1))
    labels = labels.astype(int)
    is_label = np.arange(case.vocab) == labels[:, None]
    weights = np.where(labels < 0, 0, weights)
    losses = lse - (logits * is_label).sum(axis=1) + case.z_loss * lse**2
    p = np.exp(logits - lse[:, None])
    by_logits = (1 + 2 * case.z_loss * lse)[:, None] * p - is_label
    by_logits = by_logits * weights[:, None]
    # p and the label's one may cancel; their roundings do not.
    parts = (abs(1 + 2 * case.z_loss * lse)[:, None] * p + is_label) * weights[:, None]
    turn = (lambda a: a) if case.vocab_axis else np.transpose
    return {
        "total": (weights * losses).sum(),
        "weight": weights.sum(),
        "x": (by_logits @ weight.T).reshape(arrays[0].shape),
        "x_sum": (parts @ abs(weight).T).reshape(arrays[0].shape),
        "w": turn(x.T @ by_logits),
        "w_sum": turn(abs(x).T @ parts),
        "total_sum": (weights * (abs(losses) + abs(lse))).sum(),
    }


def assert_exact(case: Case, arrays: Any, made: Any) -> None:
    """`made` is loss, gradient by activations and gradient by weight."""
    loss, *grads = made
    expected = exact(case, arrays)
    chex.assert_type([loss.total, *grads], [jnp.float32, case.dtype, case.dtype])
    unit = 4 * UNIT[jnp.dtype(case.dtype).name] + SUMS
    assert abs(float(loss.total) - expected["total"]) <= SUMS * expected["total_sum"]
    np.testing.assert_allclose(float(loss.weight), expected["weight"], rtol=SUMS)
    for grad, name in zip(grads, "xw", strict=True):
        error = abs(np.asarray(grad, np.float64) - expected[name])
        assert (error <= unit * expected[f"{name}_sum"] + 1e-30).all(), error.max()


def check_exact(case: Case, implementation: str) -> None:
    arrays = case.make()

    def summed(x, weight, labels, weights):
        options = case.options | {"implementation": implementation}
        loss = cross_entropy(x, weight, labels, token_weights=weights, **options)
        return loss.total, loss

    (_, loss), grads = jax.jit(jax.value_and_grad(summed, (0, 1), True))(*arrays)
    assert_exact(case, arrays, (loss, *grads))


# Pieces that do not fit, both layouts, rounding, no token, and none that counts.
FAST = ("odd", "embedding", "bfloat16", "one_piece", "no_token", "none_counts")


@pytest.mark.parametrize(
    ("name", "implementation"),
    [
        *((name, "xla") if name in FAST else slow((name, "xla")) for name in CASES),
        *((name, "reference") for name in ("embedding", "bfloat16")),
    ],
)
def test_loss_and_gradients_are_those_of_exact_arithmetic(name, implementation):
    check_exact(CASES[name], implementation)


@pytest.mark.skipif(IS_OLD, reason=LOCKS_UP)
@pytest.mark.slow
@pytest.mark.parametrize("case", [*kernel_cases()], ids=lambda case: case.name)
def test_loss_and_gradients_of_the_kernel_are_those_of_exact_arithmetic(case):
    """Interpreted, on two blocks of threads that have several tiles each."""
    arrays = case.make()
    x, weight, labels, weights = arrays
    chunks = Chunks(case.chunk_tokens, case.chunk_vocab, case.vocab_axis)
    options = {"num_cores": 2, "tiles": TILES}

    def total(x, weight):
        flat = x.reshape(-1, case.dim), weight, labels.reshape(-1)
        made = mosaic_gpu.token_losses(*flat, chunks, **options)
        made = (a.reshape(labels.shape) for a in made)
        given = {"token_weights": weights, "z_loss": case.z_loss}
        loss = weighted(*made, labels, **given)
        return loss.total, loss

    with interpreted():
        (_, loss), grads = jax.value_and_grad(total, (0, 1), True)(x, weight)
        jax.block_until_ready(grads)
    assert_exact(case, arrays, (loss, *grads))


def test_what_does_not_count_changes_nothing():
    x, weight, labels, _ = EVEN.make()
    counts = jnp.arange(labels.size) < 11
    mask = counts.astype(jnp.float32)

    def mean(x, labels, mask):
        loss = cross_entropy(x, weight, labels, token_weights=mask)
        return loss.mean, loss

    run = jax.jit(jax.value_and_grad(mean, has_aux=True))
    (value, loss), grad = run(x[:11], labels[:11], mask[:11])
    assert loss.weight == 11 and value == loss.total / 11
    by_mask = run(x.at[11:].set(7), labels, mask)
    ignored = jnp.where(counts, labels, -1)
    by_label = run(x, ignored, jnp.where(counts, mask, jnp.nan))
    for (other, _), found in (by_mask, by_label):
        np.testing.assert_allclose(other, value, rtol=SUMS)
        np.testing.assert_allclose(found[:11], grad, rtol=SUMS, atol=1e-9)
        assert (found[11:] == 0).all()
    # Without any token that counts the mean is zero.
    (value, _), grad = run(x, labels - 1000, mask)
    assert value == 0 and (grad == 0).all()


def test_a_label_beyond_the_vocabulary_is_not_passed_over():
    x, weight, labels, _ = EVEN.make()
    losses, _ = token_losses(x, weight, labels.at[3].set(weight.shape[1]))
    assert np.isnan(losses[3]) and np.isfinite(np.delete(losses, 3)).all()
    losses, _ = token_losses(x, weight, labels.at[3].set(weight.shape[1] - 1))
    assert np.isfinite(losses).all()


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_large_logits_do_not_overflow(implementation):
    x = jnp.array([[1e4], [-1e4]])
    weight = jnp.array([[1.0, -1.0, 0.0]])
    labels = jnp.array([0, 0])
    options = {"implementation": implementation, "chunk_vocab": 1}
    losses, lse = token_losses(x, weight, labels, **options)
    np.testing.assert_array_equal(losses, [0, 2e4])
    np.testing.assert_array_equal(lse, [1e4, 1e4])


@pytest.mark.parametrize("checked", [True, False])
def test_the_mean_over_devices_is_exact_with_uneven_shards(checked):
    """One device has no token that counts; the weight is on all of them."""
    case = Case("sharded", (8, 5), 6, 19, z_loss=1e-2)
    x, weight, labels, weights = case.make()
    labels = labels.at[0].set(-1).at[1, 1:].set(-1)
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(AxisType.Auto,))

    def local(x, weight, labels, weights):
        loss = cross_entropy(x, weight, labels, token_weights=weights, **case.options)
        return Loss(*jax.lax.psum(loss, "fsdp"))

    specs = P("fsdp"), P(), P("fsdp"), P("fsdp")
    sharded = jax.shard_map(
        local, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=checked
    )

    def mean(loss, x, weight):
        return loss(x, weight, labels, weights).mean

    def plain(x, weight, labels, weights):
        return cross_entropy(x, weight, labels, token_weights=weights, **case.options)

    made, expected = (
        jax.jit(jax.value_and_grad(partial(mean, loss), (0, 1)))(x, weight)
        for loss in (sharded, plain)
    )
    chex.assert_trees_all_close(made, expected, rtol=SUMS, atol=1e-7)


def test_the_logits_are_never_whole_in_memory():
    """What XLA's compiler plans for value and gradients; nothing is computed.

    In float32, because on a CPU XLA makes float32 copies of what is bfloat16.
    """
    tokens, dim, vocab = 32 << 10, 1024, 128 << 10
    x, weight = (
        jax.ShapeDtypeStruct(s, jnp.float32) for s in ((tokens, dim), (dim, vocab))
    )
    labels = jax.ShapeDtypeStruct((tokens,), jnp.int32)
    run = jax.value_and_grad(lambda *given: cross_entropy(*given).mean, (0, 1))
    made = jax.jit(run).lower(x, weight, labels).compile()
    fused = made.memory_analysis().temp_size_in_bytes
    assert fused <= 4 * tokens * dim + 4 * dim * 8192 + 6 * 4 * 2048 * 8192
    assert fused < 0.05 * 4 * tokens * vocab


WRONG = [
    ("vocab_axis", 2),
    ("vocab_axis", 0),
    ("chunk_vocab", 0),
    ("chunk_tokens", 0),
    ("weight", jnp.ones((24, 64), jnp.bfloat16)),
    ("weight", jnp.ones((24, 0))),
    ("labels", jnp.ones(16)),
    ("labels", jnp.ones(15, jnp.int32)),
    ("token_weights", jnp.ones((16, 1))),
    ("implementation", "cuda"),
    ("implementation", "mosaic_gpu"),
]


def test_what_does_not_fit_is_refused(golden):
    x, weight, labels, weights = EVEN.make()
    good = {"weight": weight, "labels": labels, "token_weights": weights}
    calls = {
        f"{n}. {name}": partial(cross_entropy, x, **good | {name: value})
        for n, (name, value) in enumerate(WRONG)
    }
    golden.check("cross_entropy.txt", refusals(calls))
