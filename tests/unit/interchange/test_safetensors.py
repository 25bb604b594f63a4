"""Parameters go out as safetensors and come in again, bit for bit."""

import errno
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import optax
import pytest
import safetensors
from safetensors.numpy import save_file

import zinf
from tests.robustness.small import content
from tests.unit.interchange.models import (
    BATCH,
    BF16,
    DIM,
    ON_DEVICE,
    assert_same_trees,
    draw,
    flat,
    init,
    loss_fn,
    on_nvme,
)
from zinf.checkpoint.saved import Saved
from zinf.core.interchange import (
    export_safetensors,
    import_safetensors,
    safetensors_files,
)
from zinf.core.interchange.safetensors_files import OpenedFile, SafetensorsFiles
from zinf.core.memory import BudgetExceeded, StorageError
from zinf.core.memory.nvme.system import System
from zinf.core.program import Tier

NUMPY = {"BF16": ml_dtypes.bfloat16, "F16": np.float16, "F32": np.float32}
NUMPY |= {"I32": np.int32}


def by_library(folder: Path) -> dict[str, np.ndarray]:
    """The tensors of an export, as the safetensors library finds them."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        for name, entry in safetensors.deserialize(path.read_bytes()):
            array = np.frombuffer(entry["data"], NUMPY[entry["dtype"]])
            assert name not in found
            found[name] = array.reshape(entry["shape"])
    return found


def assert_same(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert found.keys() == expected.keys()
    assert_same_trees(found, dict(expected))


@pytest.fixture(scope="module")
def exported(trained, folder) -> Path:
    export_safetensors(trained, folder / "exported")
    return folder / "exported"


def test_an_export_of_a_tied_partly_frozen_model_is_its_parameters(
    trained, exported, saved_folder, tmp_path
):
    params = flat(trained.params())
    # Masters, frozen compute copies and integers, the tied embedding once.
    assert {x.dtype.name for x in params.values()} == {"float32", "bfloat16", "int32"}
    assert_same(by_library(exported), params)
    assert [path.name for path in exported.iterdir()] == ["model.safetensors"]
    with Saved(saved_folder) as saved:
        export_safetensors(saved, tmp_path / "out")
    file = "model.safetensors"
    assert (tmp_path / "out" / file).read_bytes() == (exported / file).read_bytes()


def test_an_average_is_exported_in_place_of_the_weights(start, saved_folder, tmp_path):
    """Of an engine and of its checkpoint; what has no average is as it is kept."""
    tx = optax.chain(optax.adamw(1e-2), zinf.with_ema(0.5))
    engine = start(on_nvme(tmp_path / "nvme", **BF16), tx=tx)
    engine.step(draw())
    names = ("embed", "blocks/w", "scale")
    expected = {x.replace("/", "."): engine.get(x, "ema") for x in names}
    plain = flat(engine.params())
    assert all(not np.array_equal(plain[name], x) for name, x in expected.items())
    export_safetensors(engine, tmp_path / "out", kind="ema")
    assert_same(by_library(tmp_path / "out"), plain | expected)
    engine.save(tmp_path / "saved")
    with Saved(tmp_path / "saved") as saved:
        export_safetensors(saved, tmp_path / "again", kind="ema")
        export_safetensors(saved, tmp_path / "plain")
        with pytest.raises(ValueError, match="'other'; it has 'ema'"):
            export_safetensors(saved, tmp_path / "other", kind="other")
        saved.scalars["averages"]["ema"]["embed"] = 7
        with pytest.raises(ValueError, match="state7/embed is an average of 'embed'"):
            export_safetensors(saved, tmp_path / "other", kind="ema")
    assert_same(by_library(tmp_path / "again"), plain | expected)
    assert_same(by_library(tmp_path / "plain"), plain)
    with (
        Saved(saved_folder) as saved,
        pytest.raises(ValueError, match="it has none. Runs with optimizer.ema"),
    ):
        export_safetensors(saved, tmp_path / "other", kind="ema")


@pytest.mark.parametrize("limit", [1, 24 * DIM * 4])
def test_files_are_no_larger_than_asked_and_the_index_is_right(
    limit, trained, tmp_path
):
    """A tensor that is larger has a file of its own; the embedding fits exactly."""
    params = flat(trained.params())
    export_safetensors(trained, tmp_path / "out", max_shard_bytes=limit)
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    total = sum(x.nbytes for x in params.values())
    assert index["metadata"]["total_size"] == total > limit
    assert index["weight_map"].keys() == params.keys()
    files = sorted(set(index["weight_map"].values()))
    count = len(params) if limit == 1 else 4
    assert files == [
        f"model-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)
    ]
    for file in files:
        inside = [n for n, f in index["weight_map"].items() if f == file]
        assert len(inside) == 1 or sum(params[name].nbytes for name in inside) <= limit
        with safetensors.safe_open(tmp_path / "out" / file, "np") as opened:
            assert set(opened.keys()) == set(inside)
    assert_same(by_library(tmp_path / "out"), params)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_chosen_dtype_is_that_of_all_floats_and_names_may_be_given(
    dtype, trained, tmp_path
):
    names = {"embed": "lm_head.weight"}
    export_safetensors(trained, tmp_path / "out", dtype=dtype, names=names)
    expected = {
        names.get(name, name): x if x.dtype == np.int32 else x.astype(np.dtype(dtype))
        for name, x in flat(trained.params()).items()
    }
    assert_same(by_library(tmp_path / "out"), expected)


def test_an_export_that_is_refused_writes_nothing(trained, tmp_path, monkeypatch):
    out = tmp_path / "out"
    for dtype in ("int32", "float24"):
        with pytest.raises((ValueError, TypeError), match=dtype):
            export_safetensors(trained, out, dtype=dtype)
    with pytest.raises(ValueError, match="max_shard_bytes is 0"):
        export_safetensors(trained, out, max_shard_bytes=0)
    with monkeypatch.context() as patch:
        usage = type("Usage", (), {"free": 10})
        patch.setattr("shutil.disk_usage", lambda _: usage)
        with pytest.raises(StorageError, match="and 10 are free"):
            export_safetensors(trained, out)
    ledger = trained.stores[Tier.HOST].ledger
    with monkeypatch.context() as patch:
        patch.setattr(ledger, "_capacity_bytes", ledger.used_bytes + DIM)
        with pytest.raises(BudgetExceeded, match="exporting parameters"):
            export_safetensors(trained, out)
    with monkeypatch.context() as patch:
        patch.setattr("jax.process_count", lambda: 2)
        for use in (export_safetensors, import_safetensors):
            with pytest.raises(NotImplementedError, match="zinf checkpoint export"):
                use(trained, out)
    unplaced = zinf.initialize(loss_fn, init, optax.sgd(0.1), ON_DEVICE)
    with pytest.raises(ValueError, match="have no place before the first batch"):
        export_safetensors(unplaced, out)
    assert list(tmp_path.iterdir()) == []
    out.mkdir()
    (out / "mine").write_text("kept")
    with pytest.raises(FileExistsError, match="is not overwritten"):
        export_safetensors(trained, out)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (out / "mine").read_text() == "kept"


@pytest.mark.parametrize("call", ["allocate", "pwritev", "sync"])
def test_a_full_drive_is_named_and_leaves_nothing(call, trained, tmp_path, monkeypatch):
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    system = System(**{call: full})
    monkeypatch.setattr("zinf.core.memory.nvme.drive.System", lambda: system)
    with pytest.raises(StorageError, match="No space left.*Free space") as failed:
        export_safetensors(trained, tmp_path / "out")
    assert failed.value.errno == errno.ENOSPC
    assert str(failed.value.filename).endswith("model.safetensors")
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(params=["nvme", "device"])
def other(request, start, tmp_path):
    """An engine of the same model with other values, on a tier."""
    config = on_nvme(tmp_path / "other") if request.param == "nvme" else ON_DEVICE
    return start({**config, **BF16}, lambda: init(1))


def test_what_was_exported_is_imported_onto_any_tier_or_initial_values_stay(
    other, trained, exported, start, tmp_path, monkeypatch
):
    before = content(other)
    read, calls = SafetensorsFiles.read, []

    def fail_later(self, name, box):
        calls.append(name)
        if len(calls) == 3:
            raise StorageError(5, "damaged")
        return read(self, name, box)

    with monkeypatch.context() as patch:
        patch.setattr(SafetensorsFiles, "read", fail_later)
        with pytest.raises(StorageError, match="damaged") as failed:
            import_safetensors(other, exported)
    assert "initial values" in failed.value.__notes__[0]
    assert content(other) == before
    import_safetensors(other, exported)
    assert_same_trees(other.params(), trained.params())
    # As if it were initialized with them: compute copies and optimizer state too.
    params = trained.params()
    fresh = start(on_nvme(tmp_path / "fresh", **BF16), lambda: params)
    assert content(other) == content(fresh)
    assert other.step(draw())["loss"] == fresh.step(draw())["loss"]
    with pytest.raises(ValueError, match="has taken 1 steps"):
        import_safetensors(other, exported)


@pytest.mark.slow
def test_state_that_is_made_of_parameters_is_made_of_the_imported(
    start, tmp_path, exported, trained
):
    tx = optax.contrib.schedule_free_sgd(1e-2)
    params = trained.params()
    other = start(on_nvme(tmp_path / "a", **BF16), lambda: init(1), tx)
    import_safetensors(other, exported)
    fresh = start(on_nvme(tmp_path / "b", **BF16), lambda: params, tx)
    assert content(other) == content(fresh)


def test_narrow_tensors_are_widened_exactly(start, tmp_path, trained):
    export_safetensors(trained, tmp_path / "out", dtype="bfloat16")
    engine = start(on_nvme(tmp_path / "nvme"), lambda: init(1))
    import_safetensors(engine, tmp_path / "out")
    expected = {
        name: x if x.dtype == np.int32 else x.astype(ml_dtypes.bfloat16).astype("f4")
        for name, x in flat(trained.params()).items()
    }
    assert_same(flat(engine.params()), expected)


def test_tensors_are_rounded_kept_and_ignored_only_if_that_is_allowed(
    start, tmp_path, trained
):
    names = {"embed": "extra"}
    export_safetensors(trained, tmp_path / "out", dtype="float32", names=names)
    engine = start(on_nvme(tmp_path / "nvme", **BF16), lambda: init(1))
    before, kept = content(engine), engine.params()["embed"]
    words = r"'embed' \(as 'embed'\)[^$]*'adapters/0' is bfloat16 here and float32"
    with pytest.raises(ValueError, match=words):
        import_safetensors(engine, tmp_path / "out")
    assert content(engine) == before
    terms = {"may_round": True, "keep": ["emb*"], "ignore": ["ex*"]}
    import_safetensors(engine, tmp_path / "out", **terms)
    assert_same_trees(engine.params(), {**trained.params(), "embed": kept})


def test_a_model_on_several_devices_goes_out_whole_and_comes_in_cut(tmp_path):
    mesh, tx = zinf.make_mesh(jax.devices()[:BATCH]), optax.adamw(1e-2)

    def start_on_mesh(name: str, params: Callable[[], Any]) -> zinf.Engine:
        config = on_nvme(tmp_path / name, **BF16)
        return zinf.initialize(loss_fn, params, tx, config, batch=draw(), mesh=mesh)

    engine = start_on_mesh("a", init)
    layouts = engine.residents.layouts
    cut = [layouts.of(a) for a, s in engine.residents.specs.items() if s.shape]
    assert all(layout.share.num_devices == BATCH for layout in cut)
    # By columns, and where there are none by rows.
    assert {layout.has_whole_rows for layout in cut} == {True, False}
    export_safetensors(engine, tmp_path / "out")
    assert_same(by_library(tmp_path / "out"), flat(engine.params()))
    other = start_on_mesh("b", lambda: init(1))
    import_safetensors(other, tmp_path / "out")
    assert content(other) == content(engine)
    engine.close()
    other.close()


INDEX = "model.safetensors.index.json"
ELSEWHERE = ["../up.safetensors", "/etc/x.safetensors", "a/b.safetensors", "..", "", 3]
ELSEWHERE += ["\0.safetensors", "x.pickle"]


def test_folders_that_hold_no_sound_model_are_refused(exported, tmp_path, golden):
    model = exported / "model.safetensors"
    names = sorted(by_library(exported))
    whole = dict.fromkeys(names, model.name)
    # By what is wrong: the weight_map of the index, and the files beside it.
    folders: dict[str, tuple[Any, list[str]]] = {
        "empty": (None, []),
        "absent": ({"embed": "other.safetensors"}, []),
        "list": ([], []),
        "null": (None, ["index without a map"]),
        "more": (whole | {"more": model.name}, [model.name]),
        "fewer": (dict.fromkeys(names[1:], model.name), [model.name]),
        "twice": (None, ["a.safetensors", "b.safetensors"]),
        **{f"elsewhere {i}": ({"x": x}, []) for i, x in enumerate(ELSEWHERE)},
    }
    lines = []
    for name, (weights, files) in folders.items():
        folder = tmp_path / name
        folder.mkdir()
        if weights is not None or name == "null":
            (folder / INDEX).write_text(json.dumps({"weight_map": weights}))
        for file in files:
            (folder / file).symlink_to(model)
        with pytest.raises((ValueError, OSError)) as refused:
            SafetensorsFiles(folder)
        lines.append(str(refused.value).replace(str(tmp_path), ""))
    os.mkfifo(tmp_path / "model.safetensors")
    for path in ("model.safetensors", "nowhere"):  # A pipe is not waited for.
        with pytest.raises((ValueError, OSError)) as refused:
            SafetensorsFiles(tmp_path / path)
        lines.append(str(refused.value).replace(str(tmp_path), ""))
    golden.check("folders.txt", "\n".join(lines))
    (tmp_path / "more" / INDEX).write_text(json.dumps({"weight_map": whole}))
    with SafetensorsFiles(tmp_path / "more") as files:
        assert set(files.specs) == set(names)


def test_a_file_that_is_cut_off_or_replaced_after_it_was_opened_is_named(
    exported, tmp_path
):
    file = tmp_path / "model.safetensors"
    content = (exported / file.name).read_bytes()
    file.write_bytes(content)
    with SafetensorsFiles(file) as files:
        last = max(files.specs, key=lambda name: files._stored[name].start)
        box = tuple((0, size) for size in files.specs[last].shape)
        files.read(last, box)
        os.truncate(file, file.stat().st_size - 1)
        with pytest.raises(StorageError, match="the file ends at byte") as failed:
            files.read(last, box)
        assert failed.value.filename == str(file)
        (tmp_path / "other").write_bytes(content)
        os.replace(tmp_path / "other", file)
        with pytest.raises(StorageError, match="another file has taken its place"):
            files.read(last, box)


@pytest.mark.parametrize("is_cached", [True, False])
def test_a_tensor_is_read_past_the_page_cache_if_it_is_not_there(
    is_cached, tmp_path, monkeypatch
):
    """In spans that threads read at once, from wherever the tensor begins."""
    words = {"a": np.arange(7, dtype=np.uint8), "b": np.arange(10**7 // 4)}
    file, together, lasting = tmp_path / "x.safetensors", threading.Barrier(2), []
    save_file(words, file)
    read = OpenedFile._read

    def noting(opened, start, memory, mover):
        if mover.only_cached and not is_cached:
            raise BlockingIOError
        if memory.size > 2**20:
            together.wait(60)
            lasting.append(mover.only_cached)
        read(opened, start, memory, mover)

    monkeypatch.setattr(OpenedFile, "_read", noting)
    monkeypatch.setattr(safetensors_files, "SPAN_BYTES", 10**7)
    with SafetensorsFiles(file) as files:
        for name, value in words.items():
            found = files.read(name, ((0, len(value)),))
            np.testing.assert_array_equal(found, value)
    assert lasting == [is_cached] * 2
