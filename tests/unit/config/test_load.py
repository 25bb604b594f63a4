import json
from pathlib import Path

import pytest

from zinf.core.config import Config


def written(folder, name, text):
    path = folder / name
    path.write_text(text)
    return path


def test_yaml_json_and_dict_give_the_same_config(tmp_path):
    raw = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}, "run": {"steps": 5}}
    as_json = written(tmp_path, "a.json", json.dumps(raw))
    as_yaml = written(
        tmp_path,
        "a.yaml",
        "optimizer: {type: AdamW, params: {lr: 1e-4}}\nrun:\n  steps: 5\n",
    )
    expected = Config.load(raw)
    assert Config.load(as_json) == expected
    assert Config.load(str(as_yaml)) == expected
    assert Config.load(expected) is expected

    empty = written(tmp_path, "empty.yaml", "# nothing\n")
    assert Config.load(empty) == Config.load(None) == Config.load({}) == Config()
    # YAML 1.1 would read these numbers as text.
    numbers = "steps_per_print: 1e3\ngradient_clipping: 1E-1\n"
    config = Config.load(written(tmp_path, "a.yml", numbers))
    assert (config.log_every, config.clip_norm) == (1000, 0.1)


def test_overrides_are_yaml_and_the_last_one_wins():
    raw = {"run": {"steps": 5, "seed": 3}, "scheduler": None}
    config = Config.load(
        raw,
        [
            "run.steps=7",
            "run.steps=8",
            "memory.nvme=[a, b]",
            "memory.device=2GiB",
            "bf16.enabled=true",
            "optimizer={type: SGD, params: {lr: 1e-2}}",
            "run.metrics=null",
            "frozen=['*=x']",
        ],
    )
    assert (config.run.steps, config.run.seed) == (8, 3)
    assert raw == {"run": {"steps": 5, "seed": 3}, "scheduler": None}
    assert [str(path) for path in config.nvme_paths] == ["a", "b"]
    assert config.device_bytes == 2 * 1024**3
    assert config.compute_dtype == "bfloat16"
    assert config.optimizer.params.lr == 0.01
    assert config.frozen == ("*=x",)


def test_overrides_go_on_top_of_a_config():
    config = Config.load(
        {
            "optimizer": {"type": "adam", "params": {"lr": 1e-3, "eps": 1e-6}},
            "memory": {"nvme": ["a"], "device": "1GiB"},
            "autotuning": {"enabled": False},
        }
    )
    changed = Config.load(config, ["optimizer.params.lr=2e-3"])
    assert changed.optimizer.params.lr == 2e-3
    assert changed.optimizer.params.eps == 1e-6
    assert changed.memory == config.memory
    assert config.optimizer.params.lr == 1e-3


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("run.steps", "must be of the form a.b=value"),
        ("=3", "must be of the form"),
        ("run..steps=3", "must be of the form"),
        ("run.steps=[1", "run.steps="),
        ("run.steps.x=3", "run.steps is 5"),
        ("run.stpes=3", "run.stpes: unknown key. Did you mean 'steps'?"),
        ("run.steps=x", "run.steps = 'x': must be a valid integer"),
        ("run.steps=true", "run.steps = True: must be a valid integer"),
    ],
)
def test_a_wrong_override_is_refused(override, words):
    with pytest.raises(ValueError) as error:
        Config.load({"run": {"steps": 5}}, [override])
    assert words in str(error.value)


def test_what_is_no_source_is_refused(tmp_path):
    with pytest.raises(TypeError, match="list"):
        Config.load({}, "run.steps=3")
    for source in (3, ["run"], b"run"):
        with pytest.raises(TypeError, match="mapping, a path or a Config"):
            Config.load(source)
    written(tmp_path, "quickstart.yaml", "")
    with pytest.raises(FileNotFoundError) as error:
        Config.load(tmp_path / "quikstart.yaml")
    assert str(tmp_path / "quikstart.yaml") in str(error.value)
    assert "Did you mean 'quickstart.yaml'?" in str(error.value)
    with pytest.raises(FileNotFoundError, match="no/such"):
        Config.load("no/such/file.yaml")
    with pytest.raises(IsADirectoryError, match="folder"):
        Config.load(tmp_path)


# Each line has ten aliases of the line before: 10 ** 9 values.
BOMB = "l0: &l0 [1]\n" + "".join(
    f"l{i}: &l{i} [{', '.join([f'*l{i - 1}'] * 10)}]\n" for i in range(1, 10)
)
MERGES = "l0: &l0 {a: 1}\n" + "".join(
    f"l{i}: &l{i} {{<<: [{', '.join([f'*l{i - 1}'] * 10)}]}}\n" for i in range(1, 10)
)
CHAIN = "l0: &l0 [1]\n" + "".join(f"l{i}: &l{i} [*l{i - 1}]\n" for i in range(1, 60))


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.yaml", "run:\n  steps: [1\nmemory: 3\n", "line 3"),
        ("a.yaml", "run:\n\tsteps: 1\n", "line 2"),
        ("a.yaml", "run: 1\nseed: 2\nrun: 3\n", "line 3, column 1: the key 'run' is"),
        ("a.yaml", "- run\n", "found a list"),
        ("a.yaml", "run\n", "found a str"),
        ("a.yaml", "run: !!python/object:os.system {}\n", "line 1"),
        ("a.json", '{"run": 1,\n "x": }', "line 2"),
        ("a.json", '{"run": 1, "run": 2}', "run given twice"),
        ("a.json", "", "line 1"),
        ("a.json", "[]", "found a list"),
        ("a.json", '{\n"run": {} // none\n "data": {}}', "line 3, column 2"),
        ("a.yaml", BOMB, "line 6, column 5: it has more than 100,000 values"),
        ("a.yaml", MERGES, "it has more than 100,000 values"),
        ("a.yaml", "run: &a\n  x: *a\n", "an alias that refers to itself"),
        ("a.yaml", CHAIN, "nested deeper than 50 levels"),
        ("a.yaml", "run: " + "[" * 10**5, "nested deeper than 50 levels"),
        ("a.json", '{"run":' + "[" * 10**5, "nested deeper than 50 levels"),
        # A comment or text that is left open was searched again from each character.
        ("a.json", "{" + "/*x" * 2**18, "Expecting property name"),
        ("a.json", '{"' + '\\"' * 2**19, "has more than 1,048,576 bytes"),
        ("a.json", '{"' + '\\"' * 2**18, "line 1, column 2"),
        ("a.json", '{"run": ' + "1" * 5000 + "}", "limit (4300 digits)"),
        ("a.yaml", "run: " + "1" * 5000, "limit (4300 digits)"),
        ("a.yaml", "run: 2026-13-01\n", "month must be in 1..12"),
        ("a.yaml", "run: !!bool maybe\n", "a value cannot be read (KeyError: 'maybe')"),
        ("a.toml", "", "must end in .yaml, .yml, .json"),
        ("a.yaml", "runn: {}\n", "a.yaml has 1 problem"),
    ],
)
def test_a_malformed_file_is_refused_with_path_and_line(tmp_path, name, text, words):
    path = written(tmp_path, name, text)
    with pytest.raises(ValueError) as error:
        Config.load(path)
    assert words in str(error.value)
    assert str(path) in str(error.value)


def test_json_may_have_comments_and_last_commas_as_deepspeed_s_has(tmp_path):
    text = """{
      // Written by hand. "quoted", and {"run": 1}
      "run": {"output": "a//b#c", "steps": 3, /* three
         of them */ },  # the end,
      "train_batch_size": 8, // last
    }"""
    config = Config.load(written(tmp_path, "a.json", text))
    assert config.run.output == Path("a//b#c")
    assert (config.run.steps, config.batch_size) == (3, 8)


def test_text_in_another_encoding_is_refused(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_bytes("run: {output: Zürich}".encode("latin-1"))
    with pytest.raises(ValueError, match="not UTF-8"):
        Config.load(path)
    path.write_bytes(b"\xef\xbb\xbf" + b"run: {steps: 3}")
    assert Config.load(path).run.steps == 3


@pytest.mark.parametrize("pattern", ["*", "*.txt", "!old", "%x", "@x", "`x"])
def test_an_override_that_cannot_be_yaml_is_a_text(pattern):
    """A shell passes `--set data.glob='*'` without the quotes."""
    assert Config.load({}, [f"data.glob={pattern}"]).data.glob == pattern
