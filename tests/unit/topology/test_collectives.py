"""Collectives of programs compiled here, for 8 virtual devices, against formulas."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from zinf.topology import collectives, memory, traffic

NUM_DEVICES = 8
SHAPE = (64, 48)
WHOLE = SHAPE[0] * SHAPE[1] * 4


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    """Two by four, "fsdp" being the transposed axis: its groups are not contiguous."""
    devices = np.array(jax.devices()[:NUM_DEVICES]).reshape(4, 2).T
    return Mesh(devices, ("replica", "fsdp"), axis_types=(AxisType.Auto,) * 2)


def compiled(mesh, function, *specs, out):
    """The program of a function of float32 arrays of `SHAPE`."""
    args = [
        jax.ShapeDtypeStruct(SHAPE, jnp.float32, sharding=NamedSharding(mesh, spec))
        for spec in specs
    ]
    made = jax.jit(function, out_shardings=NamedSharding(mesh, out)).lower(*args)
    return made.compile()


def mapped(mesh, function, spec, out):
    """The same of a function that each device runs on its part."""
    return compiled(
        mesh,
        jax.shard_map(
            function, mesh=mesh, in_specs=spec, out_specs=out, check_vma=False
        ),
        spec,
        out=out,
    )


def only(made):
    (found,) = collectives(made.as_text())
    return found


def test_an_all_gather_sends_all_but_the_last_part(mesh):
    n = 4
    found = only(compiled(mesh, lambda w: w * 2, P("fsdp"), out=P()))
    assert (found.kind, found.group_size, found.times) == ("all-gather", n, 1)
    assert (found.operand_bytes, found.result_bytes) == (WHOLE // n, WHOLE)
    assert found.sent_bytes == WHOLE * (n - 1) / n


def test_an_all_reduce_sends_twice_that(mesh):
    n = 2
    found = only(mapped(mesh, lambda w: jax.lax.psum(w, "replica"), P(), P()))
    assert (found.kind, found.group_size) == ("all-reduce", n)
    assert found.operand_bytes == found.result_bytes == WHOLE
    assert found.sent_bytes == 2 * WHOLE * (n - 1) / n


def test_a_reduce_scatter_sends_all_but_its_own_part(mesh):
    n = NUM_DEVICES
    axes = ("replica", "fsdp")

    def scatter(w):
        return jax.lax.psum_scatter(w, axes, tiled=True)

    found = only(mapped(mesh, scatter, P(), P(axes)))
    assert (found.kind, found.group_size) == ("reduce-scatter", n)
    assert (found.operand_bytes, found.result_bytes) == (WHOLE, WHOLE // n)
    assert found.sent_bytes == WHOLE * (n - 1) / n


def test_an_all_to_all_keeps_its_own_part(mesh):
    n = 4

    def swap(w):
        return jax.lax.all_to_all(w, "fsdp", 1, 0, tiled=True)

    found = only(mapped(mesh, swap, P("fsdp"), P(None, "fsdp")))
    assert (found.kind, found.group_size) == ("all-to-all", n)
    assert found.operand_bytes == found.result_bytes == WHOLE // n
    assert found.sent_bytes == WHOLE / n * (n - 1) / n


def test_a_permute_sends_what_it_holds(mesh):
    n = 4
    ring = [(at, (at + 1) % n) for at in range(n)]

    def shift(w):
        return jax.lax.ppermute(w, "fsdp", ring)

    found = only(mapped(mesh, shift, P("fsdp"), P("fsdp")))
    assert found.kind == "collective-permute"
    # Both replicas have a ring.
    assert found.group_size == NUM_DEVICES
    assert found.sent_bytes == WHOLE / n


def test_a_loop_counts_as_often_as_it_runs(mesh):
    times, n = 5, 4

    def loop(w):
        def body(carry, _):
            return jnp.tanh(jax.lax.psum(carry, "fsdp")), None

        return jax.lax.scan(body, w, length=times)[0]

    found = traffic(collectives(mapped(mesh, loop, P(), P()).as_text()))["all-reduce"]
    assert (found.count, found.is_exact) == (times, True)
    assert found.sent_bytes == times * 2 * WHOLE * (n - 1) // n


def test_a_loop_in_a_loop_multiplies(mesh):
    def inner(carry, _):
        return jnp.tanh(jax.lax.psum(carry, "fsdp")), None

    def outer(carry, _):
        return jax.lax.scan(inner, carry, length=3)[0] * 2, None

    def loop(w):
        return jax.lax.scan(outer, w, length=5)[0]

    found = traffic(collectives(mapped(mesh, loop, P(), P()).as_text()))["all-reduce"]
    assert (found.count, found.is_exact) == (3 * 5, True)


def test_a_loop_until_the_data_says_so_is_not_exact(mesh):
    def loop(w):
        def body(carry):
            return jnp.tanh(jax.lax.psum(carry, "fsdp")) + 1

        return jax.lax.while_loop(lambda carry: carry[0, 0] < 7, body, w)

    found = collectives(mapped(mesh, loop, P(), P()).as_text())
    assert [one.times for one in found] == [1]
    assert not any(one.is_exact for one in found)


def test_a_program_of_one_device_sends_nothing():
    made = jax.jit(jnp.tanh).lower(jnp.zeros(SHAPE)).compile()
    assert collectives(made.as_text()) == ()


def test_a_zero_3_layer_gathers_in_both_passes_and_reduces_once(mesh):
    """As the paper derives it, with XLA:CPU's all-reduce for the reduce-scatter."""
    axes = ("replica", "fsdp")
    n = NUM_DEVICES
    whole, parts = NamedSharding(mesh, P()), NamedSharding(mesh, P(axes))

    def layer(up, down, x):
        return jnp.tanh(x @ up.T) @ down

    def gathered(arrays):
        return [jax.lax.with_sharding_constraint(a, whole) for a in arrays]

    def forward(up, down, x):
        return layer(*gathered([up, down]), x)

    def backward(up, down, x, dy):
        _, pull = jax.vjp(lambda *w: layer(*w, x), *gathered([up, down]))
        return [jax.lax.with_sharding_constraint(g, parts) for g in pull(dy)]

    def sent(function, *shapes):
        args = [
            jax.ShapeDtypeStruct(shape, jnp.float32, sharding=parts)
            for shape in (SHAPE, SHAPE, *shapes)
        ]
        made = jax.jit(function, out_shardings=parts).lower(*args).compile()
        sums = traffic(collectives(made.as_text()))
        return {kind: found.sent_bytes for kind, found in sums.items()}

    x = (16, SHAPE[1])
    once = 2 * WHOLE * (n - 1) // n
    assert sent(forward, x) == {"all-gather": once}
    assert sent(backward, x, x) == {"all-gather": once, "all-reduce": 2 * once}


def test_memory_counts_arguments_results_and_what_takes_their_place(mesh):
    n = 4
    spec = NamedSharding(mesh, P("fsdp"))
    w = jax.ShapeDtypeStruct(SHAPE, jnp.float32, sharding=spec)
    double = jax.jit(lambda w: w * 2, out_shardings=spec)
    found = memory(double.lower(w).compile())
    assert found.argument_bytes == found.output_bytes == WHOLE // n
    assert found.device_bytes == 2 * WHOLE // n + found.temp_bytes
    assert found.host_bytes == 0
    donated = jax.jit(lambda w: w * 2, out_shardings=spec, donate_argnums=0)
    found = memory(donated.lower(w).compile())
    assert found.alias_bytes == WHOLE // n
    assert found.device_bytes == WHOLE // n + found.temp_bytes
