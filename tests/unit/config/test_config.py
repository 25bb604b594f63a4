"""Configs are values: frozen, checked, loaded again, and told of once."""

import copy
import logging
import pickle
from contextlib import closing
from pathlib import Path
from textwrap import indent, wrap
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from pydantic import ValidationError

import zinf
from tests.golden import Golden
from tests.unit.config.cases import OF_SOME, sections, shown
from zinf.core.config import (
    Config,
    ConfigError,
    Grouping,
    Status,
    grouping,
    notices,
    report,
)
from zinf.core.config.schema import Data, Memory
from zinf.core.objectives import KEYS_OF_SOME, OBJECTIVES, OF_OWN_MODELS
from zinf.core.program import Tier

SHIPPED = Path(__file__).parents[3] / "configs"


def test_every_default_is_in_the_golden_file(golden: Golden) -> None:
    lines = []
    for section, path, around in sections():
        kind = next((x["type"] for x in around.values()), "")
        fields = section.model_fields.items()
        usual = [
            f"{name}={shown(field.default)}"
            for name, field in fields
            if section.section_at(name, {}) is None and not field.is_required()
        ]
        name = " ".join(filter(None, (".".join(path) or "top level", kind)))
        text = "\n".join(wrap(", ".join(usual), 86, break_on_hyphens=False))
        lines.append(f"{name}:\n{indent(text, '  ')}".rstrip())
    golden.check("defaults.txt", "\n".join(dict.fromkeys(lines)))


def test_every_key_has_a_sentence() -> None:
    for section, path, _ in sections():
        for name in section.known_keys():
            description = section.description_of(name)
            assert description.rstrip().endswith("."), (*path, name)


def test_an_unknown_key_is_told_all_that_are_known() -> None:
    with pytest.raises(ConfigError) as error:
        Config.load({"memory": {"devise": 1}})
    allowed = ", ".join(sorted(Memory.known_keys()))
    assert f"Did you mean 'device'? Allowed keys here: {allowed}." in str(error.value)


@pytest.mark.parametrize(
    "change",
    [
        lambda c: setattr(c, "execution", "fused"),
        lambda c: setattr(c.zero_optimization.offload_param, "device", "cpu"),
        lambda c: setattr(c.optimizer.params, "lr", 3.0),
        lambda c: setattr(c, "new", 3),
        lambda c: delattr(c.run, "steps"),
    ],
)
def test_configs_are_frozen_at_every_level(change) -> None:
    zero = {"offload_param": {"device": "none"}}
    config = Config.load({"zero_optimization": zero, "optimizer": {"type": "AdamW"}})
    before = config.model_dump()
    with pytest.raises((ValidationError, AttributeError)):
        change(config)
    assert config.model_dump() == before


def test_configs_are_values() -> None:
    config = Config.load({"run": {"steps": 3}, "train_batch_size": 8}, world_size=4)
    for same in (pickle.loads(pickle.dumps(config)), copy.deepcopy(config)):
        assert same == config
        assert same.microbatch_size == 2
    assert hash(config) == hash(Config.load(config))
    with pytest.raises(ValueError, match="fp16"):
        Config(bf16={"enabled": True}, fp16={"enabled": True})


def test_a_config_keeps_what_was_said_when_it_is_loaded_again() -> None:
    said = {
        "dump_state": True,
        "comms_logger": {"enabled": True},
        "amp": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "eps": "auto"}},
        "train_batch_size": 8,
    }
    config = Config.load(said, ignore_unsupported=True, world_size=4)
    assert Config.load(config) is config
    again = Config.load(config, ["run.steps=2"])
    assert notices(again) == notices(config)
    assert len(notices(config)) == 4
    assert again.microbatch_size == 2
    # What an override sets is no longer said, nor chosen.
    overrides = ["comms_logger.enabled=false", "optimizer.params.lr=0.25"]
    changed = Config.load(config, overrides, world_size=2)
    assert changed.microbatch_size == 4
    assert changed.chosen == {("optimizer", "params", "eps"): 1e-8}
    assert not any(line.startswith("comms_logger") for line in notices(changed))
    assert any(line.startswith("dump_state: ") for line in notices(changed))


def test_a_config_to_run_a_model_trains_nothing() -> None:
    raw = {
        "adapter": {"r": 4},
        "weight_quantization": {"quantized_initialization": {"num_bits": 8}},
        "gradient_clipping": 1.0,
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 4,
        "execution": "auto",
        "activation_checkpointing": {"cpu_checkpointing": True},
        "memory": {"device": 5},
        "zero_optimization": {"offload_param": {"device": "cpu"}},
        "bf16": {"enabled": True},
    }
    config = Config.load(raw).without_training()
    assert (config.frozen, config.execution) == (("*",), "streamed")
    assert config.adapter is config.weight_quantization is config.clip_norm is None
    assert config.batch_size is config.microbatch_size is None
    assert (config.num_microbatches, config.activation_tier) == (1, None)
    assert (config.device_bytes, config.param_tier) == (5, Tier.HOST)
    assert config.compute_dtype == "bfloat16"


def test_devices_are_read_before_the_rest_is_checked() -> None:
    wrong = {"mesh": {"fsdp": "many", "seq": 0}, "zero_optimization": 3}
    assert grouping(wrong) == Grouping()
    assert grouping({"mesh": {"fsdp": 4}}, ["mesh.fsdp=2"]) == Grouping(1, 2)


def test_weights_in_few_bits_are_all_linear_layers_or_those_that_a_key_names() -> None:
    def section(**keys: Any) -> Any:
        return Config.load({"weight_quantization": keys}).weight_quantization

    found = section(quantized_initialization={"num_bits": 4})
    assert found.groups_of("model.layers.0.mlp.up_proj").num_bits == 4
    named = {"mlp": {"num_bits": 8}, "q_proj": {"num_bits": 4}}
    found = section(post_init_quant=named)
    assert found.groups_of("layers.0.mlp.up_proj").num_bits == 8
    assert found.groups_of("layers.0.attention.q_proj").num_bits == 4
    assert found.groups_of("layers.0.attention.v_proj") is None
    with pytest.raises(ValueError, match="'mlp' and 'q_proj' are both in"):
        found.groups_of("mlp.q_proj")


def test_a_notebook_shows_a_table_with_errors_and_notes_below() -> None:
    found = report({"train_batch_size": 8, "<b>": 1})
    html = found._repr_html_()
    assert html.count("<tr>") == 1 + len(found.rows)
    assert "<b>" not in html.replace("<b>error</b>", "").replace("<b>note</b>", "")
    assert html.count("<b>error</b>") == len(found.problems) == 1
    assert html.count("<b>note</b>") == len(found.notes) > 0
    assert repr(found) == str(found)


def test_overrides_and_configs_are_reported_too() -> None:
    config = Config.load({"train_batch_size": 8})
    found = report(config, ["gradient_clipping=1.0"])
    assert [row.key for row in found.rows] == ["train_batch_size", "gradient_clipping"]


# The configs that come with zinf.


def test_every_shipped_config_is_valid_and_asks_for_nothing_unsupported() -> None:
    files = sorted(SHIPPED.rglob("*.*"))
    assert {"quickstart.yaml", "ds_zero3_nvme.json"} <= {file.name for file in files}
    for file in files:
        found = report(file)
        assert found.problems == (), file
        refused = {Status.UNSUPPORTED, Status.UNKNOWN}
        assert not [row for row in found.rows if row.status in refused], file


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("quickstart", 0.010),
        ("gpt2_350m_nvme", 0.350),
        ("gpt_13b_1xh200", 13),
        ("gpt3_175b_1gpu_nvme", 175),
        ("llama_1b_host", 1.1),
        ("pods/gpt3_175b_v5p", 175),
        ("pods/gpt_1t_v5p", 1000),
        ("pods/mt_nlg_530b_h100", 530),
        ("pods/gpt_32t_h100_nvme", 32_000),
        ("pods/gpt_100t_h100_nvme", 101_500),
    ],
)
def test_models_are_as_large_as_their_names(name: str, billions: float) -> None:
    config = Config.load(SHIPPED / f"{name}.yaml")
    model = config.model
    assert model is not None
    width, kv_heads = model.embed_dim, model.num_kv_heads or model.num_heads
    attention = 2 * width**2 + 2 * width**2 * kv_heads // model.num_heads
    num_matrices = 3 if model.activation == "swiglu" else 2
    mlp = num_matrices * width * (model.mlp_dim or 4 * width)
    num_tables = 1 if model.tied_embeddings else 2
    embedding = num_tables * model.vocab_size * width
    total = model.num_layers * (attention + mlp) + embedding
    assert total == pytest.approx(billions * 1e9, rel=0.03)
    if name in ("quickstart", "gpt2_350m_nvme"):
        assert config.param_tier is config.optimizer_tier is Tier.NVME
        assert config.nvme_paths


# In Python.


def loss_fn(params: jax.Array, batch: dict[str, jax.Array]) -> jax.Array:
    return jnp.mean((batch["x"] @ params) ** 2)


def planned(config: Any) -> None:
    batch = {"x": jax.ShapeDtypeStruct((4, 2), jnp.float32)}
    zinf.plan_only(
        loss_fn, lambda: jnp.zeros((2, 2)), optax.sgd(0.1), config, batch=batch
    )


def test_python_says_at_start_what_has_no_effect_and_what_is_not_read(caplog) -> None:
    config = {
        "sparse_gradients": True,
        "gradient_clipping": "auto",
        "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
        "run": {"steps": 3},
        "data": {},
    }
    with caplog.at_level(logging.WARNING, logger="zinf"):
        planned(config)
        said = [record.getMessage() for record in caplog.records]
        chosen, unread = said[0], said[-1]
        assert "gradient_clipping 1" in chosen
        assert "optimizer.params.lr" not in chosen
        assert any(line.startswith("sparse_gradients: ") for line in said)
        assert unread.startswith("optimizer, run: read by zinf train, and not by")
        caplog.clear()
        planned(Config.load(config).told())
        assert caplog.records == []


def test_a_batch_of_another_size_than_the_configs_is_refused() -> None:
    few, many = {"train_batch_size": 4}, {"train_micro_batch_size_per_gpu": 4}
    planned(few | {"train_micro_batch_size_per_gpu": 2})
    for sizes in ({"train_batch_size": 8}, many | {"gradient_accumulation_steps": 2}):
        with pytest.raises(ValueError, match=r"4 samples, but the config asks for 8"):
            planned(sizes)
    rest = jnp.ones((2, 2)), optax.sgd(0.1), few
    batch = {"x": jnp.ones((4, 2))}
    with closing(zinf.initialize(loss_fn, *rest, batch=batch)) as engine:
        for train in (engine.step, engine.prepare):
            with pytest.raises(ValueError, match="6 samples, but the config asks"):
                train({"x": jnp.ones((6, 2))})
        # Evaluation need not keep to the size.
        assert engine.evaluate({"x": jnp.ones((6, 2))}) == 4.0
        assert engine.step(batch)["loss"] == 4.0


def test_training_refuses_weights_in_few_bits() -> None:
    config = {"weight_quantization": {"quantized_initialization": {"num_bits": 4}}}
    with pytest.raises(ValueError, match="run and not trained: zinf generate"):
        zinf.initialize(loss_fn, jnp.ones((2, 2)), optax.sgd(0.1), config)


@pytest.mark.parametrize("objective", [*OBJECTIVES, "a model of zinf's own"])
def test_a_key_of_data_that_is_set_is_read_or_refused(objective):
    """By the table of who reads it, in which each of these keys has a reader."""
    assert OF_SOME.keys() == KEYS_OF_SOME <= Data.model_fields.keys()
    raw = {"model": {"huggingface": "folder"}, "data": {"objective": objective}}
    read = OF_OWN_MODELS
    if objective in OBJECTIVES:
        read = OBJECTIVES[objective].reads
    else:
        raw = {"model": {"num_layers": 1, "num_heads": 1, "embed_dim": 8}, "data": {}}
    usual = Config.load(raw).data
    for key, value in OF_SOME.items():
        given = raw | {"train_batch_size": 2, "data": raw["data"] | {key: value}}
        if key in read:
            assert Config.load(given).data.asks(key)
            continue
        with pytest.raises(ConfigError) as error:
            Config.load(given)
        assert [p for p in error.value.problems if p.path == ("data", key)]
        # What asks for nothing is no mistake.
        nothing = getattr(usual, key)
        if nothing is None or isinstance(nothing, bool):
            Config.load(raw | {"data": raw["data"] | {key: nothing}})
