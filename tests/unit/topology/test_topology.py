"""Texts become machines, and impossible ones errors that say what to change."""

import os

import pytest

from zinf.topology import CHIPS, parse_topology
from zinf.topology import tpu as tpu_module
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
    ("text", "message"),
    [
        ("h200", "no topology.*v5p:8x8x8"),
        ("h200:", "no topology"),
        ("h200:0", "no topology"),
        ("v5p:8x8x", "no topology"),
        ("v5p:-8x8x8", "no topology"),
        ("tpu:8", "'tpu'.*catalogue.*v5p.*h200"),
        ("v5p:8x8", "3 dims and this has 2.*v5p:4x4x4"),
        ("v5e:4x4x4", "2 dims and this has 3.*v5e:4x4"),
        ("v5p:3x4x4", "2 x 2 chips"),
        ("v5e:32x32", "1,024 chips.*largest slice of v5e has 256"),
        ("h100:2x2", "number, as in h100:8"),
        ("h100:12", "12 GPUs do not fill hosts of 8"),
    ],
)
def test_what_cannot_be_is_refused_with_what_to_change(text, message):
    with pytest.raises(ValueError, match=message):
        parse_topology(text)


def test_a_missing_compiler_is_named_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setattr(tpu_module, "find_spec", lambda name: None)
    with pytest.raises(NotImplementedError, match=r"pip install .*jax\[tpu\]"):
        parse_topology("v5e:2x2").devices()
    monkeypatch.setattr(absent_gpu, "find_spec", lambda name: None)
    with pytest.raises(NotImplementedError, match="pip install .*jax-cuda13-plugin"):
        parse_topology("h200:8").devices()


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
    assert chip.interconnect_bytes_per_second > chip.host_link_bytes_per_second
    outside = chip.network_bytes_per_second
    assert outside is None or outside < chip.interconnect_bytes_per_second
    assert chip.memory_bytes < chip.host_memory_bytes * 2 < 20 * chip.memory_bytes
    # Flops for each byte of memory that is read: 150 to 600 in this decade.
    assert 150 < chip.flops_per_second / chip.memory_bytes_per_second < 600
