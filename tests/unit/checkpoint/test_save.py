"""A save takes the arrays of its moment: by links, without bytes, or by a hold."""

import errno
import logging
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import numpy as np
import pytest

from tests.unit.checkpoint.cases import ARRAYS, EMBED, layouts_of
from zinf.checkpoint.save import Save
from zinf.checkpoint.saved import Saved
from zinf.checkpoint.share import shares_of
from zinf.core.memory import StorageError, open_stores
from zinf.core.memory.nvme import NvmeStore
from zinf.core.memory.residents import Residents
from zinf.core.program import ArrayId, Role, Tier

LARGE = ArrayId(Role.PARAM, "large")
ROWS, WIDTH = 6, 2**20
CONTENT = np.arange(ROWS * WIDTH, dtype=np.float32).reshape(ROWS, WIDTH)


def committed(save: Save) -> Saved:
    save.finish()
    save.commit({}, None)
    return Saved(save.directory)


def started(directory: Path, residents: Residents) -> Save:
    directory.mkdir()
    save = Save(directory, residents, shares_of(residents))
    save.begin()
    return save


def check_files(saved: Saved, residents: Residents, *, are_linked: bool) -> None:
    """Every chunk file is one with the tier's, or none is."""
    store = residents.stores[Tier.NVME]
    assert isinstance(store, NvmeStore)
    num_files = 0
    for array in residents.specs:
        for name, chunk in store.chunks(array):
            file = saved.folder(array) / name
            assert os.path.samefile(file, chunk.path) == are_linked, file
            num_files += 1
    assert num_files >= len([x for x in residents.specs.values() if x.nbytes])


def test_files_on_nvme_are_linked_and_not_copied(open_residents, tmp_path):
    residents = open_residents([Tier.NVME])
    save = started(tmp_path / "saved", residents)
    assert save.snapshot.copied_bytes == 0
    assert save.held_bytes == {Tier.HOST: 0, Tier.DEVICE: 0}
    assert save.released.done()
    with committed(save) as saved:
        check_files(saved, residents, are_linked=True)
        assert list(saved.verify()) == []


@pytest.mark.parametrize("tier", list(Tier))
def test_what_changes_after_a_save_has_begun_is_not_in_it(
    tier, open_residents, tmp_path
):
    """On nvme at once; elsewhere the change waits until the array is read."""
    residents = open_residents([tier])
    save = started(tmp_path / "saved", residents)
    changed = ARRAYS[EMBED] + 1
    with ThreadPoolExecutor(1) as updating:
        update = updating.submit(residents.write, EMBED, changed)
        if tier == Tier.NVME:
            update.result(timeout=30)
        else:
            assert not update.done()
        with committed(save) as saved:
            for array, value in ARRAYS.items():
                assert saved.read(array).tobytes() == value.tobytes()
        update.result(timeout=30)
    np.testing.assert_array_equal(residents.read(EMBED), changed)


def test_a_failed_save_holds_nothing_and_leaves_nothing(
    open_residents, tmp_path, monkeypatch
):
    residents = open_residents([Tier.NVME, Tier.HOST, Tier.DEVICE])
    save = started(tmp_path / "saved", residents)

    def full(*_: object) -> None:
        raise StorageError(errno.ENOSPC, "no space", "somewhere")

    monkeypatch.setattr("zinf.checkpoint.chunk_writer._write", full)
    with pytest.raises(StorageError, match="No space left on device. Free space"):
        save.finish()
    assert not save.directory.exists()
    for array, value in ARRAYS.items():
        residents.write(array, value.copy())


@pytest.fixture
def elsewhere(tmp_path: Path):
    """Residents on nvme of several chunks, on another file system than `tmp_path`."""
    other = Path("/dev/shm")
    if not other.is_dir() or other.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("there is no second file system to write to")
    root = other / f"zinf-test-{os.getpid()}"
    stores = open_stores(jax.devices()[0], nvme_paths=[root])
    arrays = {LARGE: CONTENT, EMBED: ARRAYS[EMBED]}
    residents = Residents(stores, layouts_of(arrays), dict.fromkeys(arrays, Tier.NVME))
    residents.create({})
    for array, value in arrays.items():
        residents.write(array, value)
    yield residents
    stores.nvme.clear()
    stores.close()
    for path in root.iterdir():
        path.rmdir() if path.is_dir() else path.unlink()
    root.rmdir()


def test_files_of_another_file_system_are_of_the_moment_too(elsewhere, tmp_path):
    save = started(tmp_path / "saved", elsewhere)
    assert save.snapshot.copied_bytes >= CONTENT.nbytes
    assert save.held_bytes[Tier.HOST] == 0, "they are copied file by file"
    assert save.released.done()
    elsewhere.write(LARGE, CONTENT + 1)
    (scratch,) = save.snapshot._scratch
    assert scratch.is_dir()
    with committed(save) as saved:
        np.testing.assert_array_equal(saved.read(LARGE), CONTENT)
        assert list(saved.verify()) == []
        check_files(saved, elsewhere, are_linked=False)
    assert not scratch.exists()


def test_a_file_system_without_links_has_its_arrays_held_and_copied(
    open_residents, tmp_path, monkeypatch, caplog
):
    residents = open_residents([Tier.NVME])

    def refuse(source: Path, target: Path) -> None:
        raise OSError(errno.EPERM, "no links", str(source), None, str(target))

    monkeypatch.setattr(os, "link", refuse)
    with caplog.at_level(logging.WARNING, "zinf.checkpoint"):
        save = started(tmp_path / "saved", residents)
    (record,) = (r for r in caplog.records if r.name.startswith("zinf"))
    assert "takes no hard link" in record.message
    with ThreadPoolExecutor(1) as updating:
        update = updating.submit(residents.write, EMBED, ARRAYS[EMBED] + 1)
        assert not update.done()
        with committed(save) as saved:
            for array, value in ARRAYS.items():
                assert saved.read(array).tobytes() == value.tobytes()
            check_files(saved, residents, are_linked=False)
        update.result(timeout=30)


@pytest.mark.parametrize("coverage", ["full", "sampled", "off"])
def test_a_linked_file_that_is_not_what_was_written_fails_the_save(coverage, tmp_path):
    """As far as the tier's checksum tells: sampled, of a part of what is over 2 MiB."""
    stores = open_stores(
        jax.devices()[0], nvme_paths=[tmp_path / "nvme"], checksums=coverage
    )
    residents = Residents(stores, layouts_of({LARGE: CONTENT}), {LARGE: Tier.NVME})
    residents.create({})
    with pytest.raises(StorageError, match="never"):
        started(tmp_path / "never", residents)
    assert not (tmp_path / "never").exists()
    residents.write(LARGE, CONTENT)
    assert isinstance(stores.nvme, NvmeStore)
    _, chunk = next(stores.nvme.chunks(LARGE))
    assert (chunk.full_checksum is not None) == (coverage == "full")
    with open(chunk.path, "r+b") as file:
        file.write(b"\xff" * 2 * 2**20)
    save = started(tmp_path / "saved", residents)
    if coverage == "sampled":
        with pytest.raises(StorageError, match="not what was written"):
            save.finish()
    elif coverage == "full":
        # Its sum is known, and so is not read again: loading finds it.
        with committed(save) as saved:
            (damage,) = saved.verify()
            assert damage.array == LARGE
    else:
        save.finish()
    stores.close()
