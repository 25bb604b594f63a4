"""At whatever instant the power goes, the last committed checkpoint loads."""

from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest

from tests.robustness.power import EAGER, STRICT, TORN, Files, Recorder
from tests.unit.checkpoint.cases import ARRAYS, SavedEngine, homes_on, layouts_of
from zinf.checkpoint import Checkpoints, Saved, durable
from zinf.checkpoint.incomplete import delete_incomplete
from zinf.core.memory import open_stores
from zinf.core.memory.residents import Residents
from zinf.core.program import Tier

STEPS = (1, 2, 3)
SEEDS = range(2)
WAYS = [(STRICT, 0), (EAGER, 0), (TORN, 0), *[("mixed", seed) for seed in SEEDS]]


def content(step: int) -> dict:
    return {
        a: (x + np.asarray(step, x.dtype)).astype(x.dtype) for a, x in ARRAYS.items()
    }


class Recorded:
    """Attributes:
    committed: how many events there were when each step was committed.
    """

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = folder / "saved"
        self.root.mkdir()
        self.recorder = Recorder(self.root, folder / "nvme")
        self.committed: dict[int, int] = {}
        self._watch_commits(monkeypatch)
        # Threads of the tier replace files, and a look at folders must not meet that.
        with self.recorder.recording():
            stores = open_stores(jax.devices()[0], nvme_paths=[folder / "nvme"])
        homes = homes_on(list(Tier), ARRAYS)
        residents = Residents(stores, layouts_of(ARRAYS), homes)
        residents.create({})
        with self.recorder.recording():
            engine = SavedEngine(residents, {})
            with Checkpoints(self.root, keep=1) as checkpoints:
                for step in STEPS:
                    for array, value in content(step).items():
                        residents.write(array, value)
                    engine.state = {"num_steps": step}
                    checkpoints.save(step, engine, {"position": step})
                    # Training goes on beside the save.
                    for array, value in content(99).items():
                        residents.write(array, value)
        stores.close()

    def _watch_commits(self, monkeypatch: pytest.MonkeyPatch) -> None:
        rename = durable._rename

        def watched(source: Path, target: Path) -> None:
            rename(source, target)
            if target.name.isdecimal():
                self.committed[int(target.name)] = len(self.recorder.events)

        monkeypatch.setattr(durable, "_rename", watched)

    def last_committed(self, count: int) -> int:
        return max((s for s, at in self.committed.items() if at <= count), default=0)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recorded]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        yield Recorded(tmp_path_factory.mktemp("power"), monkeypatch)


def newest(folder: Path) -> int:
    return max((int(p.name) for p in folder.iterdir() if p.name.isdecimal()), default=0)


def visible(files: Files, folder: int) -> object:
    """What a folder looks like, to tell it from others."""
    return tuple(
        (
            name,
            visible(files, inode)
            if inode in files.entries
            else files.contents.get(inode),
        )
        for name, inode in sorted(files.entries.get(folder, {}).items())
    )


@pytest.mark.parametrize(("how", "seed"), WAYS)
def test_every_prefix_loads_the_last_committed_checkpoint(
    how, seed, recorded, tmp_path
):
    root = recorded.recorder.root(recorded.root)
    seen: set[object] = set()
    found: set[int] = set()
    for count in range(len(recorded.recorder.events) + 1):
        files = recorded.recorder.after(count, how, seed=1000 * seed + count)
        if root not in files.entries:
            continue
        # What is older, or has no manifest, counts only by its name.
        entries = files.entries[root]
        step = max(
            filter(None, (complete(files, *x) for x in entries.items())), default=0
        )
        assert step >= recorded.last_committed(count), f"after event {count}"
        newest_tree = visible(files, entries[str(step)]) if step else None
        state = step, newest_tree, frozenset(entries)
        if state in seen:
            continue
        seen.add(state)
        folder = tmp_path / str(count)
        files.write(root, folder)
        delete_incomplete(folder)
        assert newest(folder) == step
        if step:
            found.add(step)
            check(folder / str(step) / "state", step)
    assert found == set(STEPS)


def complete(files: Files, name: str, folder: int) -> int | None:
    """The step of a folder that has a manifest."""
    inside = files.entries.get(folder, {}).get("state", 0)
    has_manifest = "manifest.json" in files.entries.get(inside, {})
    return int(name) if name.isdecimal() and has_manifest else None


def check(folder: Path, step: int) -> None:
    with Saved(folder) as saved:
        assert list(saved.verify()) == []
        assert saved.scalars == {"num_steps": step}
        assert saved.data == {"position": step}
        for array, value in content(step).items():
            assert saved.read(array).tobytes() == value.tobytes()


def test_the_whole_of_a_save_is_recorded(recorded, tmp_path):
    """What is there at the end is what was recorded, so no write went unseen."""
    files = recorded.recorder.after(len(recorded.recorder.events), EAGER)
    files.write(recorded.recorder.root(recorded.root), tmp_path / "after")
    there, after = (
        {str(p.relative_to(root)) for p in root.rglob("*")}
        for root in (recorded.root, tmp_path / "after")
    )
    assert there == after and "3" in there
    assert set(recorded.committed) == set(STEPS)


def test_without_its_syncs_a_checkpoint_is_lost(tmp_path, monkeypatch):
    """That the simulation would find it, if Orbax's own rename were all there is."""
    monkeypatch.setattr("zinf.checkpoint.durable.sync_folder", lambda folder: None)
    monkeypatch.setattr("zinf.checkpoint.durable.sync_file", lambda file: None)
    recorded = Recorded(tmp_path, monkeypatch)
    count = max(recorded.committed.values())
    files = recorded.recorder.after(count, STRICT)
    files.write(recorded.recorder.root(recorded.root), tmp_path / "after")
    assert newest(tmp_path / "after") < recorded.last_committed(count)
