"""The real compilers, for machines that are not there, where they are installed."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from zinf.core.topology import (
    Topology,
    collectives,
    compile_for,
    host_copies,
    memory,
    out_of_memory,
    parse_topology,
)


@pytest.fixture(scope="module")
def v5e() -> Topology:
    return parse_topology("v5e:4x4")


def mesh_of(topology: Topology) -> Mesh:
    devices = np.array(topology.devices())
    return Mesh(devices, ("fsdp",), axis_types=(AxisType.Auto,))


@pytest.mark.tpu_compiler
def test_tpus_keep_a_reduce_scatter_over_one_axis_of_the_torus(v5e):
    ordered = sorted(v5e.devices(), key=lambda device: tuple(device.coords))
    torus = np.array(ordered).reshape(v5e.shape)
    mesh = Mesh(torus, ("x", "y"), axis_types=(AxisType.Auto,) * 2)

    def scatter(g):
        return jax.lax.psum_scatter(g * 2, "y", tiled=True)

    mapped = jax.shard_map(
        scatter, mesh=mesh, in_specs=P(), out_specs=P("y"), check_vma=False
    )
    # Smaller gradients are padded, and what is too much sent on.
    whole = NamedSharding(mesh, P())
    g = jax.ShapeDtypeStruct((8192, 32768), jnp.bfloat16, sharding=whole)
    made = v5e.compile(jax.jit(mapped).lower(g))
    (found,) = collectives(made.as_text())
    assert (found.kind, found.group_size) == ("reduce-scatter", 4)


@pytest.mark.tpu_compiler
def test_tpus_say_what_moves_to_the_host_and_rests_there(v5e):
    parts = NamedSharding(mesh_of(v5e), P("fsdp"))
    there = parts.with_memory_kind("pinned_host")
    up = jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16, sharding=parts)
    update = jax.jit(lambda up: jax.device_put(up * 2, there), out_shardings=there)
    made = v5e.compile(update.lower(up))
    part = 1024 * 1024 * 2 // 16
    (copy,) = host_copies(made.as_text())
    assert (copy.nbytes, copy.is_to_host) == (part, True)
    found = memory(made)
    assert (found.argument_bytes, found.host_output_bytes) == (part, part)
    assert found.host_bytes == part


@pytest.mark.gpu_compiler
def test_arguments_that_a_program_puts_on_the_host_are_there_for_an_absent_gpu():
    mesh = mesh_of(parse_topology("h200:1"))
    there = NamedSharding(mesh, P(), memory_kind="pinned_host")
    here = NamedSharding(mesh, P())
    host, device = jax.memory.Space.Host, jax.memory.Space.Device

    def update(state, both, x):
        state = jax.device_put(jax.device_put(state, host), device)
        kept = jax.device_put(both, host)  # and read on the device below
        return jax.device_put(state + x, host), kept, both * x

    jitted = jax.jit(update, donate_argnums=0, out_shardings=(there, there, here))
    x = jax.ShapeDtypeStruct((1024, 1024), jnp.float32, sharding=here)
    made = compile_for(mesh, jitted.lower(x, x, x))
    found, nbytes = memory(made), 4 * 2**20
    # Only `state` is there, and its new content has its memory.
    assert found.host_argument_bytes == found.host_alias_bytes == nbytes
    assert found.argument_bytes == 2 * nbytes
    assert found.host_output_bytes == 2 * nbytes
    moved = [copy for copy in host_copies(made.as_text()) if copy.nbytes == nbytes]
    assert sorted(copy.is_to_host for copy in moved) == [False, True, True]


@pytest.mark.tpu_compiler
def test_a_tpu_program_that_does_not_fit_says_by_how_much(v5e):
    """The sums of 2^17 rows, all against all: 2^34 halves, twice the memory."""

    whole = NamedSharding(mesh_of(v5e), P())

    def all_pairs(x):
        pairs = jax.lax.with_sharding_constraint(x @ x.T, whole)
        return jnp.sort(pairs, axis=1)

    rows = 1 << 17
    x = jax.ShapeDtypeStruct((rows, 128), jnp.bfloat16, sharding=whole)
    with pytest.raises(jax.errors.JaxRuntimeError) as raised:
        v5e.compile(jax.jit(all_pairs, out_shardings=whole).lower(x))
    found = out_of_memory(raised.value)
    assert found is not None
    memory_bytes = v5e.chip.memory_bytes
    # What libtpu keeps for itself is less than a tenth.
    assert 0.9 * memory_bytes < found.available_bytes <= memory_bytes
    assert found.needed_bytes >= rows * rows * 2


@pytest.mark.tpu_compiler
@pytest.mark.gpu_compiler
@pytest.mark.parametrize("text", ["v4:2x2x1", "v5p:2x2x2", "v5e:1x1", "h100:16"])
def test_devices_are_as_many_as_parsed_and_in_process_order(text):
    topology = parse_topology(text)
    devices = topology.devices()
    assert len(devices) == topology.num_devices
    processes = [device.process_index for device in devices]
    assert processes == sorted(processes)
    assert len(set(processes)) == topology.num_hosts
    # The CPU works beside them.
    assert jax.jit(lambda x: x * 2)(jnp.arange(4.0)).tolist() == [0, 2, 4, 6]


@pytest.mark.gpu_compiler
@pytest.mark.parametrize(
    ("first", "words"),
    [("", "H200"), ("jax.devices()", "Set JAX_PLATFORMS=cpu")],
    ids=["topology", "jax"],
)
def test_gpus_are_described_where_jax_may_choose_its_platform(first, words):
    """jax then asks for CUDA's libraries, which a machine without GPUs lacks."""
    skips = ("JAX_PLATFORMS", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK")
    environment = {key: x for key, x in os.environ.items() if key not in skips}
    program = f"""
import jax
from zinf.core.topology import parse_topology
{first}
try:
    print(parse_topology("h200:1").devices())
except NotImplementedError as error:
    print(error)
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    if not first:
        assert words in done.stdout
        assert "Traceback" not in done.stderr
    else:
        # With CUDA's libraries the plugin is there already.
        assert words in done.stdout or "H200" in done.stdout
