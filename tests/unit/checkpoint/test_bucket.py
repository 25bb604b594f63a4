"""Checkpoints in object storage, on a folder that is used like a bucket."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from tests.unit.checkpoint.cases import ARRAYS, SavedEngine
from zinf.checkpoint import Checkpoints, Saved, as_place, read_arrays, write_arrays
from zinf.checkpoint.bucket import store as bucket_store
from zinf.checkpoint.bucket.save import NUM_COPIES, ObjectSave, ObjectWriter
from zinf.checkpoint.bucket.store import Store
from zinf.checkpoint.place import ObjectFolder
from zinf.checkpoint.share import shares_of
from zinf.memory import StorageError
from zinf.program import ArrayId, Role, Tier

EMBED = ArrayId(Role.PARAM, "embed")


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file://{tmp_path}/bucket/run"


@pytest.fixture
def engine(open_residents) -> SavedEngine:
    return SavedEngine(open_residents([Tier.NVME, Tier.HOST, Tier.DEVICE]), {})


def advance(engine: SavedEngine, step: int) -> None:
    if engine.pending_save is not None:
        engine.pending_save.result()
    engine.residents.write(EMBED, ARRAYS[EMBED] + step)
    engine.state = {"num_steps": step}


def objects(url: str) -> list[str]:
    place = as_place(url)
    assert isinstance(place, ObjectFolder)
    return Store(place).names()


def test_urls_are_told_from_paths(tmp_path):
    assert as_place("s3://b/runs/a/") == ObjectFolder("s3", "b", "runs/a")
    assert as_place("gs://b") / "3" == ObjectFolder("gs", "b", "3")
    assert str(as_place("s3://b/runs/a") / "3") == "s3://b/runs/a/3"
    assert as_place(str(tmp_path)) == tmp_path
    assert as_place("runs/a") == Path("runs/a").absolute()
    for wrong in ("s3://", "s3:///a", "file://runs/a", "file:///"):
        with pytest.raises(ValueError, match="The address of checkpoints .* is not"):
            as_place(wrong)
    with pytest.raises(ValueError, match="https://a/b: zinf knows s3://"):
        as_place("https://a/b")


def test_what_is_saved_is_read_on_any_tier(url, engine, open_residents):
    write_arrays(f"{url}/a", engine.residents, {"step": 3}, [1])
    with Saved(f"{url}/a") as saved:
        assert saved.data == [1]
        assert list(saved.verify()) == []
        np.testing.assert_array_equal(saved.read(EMBED, (2, 5)), ARRAYS[EMBED][2:5])
    for tier in Tier:
        fresh = open_residents([tier])
        fresh.write(EMBED, np.zeros_like(ARRAYS[EMBED]))
        assert read_arrays(f"{url}/a", fresh) == {"step": 3}
        for array, value in ARRAYS.items():
            assert fresh.read(array).tobytes() == value.tobytes()
    with pytest.raises(FileExistsError, match="never overwritten"):
        write_arrays(f"{url}/a", engine.residents, {})


def test_it_is_the_format_of_folders(url, engine, tmp_path):
    """What is uploaded has the bytes of what is written."""
    write_arrays(f"{url}/a", engine.residents, {"step": 3})
    write_arrays(tmp_path / "folder", engine.residents, {"step": 3})
    names = objects(f"{url}/a")
    folder = tmp_path / "folder"
    files = [p.relative_to(folder) for p in folder.rglob("*") if p.is_file()]
    assert sorted(map(str, files)) == names
    for name in names:
        uploaded = (tmp_path / "bucket/run/a" / name).read_bytes()
        assert uploaded == (folder / name).read_bytes()


def test_nothing_is_linked_into_a_bucket_and_nothing_stays_beside_the_tier(
    url, engine, tmp_path
):
    with Checkpoints(url) as checkpoints:
        checkpoints.save(1, engine)
        checkpoints.wait()
        assert checkpoints.last_save.snapshot.linked
    bucket = [p for p in (tmp_path / "bucket").rglob("*") if p.is_file()]
    assert {p.stat().st_nlink for p in bucket} == {1}
    assert list((tmp_path / "nvme0").rglob("saving-*")) == []


def test_the_newest_are_kept_and_restored(url, engine):
    with Checkpoints(url, keep=2) as checkpoints:
        assert checkpoints.latest_step() is None
        for step in (5, 10, 15):
            advance(engine, step)
            checkpoints.save(step, engine, {"position": step})
        assert checkpoints.latest_step() == 15
        checkpoints.wait()
        with pytest.raises(ValueError, match="has a checkpoint of step 15 already"):
            checkpoints.save(15, engine)
    assert {name.partition("/")[0] for name in objects(url)} == {"10", "15"}
    with Checkpoints(url, keep=2) as again:
        assert again.latest_step() == 15
        advance(engine, 99)
        assert again.restore(engine) == {"position": 15}
        assert engine.state == {"num_steps": 15}
        np.testing.assert_array_equal(engine.residents.read(EMBED), ARRAYS[EMBED] + 15)
        assert again.restore(engine, 10) == {"position": 10}


def test_a_save_waits_for_no_step_of_arrays_on_nvme(url, engine, monkeypatch):
    """The upload has the content of the save's instant; the tier goes on."""
    gate = threading.Event()
    adopt = ObjectWriter.adopt

    def late(self, linked):
        assert gate.wait(30)
        return adopt(self, linked)

    monkeypatch.setattr(ObjectWriter, "adopt", late)
    assert engine.residents.homes[EMBED] == Tier.NVME
    with Checkpoints(url) as checkpoints:
        advance(engine, 1)
        checkpoints.save(1, engine)
        engine.residents.write(EMBED, ARRAYS[EMBED] + 2)
        gate.set()
        checkpoints.wait()
        checkpoints.restore(engine)
    np.testing.assert_array_equal(engine.residents.read(EMBED), ARRAYS[EMBED] + 1)


class Died(Exception): ...


@pytest.mark.parametrize("num_puts", [0, 5, -1])
def test_a_save_that_is_cut_short_is_no_checkpoint(
    url, engine, monkeypatch, caplog, num_puts
):
    """However many objects were uploaded, -1 being all but the manifest."""
    with Checkpoints(url) as checkpoints:
        advance(engine, 1)
        checkpoints.save(1, engine)
        checkpoints.wait()
        num_objects = len(objects(url))
        num_puts %= num_objects
        put, left = Store.put, iter(range(num_puts))

        def dies(self, name, content):
            if next(left, None) is None:
                raise Died
            return put(self, name, content)

        monkeypatch.setattr(Store, "put", dies)
        monkeypatch.setattr(ObjectSave, "remove", lambda self: None)
        advance(engine, 2)
        checkpoints.save(2, engine)
        with pytest.raises(Died):
            checkpoints.wait()
        assert len(objects(url)) == num_objects + num_puts
        assert checkpoints.latest_step() == 1
    monkeypatch.undo()
    with Checkpoints(url) as again:
        assert again.latest_step() == 1
        again.restore(engine)
        assert engine.state == {"num_steps": 1}
    assert len(objects(url)) == num_objects
    assert ("cut short" in caplog.text) == (num_puts > 0)


def test_a_save_that_fails_deletes_what_it_uploaded(url, engine, monkeypatch):
    put = Store.put

    def refuses(self, name, content):
        if name.endswith("manifest.json") or "embed" not in name:
            return put(self, name, content)
        raise self.failure("Cannot save", ValueError("UNAVAILABLE: no more"))

    monkeypatch.setattr(Store, "put", refuses)
    ledgers = [engine.residents.stores[tier].ledger for tier in Tier]
    used = [ledger.used_bytes for ledger in ledgers]
    with Checkpoints(url) as checkpoints:
        checkpoints.save(1, engine)
        with pytest.raises(StorageError, match="UNAVAILABLE: no more. Check the"):
            checkpoints.wait()
        assert checkpoints.latest_step() is None
    assert objects(url) == []
    assert [ledger.used_bytes for ledger in ledgers] == used


def test_other_objects_are_left_alone(url, engine, tmp_path):
    mine = tmp_path / "bucket/run/7/state/mine"
    notes = tmp_path / "bucket/run/8/notes"
    for path in (mine, notes):
        path.parent.mkdir(parents=True)
        path.write_text("x")
    with Checkpoints(url) as checkpoints:
        assert checkpoints.latest_step() is None
    # Neither has the marker of a save by zinf.
    assert mine.exists() and notes.exists()


def test_damage_is_named(url, engine, tmp_path):
    write_arrays(f"{url}/a", engine.residents, {})
    folder = tmp_path / "bucket/run/a/param/embed"
    (chunk,) = folder.glob("c.*")
    content = bytearray(chunk.read_bytes())
    content[5] ^= 1
    chunk.write_bytes(content)
    with Saved(f"{url}/a") as saved:
        (damage,) = saved.verify()
        assert damage.array == EMBED and "checksum" in damage.found
        with pytest.raises(StorageError, match="checksum .* instead of"):
            saved.read(EMBED)
        chunk.write_bytes(content[:-4])
        with pytest.raises(StorageError):
            saved.read(EMBED)
        chunk.unlink()
        with pytest.raises(StorageError, match="there is no such object"):
            saved.read(EMBED)
    (tmp_path / "bucket/run/a/manifest.json").unlink()
    with pytest.raises(FileNotFoundError, match="has no manifest.json"):
        Saved(f"{url}/a")


def test_uploads_are_counted_in_the_budget_of_the_host(url, open_residents):
    residents = open_residents([Tier.NVME])
    place = as_place(url)
    assert isinstance(place, ObjectFolder)
    save = ObjectSave(place, residents, shares_of(residents))
    save.begin()
    largest = max(linked.share.grid.chunk_bytes for linked in save.snapshot.linked)
    assert save.held_bytes[Tier.HOST] == 2 * NUM_COPIES * largest
    ledger = residents.stores[Tier.HOST].ledger
    before = ledger.peak_bytes
    save.finish()
    assert ledger.peak_bytes - before <= save.held_bytes[Tier.HOST]
    assert ledger.peak_bytes > before


class Answers(BaseHTTPRequestHandler):
    """A server of S3 that refuses everything."""

    code = 403
    body = b"<Error><Code>AccessDenied</Code><Message>no</Message></Error>"

    def do_GET(self) -> None:
        self.send_response(self.code)
        self.send_header("Content-Length", str(len(self.body)))
        self.end_headers()
        self.wfile.write(self.body)

    do_PUT = do_HEAD = do_GET

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def server(monkeypatch) -> Iterator[type[Answers]]:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "x")
    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as opened:
        thread = threading.Thread(target=opened.serve_forever)
        thread.start()
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{opened.server_port}")
        yield Answers
        opened.shutdown()
        thread.join()


def test_denied_access_says_which_credentials_are_needed(server):
    with pytest.raises(StorageError, match="access is denied.*AWS_ACCESS_KEY_ID"):
        Checkpoints("s3://bucket/run")


def test_a_missing_bucket_is_named(server, monkeypatch):
    monkeypatch.setattr(server, "code", 404)
    body = b"<Error><Code>NoSuchBucket</Code><Message>no</Message></Error>"
    monkeypatch.setattr(server, "body", body)
    with pytest.raises(StorageError, match="there is no bucket 'bucket'. Make it"):
        Checkpoints("s3://bucket/run")


def test_an_endpoint_that_cannot_be_reached_is_named(server, monkeypatch):
    hasty = {"max_retries": 1, "initial_delay": "1ms", "max_delay": "1ms"}
    monkeypatch.setattr(bucket_store, "PROMPT", hasty)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    with pytest.raises(StorageError, match="http://127.0.0.1:1 cannot be reached"):
        Checkpoints("s3://bucket/run")


def test_a_wrong_name_of_a_bucket_is_refused():
    with pytest.raises(StorageError, match="Invalid S3 bucket name.*Name a bucket"):
        Checkpoints("s3://b/run")
