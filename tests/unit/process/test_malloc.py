"""malloc is left as it is, unless the process is ours or its owner asks."""

import subprocess
import sys

import pytest

from zinf.core.process.malloc import anonymous_bytes

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="settings are those of glibc"
)

MIB = 2**20

# Threads that allocate at the same time have heaps of their own, unless told to share.
# glibc's own limit is 8 heaps a core.
NUM_HEAPS = """
import ctypes, pathlib, re, sys, tempfile, threading
libc = ctypes.CDLL(None)
libc.fopen.restype = ctypes.c_void_p

def num_heaps():
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "heaps.xml")
        file = ctypes.c_void_p(libc.fopen(str(path).encode(), b"w"))
        assert not libc.malloc_info(0, file) and not libc.fclose(file)
        return len(re.findall("<heap nr=", path.read_text()))

def num_heaps_of_threads():
    all_of_them = threading.Barrier(32)
    def allocate():
        all_of_them.wait()
        block = bytearray(10_000)
        all_of_them.wait()
    threads = [threading.Thread(target=allocate) for _ in range(32)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    return num_heaps()
"""
# No array is made before the engine is, when settings would still have an effect.
ENGINE = f"""{NUM_HEAPS}
import jax.numpy as jnp, numpy as np, optax, zinf
batch = np.ones((2, 4), np.float32)
engine = zinf.initialize(
    lambda params, batch: ((batch @ params) ** 2).mean(), lambda: jnp.ones((4, 4)),
    optax.sgd(0.1), {{"execution": "streamed", "memory": {{"device": "1MiB"}}}},
    batch=batch,
)
engine.step(batch)
engine.close()
assert num_heaps_of_threads() >= 8
"""
COMMAND = f"""{NUM_HEAPS}
sys.argv = ["zinf", "--version"]
from zinf.cli import main
try: main()
except SystemExit: pass
assert num_heaps_of_threads() == 1
"""
TUNED = f"""{NUM_HEAPS}
import zinf
zinf.tune_malloc()
assert num_heaps_of_threads() == 1
import numpy as np
from zinf.core.process.malloc import anonymous_bytes, give_back, keep_large_blocks
MIB = 2**20
keep_large_blocks(True)
np.ones(100 * MIB, np.uint8)
full = anonymous_bytes()
give_back(40 * MIB)
assert 32 * MIB < full - anonymous_bytes() < 56 * MIB, (full - anonymous_bytes()) / MIB
give_back(1000 * MIB)
assert full - anonymous_bytes() > 80 * MIB
"""


@pytest.mark.parametrize(
    "script",
    [
        pytest.param(ENGINE, id="an engine leaves malloc alone"),
        pytest.param(COMMAND, id="the command line tunes"),
        pytest.param(TUNED, id="threads share one heap, and bytes are given back"),
    ],
)
def test_malloc_of_a_process(script: str) -> None:
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


def test_anonymous_memory_grows_with_what_is_written() -> None:
    before = anonymous_bytes()
    block = bytearray(64 * MIB)
    assert anonymous_bytes() - before > 60 * MIB
    del block
