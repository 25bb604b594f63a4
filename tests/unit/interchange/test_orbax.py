"""Orbax opens what zinf exports, and zinf what Orbax saved."""

import json
import shutil
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

import zinf.linen
from tests.robustness.small import content
from tests.unit.interchange.models import BF16, assert_same_trees, init, on_nvme
from zinf.checkpoint.saved import Saved
from zinf.core.interchange import export_orbax, import_orbax
from zinf.core.interchange.orbax_export import nested
from zinf.core.interchange.orbax_import import OrbaxTensors
from zinf.core.memory import StorageError


def save(path: Path, tree) -> Path:
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, tree)
    return path


def restore(path: Path, target=None):
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(path, target)


@pytest.fixture(scope="module")
def exported(trained, folder) -> Path:
    export_orbax(trained, folder / "exported-orbax")
    return folder / "exported-orbax"


def test_orbax_restores_an_export_as_the_parameters_also_onto_devices(
    trained, exported
):
    assert_same_trees(restore(exported), trained.params())
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[1])
    target = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        trained.params(),
    )
    found = restore(exported, target)
    assert_same_trees(found, trained.params())
    assert {x.sharding for x in jax.tree.leaves(found)} == {sharding}
    with pytest.raises(FileExistsError, match="is not overwritten"):
        export_orbax(trained, exported)


def test_a_checkpoint_exports_the_same_with_text_for_indices_in_any_dtype(
    trained, saved_folder, tmp_path
):
    with Saved(saved_folder) as saved:
        export_orbax(saved, tmp_path / "out", dtype="bfloat16")
    expected = jax.tree.map(
        lambda x: x if x.dtype == np.int32 else x.astype(ml_dtypes.bfloat16),
        trained.params(),
    )
    first, second = expected["adapters"]
    expected["adapters"] = {"0": first, "1": second}
    assert_same_trees(restore(tmp_path / "out"), expected)


def test_what_orbax_saved_is_imported(start, tmp_path, trained):
    params = trained.params()
    save(tmp_path / "theirs", jax.tree.map(jnp.asarray, params))
    engine = start(on_nvme(tmp_path / "a", **BF16), lambda: init(1))
    import_orbax(engine, tmp_path / "theirs")
    fresh = start(on_nvme(tmp_path / "b", **BF16), lambda: params)
    assert content(engine) == content(fresh)


@pytest.mark.parametrize(
    "options", [{"use_ocdbt": False}, {"use_zarr3": True}], ids=str
)
def test_other_formats_of_orbax_are_imported_below_any_key(
    options, start, tmp_path, trained
):
    handler = ocp.PyTreeCheckpointHandler(**options)
    state = {"params": trained.params(), "step": 3}
    with ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(tmp_path / "theirs", args=ocp.args.PyTreeSave(state))
    engine = start(on_nvme(tmp_path / "nvme", **BF16), lambda: init(1))
    with pytest.raises(ValueError, match="'adapters/0' .as 'adapters/0'."):
        import_orbax(engine, tmp_path / "theirs")
    below = lambda path: f"params/{path}"  # noqa: E731
    import_orbax(engine, tmp_path / "theirs", names=below, ignore=["step"])
    assert_same_trees(engine.params(), trained.params())


class Norm(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.BatchNorm(use_running_average=False)(nn.Dense(4)(x))
        return nn.Dense(1)(x)


@pytest.mark.slow
def test_model_state_goes_beside_the_parameters(tmp_path):
    x = np.random.default_rng(0).random((8, 3), np.float32)

    def engine_of(seed: int) -> zinf.Engine:
        variables = Norm().init(jax.random.key(seed), x)
        params, state = variables["params"], {"stats": variables["batch_stats"]}

        def loss(params, state, batch):
            out, new = Norm().apply(
                {"params": params, "batch_stats": state["stats"]},
                batch,
                mutable=["batch_stats"],
            )
            return jnp.mean(jnp.square(out)), {"stats": new["batch_stats"]}

        tx = optax.sgd(0.1)
        return zinf.initialize(loss, params, tx, model_state=state, batch=x)

    engine = engine_of(0)
    engine.step(x)
    export_orbax(engine, tmp_path / "out")
    expected = {"params": engine.params(), "model_state": engine.model_state()}
    assert_same_trees(restore(tmp_path / "out"), expected)
    other = engine_of(1)
    import_orbax(other, tmp_path / "out")
    assert_same_trees(other.params(), engine.params())
    assert_same_trees(other.model_state(), engine.model_state())
    engine.close()
    other.close()


def test_a_leaf_without_elements_is_refused_by_name(tmp_path):
    params = {"w": jnp.ones(3), "none": jnp.ones((0, 2))}
    loss = lambda p, x: jnp.mean(p["w"] * x)  # noqa: E731
    batch = np.ones((2, 3), np.float32)[0]
    engine = zinf.initialize(loss, params, optax.sgd(0.1), batch=batch)
    with pytest.raises(ValueError, match=r"'none' has shape \[0, 2\]"):
        export_orbax(engine, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
    engine.close()


def test_a_folder_of_something_else_or_of_no_arrays_is_refused(exported, tmp_path):
    with pytest.raises(FileNotFoundError, match="has no _METADATA"):
        OrbaxTensors(tmp_path)
    for text in ("", "[]", "{}", '{"tree_metadata": 3}', "\0"):
        (tmp_path / "_METADATA").write_text(text)
        with pytest.raises(ValueError, match="is no Orbax checkpoint|empty"):
            OrbaxTensors(tmp_path)
    shutil.copytree(exported, tmp_path / "copy")
    path = tmp_path / "copy" / "_METADATA"
    original = path.read_text()
    for kind in ("object", "string", "__import__('os')", None, 3):
        changed = json.loads(original)
        changed["tree_metadata"]["('embed',)"]["value_metadata"]["value_type"] = kind
        path.write_text(json.dumps(changed))
        with pytest.raises(ValueError, match="is no Orbax checkpoint"):
            OrbaxTensors(tmp_path / "copy")


def test_a_damaged_file_is_an_error_that_names_the_array(tmp_path):
    random = np.random.default_rng(0).standard_normal((300, 400))
    opened = OrbaxTensors(save(tmp_path / "theirs", {"a": {"b": random}}))
    box = ((0, 300), (0, 400))
    np.testing.assert_array_equal(opened.read("a/b", box), random)
    for path in (tmp_path / "theirs" / "ocdbt.process_0" / "d").iterdir():
        path.write_bytes(path.read_bytes()[: random.nbytes // 2])
    with pytest.raises(StorageError, match="Cannot read 'a/b'"):
        opened.read("a/b", box)


def test_paths_become_dicts():
    assert nested({"a/b": 1, "a/c/d": 2, "e": 3}) == {
        "a": {"b": 1, "c": {"d": 2}},
        "e": 3,
    }
    for wrong in ({"a": 1, "a/b": 2}, {"a/b": 1, "a": 2}):
        with pytest.raises(ValueError, match="within"):
            nested(wrong)
