"""Checkpoints in object storage, on a folder that is used like a bucket."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from tests.unit.checkpoint.cases import ARRAYS, EMBED, SavedEngine, advance, flipped
from zinf.checkpoint import Checkpoints, Saved, as_place, read_arrays, write_arrays
from zinf.checkpoint.bucket import store as bucket_store
from zinf.checkpoint.bucket.save import NUM_COPIES, ObjectSave, ObjectWriter
from zinf.checkpoint.bucket.store import Store
from zinf.checkpoint.place import ObjectFolder
from zinf.checkpoint.share import shares_of
from zinf.core.memory import StorageError
from zinf.core.program import Tier


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file://{tmp_path}/bucket/run"


@pytest.fixture
def engine(open_residents) -> SavedEngine:
    return SavedEngine(open_residents([Tier.NVME, Tier.HOST, Tier.DEVICE]), {})


def objects(url: str) -> list[str]:
    place = as_place(url)
    assert isinstance(place, ObjectFolder)
    return Store(place).names()


def test_urls_are_told_from_paths(tmp_path):
    assert as_place("s3://b/runs/a/") == ObjectFolder("s3", "b", "runs/a")
    assert as_place("gs://b") / "3" == ObjectFolder("gs", "b", "3")
    folder = as_place("s3://b/runs/a") / "3"
    assert str(folder) == "s3://b/runs/a/3"
    assert (folder.parent, folder.name) == (as_place("s3://b/runs/a"), "3")
    assert as_place(str(tmp_path)) == tmp_path
    assert as_place("runs/a") == Path("runs/a").absolute()
    for wrong in ("s3://", "s3:///a", "file://runs/a", "file:///"):
        with pytest.raises(ValueError, match="The address of checkpoints .* is not"):
            as_place(wrong)
    with pytest.raises(ValueError, match="https://a/b: zinf knows s3://"):
        as_place("https://a/b")


def test_what_is_uploaded_is_a_checkpoint_of_folders_and_read_on_any_tier(
    url, engine, open_residents, tmp_path
):
    write_arrays(f"{url}/a", engine.residents, {"step": 3}, [1])
    folder = tmp_path / "folder"
    write_arrays(folder, engine.residents, {"step": 3}, [1])
    files = [p.relative_to(folder) for p in folder.rglob("*") if p.is_file()]
    assert sorted(map(str, files)) == objects(f"{url}/a")
    for file in files:
        uploaded = (tmp_path / "bucket/run/a" / file).read_bytes()
        assert uploaded == (folder / file).read_bytes()
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


def test_a_save_waits_for_no_step_of_arrays_on_nvme_and_leaves_no_link(
    url, engine, monkeypatch, tmp_path
):
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
        assert checkpoints.last_save.snapshot.linked
        engine.residents.write(EMBED, ARRAYS[EMBED] + 2)
        gate.set()
        checkpoints.wait()
        checkpoints.restore(engine)
    np.testing.assert_array_equal(engine.residents.read(EMBED), ARRAYS[EMBED] + 1)
    bucket = [p for p in (tmp_path / "bucket").rglob("*") if p.is_file()]
    assert {p.stat().st_nlink for p in bucket} == {1}
    assert list((tmp_path / "nvme0").rglob("saving-*")) == []


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
        monkeypatch.setattr(Store, "clear", lambda self: None)
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


def test_other_objects_are_left_alone(url, tmp_path):
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
    content = flipped(chunk.read_bytes(), 5)
    chunk.write_bytes(content)
    with Saved(f"{url}/a") as saved:
        (damage,) = saved.verify()
        assert damage.array == EMBED and "checksum" in damage.found
        with pytest.raises(StorageError, match="checksum .* instead of"):
            saved.read(EMBED)
        chunk.write_bytes(content[:-4])
        with pytest.raises(StorageError, match="less than 192 bytes|OUT_OF_RANGE"):
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
    assert before < ledger.peak_bytes <= before + save.held_bytes[Tier.HOST]


class Answers(BaseHTTPRequestHandler):
    """A server of S3 that refuses everything."""

    code, kind = 403, b"AccessDenied"

    def do_GET(self) -> None:
        body = b"<Error><Code>" + self.kind + b"</Code><Message>no</Message></Error>"
        self.send_response(self.code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_PUT = do_HEAD = do_GET

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def server(monkeypatch) -> Iterator[str]:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "x")
    hasty = {"max_retries": 1, "initial_delay": "1ms", "max_delay": "1ms"}
    monkeypatch.setattr(bucket_store, "PROMPT", hasty)
    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as opened:
        thread = threading.Thread(target=opened.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{opened.server_port}"
        opened.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("code", "kind", "bucket", "words"),
    [
        (403, b"AccessDenied", "bucket", "access is denied.*AWS_ACCESS_KEY_ID"),
        (404, b"NoSuchBucket", "bucket", "there is no bucket 'bucket'. Make it"),
        (0, b"", "bucket", "http://127.0.0.1:1 cannot be reached"),
        (404, b"", "b", "Invalid S3 bucket name.*Name a bucket"),
    ],
)
def test_storage_that_cannot_be_used_says_what_is_needed(
    code, kind, bucket, words, server, monkeypatch
):
    monkeypatch.setattr(Answers, "code", code)
    monkeypatch.setattr(Answers, "kind", kind)
    endpoint = server if code else "http://127.0.0.1:1"
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    with pytest.raises(StorageError, match=words):
        Checkpoints(f"s3://{bucket}/run")
