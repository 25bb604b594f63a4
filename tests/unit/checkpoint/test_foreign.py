"""What is not zinf's own unfinished save or this run's checkpoint is never deleted."""

import os
import shutil
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp
import pytest

from tests.unit.checkpoint.cases import SavedEngine
from zinf.checkpoint import Checkpoints
from zinf.checkpoint.incomplete import MARKER, mark
from zinf.core.program import Tier


def content(folder: Path) -> dict[str, bytes | str | None]:
    """Every file, link and folder below a folder, and what is in it."""
    return {
        str(path.relative_to(folder)): os.readlink(path)
        if path.is_symlink()
        else (path.read_bytes() if path.is_file() else None)
        for path in sorted(folder.rglob("*"))
    }


def make_foreign(folder: Path) -> None:
    """Photographs by year, checkpoints of Orbax, another's unfinished save, links."""
    (folder / "2023" / "summer").mkdir(parents=True)
    (folder / "2023" / "summer" / "beach.jpg").write_bytes(b"\xff\xd8 a picture")
    with ocp.CheckpointManager(folder, item_names=("state",)) as manager:
        for step in (10, 20):
            state = ocp.args.StandardSave({"w": np.arange(4)})
            manager.save(step, args=ocp.args.Composite(state=state))
    # Orbax's name of an unfinished save, and names that only look like one.
    (folder / "30.orbax-checkpoint-tmp" / "state").mkdir(parents=True)
    (folder / "30.orbax-checkpoint-tmp" / "state" / "part").write_bytes(b"half")
    (folder / "40" / "state").mkdir(parents=True)
    (folder / "40" / "state" / "zarr.json").write_text("{}")
    (folder / "50").symlink_to(folder / "2023")
    (folder / "60").mkdir()
    (folder / "60" / MARKER).write_text('{"written_by": "somebody"}')
    (folder / "notes.txt").write_text("mine")


@pytest.mark.parametrize("kind", ["folder", "bucket"])
def test_foreign_folders_are_bit_equal_after_saves_and_rotation(
    kind, tmp_path, open_residents
):
    folder = tmp_path / "shared"
    folder.mkdir()
    make_foreign(folder)
    before = content(folder)
    engine = SavedEngine(open_residents([Tier.HOST]), {"num_steps": 0})
    place = f"file://{folder}" if kind == "bucket" else folder
    with Checkpoints(place, keep=2) as checkpoints:
        assert checkpoints.latest_step() is None
        for step in (1, 2, 3):
            checkpoints.save(step, engine)
        with pytest.raises(FileNotFoundError):
            checkpoints.restore(engine, 2023)
        assert checkpoints.latest_step() == 3
    after = content(folder)
    assert {name: after.get(name) for name in before} == before
    # Deleting an object leaves its folder where a folder stands for a bucket.
    new = {name for name in after.keys() - before.keys() if after[name] is not None}
    added = {name.partition("/")[0] for name in new}
    assert added == {"2", "3"}


def test_a_step_whose_folder_is_there_is_refused_by_name(tmp_path, open_residents):
    engine = SavedEngine(open_residents([Tier.HOST]), {"num_steps": 0})
    (tmp_path / "7").mkdir()
    with Checkpoints(tmp_path) as checkpoints:
        with pytest.raises(FileExistsError, match="a folder for step 7 already"):
            checkpoints.save(7, engine)
        checkpoints.save(8, engine)


def test_a_new_run_keeps_the_checkpoints_of_an_older_one(tmp_path, open_residents):
    """A run that goes on from a checkpoint counts those before it as its own."""
    engine = SavedEngine(open_residents([Tier.HOST]), {"num_steps": 0})

    def run(steps: list[int], goes_on: bool = False) -> set[str]:
        with Checkpoints(tmp_path / "saved", keep=2) as checkpoints:
            if goes_on:
                checkpoints.restore(engine)
            for step in steps:
                checkpoints.save(step, engine)
        return {path.name for path in (tmp_path / "saved").iterdir()}

    assert run([100, 200]) == {"100", "200"}
    assert run([1, 2, 3]) == {"2", "3", "100", "200"}
    assert run([300], goes_on=True) == {"200", "300"}


def test_unfinished_saves_of_zinf_are_deleted_unless_they_go_on(
    tmp_path, caplog, open_residents
):
    for name in ("4.orbax-checkpoint-tmp", "5"):
        (tmp_path / name / "state").mkdir(parents=True)
        mark(tmp_path / name)
    under_way = tmp_path / "6.orbax-checkpoint-tmp"
    shutil.copytree(tmp_path / "5", under_way)
    marker = (under_way / MARKER).read_text()
    (under_way / MARKER).write_text(
        marker.replace(f'"pid": {os.getpid()}', f'"pid": {os.getppid()}')
    )
    with Checkpoints(tmp_path):
        assert [path.name for path in tmp_path.iterdir()] == [under_way.name]
    assert "being saved by another process" in caplog.text
    assert caplog.text.count("cut short; it is deleted") == 2
