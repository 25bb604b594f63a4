"""Files of arrays: dealt over drives by their speeds, and reused."""

import errno
import os
from collections.abc import Callable, Iterator

import pytest
import zarr

from tests.robustness.faults import Rule, fail
from zinf.core.memory import StorageError
from zinf.core.memory.nvme import Drive, Profile
from zinf.core.memory.nvme.array import Layout, NvmeArray
from zinf.core.memory.nvme.files import Files, Place
from zinf.core.memory.nvme.root import Root
from zinf.core.program import ArraySpec

CHUNK_BYTES = 400
MakeFiles = Callable[..., Files]


def layout(num_chunks: int, chunk_bytes: int = CHUNK_BYTES) -> Layout:
    spec = ArraySpec((num_chunks, chunk_bytes), "uint8", 1)
    return Layout(spec, (1, chunk_bytes))


def take(files: Files, wanted: Layout, spare_bytes: int = 0) -> NvmeArray:
    return files.take(wanted, what="Cannot create it", spare_bytes=spare_bytes)


def on(array: NvmeArray, files: Files) -> list[str]:
    """The place of each chunk."""
    return [files.drive(chunk).folder.name for chunk in array.chunks]


def folders(files: Files) -> list[list[str]]:
    return [sorted(os.listdir(place.root.arrays)) for place in files.places]


def used(files: Files) -> list[int]:
    return [place.used_bytes for place in files.places]


@pytest.fixture
def make_files(tmp_path, layer) -> Iterator[MakeFiles]:
    """Files in folders a, b, ... of the given speeds."""
    places: list[Place] = []

    def make(*speeds: float) -> Files:
        for name, speed in zip("abc", speeds, strict=False):
            root = Root(tmp_path / name)
            profile = Profile(num_threads=1)
            drive = Drive(root.path, profile=profile, system=layer.system)
            places.append(Place(root, drive, speed))
        return Files(places, checksums="full")

    yield make
    for place in places:
        place.drive.close()
        place.root.close()


@pytest.mark.parametrize(
    ("speeds", "shares"),
    [((1, 1), (6, 6)), ((2, 1), (8, 4)), ((1, 3), (3, 9)), ((1, 2, 3), (2, 4, 6))],
)
def test_chunks_are_dealt_in_proportion_to_what_drives_do(make_files, speeds, shares):
    files = make_files(*speeds)
    places = on(take(files, layout(12)), files)
    assert tuple(places.count(name) for name in "abc"[: len(speeds)]) == shares
    assert used(files) == [share * CHUNK_BYTES for share in shares]


def test_a_drive_that_is_ahead_waits_for_the_others(make_files):
    files = make_files(1, 1)
    take(files, layout(1, chunk_bytes=3 * CHUNK_BYTES))
    # 3 are on a: the next two are on b for sure, the last ones shared.
    assert on(take(files, layout(4)), files)[:2] == ["b", "b"]
    assert set(used(files)) == {3 * CHUNK_BYTES, 4 * CHUNK_BYTES}


def test_readers_see_one_folder_in_which_other_drives_are_links(make_files):
    files = make_files(1, 1)
    array = take(files, layout(4))
    for chunk in array.chunks:
        seen = array.folder / chunk.path.name
        assert seen.resolve() == chunk.path.resolve()
        assert seen.is_symlink() == (chunk.path.parent != array.folder)
        assert chunk.path.stat().st_size == CHUNK_BYTES
        chunk.path.write_bytes(bytes([chunk.start // CHUNK_BYTES]) * CHUNK_BYTES)
    found = zarr.open_array(array.folder, mode="r")
    assert [int(row[0]) for row in found[...]] == [0, 1, 2, 3]
    assert folders(files) == [[array.folder.name]] * 2
    mode = (files.places[1].root.arrays / array.folder.name).stat().st_mode
    assert mode & 0o777 == 0o700


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_when_one_drive_is_full_the_others_take_the_chunks(make_files, layer, code):
    files = make_files(1, 1)
    with layer.broken(Rule("allocate", fail(code), path="*/b/arrays/*")):
        array = take(files, layout(4))
    assert on(array, files) == ["a"] * 4
    assert used(files) == [4 * CHUNK_BYTES, 0]
    assert os.listdir(files.places[1].root.arrays / array.folder.name) == []
    assert not any(path.is_symlink() for path in array.folder.iterdir())


@pytest.mark.parametrize(
    ("path", "code", "message"),
    [
        ("*", errno.ENOSPC, "No space.*Free space"),
        ("*/b/arrays/*", errno.EIO, "Input/output"),
    ],
)
def test_when_all_drives_are_full_or_one_fails_nothing_is_left(
    make_files, layer, path, code, message
):
    files = make_files(1, 1)
    with layer.broken(Rule("allocate", fail(code), path=path)):
        with pytest.raises(StorageError, match=f"Cannot create it: {message}") as error:
            take(files, layout(4))
    assert error.value.errno == code
    with pytest.raises(StorageError, match="Cannot create it: .*uint4") as error:
        take(files, Layout(ArraySpec((4,), "uint4", 1), (4,)))
    assert error.value.errno == errno.EINVAL
    assert (folders(files), used(files)) == ([[], []], [0, 0])


def test_files_of_an_array_that_is_gone_are_given_to_one_new_one_of_its_layout(
    make_files,
):
    files = make_files(1, 1)
    first = take(files, layout(4))
    nodes = [chunk.path.stat().st_ino for chunk in first.chunks]
    first.mark_written(None)
    files.give_back(first, spare_bytes=first.spec.nbytes)
    for other in (
        Layout(first.spec, (2, CHUNK_BYTES)),
        Layout(ArraySpec(first.spec.shape, "int8", 1), (1, CHUNK_BYTES)),
    ):
        assert take(files, other, spare_bytes=2**20).folder != first.folder
    before = used(files)
    second = take(files, layout(4))
    assert second.folder == first.folder and used(files) == before
    assert [chunk.path.stat().st_ino for chunk in second.chunks] == nodes
    assert not second.is_written((0, 1))
    assert take(files, layout(4)).folder != first.folder


def test_spares_never_hold_more_than_they_may_and_the_oldest_goes_first(make_files):
    files = make_files(1, 1)
    arrays = [take(files, layout(2)) for _ in range(3)]
    for array in arrays:
        files.give_back(array, spare_bytes=2 * array.spec.nbytes)
    assert [array.folder.exists() for array in arrays] == [False, True, True]
    assert used(files) == [2 * CHUNK_BYTES] * 2
    # A new array of another layout leaves less for spares, which is made room first.
    new = take(files, layout(4), spare_bytes=arrays[0].spec.nbytes)
    assert folders(files) == [[arrays[2].folder.name, new.folder.name]] * 2
    files.give_back(new, spare_bytes=2**20)
    files.delete_spares(0)
    assert (folders(files), used(files)) == ([[], []], [0, 0])
