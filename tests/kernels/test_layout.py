"""Each op is a folder with the same file names in it, and says what can run where."""

import ast
from importlib import import_module
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import zinf_kernels
from zinf_kernels.absent_gpu import GPUS
from zinf_kernels.device import Device

ROOT = Path(zinf_kernels.__file__).parent
OPS = sorted(folder.name for folder in ROOT.iterdir() if (folder / "api.py").exists())
REQUIRED = {"__init__.py", "api.py", "reference.py", "cases.py"}
# A file with one of these names is an implementation, and is called by its name.
BACKENDS = {"cpu", "xla", "triton", "mosaic_gpu", "mosaic_tpu", "reference"}
ON_DEVICE = ("cross_entropy", "quantize", "tiled_matmul")
by_op = pytest.mark.parametrize("op", OPS)


def test_all_folders_are_ops():
    folders = {path.name for path in ROOT.iterdir() if path.is_dir()}
    assert {*OPS} == folders - {"__pycache__"}
    assert {*OPS} > {*ON_DEVICE}


@by_op
def test_an_op_has_the_same_files_as_the_others(op):
    assert {path.name for path in (ROOT / op).glob("*.py")} >= REQUIRED
    cases = list(import_module(f"zinf_kernels.{op}.cases").cases())
    assert len({case.name for case in cases}) == len(cases) > 1


@by_op
def test_an_implementation_is_a_file_of_its_name(op):
    existing = import_module(f"zinf_kernels.{op}.api").EXISTING
    files = {path.stem for path in (ROOT / op).glob("*.py")} & BACKENDS
    assert {*existing} == files
    assert "reference" in existing


@by_op
def test_a_reference_is_plain_jnp_or_numpy(op):
    tree = ast.parse((ROOT / op / "reference.py").read_text())
    names = [ast.unparse(node) for node in ast.walk(tree) if is_import(node)]
    assert any("numpy" in name for name in names)
    assert not [name for name in names if "pallas" in name or "numba" in name]


def is_import(node: ast.AST) -> bool:
    return isinstance(node, ast.Import | ast.ImportFrom)


CPU = Device("cpu", "cpu", 1)
DEVICES = {"CPU": CPU} | {name: gpu.device for name, gpu in GPUS.items()}


@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
@pytest.mark.parametrize("op", ON_DEVICE)
def test_every_op_runs_everywhere_and_kernels_say_why_they_do_not(op, device):
    api = import_module(f"zinf_kernels.{op}.api")
    arguments = {
        "cross_entropy": {"x": array(256, 64), "weight": array(64, 128)},
        "quantize": {"x": array(1024)},
        "tiled_matmul": {"a": array(256, 64), "b": array(64, 128)},
    }
    found = api.obstacles(device, **arguments[op])
    assert {*api.EXISTING} - {*found}
    assert ("mosaic_gpu" in found) == (device.capability != (9, 0))
    assert all(reason.endswith(".") for reason in found.values())


def array(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)
