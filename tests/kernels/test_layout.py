"""Each op is a folder with the same file names in it, and says what can run where."""

import ast
from importlib import import_module
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import zinf_kernels
from tests.unit.refusals import refusals
from zinf_kernels.absent_gpu import GPUS
from zinf_kernels.cross_entropy.chunks import Chunks
from zinf_kernels.device import Device
from zinf_kernels.dispatch import choose_name

ROOT = Path(zinf_kernels.__file__).parent
OPS = sorted(folder.name for folder in ROOT.iterdir() if (folder / "api.py").exists())
REQUIRED = {"__init__.py", "api.py", "reference.py", "cases.py"}
# A file with one of these names is an implementation, and is called by its name.
BACKENDS = {"cpu", "xla", "triton", "mosaic_gpu", "mosaic_tpu", "reference"}


def test_all_folders_are_ops():
    folders = {path.name for path in ROOT.iterdir() if path.is_dir()}
    assert {*OPS} == folders - {"__pycache__"}


@pytest.mark.parametrize("op", OPS)
def test_an_op_has_the_same_files_as_the_others(op):
    files = {path.name for path in (ROOT / op).glob("*.py")}
    assert files >= REQUIRED
    cases = list(import_module(f"zinf_kernels.{op}.cases").cases())
    assert len({case.name for case in cases}) == len(cases) > 1
    # An implementation is a file of its name.
    existing = import_module(f"zinf_kernels.{op}.api").EXISTING
    stems = {Path(name).stem for name in files}
    assert stems & BACKENDS <= {*existing} <= stems
    # A reference is plain jnp or numpy.
    tree = ast.parse((ROOT / op / "reference.py").read_text())
    imports = (ast.Import, ast.ImportFrom)
    names = [ast.unparse(x) for x in ast.walk(tree) if isinstance(x, imports)]
    assert any("numpy" in name for name in names)
    assert not [name for name in names if "pallas" in name or "numba" in name]


def test_the_first_implementation_that_exists_and_can_run_is_taken(golden):
    existing, why_not = ("fast", "other", "plain"), {"fast": "It is not here."}

    def chosen(names, obstacles=why_not, existing=existing):
        return choose_name(names, op="op", existing=existing, obstacles=obstacles)

    assert chosen(None, {}) == "fast"
    assert chosen(None) == "other"
    assert chosen(("none", "fast", "plain", "other")) == chosen("plain") == "plain"
    wrong = {
        "two that do not exist": lambda: chosen(("a", "b")),
        "one of which exists": lambda: chosen(("a", "fast")),
        "the only one": lambda: chosen(None, existing=("fast",)),
    }
    golden.check("choices.txt", refusals(wrong))


def array(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


A, B = array(256, 64), array(64, 128)
X = array(2, 128, 64)
# Attention has more kernels: tests/kernels/test_attention.py.
FITS = {
    "cross_entropy": {"x": X, "weight": B},
    "quantize": {"x": array(1024)},
    "tiled_matmul": {"a": A, "b": B, "residual": array(256, 128, dtype=jnp.float32)},
}
DEVICES = {
    "CPU": Device("cpu", "cpu", 1),
    "unknown GPU": Device("gpu", "NVIDIA X1", 1),
    **{name: gpu.device for name, gpu in GPUS.items()},
}
DOES_NOT_FIT = [
    ("cross_entropy", {"x": array(2, 128, 64, dtype=jnp.float32)}),
    ("cross_entropy", {"x": array(128, 64)}),
    ("cross_entropy", {"weight": array(64, 127)}),
    ("cross_entropy", {"weight": array(127, 64), "chunks": Chunks(vocab_axis=0)}),
    ("cross_entropy", {"chunks": Chunks(tokens=100)}),
    ("quantize", {"block_size": 64}),
    ("quantize", {"x": array(0)}),
    ("tiled_matmul", {"a": array(255, 64)}),
    ("tiled_matmul", {"b": array(64, 0)}),
    ("tiled_matmul", {"a": array(256, 63), "b": array(63, 128)}),
    ("tiled_matmul", {name: array(256, 256, dtype=jnp.float32) for name in "ab"}),
    ("tiled_matmul", {"out_dtype": jnp.float16}),
]


def test_kernels_say_why_they_cannot_run(golden):
    """Something runs everywhere; the kernels run on Hopper, on sizes that fit tiles."""
    lines = []
    for op, arguments in FITS.items():
        api = import_module(f"zinf_kernels.{op}.api")
        for name, device in DEVICES.items():
            found = api.obstacles(device, **arguments)
            assert {*api.EXISTING} - {*found} and {*found} <= {"mosaic_gpu"}
            lines.append(f"{op} on {name}: {found.get('mosaic_gpu', 'runs')}")
    for op, change in DOES_NOT_FIT:
        api = import_module(f"zinf_kernels.{op}.api")
        found = api.obstacles(GPUS["H200"].device, **FITS[op] | change)
        lines.append(f"{op}: {found.get('mosaic_gpu', 'runs')}")
    golden.check("obstacles.txt", "\n".join(lines))
