"""Parameters go out as safetensors and come in again, bit for bit."""

import errno
import json
import os
from pathlib import Path

import ml_dtypes
import numpy as np
import optax
import pytest
import safetensors

from tests.robustness.small import content
from tests.unit.interchange.models import (
    BF16,
    DIM,
    ON_DEVICE,
    assert_same_trees,
    draw,
    flat,
    init,
    on_nvme,
)
from zinf.checkpoint.saved import Saved
from zinf.interchange import export_safetensors, import_safetensors
from zinf.interchange.safetensors_files import SafetensorsFiles
from zinf.memory import BudgetExceeded, StorageError
from zinf.memory.nvme.system import System
from zinf.program import Tier

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


def test_an_export_of_a_tied_partly_frozen_model_is_its_parameters(trained, exported):
    params = flat(trained.params())
    # Masters, frozen compute copies and integers, the tied embedding once.
    assert {x.dtype.name for x in params.values()} == {"float32", "bfloat16", "int32"}
    assert_same(by_library(exported), params)
    assert [path.name for path in exported.iterdir()] == ["model.safetensors"]


def test_a_checkpoint_exports_the_same_files_as_its_engine(
    exported, saved_folder, tmp_path
):
    with Saved(saved_folder) as saved:
        export_safetensors(saved, tmp_path / "out")
    file = "model.safetensors"
    assert (tmp_path / "out" / file).read_bytes() == (exported / file).read_bytes()


def test_files_are_no_larger_than_asked_and_the_index_is_right(trained, tmp_path):
    params = flat(trained.params())
    limit = max(x.nbytes for x in params.values())
    export_safetensors(trained, tmp_path / "out", max_shard_bytes=limit)
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    total = sum(x.nbytes for x in params.values())
    assert index["metadata"]["total_size"] == total > limit
    assert index["weight_map"].keys() == params.keys()
    files = sorted(set(index["weight_map"].values()))
    count = len(files)
    assert count > 1
    assert files == [
        f"model-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)
    ]
    for file in files:
        inside = [n for n, f in index["weight_map"].items() if f == file]
        assert sum(params[name].nbytes for name in inside) <= limit
        with safetensors.safe_open(tmp_path / "out" / file, "np") as opened:
            assert set(opened.keys()) == set(inside)
    assert_same(by_library(tmp_path / "out"), params)


def test_a_tensor_larger_than_a_file_has_one_of_its_own(trained, tmp_path):
    export_safetensors(trained, tmp_path / "out", max_shard_bytes=1)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == len(
        flat(trained.params())
    )
    assert_same(by_library(tmp_path / "out"), flat(trained.params()))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_a_chosen_dtype_is_that_of_all_floats_rounded_to_nearest(
    dtype, trained, tmp_path
):
    export_safetensors(trained, tmp_path / "out", dtype=dtype)
    expected = {
        name: x if x.dtype == np.int32 else x.astype(np.dtype(dtype))
        for name, x in flat(trained.params()).items()
    }
    assert_same(by_library(tmp_path / "out"), expected)


def test_names_may_be_given(trained, tmp_path):
    export_safetensors(trained, tmp_path / "out", names={"embed": "lm_head.weight"})
    expected = flat(trained.params())
    expected["lm_head.weight"] = expected.pop("embed")
    assert_same(by_library(tmp_path / "out"), expected)


def test_a_dtype_that_is_none_is_refused_before_anything_is_written(trained, tmp_path):
    for dtype in ("int32", "float24"):
        with pytest.raises((ValueError, TypeError), match=dtype):
            export_safetensors(trained, tmp_path / "out", dtype=dtype)
    assert list(tmp_path.iterdir()) == []


def test_an_export_never_overwrites(trained, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("kept")
    with pytest.raises(FileExistsError, match="is not overwritten"):
        export_safetensors(trained, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (tmp_path / "out" / "mine").read_text() == "kept"


@pytest.mark.parametrize("call", ["allocate", "pwritev", "sync"])
def test_a_full_drive_is_named_and_leaves_nothing(call, trained, tmp_path, monkeypatch):
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    system = System(**{call: full})
    monkeypatch.setattr("zinf.memory.nvme.drive.System", lambda: system)
    with pytest.raises(StorageError, match="No space left.*Free space") as failed:
        export_safetensors(trained, tmp_path / "out")
    assert failed.value.errno == errno.ENOSPC
    assert str(failed.value.filename).endswith("model.safetensors")
    assert list(tmp_path.iterdir()) == []


def test_too_little_space_is_found_before_anything_is_written(
    trained, tmp_path, monkeypatch
):
    usage = type("Usage", (), {"free": 10})
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage)
    with pytest.raises(StorageError, match="and 10 are free"):
        export_safetensors(trained, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(params=["nvme", "device"])
def other(request, start, tmp_path):
    """An engine of the same model with other values, on a tier."""
    config = on_nvme(tmp_path / "other") if request.param == "nvme" else ON_DEVICE
    return start({**config, **BF16}, lambda: init(1))


@pytest.mark.sampled(2)
def test_what_was_exported_is_imported_onto_any_tier(
    other, trained, exported, start, tmp_path
):
    import_safetensors(other, exported)
    assert_same_trees(other.params(), trained.params())
    # As if it were initialized with them: compute copies and optimizer state too.
    params = trained.params()
    fresh = start(on_nvme(tmp_path / "fresh", **BF16), lambda: params)
    assert content(other) == content(fresh)
    assert other.step(draw())["loss"] == fresh.step(draw())["loss"]


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


def test_wide_tensors_are_rounded_only_if_that_is_allowed(start, tmp_path, trained):
    export_safetensors(trained, tmp_path / "out", dtype="float32")
    engine = start(on_nvme(tmp_path / "nvme", **BF16), lambda: init(1))
    before = content(engine)
    with pytest.raises(ValueError, match="'adapters/0' is bfloat16 here and float32"):
        import_safetensors(engine, tmp_path / "out")
    assert content(engine) == before
    import_safetensors(engine, tmp_path / "out", may_round=True)
    assert_same_trees(engine.params(), trained.params())


def test_leaves_may_be_kept_and_tensors_ignored(start, tmp_path, trained):
    rename = {"embed": "extra"}
    export_safetensors(trained, tmp_path / "out", names=rename)
    engine = start(on_nvme(tmp_path / "nvme", **BF16), lambda: init(1))
    kept = engine.params()["embed"]
    with pytest.raises(ValueError, match=r"'embed' \(as 'embed'\)"):
        import_safetensors(engine, tmp_path / "out")
    import_safetensors(engine, tmp_path / "out", keep=["emb*"], ignore=["ex*"])
    expected = {**trained.params(), "embed": kept}
    assert_same_trees(engine.params(), expected)


def test_parameters_are_imported_before_the_first_step_alone(trained, exported):
    before = content(trained)
    with pytest.raises(ValueError, match="has taken 1 steps"):
        import_safetensors(trained, exported)
    assert content(trained) == before


def test_an_import_that_fails_half_way_leaves_the_initial_values(
    other, exported, monkeypatch
):
    before = content(other)
    read, calls = SafetensorsFiles.read, []

    def fail_later(self, name, box):
        calls.append(name)
        if len(calls) == 3:
            raise StorageError(5, "damaged")
        return read(self, name, box)

    monkeypatch.setattr(SafetensorsFiles, "read", fail_later)
    with pytest.raises(StorageError, match="damaged") as failed:
        import_safetensors(other, exported)
    assert "initial values" in failed.value.__notes__[0]
    assert content(other) == before
    monkeypatch.undo()
    import_safetensors(other, exported)
    assert content(other) != before


def test_neither_way_exceeds_the_budget_of_the_host(trained, exported, tmp_path):
    ledger = trained.stores[Tier.HOST].ledger
    room = ledger._capacity_bytes
    ledger._capacity_bytes = ledger.used_bytes + DIM
    try:
        with pytest.raises(BudgetExceeded, match="exporting parameters"):
            export_safetensors(trained, tmp_path / "out")
    finally:
        ledger._capacity_bytes = room
    assert list(tmp_path.iterdir()) == []


def test_an_engine_without_a_place_says_so(tmp_path):
    import zinf
    from tests.unit.interchange.models import loss_fn

    engine = zinf.initialize(loss_fn, init, optax.sgd(0.1), ON_DEVICE)
    with pytest.raises(ValueError, match="have no place before the first batch"):
        export_safetensors(engine, tmp_path / "out")


def test_an_engine_of_several_processes_is_pointed_to_checkpoints(
    trained, tmp_path, monkeypatch
):
    monkeypatch.setattr("jax.process_count", lambda: 2)
    for use in (export_safetensors, import_safetensors):
        with pytest.raises(NotImplementedError, match="zinf checkpoint export"):
            use(trained, tmp_path / "out")


def write_index(folder: Path, weights: object) -> None:
    content = json.dumps({"weight_map": weights})
    (folder / "model.safetensors.index.json").write_text(content)


@pytest.mark.parametrize(
    "file",
    ["../up.safetensors", "/etc/x.safetensors", "a/b.safetensors", "..", "", 3]
    + ["\0.safetensors", "x.pickle"],
)
def test_an_index_that_points_elsewhere_is_refused(file, tmp_path):
    write_index(tmp_path, {"x": file})
    with pytest.raises(ValueError, match="names .*, no file"):
        SafetensorsFiles(tmp_path)


@pytest.mark.parametrize("weights", [[], None])
def test_an_index_without_a_sound_map_is_refused(weights, tmp_path):
    write_index(tmp_path, weights)
    with pytest.raises((ValueError, StorageError)):
        SafetensorsFiles(tmp_path)


def test_files_of_an_index_that_are_absent_are_named(tmp_path):
    write_index(tmp_path, {"embed": "other.safetensors"})
    with pytest.raises(FileNotFoundError, match="lacks other.safetensors, which"):
        SafetensorsFiles(tmp_path)


@pytest.mark.slow
def test_an_index_that_disagrees_with_the_files_is_refused(exported, tmp_path):
    file = tmp_path / "model.safetensors"
    file.symlink_to(exported / "model.safetensors")
    names = list(by_library(exported))
    write_index(tmp_path, dict.fromkeys([*names, "more"], file.name))
    with pytest.raises(ValueError, match="disagree about more"):
        SafetensorsFiles(tmp_path)
    write_index(tmp_path, dict.fromkeys(names[1:], file.name))
    with pytest.raises(ValueError, match=f"disagree about {names[0]}"):
        SafetensorsFiles(tmp_path)
    write_index(tmp_path, dict.fromkeys(names, file.name))
    with SafetensorsFiles(tmp_path) as files:
        assert set(files.specs) == set(names)


def test_what_is_no_file_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="is no file"):
        SafetensorsFiles(tmp_path)
    with pytest.raises(FileNotFoundError, match="has no .safetensors file"):
        SafetensorsFiles(tmp_path.parent)
    with pytest.raises(StorageError, match="No such file"):
        SafetensorsFiles(tmp_path / "absent")


def test_a_tensor_in_two_files_is_refused(exported, tmp_path):
    for name in ("a.safetensors", "b.safetensors"):
        (tmp_path / name).symlink_to(exported / "model.safetensors")
    with pytest.raises(ValueError, match="is in .*b.safetensors and in .*a.safetensor"):
        SafetensorsFiles(tmp_path)


def test_a_file_that_is_cut_off_after_it_was_opened_is_named(exported, tmp_path):
    file = tmp_path / "model.safetensors"
    file.write_bytes((exported / file.name).read_bytes())
    with SafetensorsFiles(file) as files:
        os.truncate(file, file.stat().st_size - 1)
        last = max(files.specs, key=lambda name: files._stored[name].start)
        shape = files.specs[last].shape
        with pytest.raises(StorageError, match="the file ends at byte") as failed:
            files.read(last, tuple((0, size) for size in shape))
        assert failed.value.filename == str(file)
