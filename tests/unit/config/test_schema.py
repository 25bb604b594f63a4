from pathlib import Path

import pytest

from zinf.config import Config, ConfigError

SHAPE = {"num_layers": 2, "num_heads": 4, "embed_dim": 32, "max_length": 512}


def test_a_model_has_gpt2s_options_over_bytes_by_default():
    model = Config.load({"model": SHAPE}).model
    assert (model.name, model.vocab_size) == ("gpt", 256)
    assert (model.norm, model.activation, model.position) == (
        "layernorm",
        "gelu",
        "learned",
    )
    assert model.num_kv_heads is None
    assert model.mlp_dim is None
    assert model.tied_embeddings
    assert model.use_bias
    assert model.dropout == 0
    assert not model.scan_layers


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"embed_dim": 30}, "model.embed_dim: 30 is not a multiple of num_heads, 4"),
        ({"num_kv_heads": 3}, "model.num_kv_heads: 3 does not divide num_heads, 4"),
        ({"embed_dim": 12, "position": "rope"}, "/ num_heads is 3"),
        ({"vocab_size": 128}, "model.vocab_size"),
        ({"max_length": 128}, "data.sequence_length: 256 tokens are more than"),
        ({"norm": "rms_norm"}, "Did you mean 'rmsnorm'?"),
        ({"dropout": 1.0}, "model.dropout"),
        ({"name": "gtp"}, "Did you mean 'gpt'?"),
    ],
)
def test_impossible_models_are_refused(change, words):
    with pytest.raises(ConfigError) as error:
        Config.load({"model": {**SHAPE, **change}})
    assert words in str(error.value)


def test_data_is_the_standard_library_unless_told_otherwise():
    assert Config.load({}).data.paths == "stdlib"
    raw = {"data": {"paths": ["a", "b/c.py"]}}
    assert Config.load(raw).data.paths == (Path("a"), Path("b/c.py"))


def test_run_has_defaults_for_everything():
    run = Config.load({}).run
    assert run.output == Path("runs/default")
    assert run.metrics is None
    assert run.checkpoint_every is None
    assert run.evaluate_every is None
    assert not run.resume
