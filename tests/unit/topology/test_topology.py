"""Texts become machines, impossible ones errors, and executables are only read."""

import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.marks import slow
from zinf.core.topology import CHIPS, compile_for, memory, only_read, parse_topology
from zinf.core.topology import tpu as tpu_module
from zinf.core.topology.options import compile_with
from zinf_kernels import absent_gpu


@pytest.mark.parametrize(
    ("text", "devices", "hosts"),
    [
        ("v5p:8x8x8", 8 * 8 * 8, 8 * 8 * 8 // 4),
        ("v5e:16x16", 16 * 16, 16 * 16 // 4),
        ("v6e:1x1", 1, 1),
        ("v4:2x2x1", 4, 1),
        ("h200:8", 8, 1),
        ("h100:64", 64, 8),
        ("a100:3", 3, 1),
        (" B200:8 ", 8, 1),
    ],
)
def test_a_text_is_a_number_of_devices_on_hosts(text, devices, hosts):
    found = parse_topology(text)
    assert (found.num_devices, found.num_hosts) == (devices, hosts)
    assert found.devices_per_host * found.num_hosts == devices


@pytest.mark.parametrize(
    ("text", "hides"), [("v5p:2x2x2", True), ("v5p:1x1x1", False), ("h200:8", False)]
)
def test_a_tpu_is_told_to_gather_during_matmuls_if_it_has_others(text, hides):
    options = parse_topology(text).compiler_options
    assert ("xla_enable_async_all_gather" in options) == hides


class Lowered:
    """A program that compiles only without options."""

    def __init__(self, says):
        self.says = says

    def compile(self, options):
        if options:
            raise jax.errors.JaxRuntimeError(self.says)
        return self


@pytest.mark.parametrize(
    "says",
    [
        "RESOURCE_EXHAUSTED: Used 20.0G of 15.75G hbm.",
        "INVALID_ARGUMENT: No such compile option: 'xla_enable_async_all_gather'",
    ],
)
def test_a_tpu_waits_for_gathers_if_it_cannot_do_otherwise(says, caplog):
    program = Lowered(says)
    options = parse_topology("v5p:2x2x2").compiler_options
    assert compile_with(program, options) is program
    assert "gathers weights during matmuls" in caplog.text
    # Absent GPUs need their option, and another error is not about options.
    for text, other in ((says, "h200:8"), ("INTERNAL: a bug", "v5p:2x2x2")):
        with pytest.raises(jax.errors.JaxRuntimeError, match=text[:8]):
            compile_with(Lowered(text), parse_topology(other).compiler_options)


IMPOSSIBLE = (
    *("h200", "h200:", "h200:0", "v5p:8x8x", "v5p:-8x8x8", "tpu:8", "v5p:8x8"),
    *("v5e:4x4x4", "v5p:3x4x4", "v5e:32x32", "h100:2x2", "h100:12"),
)


def test_what_cannot_be_is_refused_with_what_to_change(golden, monkeypatch):
    sentences = []
    for text in IMPOSSIBLE:
        with pytest.raises(ValueError) as raised:
            parse_topology(text)
        sentences.append(f"{text} - {raised.value}")
    # A missing compiler is named with the command that installs it.
    monkeypatch.setattr(tpu_module, "find_spec", lambda name: None)
    monkeypatch.setattr(absent_gpu, "find_spec", lambda name: None)
    version = jax.__version__
    for text in ("v5e:2x2", "h200:8"):
        with pytest.raises(NotImplementedError) as raised:
            parse_topology(text).devices()
        sentences.append(f"{text} - {raised.value}".replace(version, "VERSION"))
    golden.check("refused.txt", "\n".join(sentences))


def test_settings_of_libtpu_are_gone_afterwards_and_those_of_the_user_stay(monkeypatch):
    kept, added = list(tpu_module.SETTINGS)[:2]
    monkeypatch.setenv(kept, "mine")
    monkeypatch.delenv(added, raising=False)
    with tpu_module._settings():
        assert os.environ[kept] == "mine"
        assert os.environ[added] == tpu_module.SETTINGS[added]
    assert os.environ[kept] == "mine"
    assert added not in os.environ


def test_the_slowest_link_to_other_devices_counts():
    h100 = CHIPS["h100"]
    inside, outside = h100.interconnect_bytes_per_second, h100.network_bytes_per_second
    assert parse_topology("h100:8").link_bytes_per_second == inside
    assert parse_topology("h100:16").link_bytes_per_second == outside < inside
    torus = CHIPS["v5p"].interconnect_bytes_per_second
    assert parse_topology("v5p:8x8x8").link_bytes_per_second == torus


@pytest.mark.parametrize("chip", list(CHIPS.values()), ids=list(CHIPS))
def test_the_catalogue_is_plausible(chip):
    """Memories nest and links get slower outwards, with bytes per second as units.

    A figure in bits, or in both directions, would break one of these.
    """
    assert chip.memory_bytes_per_second > chip.interconnect_bytes_per_second
    assert chip.interconnect_bytes_per_second >= chip.host_link_bytes_per_second
    outside = chip.network_bytes_per_second
    assert outside is None or outside < chip.interconnect_bytes_per_second
    assert chip.memory_bytes < chip.host_memory_bytes * 2 < 20 * chip.memory_bytes
    # Flops for each byte of memory that is read: 150 to 600 in this decade.
    assert 150 < chip.flops_per_second / chip.memory_bytes_per_second < 600


def attention(x, up, down):
    query, key = x @ down.T, x @ up
    weights = jax.nn.softmax((query @ key.T).astype(jnp.float32))
    return jnp.sum((weights.astype(x.dtype) @ x).astype(jnp.float32))


def layers(x, up, down):
    def layer(value, _):
        return jnp.tanh(value + jnp.cumsum(value @ up, 0) @ down), None

    return jnp.sum(jax.lax.scan(jax.checkpoint(layer), x, None, length=3)[0])


def lookup(x, up, down):
    rows = jnp.argmax(x @ up, -1)
    return jnp.sum(jnp.sort(down[rows] * x, -1)[:, :8].astype(jnp.float32))


def compiled(loss, dtype):
    # Two devices, so that there are shardings and collectives to read.
    devices = np.array(jax.devices()[:2])
    mesh = Mesh(devices, ("fsdp",), axis_types=(AxisType.Auto,))
    cut = NamedSharding(mesh, P("fsdp"))
    shapes = ((64, 32), (32, 128), (128, 32))
    arguments = [jax.ShapeDtypeStruct(s, dtype, sharding=cut) for s in shapes]
    step = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))
    return compile_for(mesh, step.lower(*arguments))


@pytest.mark.parametrize(
    ("loss", "dtype"),
    [
        (lookup, "float32"),
        slow((attention, "bfloat16")),
        slow((layers, "float32")),
    ],
)
def test_executables_that_are_only_read_take_the_memory_of_those_that_run(loss, dtype):
    runs = compiled(loss, dtype)
    with only_read():
        is_read = compiled(loss, dtype)
    assert memory(is_read) == memory(runs)
    assert is_read.output_shardings == runs.output_shardings
    assert is_read.cost_analysis()["flops"] == runs.cost_analysis()["flops"]


def test_only_executables_within_the_context_are_compiled_quickly():
    asked = []

    class Lowered:
        def compile(self, options):
            asked.append(options)

    mesh = Mesh(np.array(jax.devices()[:1]), ("fsdp",))
    compile_for(mesh, Lowered())
    with only_read():
        compile_for(mesh, Lowered())
    compile_for(mesh, Lowered())
    assert asked[0] is asked[2] is None
    assert asked[1]
