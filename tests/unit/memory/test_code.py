"""What compiling touched of libraries is resident no more, and all else is."""

import subprocess
import sys
from pathlib import Path

import pytest

from zinf.memory.code import _unchanged

needs_smaps = pytest.mark.skipif(
    not Path("/proc/self/smaps").exists(), reason="the system lists no mappings"
)

COMPILES = """
import jax, jax.numpy as jnp
from zinf.memory.code import drop_code
from zinf.memory.heap import code_bytes, resident_bytes
MIB = 2**20
def of(x):
    return jnp.sin(x @ x.T).sum()
x = jnp.arange(64.0).reshape(8, 8)
expected = jax.jit(jax.grad(of))(x)
before, others = code_bytes(), resident_bytes()
dropped = drop_code()
left = code_bytes()
assert dropped > 50 * MIB, dropped
assert before - left > 0.9 * dropped, (before, left, dropped)
assert abs(resident_bytes() - others) < 4 * MIB, "memory of the process itself went"
# All that went comes back: in what is compiled, and in compiling it anew.
assert (jax.jit(jax.grad(of))(x) == expected).all()
jax.clear_caches()
assert (jax.jit(jax.grad(of))(x) == expected).all()
assert code_bytes() > left
"""

# What a mapping is listed as, with its resident and own KiB.
SMAPS = """\
{start}000-{end}000 {permissions} 00001000 fe:00 {inode}      {name}
Size:                  8 kB
Rss:               {resident} kB
Private_Clean:         0 kB
Anonymous:             {own} kB
VmFlags: rd mr mw me
"""


def listed(**changes: object) -> str:
    usual = {
        "start": "7f0000000",
        "end": "7f0001000",
        "permissions": "r-xp",
        "inode": 123,
        "name": "/usr/lib/libjax_common.so",
        "resident": 8192,
        "own": 0,
    }
    return SMAPS.format(**usual | changes)


@needs_smaps
def test_code_goes_and_comes_back() -> None:
    subprocess.run([sys.executable, "-c", COMPILES], check=True, timeout=120)


@pytest.mark.parametrize("permissions", ["r-xp", "r--p"])
@pytest.mark.parametrize("name", ["/lib/libstdc++.so.6.0.30", "/a b/_x.cpython-313.so"])
def test_unchanged_pages_of_libraries_go(permissions: str, name: str) -> None:
    found = list(_unchanged(listed(permissions=permissions, name=name)))
    assert found == [(0x7F0000000000, 0x1000000, 8192 * 1024)]


@pytest.mark.parametrize(
    "changes",
    [
        {"own": 4},  # relocated by the loader, or with a breakpoint
        {"permissions": "rw-p"},
        {"permissions": "r--s"},
        {"name": "/data/tokens.npy"},
        {"name": "/usr/lib/libgone.so (deleted)"},
        {"name": "", "inode": 0},
        {"name": "[heap]", "inode": 0},
        {"resident": 64},
    ],
    ids=str,
)
def test_everything_else_stays(changes: dict) -> None:
    around = listed(start="7e0000000", end="7e0001000"), listed()
    found = list(_unchanged("".join([around[0], listed(**changes), around[1]])))
    assert len(found) == 2
