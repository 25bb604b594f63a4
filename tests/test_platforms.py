"""zinf on macOS and Windows, as far as Linux can show it.

Nothing here runs on those systems. A type checker knows from typeshed which names
Python has where. And processes that pretend to be on another system import everything,
train, save and restore; `tests.other_system` says what that shows and what it cannot.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiers import streamed

ROOT = Path(__file__).resolve().parents[1]
SYSTEMS = ("darwin", "win32")
# Modules of the standard library that are not the same everywhere.
MISSING = re.compile(r"No attribute `\w+` in module `(os|mmap|fcntl|socket|signal)`.*")

IMPORT_ALL = """
import importlib, pkgutil
import zinf, zinf_kernels
for package in (zinf, zinf_kernels):
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        if module.name != "zinf.__main__" and not module.name.startswith("zinf.hf."):
            importlib.import_module(module.name)
            print(module.name)
"""

TRAIN = """
import json
from pathlib import Path
import optax
import zinf
from tests.robustness.small import content, draw, init, loss_fn
from zinf.checkpoint import Checkpoints

folder, config = Path(sys.argv[2]), json.loads(sys.argv[3])
start = lambda: zinf.initialize(loss_fn, init, optax.adam(1e-2), config, batch=draw())
with start() as engine, Checkpoints(folder / "many") as checkpoints:
    losses = [float(engine.step(draw(seed))["loss"]) for seed in range(3)]
    engine.save(folder / "one")
    checkpoints.save(3, engine)
    saved = content(engine)
    losses.append(float(engine.step(draw(3))["loss"]))
    checkpoints.restore(engine, 3)
    assert content(engine) == saved
with start() as engine:
    engine.restore(folder / "one")
    assert content(engine) == saved
    assert float(engine.step(draw(3))["loss"]) == losses[-1]
names = {Path(path).name for path in synced}
print(json.dumps({"losses": losses, "synced": sorted(names)}))
"""

COMMANDS = """
from zinf.cli import main
for command in json.loads(sys.argv[2]):
    sys.argv = ["zinf", *command]
    try:
        main()
    except SystemExit as end:
        print("ended", end.code or 0, flush=True)
"""

POOL = """
from zinf.core.machine.capacity import host_memory_bytes
from zinf.core.memory.host.pool import Pool
pool = Pool()
blocks = [pool.take(nbytes) for nbytes in (2**23, 2**20, 2**23)]
blocks[0][:] = 7
middle = blocks.pop(1)
middle[:] = 8
del blocks
pool.trim()
assert (middle == 8).all() and pool.idle_bytes == 0, pool.idle_bytes
assert len(pool._regions) == 1
del middle
pool.trim()
assert pool._regions == []
print(host_memory_bytes())
"""

SYNC = """
import errno, os
from zinf.core.memory.nvme import system
code = errno.ENOTSUP
def refuse(*arguments):
    raise OSError(code, "F_FULLFSYNC failed")
system.fcntl.fcntl = refuse
calls = []
os.fsync = calls.append
with open(sys.argv[2], "w") as file:
    system.sync(file.fileno())
    assert calls == [file.fileno()]
    code = errno.EIO
    try:
        system.sync(file.fileno())
    except OSError as error:
        assert error.errno == errno.EIO and len(calls) == 1
        print("synced, then lost")
"""


def run(system: str, code: str, *arguments: str) -> str:
    """What code prints in a process on that system."""
    begin = "import json, sys\nsynced = ()\n"
    if system != "linux":
        begin += "from tests.other_system import pretend\n"
        begin += f"synced = pretend({system!r})\n"
    command = [sys.executable, "-W", "error", "-c", begin + code, system, *arguments]
    asked = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert asked.returncode == 0, asked.stderr
    return asked.stdout


def trained(system: str, folder: Path, config: object) -> dict[str, list]:
    folder.mkdir()
    return json.loads(run(system, TRAIN, str(folder), json.dumps(config)))


@pytest.mark.slow
@pytest.mark.parametrize("system", SYSTEMS)
def test_no_module_uses_a_name_that_the_system_lacks(system: str) -> None:
    command = [sys.executable, "-m", "pyrefly", "check", "--python-platform", system]
    command += ["--python-interpreter-path", sys.executable]
    asked = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert "errors" in asked.stdout + asked.stderr, asked
    found = (match[0] for match in MISSING.finditer(asked.stdout + asked.stderr))
    assert list(found) == []


@pytest.mark.slow
@pytest.mark.parametrize("system", SYSTEMS)
def test_every_module_can_be_imported(system: str) -> None:
    imported = run(system, IMPORT_ALL).split()
    # The modules of `hf` need torch, which is not pretended to be on another system.
    files = [
        path
        for path in (ROOT / "zinf").rglob("*.py")
        if path.name != "__main__.py"
        and (path.parent.name != "hf" or path.name == "__init__.py")
    ]
    assert {"zinf.core.memory.nvme.lock", "zinf_kernels.elementwise.cpu"} <= {*imported}
    assert len(imported) >= len(files) - 1  # `zinf` itself is not listed.


@pytest.mark.parametrize("system", SYSTEMS)
def test_host_memory_is_given_back_with_its_addresses(system: str) -> None:
    total = int(run(system, POOL))
    assert total == 2**33 if system == "win32" else total > 2**30


@pytest.mark.slow
def test_streamed_steps_are_the_same_as_on_linux(tmp_path: Path) -> None:
    losses = trained("linux", tmp_path / "linux", streamed("cpu"))["losses"]
    for system, device in (("darwin", "nvme"), ("win32", "cpu")):
        folder = tmp_path / system
        nvme = folder / "nvme" if device == "nvme" else None
        found = trained(system, folder, streamed(device, nvme))
        assert found["losses"] == losses
        if system == "darwin":
            # Files, their folders, and what is renamed at the end.
            synced = {"c.0.0", "zarr.json", "manifest.json.new", "one"}
            assert synced <= {*found["synced"]}


def test_a_drive_without_full_sync_is_synced_as_it_can_be(tmp_path: Path) -> None:
    assert run("darwin", SYNC, str(tmp_path / "file")) == "synced, then lost\n"


CONFIG = """
model: {num_layers: 2, num_heads: 2, embed_dim: 32, max_length: 16}
data: {paths: [TEXT], sequence_length: 16}
train_batch_size: 8
execution: streamed
optimizer: {type: AdamW, params: {lr: 1e-3}}
zero_optimization:
  stage: 3
  offload_param: {device: cpu}
  offload_optimizer: {device: cpu}
run: {steps: 2, output: RUN, metrics: RUN/metrics.jsonl, checkpoint_every: 1}
"""


@pytest.mark.slow
def test_the_command_line_trains_and_exchanges_on_windows(tmp_path: Path) -> None:
    text, config = tmp_path / "text.txt", str(tmp_path / "config.yaml")
    # A text that is not ASCII.
    text.write_text("Größer als Gerätespeicher. " * 99, "utf-8")
    places = CONFIG.replace("TEXT", str(text)).replace("RUN", str(tmp_path / "run"))
    Path(config).write_text(places, "utf-8")
    checkpoints, out = str(tmp_path / "run" / "checkpoints"), str(tmp_path / "out")
    elsewhere = ["--set", f"run.output={tmp_path / 'new'}"]
    keys = [f"memory={{nvme: [{tmp_path / 'n'}]}}"]
    keys += ["zero_optimization={stage: 3, offload_param: {device: nvme}}"]
    commands = [
        ["plan", config],
        ["train", config],
        ["report", str(tmp_path / "run")],
        ["checkpoint", "verify", checkpoints],
        ["checkpoint", "export", checkpoints, out],
        ["checkpoint", "import", out, config, *elsewhere],
        # An NVMe tier is refused in a line.
        ["train", config, "--set", keys[0], "--set", keys[1]],
    ]
    code = "import os\nos.dup2(1, 2)\n" + COMMANDS
    printed = run("win32", code, json.dumps(commands))
    assert printed.count("ended 0") == len(commands) - 1, printed
    assert (tmp_path / "run" / "metrics.jsonl").read_text("utf-8").count("\n") == 2
    assert list((tmp_path / "out").glob("*.safetensors"))
    assert printed.endswith("ended 2\n") and "Traceback" not in printed
    (line,) = re.findall("^error: .*", printed, re.MULTILINE)
    assert "needs Linux or macOS" in line and "the host tier works here" in line
    assert not (tmp_path / "n").exists()
