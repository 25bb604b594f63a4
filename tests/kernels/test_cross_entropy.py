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

from zinf_kernels.absent_gpu import GPUS, compile_for
from zinf_kernels.cross_entropy import (
    Loss,
    cross_entropy,
    mosaic_gpu,
    obstacles,
    token_losses,
    weighted,
)
from zinf_kernels.cross_entropy.cases import (
    Case,
    benchmark_cases,
    cases,
    kernel_cases,
)
from zinf_kernels.cross_entropy.chunks import Chunks
from zinf_kernels.interpreter import IS_OLD, LOCKS_UP, interpreted
from zinf_kernels.tiles import Tiles

CASES, KERNEL_CASES = tuple(cases()), tuple(kernel_cases())
by_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
by_implementation = pytest.mark.parametrize("implementation", ["xla", "reference"])
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


def summed(case: Case, implementation: str | None, x, weight, labels, weights):
    options = case.options | {"implementation": implementation}
    loss = cross_entropy(x, weight, labels, token_weights=weights, **options)
    return loss.total, loss


@pytest.mark.sampled(3)
@by_implementation
@by_case
def test_loss_and_gradients_are_those_of_exact_arithmetic(case, implementation):
    arrays = case.make()
    run = jax.value_and_grad(partial(summed, case, implementation), (0, 1), True)
    (_, loss), grads = jax.jit(run)(*arrays)
    assert_exact(case, arrays, (loss, *grads))


@pytest.mark.skipif(IS_OLD, reason=LOCKS_UP)
@pytest.mark.parametrize("case", KERNEL_CASES, ids=lambda case: case.name)
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


def test_the_cases_hold_what_they_are_named_for():
    by_name = {case.name: case for case in CASES}
    assert exact(by_name["none_counts"], by_name["none_counts"].make())["weight"] == 0
    odd = by_name["odd"]
    assert odd.batch[0] % odd.chunk_tokens and odd.vocab % odd.chunk_vocab
    labels = odd.make()[2]
    assert 0 < int((labels < 0).sum()) < labels.size


@pytest.mark.slow
def test_the_mean_is_the_sum_over_the_weight_and_zero_without_any():
    x, weight, labels, _ = CASES[0].make()
    loss = cross_entropy(x, weight, labels)
    assert loss.weight == labels.size
    assert loss.mean == loss.total / labels.size

    def mean(x):
        return cross_entropy(x, weight, labels - 1000).mean

    value, grad = jax.jit(jax.value_and_grad(mean))(x)
    assert value == 0 and (grad == 0).all()


def test_what_does_not_count_changes_nothing():
    x, weight, labels, _ = CASES[0].make()
    counts = jnp.arange(labels.size) < 11
    mask = counts.astype(jnp.float32)

    def mean(x, labels, mask):
        return cross_entropy(x, weight, labels, token_weights=mask).mean

    run = jax.jit(jax.value_and_grad(mean))
    expected = run(x[:11], labels[:11], mask[:11])
    by_mask = run(x.at[11:].set(7), labels, mask)
    ignored = jnp.where(counts, labels, -1)
    by_label = run(x, ignored, jnp.where(counts, mask, jnp.nan))
    for value, grad in (by_mask, by_label):
        np.testing.assert_allclose(value, expected[0], rtol=SUMS)
        np.testing.assert_allclose(grad[:11], expected[1], rtol=SUMS, atol=1e-9)
        assert (grad[11:] == 0).all()


def test_a_label_beyond_the_vocabulary_is_not_passed_over():
    x, weight, labels, _ = CASES[0].make()
    losses, _ = token_losses(x, weight, labels.at[3].set(weight.shape[1]))
    assert np.isnan(losses[3]) and np.isfinite(np.delete(losses, 3)).all()


@by_implementation
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


def memory_of(implementation: str, *, tokens: int, dim: int, vocab: int) -> Any:
    """What XLA's compiler plans for value and gradients; nothing is computed.

    In float32, because on a CPU XLA makes float32 copies of what is bfloat16.
    """
    shapes = (tokens, dim), (dim, vocab)
    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    labels = jax.ShapeDtypeStruct((tokens,), jnp.int32)

    def mean(x, weight, labels):
        return cross_entropy(x, weight, labels, implementation=implementation).mean

    run = jax.jit(jax.value_and_grad(mean, (0, 1)))
    return run.lower(*arrays, labels).compile().memory_analysis()


def test_the_logits_are_never_whole_in_memory():
    """128K words and 32K tokens: under 5% of the plain form's bytes, and as stated."""
    tokens, dim, vocab = 32 << 10, 1024, 128 << 10
    plain, fused = (
        memory_of(name, tokens=tokens, dim=dim, vocab=vocab).temp_size_in_bytes
        for name in ("reference", "xla")
    )
    assert plain >= 4 * tokens * vocab
    assert fused < 0.05 * plain
    piece = 4 * 2048 * 8192
    assert fused <= 4 * tokens * dim + 4 * dim * 8192 + 6 * piece


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab_axis": 2}, "vocab_axis is 2"),
        ({"vocab_axis": 0}, "axis 1 of weight must be as long as the last of x"),
        ({"chunk_vocab": 0}, "chunk_vocab 0. Pass at least 1"),
        ({"weight": jnp.ones((24, 64), jnp.bfloat16)}, "weight bfloat16. Convert both"),
        ({"weight": jnp.ones((24, 0))}, "vocabulary is empty"),
        ({"labels": jnp.ones(16)}, "labels are float32, but negative"),
        ({"labels": jnp.ones(15, jnp.int32)}, "Give a label for each vector"),
        ({"token_weights": jnp.ones((16, 1))}, "one weight for each label"),
        ({"implementation": "cuda"}, "'xla', 'reference'"),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    x, weight, labels, weights = CASES[0].make()
    given = {"weight": weight, "labels": labels, "token_weights": weights} | change
    with pytest.raises(ValueError, match=message):
        cross_entropy(x, **given)


def test_one_can_ask_why_the_kernel_cannot_run():
    x, weight = jnp.ones((2, 128, 64), jnp.bfloat16), jnp.ones((64, 128), jnp.bfloat16)
    assert obstacles(GPUS["H200"].device, x=x, weight=weight) == {}

    def reason(gpu="H100", *, x=x, weight=weight, **sizes):
        chunks = Chunks(**sizes)
        return obstacles(GPUS[gpu].device, x=x, weight=weight, chunks=chunks)[
            "mosaic_gpu"
        ]

    assert "needs compute capability 9.0" in reason("A100")
    assert "bfloat16 or float16, not float32" in reason(x=x.astype(jnp.float32))
    assert "of the tokens, words and channels as m, n and k, m is 128" in reason(x=x[0])
    assert "n is 127" in reason(weight=weight[:, :127])
    assert "of chunk_tokens and chunk_vocab" in reason(tokens=100)
    with pytest.raises(ValueError, match="it is for GPUs and this is a CPU"):
        cross_entropy(x, weight, jnp.ones((2, 128), int), implementation="mosaic_gpu")


# The kernel on the GPUs that have it, and XLA's form on all.
COMPILED = [(gpu, "xla") for gpu in GPUS]
COMPILED += [(gpu, "mosaic_gpu") for gpu in ("H100", "H200")]


@pytest.mark.gpu_compiler
@pytest.mark.parametrize(
    "case", tuple(benchmark_cases(8192, 512, 32 << 10)), ids=lambda case: case.name
)
@pytest.mark.parametrize(("gpu", "implementation"), COMPILED)
def test_it_compiles_for_every_gpu_within_the_memory_that_is_stated(
    gpu, implementation, case
):
    (tokens,), dim, vocab = case.batch, case.dim, case.vocab
    arrays = [
        jax.ShapeDtypeStruct(shape, dtype)
        for shape, dtype in (
            ((tokens, dim), jnp.bfloat16),
            ((dim, vocab)[:: 1 if case.vocab_axis else -1], jnp.bfloat16),
            ((tokens,), jnp.int32),
            ((tokens,), jnp.float32),
        )
    ]
    run = jax.value_and_grad(partial(summed, case, implementation), (0, 1), True)
    compiled = compile_for(GPUS[gpu], run, *arrays)
    piece = 4 * 2048 * 8192
    bound = 4 * tokens * dim + 4 * dim * 8192 + 6 * piece
    assert compiled.memory_analysis().temp_size_in_bytes <= bound
    assert ("mosaic_gpu" in compiled.as_text()) == (implementation == "mosaic_gpu")
