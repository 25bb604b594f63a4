"""What cannot be trained is refused before anything is made, with what to change."""

import shutil
from collections import namedtuple

import jax.numpy as jnp
import optax
import pytest

from tests.robustness.small import assert_trees_equal, draw, init, on_nvme
from zinf.memory.storage_error import StorageError

Usage = namedtuple("Usage", "total used free")


@pytest.mark.parametrize(
    ("leaf", "kind"), [("text", "str"), (object(), "object"), (max, "builtin")]
)
def test_a_parameter_that_is_no_array_is_named_with_its_type(leaf, kind, start):
    with pytest.raises(ValueError, match=rf"layers/1/note.*{kind}"):
        start(params={"layers": [{"w": jnp.ones(2)}, {"note": leaf}]})


def test_none_is_an_empty_part_of_the_parameters(start):
    params = {**init(), "unused": None}
    engine = start(params=params, batch=draw())
    engine.step(draw())
    assert engine.params()["unused"] is None


def test_parameters_with_one_key_path_are_refused(start):
    params = {"a": {"b": jnp.ones(2)}, "a/b": jnp.ones(2)}
    with pytest.raises(ValueError, match=r"same key path: a/b\. Rename"):
        start(params=params)


def test_parameters_without_leaves_are_refused(start):
    with pytest.raises(ValueError, match="no leaves"):
        start(params={"a": {}})


def test_an_optimizer_that_clips_updates_says_where_clipping_is_done(start):
    tx = optax.chain(optax.adam(1e-3), optax.clip_by_global_norm(1.0))
    with pytest.raises(ValueError, match="is the first transform of the chain"):
        start(tx=tx)


def test_an_unknown_key_is_named_with_the_nearest(start):
    with pytest.raises(ValueError, match=r"gradient_clippin.*gradient_clipping"):
        start({"gradient_clippin": 1.0})


def test_a_missing_config_file_is_named(tmp_path, start):
    with pytest.raises(FileNotFoundError, match=r"absent\.yaml does not exist"):
        start(str(tmp_path / "absent.yaml"))


def test_a_loss_that_is_no_scalar_is_refused(start):
    with pytest.raises(ValueError, match="one floating-point number"):
        start(loss=lambda p, b: b["x"] @ p["out"], batch=draw())


def test_an_nvme_folder_that_is_a_file_is_refused(tmp_path, start):
    path = tmp_path / "file"
    path.write_text("mine")
    with pytest.raises(StorageError, match="is a file"):
        start(on_nvme(path), batch=draw())
    assert path.read_text() == "mine"


def test_an_nvme_folder_of_another_program_is_left_alone(tmp_path, start):
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(StorageError, match=r"such as 'mine.txt'"):
        start(on_nvme(tmp_path), batch=draw())
    assert [p.name for p in tmp_path.iterdir()] == ["mine.txt"]


@pytest.mark.parametrize("is_said", [True, False])
def test_a_drive_that_is_too_small_is_refused_with_numbers(
    is_said, monkeypatch, tmp_path, start
):
    """By the plan if the budget is what is free, else by the store."""
    free = 1000
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**9, 0, free))
    config = on_nvme(tmp_path / "nvme")
    config["memory"] |= {"nvme_capacity": "1GiB"} if is_said else {}
    error = StorageError if is_said else ValueError
    with pytest.raises(error, match=r"[0-9],[0-9]{3}.* bytes") as caught:
        start(config, batch=draw())
    shown = f"{free:,}" if is_said else f"{int(free * 0.95):,}"
    assert shown in str(caught.value)


def test_a_full_drive_is_refused(monkeypatch, tmp_path, start):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**9, 10**9, 0))
    with pytest.raises(StorageError, match="no free bytes"):
        start(on_nvme(tmp_path / "nvme"), batch=draw())


@pytest.mark.slow
def test_state_that_fits_nowhere_is_refused_with_numbers(start):
    memory = {"device": "1KiB", "host": "1KiB"}
    with pytest.raises(ValueError, match=r"1,024 bytes.*at least [0-9,]+"):
        start({"memory": memory}, batch=draw())


def test_an_engine_after_close_is_refused_not_begun_anew(start):
    engine = start(batch=draw())
    engine.step(draw())
    engine.close()
    for use in (engine.step, engine.evaluate, lambda _: engine.params()):
        with pytest.raises(RuntimeError, match="was closed"):
            use(draw())
    with pytest.raises(RuntimeError, match="was closed"):
        engine.restore("anywhere")
    engine.close()


def test_a_frozen_pattern_that_matches_nothing_is_refused(start):
    with pytest.raises(ValueError, match=r"no parameter matches 'layer/\*'"):
        start({"frozen": ["layer/*"]})


def test_a_model_that_is_frozen_whole_stays_as_it_is(start):
    engine = start({"frozen": ["*"]}, batch=draw())
    engine.step(draw())
    assert_trees_equal(engine.params(), init())
