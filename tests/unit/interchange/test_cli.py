"""`zinf checkpoint` lists, verifies, compares, exports and imports."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import pytest
import safetensors.numpy
import yaml
from typer.testing import CliRunner, Result

from tests.unit.interchange.models import assert_same_trees
from zinf.checkpoint.saved import Saved
from zinf.cli import app
from zinf.interchange.sources import parameters


def run(*arguments: Any) -> Result:
    named = [str(argument) for argument in arguments]
    return CliRunner().invoke(app, ["checkpoint", *named])


def config_in(folder: Path) -> dict[str, Any]:
    return {
        "model": {"num_layers": 1, "num_heads": 2, "embed_dim": 16, "max_length": 16},
        "data": {"paths": [str(folder / "text.txt")], "sequence_length": 16},
        "train_batch_size": 4,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {
            "stage": 3,
            "offload_param": {"device": "nvme"},
            "offload_optimizer": {"device": "nvme"},
        },
        "memory": {"nvme": [str(folder / "nvme")]},
        "persistence_threshold": 1,
        "run": {
            "steps": 2,
            "output": str(folder / "out"),
            "log_every": 1,
            "checkpoint_every": 1,
        },
    }


@pytest.fixture(scope="module")
def shared(tmp_path_factory) -> Path:
    """A run of two steps, with a checkpoint of each."""
    folder = tmp_path_factory.mktemp("run")
    letters = np.random.default_rng(0).integers(97, 105, 4000).astype(np.uint8)
    (folder / "text.txt").write_bytes(letters.tobytes())
    (folder / "run.yaml").write_text(yaml.safe_dump(config_in(folder)))
    trained = CliRunner().invoke(app, ["train", str(folder / "run.yaml")])
    assert trained.exit_code == 0, trained.output
    return folder


@pytest.fixture
def runs(shared: Path) -> Path:
    return shared / "out" / "checkpoints"


def parameters_of(folder: Path) -> dict[str, bytes]:
    with Saved(folder) as saved:
        tensors = parameters(saved)
        return {
            name: tensors.read(name, tuple((0, n) for n in spec.shape)).tobytes()
            for name, spec in tensors.specs.items()
        }


@pytest.mark.slow
def test_checkpoints_are_listed_with_what_they_take(runs):
    listed = run("ls", runs)
    assert listed.exit_code == 0, listed.output
    rows = [line.split() for line in listed.output.splitlines()]
    assert [row[0] for row in rows[1:3]] == ["1", "2"]
    manifest = json.loads((runs / "2" / "state" / "manifest.json").read_text())
    assert all(" ".join(row[4:]) == manifest["zinf_version"] for row in rows[1:3])
    files = [path for path in runs.rglob("*") if path.is_file() and path.parent != runs]
    inside = [path for path in files if "state" in path.parts]
    total = sum({p.stat().st_ino: p.stat().st_size for p in inside}.values())
    assert f"{total:,} bytes on the drive in all" in listed.output


def test_the_arrays_of_one_are_listed(runs):
    listed = run("ls", runs, "--step", 1)
    assert listed.exit_code == 0, listed.output
    row = next(x for x in listed.output.splitlines() if "master/token_embedding" in x)
    assert row.split() == [
        "master/token_embedding",
        *("float32", "256", "x", "16", "256", "x", "16"),
        f"{256 * 16 * 4:,}",
    ]


def test_verify_is_content_with_what_was_saved_and_names_what_was_not(runs, tmp_path):
    sound = run("verify", runs)
    assert sound.exit_code == 0, sound.output
    assert "all as it was saved" in sound.output
    shutil.copytree(runs / "2" / "state", tmp_path / "copy")
    file = tmp_path / "copy" / "state0" / "token_embedding" / "c.0.0"
    content = bytearray(file.read_bytes())
    content[99] ^= 4
    file.write_bytes(content)
    damaged = run("verify", tmp_path / "copy")
    assert damaged.exit_code == 1
    (line, total) = damaged.output.splitlines()
    assert line.startswith(f"state0/token_embedding, chunk (0, 0), {file}: ")
    assert "1 files are damaged" in total
    (tmp_path / "copy" / "manifest.json").write_text("{")
    assert run("verify", tmp_path / "copy").exit_code == 2


def test_diff_names_what_differs_and_says_so_in_its_exit_code(runs):
    same = run("diff", runs / "2", runs)
    assert same.exit_code == 0, same.output
    assert same.output.splitlines()[-1].endswith("arrays are equal, 0 differ.")
    other = run("diff", runs, runs, "--step", 1, 2)
    assert other.exit_code == 1
    assert "num_steps: 1 / 2" in other.output
    row = next(x for x in other.output.splitlines() if "master/norm/bias" in x)
    name, count, largest, first = row.split()
    assert (int(count), first) == (16, "[0]")
    with Saved(runs / "1/state") as one, Saved(runs / "2/state") as two:
        array = next(a for a in one.arrays if str(a) == name)
        expected = np.abs(one.read(array) - two.read(array).astype(np.float64)).max()
    assert float(largest) == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.slow
def test_an_export_needs_no_config_and_its_import_starts_a_run(shared, runs, tmp_path):
    exported = run("export", runs, tmp_path / "out")
    assert exported.exit_code == 0, exported.output
    there = safetensors.numpy.load_file(tmp_path / "out" / "model.safetensors")
    with Saved(runs / "2" / "state") as saved:
        tensors = parameters(saved)
        for path, spec in tensors.specs.items():
            whole = tensors.read(path, tuple((0, n) for n in spec.shape))
            np.testing.assert_array_equal(there.pop(path.replace("/", ".")), whole)
    assert there == {}
    begin(tmp_path / "out", shared, tmp_path, runs)


def begin(source: Path, shared: Path, folder: Path, runs: Path, *options: str) -> None:
    """Imports parameters of step 2, and trains from them."""
    output = f"run.output={folder / 'new'}"
    imported = run("import", source, shared / "run.yaml", "--set", output, *options)
    assert imported.exit_code == 0, imported.output
    fresh = folder / "new" / "checkpoints" / "0" / "state"
    assert parameters_of(fresh) == parameters_of(runs / "2" / "state")
    with Saved(fresh) as saved:
        assert saved.scalars["num_steps"] == 0
    command = imported.output.splitlines()[-1].partition("zinf ")[2].split()
    trained = CliRunner().invoke(app, command)
    assert trained.exit_code == 0, trained.output
    assert "after step 2" in trained.output
    again = run("import", source, shared / "run.yaml", "--set", output, *options)
    assert again.exit_code == 2
    assert "has checkpoints already" in again.output


@pytest.mark.slow
def test_names_of_an_export_may_be_given_and_taken_back(shared, runs, tmp_path):
    names = tmp_path / "names.json"
    names.write_text(json.dumps({"token_embedding": "wte.weight"}))
    exported = run("export", runs, tmp_path / "out", "--names", names)
    assert exported.exit_code == 0, exported.output
    there = safetensors.numpy.load_file(tmp_path / "out" / "model.safetensors")
    assert "wte.weight" in there and "token_embedding" not in there
    output = f"run.output={tmp_path / 'new'}"
    settings = "import", tmp_path / "out", shared / "run.yaml", "--set", output
    refused = run(*settings)
    assert refused.exit_code == 2
    assert "no tensor for 1 leaves: 'token_embedding'" in refused.output
    assert not (tmp_path / "new").exists()
    begin(tmp_path / "out", shared, tmp_path, runs, "--names", str(names))
    names.write_text("[1]")
    assert run(*settings, "--names", names).exit_code == 2


@pytest.mark.slow
def test_orbax_is_another_format_both_ways(shared, runs, tmp_path):
    exported = run("export", runs, tmp_path / "out", "--to", "orbax")
    assert exported.exit_code == 0, exported.output
    with ocp.StandardCheckpointer() as checkpointer:
        tree = checkpointer.restore(tmp_path / "out")
    with Saved(runs / "2" / "state") as saved:
        norm = next(a for a in saved.arrays if str(a) == "master/norm/bias")
        assert_same_trees(tree["norm"]["bias"], saved.read(norm))
    begin(tmp_path / "out", shared, tmp_path, runs)


def test_an_export_in_files_of_another_dtype(runs, tmp_path):
    options = "--dtype", "float16", "--max-shard-bytes", 10_000
    exported = run("export", runs, tmp_path / "out", "--step", 1, *options)
    assert exported.exit_code == 0, exported.output
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 1
    for file in files:
        tensors = safetensors.numpy.load_file(file)
        assert {x.dtype for x in tensors.values()} == {np.dtype(np.float16)}
    again = run("export", runs, tmp_path / "out")
    assert again.exit_code == 2 and "is not overwritten" in again.output
