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
from zinf.memory.heap import code_bytes
MIB = 2**20
def of(x):
    return jnp.sin(x @ x.T).sum()
x = jnp.arange(64.0).reshape(8, 8)
expected = jax.jit(jax.grad(of))(x)
before = code_bytes()
dropped = drop_code()
left = code_bytes()
assert dropped > 50 * MIB, dropped
assert before - left > 0.9 * dropped, (before, left, dropped)
# All that went comes back: in what is compiled, and in compiling it anew.
assert (jax.jit(jax.grad(of))(x) == expected).all()
jax.clear_caches()
assert (jax.jit(jax.grad(of))(x) == expected).all()
assert code_bytes() > left
"""

# Two libraries that nobody may write: of one, a page was changed before that, as a
# loader does. Were it dropped, the page would again be as in the file.
CHANGES = """
import ctypes, mmap, pathlib, sys, tempfile
from zinf.memory.code import drop_code
BYTES = 8 * 2**20
libc = ctypes.CDLL(None, use_errno=True)
maps = []
with tempfile.TemporaryDirectory() as folder:
    for name in ("changed.so", "unchanged.so"):
        path = pathlib.Path(folder, name)
        path.write_bytes(b"f" * BYTES)
        with path.open("r+b") as file:
            maps.append(mmap.mmap(file.fileno(), BYTES, flags=mmap.MAP_PRIVATE))
        if name == "changed.so":
            maps[-1][BYTES // 2] = ord("c")
        address = ctypes.addressof(ctypes.c_char.from_buffer(maps[-1]))
        assert maps[-1][:].count(b"f") >= BYTES - 1  # resident, all of it
        failed = libc.mprotect(ctypes.c_void_p(address), BYTES, mmap.PROT_READ)
        assert not failed, ctypes.get_errno()
    ours = bytearray(b"o" * BYTES)
    assert drop_code() >= BYTES
    assert maps[0][BYTES // 2] == ord("c")
    assert maps[0][:].count(b"f") == BYTES - 1
    assert maps[1][:].count(b"f") == BYTES
    assert ours.count(b"o") == BYTES
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


@needs_smaps
def test_what_the_process_wrote_stays() -> None:
    subprocess.run([sys.executable, "-c", CHANGES], check=True, timeout=120)


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
