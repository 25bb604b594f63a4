"""Adapters are saved alone, loaded onto the same base only, and merged on export."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from safetensors.numpy import load_file

import zinf
from tests.unit.adapt.small import (
    BATCH,
    DIM,
    merged_by_hand,
    normal,
    two_layers,
    two_layers_loss,
)
from zinf.adapt import MergedTensors, load_adapter, lora, save_adapter
from zinf.core.interchange import export_safetensors
from zinf.core.segment import named_leaves


def stacked() -> dict:
    return {"layers": {"kernel": normal(0, 3, DIM, DIM)}, "head": normal(1, DIM, DIM)}


def stacked_loss(params, batch):
    def layer(x, kernel):
        return x + jnp.tanh(x @ kernel), None

    x, _ = jax.lax.scan(layer, batch["x"], params["layers"]["kernel"])
    return jnp.mean(jnp.square(x @ params["head"] - batch["y"]))


OPTIONS = {"r": 2, "target_modules": ["layers"], "modules_to_save": ["head"]}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """An adapted model after two steps, and the folder of its adapter."""
    adapted = lora(stacked_loss, stacked, batch=BATCH, **OPTIONS)
    config = adapted.config({"execution": "streamed"})
    folder = tmp_path_factory.mktemp("adapter")
    with zinf.initialize(
        adapted.loss_fn, adapted.params, optax.adam(0.1), config, batch=BATCH
    ) as engine:
        before = engine.evaluate(BATCH)
        assert before == pytest.approx(float(stacked_loss(stacked(), BATCH)))
        engine.step(BATCH)
        engine.step(BATCH)
        params = engine.params()
        assert engine.evaluate(BATCH) < before
        arrays = [str(array) for array in engine.residents.specs]
        assert any("adapter/" in name and "state" in name for name in arrays)
        assert not [name for name in arrays if "base/" in name and "state" in name]
        save_adapter(adapted, engine, folder / "alone")
        export_safetensors(MergedTensors(adapted, engine), folder / "merged")
    return adapted, params, folder


def test_frozen_leaves_do_not_change(trained):
    base = trained[1]["base"]
    assert [*named_leaves(base)] == ["layers/kernel"]
    np.testing.assert_array_equal(
        base["layers"]["kernel"], stacked()["layers"]["kernel"]
    )


def test_the_file_has_pefts_names_and_shapes_and_no_base(trained):
    _, params, folder = trained
    found = load_file(folder / "alone" / "adapter_model.safetensors")
    own = params["adapter"]["layers/kernel"]
    assert {n: x.shape for n, x in found.items()} == {
        "base_model.model.layers.lora_A.weight": (3, 2, DIM),
        "base_model.model.layers.lora_B.weight": (3, DIM, 2),
        "base_model.model.head": (DIM, DIM),
    }
    a = found["base_model.model.layers.lora_A.weight"]
    np.testing.assert_array_equal(a, np.swapaxes(own["lora_A"], 1, 2))
    config = json.loads((folder / "alone" / "adapter_config.json").read_text())
    assert config["peft_type"] == "LORA" and config["target_modules"] == ["layers"]


def test_a_loaded_adapter_is_the_saved_one(trained):
    _, params, folder = trained
    again = load_adapter(
        lora(stacked_loss, stacked(), batch=BATCH, **OPTIONS), folder / "alone"
    )
    for path, leaf in named_leaves(params["adapter"]).items():
        np.testing.assert_array_equal(named_leaves(again.params["adapter"])[path], leaf)


def test_an_export_has_the_merged_weights_under_the_users_names(trained):
    adapted, params, folder = trained
    found = load_file(folder / "merged" / "model.safetensors")
    base = {**stacked(), "head": params["adapter"]["head"]}
    targets = {p: x for p, x in params["adapter"].items() if p != "head"}
    by_hand = named_leaves(merged_by_hand(adapted, base, targets))
    assert found.keys() == {"layers.kernel", "head"}
    for path, leaf in by_hand.items():
        np.testing.assert_allclose(
            found[path.replace("/", ".")], leaf, rtol=1e-6, atol=1e-6
        )


def test_an_adapter_of_something_else_is_refused_by_name(trained, tmp_path):
    adapted, _, folder = trained
    alone, copy = folder / "alone", tmp_path / "copy"
    shutil.copytree(alone, copy)
    (copy / "zinf_adapter.json").unlink()

    def other(params, batch):
        return stacked_loss({k: params[k] for k in ("layers", "head")}, batch)

    wider = {**stacked(), "layers": {"kernel": normal(0, 4, DIM, DIM)}}
    extra = {**stacked(), "extra": jnp.ones(3)}
    for place, model, message in (
        (alone, (stacked_loss, wider), "another base: 'layers/kernel' has the"),
        (copy, (stacked_loss, wider), r"another base: '.*lora_A.weight' has the"),
        (alone, (other, extra), "'extra' has no such leaf there"),
    ):
        with pytest.raises(ValueError, match=message):
            load_adapter(lora(*model, batch=BATCH, **OPTIONS), place)
    with pytest.raises(ValueError, match="is of other weights: .*lora_A"):
        load_adapter(lora(two_layers_loss, two_layers(), batch=BATCH, r=2), copy)
    for changes, message in (
        ({"r": 4}, r"has r = 2, and here it is 4"),
        ({"lora_alpha": 3}, r"has lora_alpha = .* and here it is 3"),
    ):
        changed = lora(stacked_loss, stacked(), batch=BATCH, **OPTIONS | changes)
        with pytest.raises(ValueError, match=message):
            load_adapter(changed, alone)
    (copy / "adapter_config.json").unlink()
    with pytest.raises(FileNotFoundError, match="adapter_config.json is absent"):
        load_adapter(adapted, copy)
