"""`zinf checkpoint` lists, verifies, compares, exports and imports."""

import json
import shlex
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import pytest
import safetensors.numpy

from tests.command import run as zinf
from tests.runs import Runs
from tests.tiers import stage_3
from tests.unit.checkpoint.cases import flipped
from tests.unit.interchange.models import assert_same_trees
from zinf.checkpoint.saved import Saved
from zinf.core.interchange.sources import parameters

run = partial(zinf, "checkpoint")


def config_in(folder: Path) -> dict[str, Any]:
    return {
        "model": {"num_layers": 1, "num_heads": 2, "embed_dim": 16, "max_length": 16},
        "data": {"paths": [str(folder / "text.txt")], "sequence_length": 16},
        "train_batch_size": 4,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": stage_3("nvme"),
        "memory": {"nvme": [str(folder / "nvme")]},
        "persistence_threshold": 1,
        "run": {
            "steps": 2,
            "output": str(folder / "out"),
            "log_every": 1,
            "checkpoint_every": 1,
        },
    }


@pytest.fixture
def checkpoints(runs: Runs) -> Path:
    """Checkpoints of steps 4 and 8."""
    return runs.nvme.output / "checkpoints"


def bits_of(folder: Path) -> dict[str, bytes]:
    with Saved(folder) as saved:
        tensors = parameters(saved)
        return {
            name: tensors.read(name, tuple((0, n) for n in spec.shape)).tobytes()
            for name, spec in tensors.specs.items()
        }


def test_checkpoints_are_listed_with_what_they_take(checkpoints):
    listed = run("ls", checkpoints)
    rows = [line.split() for line in listed.output.splitlines()]
    assert [row[0] for row in rows[1:3]] == ["4", "8"]
    manifest = json.loads((checkpoints / "8" / "state" / "manifest.json").read_text())
    assert all(" ".join(row[4:]) == manifest["zinf_version"] for row in rows[1:3])
    files = [path for path in checkpoints.rglob("*") if path.is_file()]
    inside = [path for path in files if "state" in path.parts]
    total = sum({p.stat().st_ino: p.stat().st_size for p in inside}.values())
    assert f"{total:,} bytes on the drive in all" in listed.output
    arrays = run("ls", checkpoints, "--step", 4).output.splitlines()
    row = next(x for x in arrays if "state0/token_embedding" in x)
    assert row.split() == [
        "state0/token_embedding",
        *("float32", "256", "x", "32", "256", "x", "32"),
        f"{256 * 32 * 4:,}",
    ]


def test_verify_is_content_with_what_was_saved_and_names_what_was_not(
    checkpoints, tmp_path
):
    sound = run("verify", checkpoints)
    assert "all as it was saved" in sound.output
    shutil.copytree(checkpoints / "8" / "state", tmp_path / "copy")
    file = tmp_path / "copy" / "state0" / "token_embedding" / "c.0.0"
    file.write_bytes(flipped(file.read_bytes(), 99))
    damaged = run("verify", tmp_path / "copy", code=1)
    (line, total) = damaged.output.splitlines()
    assert line.startswith(f"state0/token_embedding, chunk (0, 0), {file}: ")
    assert "1 files are damaged" in total
    (tmp_path / "copy" / "manifest.json").write_text("{")
    run("verify", tmp_path / "copy", code=2)


def test_diff_names_what_differs_and_says_so_in_its_exit_code(checkpoints):
    same = run("diff", checkpoints / "8", checkpoints)
    assert same.output.splitlines()[-1].endswith("arrays are equal, 0 differ.")
    other = run("diff", checkpoints, checkpoints, "--step", 4, 8, code=1)
    assert "num_steps: 4 / 8" in other.output
    row = next(x for x in other.output.splitlines() if "param/norm/bias" in x)
    name, count, largest, first = row.split()
    assert (int(count), first) == (32, "[0]")
    with Saved(checkpoints / "4/state") as one, Saved(checkpoints / "8/state") as two:
        array = next(a for a in one.arrays if str(a) == name)
        expected = np.abs(one.read(array) - two.read(array).astype(np.float64)).max()
    assert float(largest) == pytest.approx(float(expected), rel=1e-5)


def test_an_export_in_files_of_another_dtype(checkpoints, tmp_path):
    options = "--dtype", "float16", "--max-shard-bytes", 20_000
    run("export", checkpoints, tmp_path / "out", "--step", 4, *options)
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 1
    for file in files:
        tensors = safetensors.numpy.load_file(file)
        assert {x.dtype for x in tensors.values()} == {np.dtype(np.float16)}
    again = run("export", checkpoints, tmp_path / "out", code=2)
    assert "is not overwritten" in again.output


def begin(
    source: Path, runs: Runs, folder: Path, *options: Any, refused: str = ""
) -> None:
    """Imports parameters of step 8, and trains from them; or is refused with words."""
    settings = f"run.output={folder / 'new'}", f"memory.nvme={[str(folder / 'nvme')]}"
    settings = [part for setting in settings for part in ("--set", setting)]
    command = "import", source, runs.nvme.config, *settings, *options
    imported = run(*command, code=2 if refused else 0)
    if refused:
        assert refused in imported.output
        assert not (folder / "new").exists()
        return
    fresh = folder / "new" / "checkpoints" / "0" / "state"
    assert bits_of(fresh) == bits_of(runs.nvme.output / "checkpoints/8/state")
    with Saved(fresh) as saved:
        assert saved.scalars["num_steps"] == 0
    resume = shlex.split(imported.output.splitlines()[-1].partition("zinf ")[2])
    trained = zinf(*resume, "--steps", "1")
    assert "after step 1" in trained.output
    again = run(*command, code=2)
    assert "has checkpoints already" in again.output


@pytest.mark.slow
def test_an_export_needs_no_config_and_its_import_starts_a_run(
    runs, checkpoints, tmp_path
):
    """Under names that are given, and taken back."""
    names = tmp_path / "names.json"
    names.write_text(json.dumps({"token_embedding": "wte.weight"}))
    run("export", checkpoints, tmp_path / "out", "--names", names)
    there = safetensors.numpy.load_file(tmp_path / "out" / "model.safetensors")
    there["token_embedding"] = there.pop("wte.weight")
    expected = bits_of(checkpoints / "8" / "state")
    found = {name: array.tobytes() for name, array in there.items()}
    assert found == {path.replace("/", "."): bits for path, bits in expected.items()}
    lacking = "no tensor for 1 leaves: 'token_embedding'"
    begin(tmp_path / "out", runs, tmp_path, refused=lacking)
    begin(tmp_path / "out", runs, tmp_path, "--names", names)


@pytest.mark.slow
def test_orbax_is_another_format_both_ways(runs, checkpoints, tmp_path):
    run("export", checkpoints, tmp_path / "out", "--to", "orbax")
    with ocp.StandardCheckpointer() as checkpointer:
        tree = checkpointer.restore(tmp_path / "out")
    with Saved(checkpoints / "8" / "state") as saved:
        norm = next(a for a in saved.arrays if str(a) == "param/norm/bias")
        assert_same_trees(tree["norm"]["bias"], saved.read(norm))
    begin(tmp_path / "out", runs, tmp_path)
