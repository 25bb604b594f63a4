"""Layers that drop tokens, compared with the same done by torch row by row."""

import json
from functools import partial

import numpy as np
import pytest

from tests.unit.hf.models import (
    SMALL,
    TOKENS,
    gpt2,
    llama,
    mixtral,
    save,
    tokenizer,
    tokens,
)

import jax  # isort: skip
import jax.numpy as jnp  # isort: skip
import torch  # isort: skip
import transformers  # isort: skip

from zinf import hf  # isort: skip
from zinf.cli.problem import dataset  # isort: skip
from zinf.config import Config  # isort: skip
from zinf.hf.dropping import layers_of  # isort: skip

# Logits of float32 models of two layers: a few units of rounding of the largest entry.
TOLERANCE = 2e-6
KEPT = 7


def kept_of(rows, layers, kept=KEPT):
    draw = np.random.default_rng(3)
    shape = (rows, layers, TOKENS)
    return np.sort(draw.random(shape).argsort(axis=2)[..., :kept], axis=2).astype("i4")


def gemma2():
    return transformers.Gemma2Config(
        **SMALL | {"num_hidden_layers": 3}, head_dim=8, sliding_window=4
    )


def drop_in_torch(layer, kept):
    """Run a layer of torch on the kept tokens of each row, one row after another."""
    forward = layer.forward

    def part(value, row, places):
        return value[min(row, len(value) - 1)][None][:, places]

    def run(hidden, *arguments, **named):
        after = hidden.clone()
        for row, places in enumerate(torch.tensor(kept).long()):
            cut = partial(part, row=row, places=places)
            few = dict(named)
            if (mask := few.get("attention_mask")) is not None:
                mask = mask[min(row, len(mask) - 1)][None]
                few["attention_mask"] = mask[:, :, places][:, :, :, places]
            if few.get("position_ids") is not None:
                few["position_ids"] = cut(few["position_ids"])
            if few.get("position_embeddings") is not None:
                few["position_embeddings"] = tuple(map(cut, few["position_embeddings"]))
            rest = [
                x[:, :, places][:, :, :, places] if getattr(x, "ndim", 0) == 4 else x
                for x in arguments
            ]
            found = forward(hidden[row : row + 1, places], *rest, **few)
            found = found[0] if isinstance(found, tuple) else found
            after[row, places] = found[0]
        return after

    layer.forward = run


def params_of(torch_model):
    named = torch_model.named_parameters()
    return {name: jnp.asarray(p.numpy(force=True)) for name, p in named}


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("make_config", "layers"),
    [(llama, (1,)), (gpt2, (0, 1)), (gemma2, (0, 2)), (mixtral, (1,))],
    ids=["llama", "gpt2", "gemma2, windows", "mixtral, experts"],
)
def test_logits_are_those_of_torch_with_the_same_tokens_kept(
    make_config, layers, tmp_path
):
    torch_model = save(make_config(), tmp_path)
    model = hf.load(tmp_path, random_ltd_layers=layers)
    params, ids, kept = params_of(torch_model), tokens(), kept_of(2, len(layers))
    logits = jax.jit(model.logits)
    whole = np.asarray(logits(params, {"input_ids": ids}))
    found = np.asarray(logits(params, {"input_ids": ids, "kept": kept}))
    for place, number in enumerate(layers):
        drop_in_torch(layers_of(torch_model)[number], kept[:, place])
    with torch.no_grad():
        wanted = torch_model(torch.tensor(ids).long(), use_cache=False).logits.numpy()
    assert np.abs(found - wanted).max() / np.abs(wanted).max() < TOLERANCE
    assert np.abs(found - whole).max() / np.abs(wanted).max() > 1e-3
    # All tokens kept are no tokens dropped, and the module is as it was.
    every = np.tile(np.arange(TOKENS, dtype=np.int32), (2, len(layers), 1))
    same = np.asarray(logits(params, {"input_ids": ids, "kept": every}))
    assert np.abs(same - whole).max() / np.abs(wanted).max() < TOLERANCE
    assert np.array_equal(whole, jax.jit(model.logits)(params, {"input_ids": ids}))


@pytest.mark.slow
def test_dropped_tokens_see_no_other_sample_of_their_row(tmp_path):
    torch_model = save(llama(), tmp_path)
    model = hf.load(tmp_path, random_ltd_layers=(0, 1))
    params, ids = params_of(torch_model), tokens(1)
    batch = {
        "input_ids": ids,
        "segment_ids": np.int32([[1] * 5 + [2] * 7]),
        "kept": kept_of(1, 2),
    }
    logits = jax.jit(model.logits)
    before = np.asarray(logits(params, batch))
    ids = ids.copy()
    ids[0, :5] = 3 + ids[0, :5] % 7
    after = np.asarray(logits(params, batch | {"input_ids": ids}))
    assert np.array_equal(before[0, 5:], after[0, 5:])
    assert not np.array_equal(before[0, :5], after[0, :5])


def test_layers_that_a_model_does_not_have_are_refused(tmp_path):
    llama().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"has 2, but the layers of .* are 0 to 1"):
        hf.load(tmp_path, random_ltd_layers=(1, 2))
    model = hf.load(tmp_path, random_ltd_layers=(1,))
    batch = {"input_ids": tokens(), "kept": kept_of(2, 2)}
    with pytest.raises(ValueError, match=r"it must be \(rows, 1, tokens\)"):
        jax.eval_shape(model.logits, model.zeros(), batch)


def test_models_that_no_mask_parts_are_refused(tmp_path):
    config = transformers.MambaConfig(
        vocab_size=96, hidden_size=32, num_hidden_layers=2, state_size=4
    )
    config.save_pretrained(tmp_path)
    model = hf.load(tmp_path, random_ltd_layers=(1,))
    with pytest.raises(NotImplementedError, match="cannot drop tokens: it"):
        model.check_dropping()


def config_of(tmp_path, sampling=None, routing=None, **changed):
    folder, data = tmp_path / "model", tmp_path / "data.jsonl"
    save(llama(), folder)
    tokenizer().save_pretrained(folder)
    draw = np.random.default_rng(0)
    lines = [
        {"text": " ".join(f"w{i % 40}" for i in range(draw.integers(2, 11)))}
        for _ in range(24)
    ]
    data.write_text("\n".join(map(json.dumps, lines)))
    return {
        "model": {"huggingface": str(folder)},
        "train_batch_size": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "data": {
            "paths": [str(data)],
            "sequence_length": TOKENS,
            "validation_fraction": 0.0,
            "max_buckets": 3,
        },
        "data_efficiency": {
            "enabled": True,
            "data_sampling": sampling or {},
            "data_routing": routing or {},
        },
        "run": {"output": str(tmp_path / "run"), "steps": 9},
        **changed,
    }


def metrics_of(tmp_path):
    lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    return list(map(json.loads, lines))


def trained(tmp_path, raw):
    from tests.unit.hf.test_commands import run

    path = tmp_path / "config.json"
    path.write_text(json.dumps(raw))
    done = run("train", path)
    assert done.exit_code == 0, done.output
    return metrics_of(tmp_path), done.output


@pytest.mark.slow
def test_a_config_has_layers_of_a_model_drop_tokens(tmp_path):
    schedule = {
        "min_value": 4,
        "max_value": TOKENS,
        "schedule_type": "fixed_linear",
        "schedule_config": {"require_steps": 6, "seq_per_step": 4},
    }
    random_ltd = {
        "enabled": True,
        "random_ltd_layer_id": [1],
        "random_ltd_schedule": schedule,
    }
    routing = {"enabled": True, "random_ltd": random_ltd}
    raw = config_of(tmp_path, routing=routing)
    metrics, _ = trained(tmp_path, raw)
    # 4 + 8 * step / 6, rounded down to a multiple of 4.
    expected = [4, 4, 4, 8, 8, 8, 12, 12, 12]
    assert [line["kept_tokens"] for line in metrics] == expected
    assert {line["sequence_length"] for line in metrics} == {TOKENS}
    assert metrics[-1]["loss"] < metrics[0]["loss"]
    random_ltd["random_ltd_layer_id"] = [2]
    with pytest.raises(ValueError, match="has 2, but the layers of"):
        dataset(Config.load(raw), "train")


@pytest.mark.slow
def test_a_config_has_batches_of_as_many_tokens_and_rates_to_match(tmp_path):
    section = {"enabled": True, "max_tokens": 24, "lr_scaling_method": "sqrt"}
    sampling = {"enabled": True, "dynamic_batching": section}
    raw = config_of(tmp_path, sampling=sampling)
    metrics, output = trained(tmp_path, raw)
    data = dataset(Config.load(raw), "train")
    batches = [batch["input_ids"] for _, batch in zip(range(9), data, strict=False)]
    assert [line["sequence_length"] for line in metrics] == [
        batch.shape[1] for batch in batches
    ]
    assert len({batch.shape for batch in batches}) > 1
    for line, batch in zip(metrics, batches, strict=True):
        assert batch.size <= 24
        expected = 1e-2 * (len(batch) / 4) ** 0.5
        assert abs(line["learning_rate"] - expected) < 1e-6 * expected
    assert "data: batches have " in output
    # Complete batches of two epochs of 24 samples; `num_batches` counts any share.
    count = hf.Task(Config.load(raw)).steps_of_epochs(4, 2.0, lambda text: None)
    drawn = [len(batch["input_ids"]) for _, batch in zip(range(count), data)]  # noqa: B905
    assert sum(drawn) <= 48 < sum(drawn) + sum({len(batch) for batch in batches})
