"""`model.function`: a loss and parameters of the user, trained by a config."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

import zinf.cli
from tests.command import run
from tests.unit.test_cli import settings
from zinf.cli.own_model import own_arguments
from zinf.core.config import Config

README = Path(zinf.cli.__file__).with_name("README.md").read_text()
(MODULE,) = re.findall(r"^```python\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
(CONFIG,) = re.findall(r"^```yaml\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """The files of the example; modules of this name are forgotten after the test."""
    path = list(sys.path)
    (tmp_path / "bigram.py").write_text(MODULE)
    text = tmp_path / "text.txt"
    letters = np.random.default_rng(0).integers(97, 105, 40_000).astype(np.uint8)
    text.write_bytes(letters.tobytes())
    raw = yaml.safe_load(CONFIG)
    raw["data"]["paths"] = [str(text)]
    raw["run"]["output"] = str(tmp_path / "out")
    (tmp_path / "bigram.yaml").write_text(yaml.safe_dump(raw))
    yield tmp_path
    sys.path[:] = path
    for name in ("bigram", "own"):
        sys.modules.pop(name, None)


def test_the_example_plans_trains_and_is_evaluated(folder: Path) -> None:
    config = folder / "bigram.yaml"
    planned = run("plan", config)
    # 256 x 256 masters and two moments, in float32.
    assert "the model of bigram:make, 512 tokens a step" in planned.stdout
    assert "12.00 bytes at rest a parameter" in planned.stdout
    streamed = settings("execution=streamed", "memory.device=2MiB")
    trained = run("train", config, *streamed)
    ((first, last),) = re.findall(r"^loss (\S+) -> (\S+)$", trained.stdout, re.M)
    assert float(first) == pytest.approx(np.log(256), rel=1e-4)  # All are as likely.
    assert float(last) < 4
    found = run("evaluate", config)
    # Of 40,000 bytes 5% are held out: 31 windows of 64 tokens, 3 batches of 8.
    assert "1,536 tokens of 3 batches" in found.stdout
    # What another loss is the mean of is not known.
    assert "loss" in found.stdout and "perplexity" not in found.stdout
    refused = run("plan", "--generate", config, code=2)
    assert "model.function bigram:make makes this one" in refused.output
    # A run goes on with the same code; comments are not code.
    code = (folder / "bigram.py").read_text()
    resume = (*streamed, *settings("run.resume=true"))
    (folder / "bigram.py").write_text(f"{code}\n# A comment.\n")
    run("train", config, *resume)
    (folder / "bigram.py").write_text(f"{code}\nOTHER = 1\n")
    changed = run("train", config, *resume, code=2)
    assert "add --allow-changed model.function.content" in changed.stderr


RETURNS = "model.function own:make must return (loss_fn, params), or a dict of them"
# The file own.py, and what is said of it.
WRONG = [
    (None, "there is no module own in"),
    ("def mak(): ...", "there is none. Did you mean 'mak'? The file has mak."),
    ("make = 3", "it is no function"),
    ("def make(): return 3", f"{RETURNS}; it returned a int."),
    ("def make(): return 1, 2, 3", f"{RETURNS}; it returned a tuple of 3."),
    ("def make(): return {'loss': 1}", "the dict has loss."),
    ("def make(a, b): ...", "must take no argument, or one, the config; it takes a, b"),
    (
        "from flax import nnx\n"
        "def make(): return sum, nnx.Linear(1, 1, rngs=nnx.Rngs(0))",
        "params is a module of flax.nnx. Return graphdef, params = nnx.split",
    ),
]


@pytest.mark.parametrize(("module", "message"), WRONG)
def test_a_function_that_makes_no_model_is_refused_by_name(
    folder: Path, module: str | None, message: str
) -> None:
    if module is not None:
        (folder / "own.py").write_text(module)
    found = run(
        "plan", folder / "bigram.yaml", *settings("model.function=own:make"), code=2
    )
    assert message in found.output


def test_arguments_by_name_are_those_of_initialize(folder: Path) -> None:
    made: dict[str, Any] = {"loss_fn": sum, "params": {}, "has_aux": True, "rng": 1}
    (folder / "own.py").write_text(
        "def make(): return {'loss_fn': sum, 'params': {}, 'has_aux': True, 'rng': 1}"
    )
    path = folder / "bigram.yaml"
    config = Config.load(path, ["model.function=own:make"])
    assert own_arguments(config) == made
    # The folder of the file goes with the config, which is equal without it.
    again = Config.load(config, ["run.steps=5"])
    assert again.folders_of_modules() == (folder, Path.cwd())
    assert Config.load(yaml.safe_load(path.read_text())) == Config.load(path)


def test_an_import_that_fails_in_the_module_is_named_as_python_does(
    folder: Path,
) -> None:
    (folder / "own.py").write_text("import no_such_module")
    config = Config.load(folder / "bigram.yaml", ["model.function=own:make"])
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        own_arguments(config)
