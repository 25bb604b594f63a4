"""Files that change behind the tier's back, and drives that lie, are found out."""

import os
import shutil
from collections.abc import Callable, Iterator
from errno import EINVAL, EIO, EISDIR, ENODATA, ENOENT
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from tests.robustness.faults import (
    Deed,
    Rule,
    before,
    flip_bit,
    misplace,
    pretend,
    read_zeros,
)
from tests.robustness.faulty_store import (
    ARRAY,
    SIZES,
    VERBS,
    Bench,
    benches,
    eventually,
    expect_at_rest,
    expect_works,
    run,
)
from zinf.memory.nvme.checksum import NUM_WINDOWS, STRIPE_BYTES, WINDOW_BYTES
from zinf.memory.storage_error import StorageError
from zinf.program import ArrayId, Role

Make = Callable[..., Bench]

# One file of two stripes and a half.
LONG = ArrayId(Role.PARAM, "long")
LONG_BYTES = STRIPE_BYTES * 5 // 2


@pytest.fixture
def make(tmp_nvme: Path) -> Iterator[Make]:
    with benches(tmp_nvme) as make:
        yield make


class Damage(NamedTuple):
    """What happens to the chunk files of an array, and what a reader is told."""

    do: Callable[[list[Path]], None]
    code: int
    found: str


def _cut(nbytes: int) -> Callable[[list[Path]], None]:
    return lambda chunks: os.truncate(chunks[1], chunks[1].stat().st_size - nbytes)


def _flip(part: float) -> Callable[[list[Path]], None]:
    """Another bit in the byte at this part of the file, 0 to 1."""

    def do(chunks: list[Path]) -> None:
        at = int(part * (chunks[1].stat().st_size - 1))
        flip(chunks[1], at, 1)

    return do


def flip(file: Path, at: int, nbytes: int) -> None:
    with file.open("r+b") as opened:
        opened.seek(at)
        wrong = bytes(byte ^ 1 for byte in opened.read(nbytes))
        opened.seek(at)
        opened.write(wrong)


def _swap(chunks: list[Path]) -> None:
    first, second = (chunk.read_bytes() for chunk in chunks)
    chunks[0].write_bytes(second)
    chunks[1].write_bytes(first)


def _rename_each_other(chunks: list[Path]) -> None:
    aside = chunks[0].with_name("aside")
    chunks[0].rename(aside)
    chunks[1].rename(chunks[0])
    aside.rename(chunks[1])


def _to_folder(chunks: list[Path]) -> None:
    chunks[1].unlink()
    chunks[1].mkdir()


def _to_zeros(chunks: list[Path]) -> None:
    chunks[1].write_bytes(bytes(chunks[1].stat().st_size))


DAMAGES = {
    "truncated by a byte": Damage(_cut(1), EIO, "bytes instead of"),
    "truncated to nothing": Damage(
        lambda c: os.truncate(c[1], 0), EIO, "it has 0 bytes instead of"
    ),
    "extended": Damage(_cut(-1), EIO, "bytes instead of"),
    "extended by a page": Damage(_cut(-4096), EIO, "bytes instead of"),
    "first bit flipped": Damage(_flip(0), EIO, "not what was written"),
    "a bit flipped": Damage(_flip(0.4), EIO, "not what was written"),
    "last bit flipped": Damage(_flip(1), EIO, "not what was written"),
    "swapped": Damage(_swap, EIO, "not what was written"),
    "renamed": Damage(_rename_each_other, EIO, "not what was written"),
    "zeroed": Damage(_to_zeros, EIO, "not what was written"),
    "deleted": Damage(lambda c: c[1].unlink(), ENOENT, "No such file"),
    "deleted with its folder": Damage(
        lambda c: shutil.rmtree(c[1].parent), ENOENT, "No such file"
    ),
}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("verb", ["read", "write row"])
def test_a_file_that_was_changed_is_never_read(verb, damage, size, make):
    bench, verb, damage = make(size), VERBS[verb], DAMAGES[damage]
    bench.fill()
    kept = bench.folder / "kept"
    shutil.copytree(bench.store.folder(ARRAY), kept)
    damage.do(bench.chunks)
    with pytest.raises(StorageError, match=damage.found) as caught:
        verb.run(bench)
    assert caught.value.errno == damage.code
    assert Path(caught.value.filename) in bench.chunks
    assert str(caught.value).startswith(f"[Errno {damage.code}] {verb.what}")
    assert "last checkpoint" in str(caught.value)
    expect_at_rest(bench)
    shutil.copytree(kept, bench.store.folder(ARRAY), dirs_exist_ok=True)
    expect_works(bench, verb)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("damage", sorted(DAMAGES.keys() - {"deleted with its folder"}))
def test_a_file_that_was_changed_can_be_written_as_a_whole(damage, size, make):
    bench = make(size)
    bench.fill()
    DAMAGES[damage].do(bench.chunks)
    expect_works(bench, VERBS["overwrite"])


@pytest.mark.parametrize("size", SIZES)
def test_a_folder_in_the_place_of_a_file_is_named(size, make):
    bench = make(size)
    bench.fill()
    _to_folder(bench.chunks)
    for verb, codes in (("read", {EINVAL, EIO, EISDIR}), ("overwrite", {EISDIR})):
        with pytest.raises(StorageError) as caught:
            VERBS[verb].run(bench)
        assert caught.value.errno in codes
        assert caught.value.filename == str(bench.chunks[1])
    expect_at_rest(bench)
    bench.chunks[1].rmdir()
    expect_works(bench, VERBS["overwrite"])


@pytest.mark.parametrize("size", SIZES)
def test_a_write_into_a_deleted_folder_is_named(size, make):
    bench = make(size)
    bench.fill()
    shutil.rmtree(bench.store.folder(ARRAY))
    with pytest.raises(StorageError, match="Something deleted files") as caught:
        bench.write(bench.new)
    assert caught.value.errno == ENOENT
    expect_at_rest(bench)
    bench.store.folder(ARRAY).mkdir()
    expect_works(bench, VERBS["overwrite"])


@pytest.mark.parametrize("size", SIZES)
def test_a_whole_tier_that_is_deleted_is_named_and_can_be_opened_again(
    size, make, tmp_nvme
):
    bench = make(size)
    bench.fill()
    shutil.rmtree(tmp_nvme)
    other = ArrayId(Role.PARAM, "new")
    for ask in (
        bench.read,
        lambda: bench.write(bench.new),
        lambda: bench.store.write(other, bench.new).result(),
    ):
        with pytest.raises(StorageError) as caught:
            ask()
        assert caught.value.errno in (ENOENT, ENODATA)
    expect_at_rest(bench)
    bench.store.close()
    expect_works(make(size), VERBS["create"])


@pytest.mark.parametrize("size", SIZES)
def test_a_file_that_shrinks_while_it_is_read_is_named(size, make):
    bench = make(size)
    bench.fill()
    shrink = before(lambda: os.truncate(bench.chunks[1], 5))
    rule = Rule("preadv", shrink, path="*/c.1.0")
    error = run(bench, VERBS["read"], rule)
    assert error is not None
    # By whichever asks first: the small file is asked for twice, its size before that.
    assert error.errno in (ENODATA, EIO)
    assert "has only 5 bytes, at byte " in str(error) or "it has 5 bytes" in str(error)
    expect_at_rest(bench)
    expect_works(bench, VERBS["overwrite"])


LIES: dict[str, Deed] = {
    "writes nothing": pretend,
    "writes a wrong bit": flip_bit(7),
    "writes elsewhere": misplace,
}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("verb", ["overwrite", "replace", "first write", "write row"])
@pytest.mark.parametrize("lie", LIES)
def test_a_drive_that_reports_success_and_did_not_write_is_found_out(
    lie, verb, size, make
):
    bench, verb = make(size), VERBS[verb]
    verb.prepare(bench)
    assert run(bench, verb, Rule("pwritev", LIES[lie])) is None
    with pytest.raises(StorageError) as caught:
        bench.read()
    assert caught.value.errno == EIO
    expect_at_rest(bench)
    bench.expect_links()
    for chunk in bench.chunks:
        chunk.unlink()
    expect_works(bench, VERBS["overwrite"])


@pytest.mark.parametrize("size", SIZES)
def test_a_rename_that_was_none_is_found_out(size, make):
    bench, verb = make(size), VERBS["replace"]
    verb.prepare(bench)
    assert run(bench, verb, Rule("replace", pretend)) is None
    with pytest.raises(StorageError, match="not what was written"):
        bench.read()
    bench.expect_links()
    expect_works(bench, verb)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("verb", ["read", "write row"])
@pytest.mark.parametrize(
    "deed",
    [flip_bit(11), read_zeros, misplace],
    ids=["a wrong bit", "zeros", "from elsewhere"],
)
def test_a_drive_that_reads_other_bytes_is_found_out(deed, verb, size, make):
    bench, verb = make(size), VERBS[verb]
    verb.prepare(bench)
    error = run(bench, verb, Rule("preadv", deed))
    assert error is not None
    assert error.errno == EIO
    assert "not what was written" in str(error)
    expect_at_rest(bench)
    expect_works(bench, verb)


@pytest.fixture
def sampled(make) -> Bench:
    bench = make(checksums="sampled")
    bench.store.write(LONG, np.arange(LONG_BYTES // 4, dtype=np.float32)).result()
    return bench


def is_found(bench: Bench, at: int, nbytes: int) -> bool:
    """Whether wrong bytes from `at` on are noticed, of what is written now."""
    value = np.full(LONG_BYTES, at % 251, np.uint8).view(np.float32)
    bench.store.write(LONG, value).result()
    (file,) = bench.store.chunk_files(LONG)
    flip(file, at, nbytes)
    try:
        bench.store.read(LONG).result()
    except StorageError as error:
        assert "not what was written" in str(error)
        return True
    return False


@pytest.mark.sampled(2)
@pytest.mark.parametrize("at", [0, 1, 4095, 100_001, LONG_BYTES - STRIPE_BYTES])
def test_samples_always_show_a_wrong_stripe(at, sampled):
    assert all(is_found(sampled, at, STRIPE_BYTES) for _ in range(NUM_WINDOWS))


@pytest.mark.parametrize("at", [3, STRIPE_BYTES + 3 * WINDOW_BYTES, LONG_BYTES - 1])
def test_samples_show_a_wrong_byte_in_one_of_eight_writes(at, sampled):
    assert sum(is_found(sampled, at, 1) for _ in range(NUM_WINDOWS)) == 1


def test_samples_are_everything_of_small_arrays(make):
    bench = make(checksums="sampled")
    bench.fill()
    for value in (bench.new, bench.old) * NUM_WINDOWS:
        bench.write(value)
        flip(bench.chunks[0], 5, 1)
        with pytest.raises(StorageError, match="not what was written"):
            bench.read()


@pytest.mark.parametrize("size", SIZES)
def test_without_checksums_sizes_are_compared_still(size, make):
    bench = make(size, checksums="off")
    bench.fill()
    np.testing.assert_array_equal(bench.read(), bench.old)
    _cut(1)(bench.chunks)
    with pytest.raises(StorageError, match="bytes instead of"):
        bench.read()
    eventually(lambda: bench.store.ledger.used_bytes)
    expect_works(bench, VERBS["overwrite"])
