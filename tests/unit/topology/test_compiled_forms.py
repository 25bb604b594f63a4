"""Forms of collectives that no compiler for CPUs writes, from recorded and made texts.

The recorded ones are the backward pass of an MLP of 8192 x 32768 (ZeRO-3, bfloat16,
gradients in shards), compiled by jax 0.10.2, without metadata and most configs.
"""

from pathlib import Path

import pytest

from zinf.topology import collectives, host_copies, out_of_memory, traffic

RECORDED = Path(__file__).parent / "recorded"
MATRIX = 8192 * 32768 * 2
TOKENS, HIDDEN, INNER = 2048, 8192, 32768
PRODUCT_FLOPS = 2 * TOKENS * HIDDEN * INNER


def recorded(name: str) -> str:
    return (RECORDED / f"{name}.hlo.txt").read_text()


def made(lines: str, *, others: str = "", devices: int = 8) -> str:
    """A module of these instructions, and other computations before them."""
    return (
        f"HloModule made, is_scheduled=true, num_partitions={devices}\n\n{others}\n"
        f"ENTRY %main (p: f32[64,32]) -> f32[64,32] {{\n{lines}\n}}\n"
    )


def test_gpus_gather_each_matrix_once_and_reduce_scatter_each_gradient():
    n = 8
    sums = traffic(collectives(recorded("h200_8")))
    assert set(sums) == {"all-gather", "reduce-scatter"}
    for found in sums.values():
        assert found.count == 2
        assert found.sent_bytes == 2 * MATRIX * (n - 1) // n
    assert sums["reduce-scatter"].operand_bytes == 2 * MATRIX
    assert sums["reduce-scatter"].result_bytes == 2 * MATRIX // n


def test_gpus_say_which_pairs_they_issue_as_one():
    """Nothing can hide the first gather: its matrix is what the first product needs."""
    found = collectives(recorded("h200_8"))
    gathers = [one for one in found if one.kind == "all-gather"]
    assert [one.is_async for one in gathers] == [False, True]
    assert gathers[0].overlapped_flops == 0
    assert gathers[1].overlapped_flops == PRODUCT_FLOPS
    scatters = [one for one in found if one.kind == "reduce-scatter"]
    assert [one.overlapped_flops for one in scatters] == [PRODUCT_FLOPS] * 2


def test_a_gather_over_several_tpu_fusions_counts_once():
    """Four computations hold it: those of start, two products and done."""
    text = recorded("v5e_8x8")
    n = 64
    assert text.count(" all-gather(") == 5
    gathers = [one for one in collectives(text) if one.kind == "all-gather"]
    assert [one.result_bytes for one in gathers] == [MATRIX, MATRIX]
    assert [one.group_size for one in gathers] == [n, n]
    assert sorted(one.is_async for one in gathers) == [False, True]
    (spread,) = [one for one in gathers if one.is_async]
    assert spread.overlapped_matmuls == 2
    assert spread.overlapped_flops == 2 * PRODUCT_FLOPS


def test_an_asynchronous_wrapper_is_what_it_holds():
    others = """
%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%wrapped (q: f32[64,32]) -> f32[16,32] {
  %q = f32[64,32]{1,0} parameter(0)
  ROOT %rs = f32[16,32]{1,0} reduce-scatter(%q), channel_id=1, \
replica_groups=[2,4]<=[4,2]T(1,0), dimensions={0}, to_apply=%add
}
"""
    lines = """
  %p = f32[64,32]{1,0} parameter(0)
  %s = ((f32[64,32]{1,0}), f32[16,32]{1,0}, u32[]) async-start(%p), calls=%wrapped
  %dot = f32[64,64]{1,0} dot(%p, %p), lhs_contracting_dims={1}, rhs_contracting_dims={1}
  %u = ((f32[64,32]{1,0}), f32[16,32]{1,0}, u32[]) async-update(%s)
  %e = f32[64,64]{1,0} dot(%p, %p), lhs_contracting_dims={1}, rhs_contracting_dims={1}
  %d = f32[16,32]{1,0} async-done(%u)
  ROOT %after = f32[64,64]{1,0} dot(%p, %p), lhs_contracting_dims={1}, \
rhs_contracting_dims={1}
"""
    (found,) = collectives(made(lines, others=others))
    assert (found.kind, found.group_size, found.is_async) == ("reduce-scatter", 4, True)
    assert (found.operand_bytes, found.result_bytes) == (64 * 32 * 4, 16 * 32 * 4)
    assert found.overlapped_matmuls == 2
    assert found.overlapped_flops == 2 * (2 * 64 * 64 * 32)


def test_an_all_reduce_fused_with_its_slice_is_a_reduce_scatter():
    others = """
%fused (q: f32[64,32], i: s32[]) -> f32[8,32] {
  %q = f32[64,32]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %z = s32[] constant(0)
  %ar = f32[64,32]{1,0} all-reduce(%q), replica_groups={{0,1,2,3,4,5,6,7}}, to_apply=%a
  ROOT %part = f32[8,32]{1,0} dynamic-slice(%ar, %i, %z), dynamic_slice_sizes={8,32}
}
"""
    lines = """
  %p = f32[64,32]{1,0} parameter(0)
  %i = s32[] constant(8)
  ROOT %f = f32[8,32]{1,0} fusion(%p, %i), kind=kCustom, calls=%fused
"""
    (found,) = collectives(made(lines, others=others))
    assert (found.kind, found.result_bytes) == ("reduce-scatter", 8 * 32 * 4)
    assert found.sent_bytes == 64 * 32 * 4 * 7 / 8


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
    line = f"  ROOT %g = f32[64,32]{{1,0}} all-reduce(%p), {groups}, to_apply=%add"
    lines = f"  %p = f32[64,32]{{1,0}} parameter(0)\n{line}"
    (found,) = collectives(made(lines, devices=16))
    assert found.group_size == size
    assert found.sent_bytes == 2 * 64 * 32 * 4 * (size - 1) / size


def test_groups_in_an_unknown_form_are_refused():
    line = "  ROOT %g = f32[] all-reduce(%p), replica_groups=<new>, to_apply=%add"
    with pytest.raises(NotImplementedError, match="<new>"):
        collectives(made(f"  %p = f32[] parameter(0)\n{line}"))


def test_what_is_no_program_is_refused():
    with pytest.raises(ValueError, match="as_text"):
        collectives("module @jit_f {}")


LOOP = """
%body (s: (u32[], f32[64,32])) -> (u32[], f32[64,32]) {
  %s = (u32[]{:T(128)}, f32[64,32]{1,0}) parameter(0)
  %i = u32[]{:T(128)} get-tuple-element(%s), index=0
  %x = f32[64,32]{1,0} get-tuple-element(%s), index=1
  %two = u32[]{:T(128)} constant(2)
  %kept = u32[]{:T(128)} copy(%i)
  %start = (f32[64,32]{1,0}, f32[64,32]{1,0}, u32[], u32[]) \
collective-permute-start(%x), source_target_pairs={{0,1},{1,2},{2,0},{3,3}}
  %done = f32[64,32]{1,0} collective-permute-done(%start)
  %next = u32[]{:T(128)} add(%kept, %two)
  ROOT %t = (u32[]{:T(128)}, f32[64,32]{1,0}) tuple(%next, %done)
}

%cond (s: (u32[], f32[64,32])) -> pred[] {
  %s = (u32[]{:T(128)}, f32[64,32]{1,0}) parameter(0)
  %i = u32[]{:T(128)} get-tuple-element(%s), index=0
  %limit = u32[]{:T(128)} constant(7)
  ROOT %less = pred[] compare(%i, %limit), direction=LT
}
"""


@pytest.mark.parametrize(("first", "times"), [(0, 4), (1, 3), (7, 0)])
def test_loops_that_the_tpu_compiler_makes_count_by_their_counter(first, times):
    """From `first`, by two, below seven; XLA writes no trip count there."""
    lines = f"""
  %p = f32[64,32]{{1,0}} parameter(0)
  %first = u32[]{{:T(128)}} constant({first})
  %copied = u32[]{{:T(128)}} copy(%first)
  %t = (u32[]{{:T(128)}}, f32[64,32]{{1,0}}) tuple(%copied, %p)
  ROOT %w = (u32[]{{:T(128)}}, f32[64,32]{{1,0}}) while(%t), condition=%cond, body=%body
"""
    (found,) = collectives(made(lines, others=LOOP))
    assert (found.times, found.is_exact, found.is_async) == (times, True, True)
    # One of the four pairs sends to itself.
    assert (found.group_size, found.sent_bytes) == (3, 64 * 32 * 4)


def test_copies_to_the_host_are_those_that_change_memory():
    lines = """
  %p = f32[64,32]{1,0} parameter(0)
  %h = f32[64,32]{1,0:S(5)} parameter(1)
  %near = f32[64,32]{1,0} copy(%p)
  %in = (f32[64,32]{1,0}, f32[64,32]{1,0:S(5)}, u32[]{:S(2)}) copy-start(%h)
  %dot = f32[64,64]{1,0} dot(%p, %p), lhs_contracting_dims={1}, rhs_contracting_dims={1}
  %here = f32[64,32]{1,0} copy-done(%in)
  %out = (f32[64,32]{1,0:S(5)}, f32[64,32]{1,0}, u32[]{:S(2)}) copy-start(%here)
  %there = f32[64,32]{1,0:S(5)} copy-done(%out)
  %fast = (f32[64,32]{1,0:S(1)}, f32[64,32]{1,0}, u32[]{:S(2)}) copy-start(%p)
  %faster = f32[64,32]{1,0:S(1)} copy-done(%fast)
  ROOT %t = f32[64,32]{1,0:S(5)} copy(%there)
"""
    found = host_copies(made(lines))
    assert [(one.name, one.is_to_host) for one in found] == [
        ("in", False),
        ("out", True),
    ]
    assert [one.nbytes for one in found] == [64 * 32 * 4] * 2
    assert [one.overlapped_matmuls for one in found] == [1, 0]
    assert all(one.is_async for one in found)


def test_a_slice_of_an_array_on_the_host_is_what_moves():
    others = """
%wrapped (q: f32[64,32], i: s32[]) -> f32[1,32] {
  %q = f32[64,32]{1,0:S(5)} parameter(0)
  %i = s32[] parameter(1)
  ROOT %part = f32[1,32]{1,0} dynamic-slice(%q, %i, %i), dynamic_slice_sizes={1,32}
}
"""
    lines = """
  %h = f32[64,32]{1,0:S(5)} parameter(0)
  %i = s32[] constant(8)
  %s = ((f32[64,32]{1,0:S(5)}, s32[]), f32[1,32]{1,0}, u32[]) async-start(%h, %i), \
calls=%wrapped
  ROOT %d = f32[1,32]{1,0} async-done(%s)
"""
    (found,) = host_copies(made(lines, others=others))
    assert (found.nbytes, found.is_to_host, found.is_async) == (32 * 4, False, True)


def test_slices_that_the_tpu_compiler_starts_and_ends_are_copies():
    lines = """
  %h = f32[64,32]{1,0:S(5)} parameter(0)
  %p = f32[64,64]{1,0} parameter(1)
  %i = s32[] constant(8)
  %in = ((f32[64,32]{1,0:S(5)}, s32[], s32[]), f32[1,32]{1,0}, u32[]{:S(2)}) \
dynamic-slice-start(%h, %i, %i), dynamic_slice_sizes={1,32}
  %dot = f32[64,64]{1,0} dot(%p, %p), lhs_contracting_dims={1}, rhs_contracting_dims={1}
  %row = f32[1,32]{1,0} dynamic-slice-done(%in)
  %out = ((f32[64,32]{1,0:S(5)}, f32[1,32]{1,0}, s32[], s32[]), \
f32[64,32]{1,0:S(5)}, u32[]{:S(2)}) dynamic-update-slice-start(%h, %row, %i, %i)
  ROOT %there = f32[64,32]{1,0:S(5)} dynamic-update-slice-done(%out)
"""
    found = host_copies(made(lines))
    assert [(x.name, x.is_to_host, x.nbytes) for x in found] == [
        ("in", False, 32 * 4),
        ("out", True, 32 * 4),
    ]
    assert [x.overlapped_matmuls for x in found] == [1, 0]


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
