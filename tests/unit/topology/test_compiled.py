"""Collectives and copies of compiled programs, against formulas.

Programs for 8 virtual devices are compiled here. Forms that no compiler for CPUs writes
are read from texts: `recorded` ones are the backward pass of an MLP of 8192 x 32768
(ZeRO-3, bfloat16, gradients in shards), compiled by jax 0.10.2, without metadata and
most configs; those in `made` are written by hand.
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from zinf.core.topology import collectives, host_copies, memory, out_of_memory, traffic

FOLDER = Path(__file__).parent
SHAPE = (64, 48)
WHOLE = SHAPE[0] * SHAPE[1] * 4
BOTH = ("replica", "fsdp")
RING = [(at, (at + 1) % 4) for at in range(4)]


def text_of(name: str) -> str:
    return (FOLDER / f"{name}.hlo.txt").read_text()


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    """Two by four, "fsdp" being the transposed axis: its groups are not contiguous."""
    devices = np.array(jax.devices()[:8]).reshape(4, 2).T
    return Mesh(devices, BOTH, axis_types=(AxisType.Auto,) * 2)


def compiled(mesh, function, *specs, out):
    """The program of a function of float32 arrays of `SHAPE`."""
    args = [
        jax.ShapeDtypeStruct(SHAPE, jnp.float32, sharding=NamedSharding(mesh, spec))
        for spec in specs
    ]
    made = jax.jit(function, out_shardings=NamedSharding(mesh, out)).lower(*args)
    return made.compile()


def mapped(mesh, function, spec, out):
    """The collectives of a function that each device runs on its part."""
    own = jax.shard_map(
        function, mesh=mesh, in_specs=spec, out_specs=out, check_vma=False
    )
    return collectives(compiled(mesh, own, spec, out=out).as_text())


def all_gather(w):
    return jax.lax.all_gather(w, "fsdp", tiled=True)


def all_reduce(w):
    return jax.lax.psum(w, "replica")


def reduce_scatter(w):
    return jax.lax.psum_scatter(w, BOTH, tiled=True)


def all_to_all(w):
    return jax.lax.all_to_all(w, "fsdp", 1, 0, tiled=True)


def permute(w):
    return jax.lax.ppermute(w, "fsdp", RING)


CUT = P("fsdp")


@pytest.mark.parametrize(
    ("function", "spec", "out", "kind", "group", "operand", "result", "sent"),
    [
        # All but the last part.
        (all_gather, CUT, P(), "all-gather", 4, WHOLE / 4, WHOLE, WHOLE * 3 / 4),
        # Twice that.
        (all_reduce, P(), P(), "all-reduce", 2, WHOLE, WHOLE, 2 * WHOLE * 1 / 2),
        # All but a device's own part.
        (
            *(reduce_scatter, P(), P(BOTH), "reduce-scatter", 8),
            *(WHOLE, WHOLE / 8, WHOLE * 7 / 8),
        ),
        (
            *(all_to_all, CUT, P(None, "fsdp"), "all-to-all", 4),
            *(WHOLE / 4, WHOLE / 4, WHOLE / 4 * 3 / 4),
        ),
        # All that a device holds; both replicas have a ring.
        (
            *(permute, CUT, CUT, "collective-permute", 8),
            *(WHOLE / 4, WHOLE / 4, WHOLE / 4),
        ),
    ],
)
def test_a_collective_sends_what_its_kind_needs(
    mesh, function, spec, out, kind, group, operand, result, sent
):
    (found,) = mapped(mesh, function, spec, out)
    assert (found.kind, found.group_size, found.times) == (kind, group, 1)
    assert (found.operand_bytes, found.result_bytes) == (operand, result)
    assert found.sent_bytes == sent


def summed(carry, _=None):
    return jnp.tanh(jax.lax.psum(carry, "fsdp")), None


def loop(w):
    return jax.lax.scan(summed, w, length=5)[0]


def loop_in_a_loop(w):
    def outer(carry, _):
        return jax.lax.scan(summed, carry, length=3)[0] * 2, None

    return jax.lax.scan(outer, w, length=5)[0]


def until_the_data_says_so(w):
    return jax.lax.while_loop(lambda x: x[0, 0] < 7, lambda x: summed(x)[0] + 1, w)


@pytest.mark.parametrize(
    ("function", "times", "is_exact"),
    [(loop, 5, True), (loop_in_a_loop, 15, True), (until_the_data_says_so, 1, False)],
)
def test_a_loop_counts_as_often_as_it_runs(mesh, function, times, is_exact):
    found = mapped(mesh, function, P(), P())
    assert {one.is_exact for one in found} == {is_exact}
    total = traffic(found)["all-reduce"]
    assert (total.count, total.is_exact) == (times, is_exact)
    assert total.sent_bytes == times * 2 * WHOLE * 3 // 4


def test_a_program_of_one_device_sends_nothing_and_a_text_is_no_program():
    made = jax.jit(jnp.tanh).lower(jnp.zeros(SHAPE)).compile()
    assert collectives(made.as_text()) == ()
    with pytest.raises(ValueError, match="as_text"):
        collectives("module @jit_f {}")


def test_memory_counts_arguments_results_and_what_takes_their_place(mesh):
    spec = NamedSharding(mesh, P("fsdp"))
    w = jax.ShapeDtypeStruct(SHAPE, jnp.float32, sharding=spec)
    for donated in ((), (0,)):
        double = jax.jit(lambda w: w * 2, out_shardings=spec, donate_argnums=donated)
        found = memory(double.lower(w).compile())
        assert found.argument_bytes == found.output_bytes == WHOLE // 4
        assert found.alias_bytes == len(donated) * WHOLE // 4
        held = (2 - len(donated)) * WHOLE // 4
        assert found.device_bytes == held + found.temp_bytes
        assert found.host_bytes == 0


MATRIX = 8192 * 32768 * 2
# A product of 2048 tokens with a matrix.
PRODUCT_FLOPS = 2 * 2048 * 8192 * 32768


def test_gpus_gather_each_matrix_once_and_reduce_scatter_each_gradient():
    n = 8
    found = collectives(text_of("recorded/h200_8"))
    sums = traffic(found)
    assert set(sums) == {"all-gather", "reduce-scatter"}
    for total in sums.values():
        assert total.count == 2
        assert total.sent_bytes == 2 * MATRIX * (n - 1) // n
    assert sums["reduce-scatter"].operand_bytes == 2 * MATRIX
    assert sums["reduce-scatter"].result_bytes == 2 * MATRIX // n
    # Nothing can hide the first gather: its matrix is what the first product needs.
    flops = {"all-gather": [0, PRODUCT_FLOPS], "reduce-scatter": [PRODUCT_FLOPS] * 2}
    for kind, expected in flops.items():
        mine = [one for one in found if one.kind == kind]
        assert [one.overlapped_flops for one in mine] == expected
        hidden = sum(map(bool, expected)) / len(expected)
        assert sums[kind].overlapped_share == hidden
    gathers = [one.is_async for one in found if one.kind == "all-gather"]
    assert gathers == [False, True]


def test_a_gather_over_several_tpu_fusions_counts_once():
    """Four computations hold it: those of start, two products and done."""
    text = text_of("recorded/v5e_8x8")
    assert text.count(" all-gather(") == 5
    gathers = [one for one in collectives(text) if one.kind == "all-gather"]
    assert [one.result_bytes for one in gathers] == [MATRIX, MATRIX]
    assert [one.group_size for one in gathers] == [64, 64]
    assert sorted(one.is_async for one in gathers) == [False, True]
    (spread,) = [one for one in gathers if one.is_async]
    assert spread.overlapped_matmuls == 2
    assert spread.overlapped_flops == 2 * PRODUCT_FLOPS


def test_a_wrapped_or_fused_reduce_scatter_is_one():
    (found,) = collectives(text_of("made/async_reduce_scatter"))
    assert (found.kind, found.group_size, found.is_async) == ("reduce-scatter", 4, True)
    assert (found.operand_bytes, found.result_bytes) == (64 * 32 * 4, 16 * 32 * 4)
    assert found.overlapped_matmuls == 2
    assert found.overlapped_flops == 2 * (2 * 64 * 64 * 32)
    # An all-reduce fused with its slice.
    (found,) = collectives(text_of("made/fused_reduce_scatter"))
    assert (found.kind, found.result_bytes) == ("reduce-scatter", 8 * 32 * 4)
    assert found.sent_bytes == 64 * 32 * 4 * 7 / 8


def of_groups(groups):
    return collectives(
        "HloModule made, is_scheduled=true, num_partitions=16\n\n"
        "ENTRY %main (p: f32[64,32]) -> f32[64,32] {\n"
        "  %p = f32[64,32]{1,0} parameter(0)\n"
        f"  ROOT %g = f32[64,32]{{1,0}} all-reduce(%p), {groups}, to_apply=%add\n}}\n"
    )


@pytest.mark.parametrize(
    ("groups", "size"),
    [
        ("replica_groups={{0,2,4,6},{1,3,5,7}}", 4),
        ("replica_groups=[8,64]<=[512]", 64),
        ("replica_groups=[4,2]<=[2,2,2]T(2,1,0)", 2),
        ("replica_groups=mesh['a'=2,'b'=4] {'b'}", 4),
        ("replica_groups=mesh['a'=2,'b'=4], device_ids=([2,4]T(1,0)) {'a','b'}", 8),
        ("replica_groups=mesh['a'=8] {'a':(1)2}", 2),
        ("replica_groups={}", 16),
        ("dimensions={0}", 16),
    ],
)
def test_a_group_is_as_large_as_xla_says(groups, size):
    (found,) = of_groups(groups)
    assert found.group_size == size
    assert found.sent_bytes == 2 * 64 * 32 * 4 * (size - 1) / size


def test_groups_in_an_unknown_form_are_refused():
    with pytest.raises(NotImplementedError, match="<new>"):
        of_groups("replica_groups=<new>")


@pytest.mark.parametrize(("first", "times"), [(0, 4), (1, 3), (7, 0)])
def test_loops_that_the_tpu_compiler_makes_count_by_their_counter(first, times):
    """From `first`, by two, below seven; XLA writes no trip count there."""
    text = text_of("made/counted_loop").replace("FIRST", str(first))
    (found,) = collectives(text)
    assert (found.times, found.is_exact, found.is_async) == (times, True, True)
    # One of the four pairs sends to itself.
    assert (found.group_size, found.sent_bytes) == (3, 64 * 32 * 4)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        # Copies that change memory: name, is_to_host, bytes, overlapped matmuls.
        ("host_copies", [("in", False, 64 * 32 * 4, 1), ("out", True, 64 * 32 * 4, 0)]),
        # A slice of an array on the host, and those that the TPU compiler starts.
        ("host_slice", [("s", False, 32 * 4, 0)]),
        ("host_slices_started", [("in", False, 32 * 4, 1), ("out", True, 32 * 4, 0)]),
    ],
)
def test_copies_to_the_host_are_those_that_change_memory(name, expected):
    found = host_copies(text_of(f"made/{name}"))
    assert all(one.is_async for one in found)
    assert [
        (one.name, one.is_to_host, one.nbytes, one.overlapped_matmuls) for one in found
    ] == expected


@pytest.mark.parametrize(
    ("text", "needed_gib", "available_gib"),
    [
        (
            "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, "
            "the total memory required for HLO temporaries (52.04G) exceeds available "
            "HBM (15.75G). HLO module: jit_step.",
            52.04,
            15.75,
        ),
        (
            "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 205.00G "
            "of 95.74G hbm. Exceeded hbm capacity by 109.26G.",
            205.00,
            95.74,
        ),
    ],
)
def test_out_of_memory_is_two_numbers(text, needed_gib, available_gib):
    found = out_of_memory(RuntimeError(text))
    assert found is not None
    assert found.needed_bytes == round(needed_gib * 2**30)
    assert found.available_bytes == round(available_gib * 2**30)


def test_another_error_is_no_shortage_and_unknown_figures_are_not_guessed():
    assert out_of_memory(RuntimeError("INVALID_ARGUMENT: 1G of 2G")) is None
    with pytest.raises(ValueError, match="not known.*some new words"):
        out_of_memory(RuntimeError("RESOURCE_EXHAUSTED: some new words"))
