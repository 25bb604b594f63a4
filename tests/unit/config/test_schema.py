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
    assert Config.load({"data": {"paths": "x.txt"}}).data.paths == (Path("x.txt"),)


@pytest.mark.parametrize(
    ("max_length", "given", "expected"),
    [(128, None, 128), (1024, None, 256), (1024, 512, 512), (64, 16, 16)],
)
def test_the_default_sequence_length_is_one_that_the_model_has(
    max_length, given, expected
):
    raw = {"model": SHAPE | {"max_length": max_length}}
    raw |= {"data": {"sequence_length": given}}
    assert Config.load(raw).sequence_length == expected
    assert Config.load({}).sequence_length == 256


def test_a_vocabulary_smaller_than_a_byte_is_for_token_arrays():
    model = SHAPE | {"vocab_size": 65}
    Config.load({"model": model, "data": {"paths": "train.bin"}})
    with pytest.raises(ConfigError, match="vocab_size: text is read as bytes"):
        Config.load({"model": model, "data": {"paths": "train.txt"}})


def test_a_sequence_longer_than_the_model_takes_is_refused():
    raw = {"model": {**SHAPE, "max_length": 128}, "data": {"sequence_length": 256}}
    with pytest.raises(ConfigError, match="sequence_length: 256 tokens are more than"):
        Config.load(raw)


def test_run_has_defaults_for_everything():
    run = Config.load({}).run
    assert run.output == Path("runs/default")
    assert run.metrics is None
    assert run.checkpoint_every is None
    assert run.evaluate_every is None
    assert not run.resume
