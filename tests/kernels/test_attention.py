"""`attention`: every implementation gives the formula's numbers; blocks hold none."""

import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from tests import marks
from tests.unit.refusals import refusals
from zinf.core.topology import collectives_of, parse_topology
from zinf_kernels.absent_gpu import GPUS, compile_for
from zinf_kernels.attention import (
    attention,
    attention_flops,
    best,
    blocks,
    choosing,
    multimodal_attention,
)
from zinf_kernels.attention.cases import Case, cases, drawn
from zinf_kernels.attention.place import Place, in_parts
from zinf_kernels.attention.rows import features
from zinf_kernels.attention.spec import Spec, is_seen
from zinf_kernels.device import Device

CASES = {case.name: case for case in cases()}
CPU = Device("cpu", "cpu", 1)


def results(
    case: Case, implementation: str, dtype: Any = None, *, has_gradients: bool = True
) -> dict[str, Any]:
    """The result and the gradients by name."""
    arrays = case.make()
    if dtype is not None:
        arrays = {
            n: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x
            for n, x in arrays.items()
        }
    some = sees_some(case, arrays)
    direction = arrays.pop("direction") * some
    options = case.options | {"implementation": implementation}
    floats = {n: arrays.pop(n) for n in ("q", "k", "v", "bias", "sinks") if n in arrays}

    @jax.jit
    def run(floats: Any, arrays: Any, direction: jax.Array) -> dict[str, Any]:
        def call(floats: Any) -> jax.Array:
            return attention(**floats, **arrays, **options)

        if not has_gradients:
            return {"result": call(floats)}
        out, vjp = jax.vjp(call, floats)
        return {"result": out} | vjp(direction)[0]

    found = run(floats, arrays, direction)
    return found | {"result": found["result"] * some}


def exact_results(case: Case) -> dict[str, Any]:
    with jax.enable_x64(True):
        return jax.tree.map(np.asarray, results(case, "reference", jnp.float64))


def sees_some(case: Case, arrays: dict[str, Any]) -> jax.Array:
    """1 for queries that see a key, else 0: (B, T, N, 1), or 1 for all.

    The result of a query that sees none has no meaning.
    """
    seen = is_seen(Spec(**{"scale": 1.0} | case.options), arrays)
    if seen is None:
        return jnp.ones((), case.dtype)
    return seen.any(-1).swapaxes(1, 2)[..., None].astype(arrays["q"].dtype)


def assert_near(case: Case, implementations: Sequence[str]) -> None:
    """Results within 4 units in the last place of the largest value, gradients 1e-5.

    A result is a mean of values, and so rounds as they do. Where the formula itself is
    further off in that dtype, because scores are large, twice its error is allowed.
    Narrow dtypes round weights and their gradients before a product: there the bounds
    are 4 and 8 roundings.
    """
    rounding = float(jnp.finfo(case.dtype).eps)
    largest_value = float(jnp.abs(case.make()["v"]).max())
    exact, plain = exact_results(case), results(case, "reference", has_gradients=False)
    off = largest_difference(plain["result"], exact["result"])
    for implementation in implementations:
        found = results(case, implementation)
        for name, x in exact.items():
            bound = max(1e-5, 8 * rounding) * np.abs(x).max()
            if name == "result":
                bound = max(4 * rounding * largest_value, 2 * off)
            difference = largest_difference(found[name], x)
            assert difference <= bound, (implementation, name)


def largest_difference(x: Any, y: Any) -> float:
    return float(np.abs(np.asarray(x, np.float64) - np.asarray(y, np.float64)).max())


@pytest.mark.parametrize("name", CASES)
def test_results_and_gradients_are_those_of_the_formula(name):
    assert_near(CASES[name], ["blocks", "xla"])


@pytest.mark.parametrize("seed", marks.drawn(range(10**6), 2))
def test_attentions_drawn_at_random_are_those_of_the_formula(seed):
    assert_near(drawn(seed), ["blocks"])


def test_float64_is_computed_in_float64():
    with jax.enable_x64(True):
        found = results(CASES["all"], "blocks", jnp.float64)
        exact = results(CASES["all"], "reference", jnp.float64)
    for name, x in exact.items():
        assert found[name].dtype == jnp.float64
        np.testing.assert_allclose(found[name], x, rtol=0, atol=1e-13)


@pytest.mark.parametrize("window", [1, 7, 40])
def test_a_later_token_changes_nothing_earlier(window):
    """Nor one that is further behind than the window: each of 40 in turn."""
    arrays = Case("", batch=1, queries=40, keys=40).make()
    arrays.pop("direction")
    place = np.arange(40)
    arrays = {n: jnp.repeat(x, 40, axis=0) for n, x in arrays.items()}
    changed = jnp.eye(40, dtype=bool)[:, :, None, None]
    other = {n: jnp.where(changed, x + 1.0, x) for n, x in arrays.items()}
    run = jax.jit(
        lambda x: attention(**x, causal=True, window=window, implementation="blocks")
    )
    same = np.all(run(arrays) == run(other), axis=(2, 3))  # (place, query)
    sees = (place >= place[:, None]) & (place < place[:, None] + window)
    np.testing.assert_array_equal(same, ~sees)


def test_a_neighbour_in_a_packed_row_changes_nothing():
    arrays = Case("", queries=700, keys=700).make()
    arrays.pop("direction")
    ids = jnp.where(jnp.arange(700) < 333, 7, 3)[None]
    other = {n: x.at[:, 333:].multiply(-3.0) for n, x in arrays.items()}

    def of_first(x: dict[str, jax.Array]) -> Any:
        def first(x: dict[str, jax.Array]) -> jax.Array:
            out = attention(**x, causal=True, q_segments=ids, implementation="blocks")
            return (out[:, :333] ** 2).sum()

        return jax.jit(jax.value_and_grad(first))(x)

    (loss, grad), (other_loss, other_grad) = of_first(arrays), of_first(other)
    assert loss == other_loss
    for name in arrays:
        np.testing.assert_array_equal(grad[name][:, :333], other_grad[name][:, :333])
        assert not np.asarray(grad[name][:, 333:]).any()


def by_the_paper(
    arrays: dict[str, np.ndarray],
    q_images: np.ndarray,
    k_images: np.ndarray,
    first: int,
    segments: np.ndarray | None,
    window: int | None,
) -> np.ndarray:
    """Multi-modal causal attention, query by query; query 0 is token `first`."""
    q, k, v = (np.asarray(arrays[n], np.float64) for n in "qkv")
    groups = q.shape[2] // k.shape[2]
    out = np.zeros((*q.shape[:3], v.shape[3]))
    for b, t, n in np.ndindex(*q.shape[:3]):
        at, head = first + t, n // groups
        if q_images[b, t]:
            out[b, t, n] = v[b, at, head]
            continue
        seen = np.arange(k.shape[1]) <= at
        if window is not None:
            seen &= np.arange(k.shape[1]) > at - window
        if segments is not None:
            seen &= segments[b] == segments[b, at]
        for kind in (k_images[b], ~k_images[b]):
            keys = np.flatnonzero(seen & kind)
            if len(keys):
                scores = k[b, keys, head] @ q[b, t, n] / np.sqrt(q.shape[3])
                weights = np.exp(scores - scores.max())
                out[b, t, n] += weights / weights.sum() @ v[b, keys, head]
    return out


@pytest.mark.parametrize("implementation", ["blocks", "xla"])
@pytest.mark.parametrize(
    ("queries", "options"),
    [(70, {}), (70, {"window": 9}), (70, {"segments": True}), (11, {"later": True})],
    ids=["square", "a window", "packed", "the last tokens"],
)
def test_text_and_images_have_a_softmax_each(queries, options, implementation):
    sizes = {"keys": 70, "key_heads": 2, "value_width": 24}
    arrays = Case("", queries=queries, **sizes).make()
    direction = arrays.pop("direction")
    random, first = np.random.default_rng(1), 70 - queries
    # The first row begins with text and the second with an image.
    images = np.repeat(random.random((2, 14)) < 0.4, 5, axis=1)
    images[:, 0] = False, True
    ids = np.repeat([[0, 0, 3, 3, 3, 4, 4]] * 2, 10, axis=1).astype(np.int32)
    segments = ids if "segments" in options else None
    given: dict[str, Any] = {"window": options.get("window")}
    if segments is not None:
        given["q_segments"] = segments  # Those of the keys, which are as many.
    if first:
        given["q_positions"] = first + jnp.arange(queries)[None]
    shown = {"q_images": images[:, first:], "k_images": images}

    @jax.jit
    def run(qkv: dict[str, jax.Array]) -> Any:
        def call(qkv: dict[str, jax.Array]) -> jax.Array:
            row = {"implementation": implementation}
            return multimodal_attention(**qkv, **shown, **given, **row)

        out, vjp = jax.vjp(call, qkv)
        return out, vjp(direction)[0]

    out, found = run(arrays)
    rest = *shown.values(), first, segments, given["window"]
    np.testing.assert_allclose(out, by_the_paper(arrays, *rest), rtol=0, atol=2e-6)
    # The derivative in a random direction, by differences of the formula in float64.
    for name, x in arrays.items():
        move = random.standard_normal(x.shape)
        ends = [
            by_the_paper(arrays | {name: np.float64(x) + sign * 1e-5 * move}, *rest)
            for sign in (1, -1)
        ]
        slope = ((ends[0] - ends[1]) * np.float64(direction)).sum() / 2e-5
        terms = np.float64(found[name]) * move
        # The terms are rounded to float32, and cancel in part.
        assert abs(terms.sum() - slope) <= 2e-6 * np.abs(terms).sum()


def test_without_images_text_is_attended_to_as_ever():
    arrays = Case("").make()
    arrays.pop("direction")
    none = np.zeros((1, 100), bool)
    found = multimodal_attention(**arrays, q_images=none)
    np.testing.assert_array_equal(found, attention(**arrays, causal=True))


def test_dropout_leaves_the_mean_and_depends_on_the_key_alone():
    arrays = Case("", queries=64, keys=512).make()
    arrays.pop("direction")
    arrays["v"] = jnp.ones_like(arrays["v"])

    def run(seed: int, implementation: str = "blocks") -> np.ndarray:
        key = jax.random.key(seed)
        options = {"dropout": 0.25, "dropout_key": key}
        return np.asarray(attention(**arrays, **options, implementation=implementation))

    # The sum of the weights that are left: 1 on average, of 512 x 0.75 weights.
    assert abs(run(0).mean() - 1) < 0.01 and run(0).std() > 0.01
    np.testing.assert_array_equal(run(0), run(0))
    assert (run(0) != run(1)).any()
    assert abs(run(0, "xla").mean() - 1) < 0.01


def gradients(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
    def loss(*qkv: jax.Array) -> jax.Array:
        return attention(*qkv, causal=True).astype(jnp.float32).sum()

    return jax.grad(loss, argnums=(0, 1, 2))(q, k, v)


def assert_linear(compile_of: Any, tokens: tuple[int, int] = (65536, 131072)) -> None:
    """Bytes grow as the sequence does, and no array has an element for each pair.

    Args:
        compile_of: a number of tokens -> the compiled program.
    """
    made = {n: compile_of(n) for n in tokens}
    few, many = (x.memory_analysis().temp_size_in_bytes for x in made.values())
    assert many < 2.1 * few
    for num_tokens, program in made.items():
        shapes = re.findall(r"\w+\[([\d,]+)\]", program.as_text())
        largest = max(np.prod([int(n) for n in s.split(",")]) for s in shapes)
        assert largest <= 4 * num_tokens * 32 * 128


def heads(num_tokens: int, count: int = 2, **options: Any) -> list[Any]:
    """Shapes of q, k and v."""
    shape = 1, num_tokens, count, 128
    return [jax.ShapeDtypeStruct(shape, jnp.bfloat16, **options)] * 3


def test_bytes_grow_as_the_sequence_does_on_the_cpu():
    assert_linear(lambda n: jax.jit(gradients).lower(*heads(n)).compile())


@pytest.mark.gpu_compiler
@pytest.mark.parametrize("name", ["blocks", "triton"])
def test_bytes_grow_as_the_sequence_does_on_gpus(name):
    with choosing(lambda spec, operands: name):
        assert_linear(lambda n: compile_for(GPUS["H100"], gradients, *heads(n)))


@pytest.mark.tpu_compiler
@pytest.mark.parametrize("name", ["blocks", "splash"])
def test_bytes_grow_as_the_sequence_does_on_tpus(name):
    v5e = parse_topology("v5e:2x2")
    there = SingleDeviceSharding(v5e.devices()[0])

    def compile_of(num_tokens: int) -> Any:
        # With few heads, most arrays of the shorter one stay in the vector memory.
        arrays = heads(num_tokens, 32, sharding=there)
        lowered = jax.jit(gradients).lower(*arrays)
        return v5e.compile(lowered)

    # Splash makes its mask on the host, which takes a minute for 131,072 tokens.
    tokens = (32768, 65536) if name == "splash" else (65536, 131072)
    with choosing(lambda spec, operands: name):
        assert_linear(compile_of, tokens)


def parts(devices: Any, platform: str) -> tuple[Place, Any]:
    """Eight devices, of which two divide examples and four heads; and the sharding."""
    mesh = Mesh(np.array(devices[:8]).reshape(2, 4), ("fsdp", "seq"))
    form = NamedSharding(mesh, PartitionSpec("fsdp", None, "seq"))
    return Place(platform, mesh, ("fsdp",), ("seq",)), form


@pytest.mark.parametrize("rows", [1, 2])
def test_a_kernel_on_the_examples_and_heads_of_each_device_gives_the_same(rows):
    case = Case("", batch=2, queries=48, keys=48, heads=8, key_heads=4)
    arrays = case.make()
    direction = arrays.pop("direction")
    ids = jnp.tile(jnp.arange(48) // 20, (rows, 1))

    def run(place: Place | None) -> Any:
        spec = Spec(scale=0.25, causal=True, place=place)

        def attend(qkv: dict[str, jax.Array]) -> jax.Array:
            segments = dict.fromkeys(("q_segments", "k_segments"), ids)
            return in_parts(blocks.attention, spec, qkv | segments)

        out, vjp = jax.vjp(jax.jit(attend), arrays)
        return {"out": out, **vjp(direction)[0]}

    expected, found = run(None), run(parts(jax.devices(), "cpu")[0])
    for name, x in expected.items():
        # The same sums, by products of other sizes.
        np.testing.assert_allclose(found[name], x, rtol=0, atol=1e-6)


@pytest.mark.gpu_compiler
def test_the_kernel_of_gpus_needs_nothing_from_other_devices():
    h100 = parse_topology("h100:8")
    place, form = parts(h100.devices(), "gpu")
    shape = 2, 4096, 8, 128
    arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=form)] * 3
    with choosing(lambda spec, operands: "triton", place):
        compiled = h100.compile(jax.jit(gradients).lower(*arrays))
    assert "triton" in compiled.as_text() and not collectives_of(compiled)
    shapes = re.findall(r"bf16\[([\d,]+)\]", compiled.as_text())
    # One example and two heads of a device.
    assert (
        max(np.prod([int(n) for n in s.split(",")]) for s in shapes) == 4096 * 2 * 128
    )


def test_a_mapped_attention_is_one_equation_over_more_examples():
    arrays = {n: x[None] for n, x in CASES["all"].make().items()}
    arrays.pop("direction")
    sinks = arrays.pop("sinks")[0]
    stacked = {
        n: jnp.concatenate([x, x + 1 if n == "q" else x]) for n, x in arrays.items()
    }
    options = CASES["all"].options | {"implementation": "blocks"}

    def run(x: dict[str, jax.Array]) -> jax.Array:
        return attention(**x, sinks=sinks, **options)

    mapped = jax.vmap(run)(stacked)
    for i in range(2):
        one = run({n: x[i] for n, x in stacked.items()})
        np.testing.assert_allclose(mapped[i], one, rtol=0, atol=2e-6)
    names = [e.primitive.name for e in jax.make_jaxpr(jax.vmap(run))(stacked).eqns]
    assert names.count("attention") == 1 and "scan" not in names


def test_small_scores_are_held_and_large_ones_are_not():
    def names(num_tokens: int) -> list[str]:
        x = jax.ShapeDtypeStruct((1, num_tokens, 4, 16), jnp.float32)
        closed = jax.make_jaxpr(lambda x: attention(x, x, x, causal=True))(x)
        return [e.primitive.name for e in closed.eqns]

    assert "attention" not in names(2048) and names(4096) == ["attention"]


def test_operations_count_the_pairs_that_positions_allow():
    shape = jax.ShapeDtypeStruct((2, 100, 4, 16), jnp.float32)
    operands = dict.fromkeys("qkv", shape)
    pairs = {
        Spec(scale=1.0): 100 * 100,
        Spec(scale=1.0, causal=True): 100 * 101 // 2,
        Spec(scale=1.0, causal=True, window=10): 10 * 11 // 2 + 90 * 10,
    }
    for spec, count in pairs.items():
        assert attention_flops(spec, operands) == 2 * 2 * 4 * count * (16 + 16)


def test_what_does_not_fit_together_is_refused(golden):
    arrays = Case("").make()
    q, k, v = (arrays[n] for n in "qkv")
    ids = jnp.zeros((2, 100), jnp.int32)
    calls = {
        "a window beyond the sequence": {"window": 101},
        "no window": {"window": 0},
        "segments of another shape": {"q_segments": ids[:, :99]},
        "segments of keys alone": {"k_segments": ids},
        "segments that are no integers": {"q_segments": ids * 1.0},
        "positions of another batch": {"q_positions": jnp.zeros((3, 100), jnp.int32)},
        "a mask of numbers": {"mask": jnp.zeros((1, 1, 100, 100))},
        "a mask of another shape": {"mask": jnp.zeros((100, 100), bool)},
        "sinks of another number": {"sinks": jnp.zeros(3)},
        "no positive cap": {"soft_cap": 0.0},
        "dropout of all": {"dropout": 1.0},
        "dropout without a key": {"dropout": 0.5},
        "an unknown row": {"implementation": "flash"},
        "float32 with cudnn": {"implementation": "cudnn"},
        "pallas here": {"implementation": "pallas"},
    }
    wrong = {
        name: lambda options=options: attention(q, k, v, **options)
        for name, options in calls.items()
    }
    wrong |= {
        "three dims": lambda: attention(q[0], k[0], v[0]),
        "other widths": lambda: attention(q, k[..., :8], v),
        "other tokens of values": lambda: attention(q, k, v[:, :9]),
        "heads that do not divide": lambda: attention(q, k[:, :, :3], v[:, :, :3]),
        "two dtypes": lambda: attention(q, k.astype(jnp.bfloat16), v),
        "integers": lambda: attention(*(x.astype(jnp.int32) for x in (q, k, v))),
    }
    golden.check("attention_errors.txt", refusals(wrong))


def test_the_row_depends_on_device_dtype_shape_and_features(golden):
    """What `auto` takes, before any trial."""
    h100, old = (Device("gpu", *x) for x in (("H100", 132, (9, 0)), ("T4", 40, (7, 5))))
    devices = {"CPU": CPU, "H100": h100, "T4": old, "TPU": Device("tpu", "TPU v5p", 1)}
    sizes = {"batch": 1, "queries": 8192, "keys": 8192, "heads": 32, "key_heads": 8}
    wide = sizes | {"width": 128, "value_width": 128, "dtype": jnp.bfloat16}
    causal, apart = {"causal": True}, {"keys_apart": True}
    table = {
        "small": Case("", options=causal),
        "Llama 8B": Case("", **wide, options=causal),
        "in float32": Case("", **wide | {"dtype": jnp.float32}, options=causal),
        "a window": Case("", **wide, options=causal | {"window": 1024}),
        "packed": Case("", **wide, options=causal, extras=("segments",)),
        "padded": Case("", **wide, options=causal | apart, extras=("segments",)),
        "soft cap": Case("", **wide, options=causal | {"soft_cap": 50.0}),
        "sinks": Case("", **wide, options=causal, extras=("sinks",)),
        "width 256": Case("", **wide | {"width": 256, "value_width": 256}),
        "other widths": Case("", **wide | {"width": 192}, options=causal),
    }
    lines = []
    for name, case in table.items():
        operands = case.shapes()
        spec = Spec(scale=1.0, **case.options)
        for device, kind in devices.items():
            row, why = best(kind, spec, operands)
            lines.append(f"{name} on {device}: {row} ({why})")
        lines.append(f"  features: {', '.join(sorted(features(spec, operands)))}")
    golden.check("attention_rows.txt", "\n".join(lines))
