"""The model card of an export: data, figures and command of what was trained.

The card is the README.md of the folder, as the Hugging Face hub shows it.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from os.path import exists
from pathlib import Path, PurePath
from typing import Any

import yaml

from zinf.core.config import Config
from zinf.core.text.json_text import from_json

CARD = "README.md"
# Figures of a run, by their names in metrics.jsonl, and what the card calls them.
FIGURES = {
    "loss": "loss of the last step",
    "evaluation_loss": "loss of the last evaluation",
    "evaluation_accuracy": "accuracy of the last evaluation",
    "reward": "mean reward of the last step",
    "tokens_seen": "tokens trained on",
}
# Sections that say where things are on one machine, and change no number.
OF_MACHINE = ("memory", "mesh", "rates", "compile_cache")
KEPT_OF_RUN = ("steps", "seed", "weights")


@dataclass(frozen=True)
class Run:
    """What a card says of a run.

    Attributes:
        objective: of `data.objective`, such as "sft".
        data: names of the files that were trained on, and for evaluation.
        figures: by what they are.
        settings: keys of the config that are not defaults, without places.
    """

    objective: str
    data: tuple[str, ...] = ()
    figures: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)


def run_of(config: Config, metrics: Path, *, step: int | None = None) -> Run:
    """What a card says of the run of a config.

    Args:
        metrics: the file with a JSON object for each step. Without it, the card has no
            figures.
        step: the last one that counts; None: that of the end.
    """
    data = config.data
    paths = [] if isinstance(data.paths, str) else [*data.paths]
    held_out = [*(data.evaluation_paths or ())]
    names = [Path(path).name for path in paths]
    names += [f"{Path(path).name} (evaluation)" for path in held_out]
    return Run(data.objective, tuple(names), _figures(metrics, step), _settings(config))


def card_of(base: str, *, adapter: bool, run: Run | None = None, more: str = "") -> str:
    """The text of a card.

    Args:
        base: the folder or name of the model that was trained.
        adapter: the folder has adapters alone, as PEFT writes them.
        run: how it was trained, where that is known.
        more: a paragraph about the files.
    """
    is_name = base.count("/") == 1 and not Path(base).exists()
    shown = base if is_name else PurePath(base).name
    head: dict[str, Any] = {"library_name": "peft" if adapter else "transformers"}
    if is_name:
        head["base_model"] = base
    head["tags"] = ["zinf", *([run.objective] if run else ())]
    what = "Adapters for" if adapter else "A model made of"
    made = f"{what} `{shown}`, written by zinf {version('zinf')}."
    parts = ["---", yaml.safe_dump(head, sort_keys=False).rstrip(), "---", ""]
    parts += [f"# {shown}", "", made, *(["", more] if more else [])]
    if run is not None:
        parts += ["", "## Training", "", f"Objective: `{run.objective}`.", ""]
        parts += [f"* data: `{name}`" for name in run.data]
        parts += [f"* {name}: {_shown(value)}" for name, value in run.figures.items()]
        settings = yaml.safe_dump(dict(run.settings), sort_keys=False).rstrip()
        parts += ["", "Command: `zinf train config.yaml`, with this file:", ""]
        parts += ["```yaml", settings, "```"]
    return "\n".join(parts) + "\n"


def write_card(folder: Path, text: str) -> None:
    """Write a card as the README.md of a folder."""
    (folder / CARD).write_text(text, encoding="utf-8")


def _shown(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def _figures(metrics: Path, step: int | None) -> dict[str, Any]:
    """The last value of each figure, and the number of steps."""
    found: dict[str, Any] = {}
    if not metrics.is_file():
        return found
    for line in metrics.read_text("utf-8").splitlines():
        values = from_json(line.encode())
        if not isinstance(values, dict):
            continue
        if "step" in values:
            if step is not None and values["step"] > step:
                break
            found["steps"] = values["step"]
        found |= {
            name: values[key]
            for key, name in FIGURES.items()
            if isinstance(values.get(key), int | float)
        }
    return found


def _settings(config: Config) -> dict[str, Any]:
    """The keys of a config that are not defaults; of files, their names."""
    found = json.loads(config.model_dump_json(exclude_defaults=True))
    found = {key: x for key, x in found.items() if key not in OF_MACHINE}
    run = found.get("run", {})
    found["run"] = {key: run[key] for key in KEPT_OF_RUN if key in run}
    for key in ("paths", "evaluation_paths"):
        if isinstance(found.get("data", {}).get(key), list):
            found["data"][key] = [Path(x).name for x in found["data"][key]]
    found.get("data", {}).pop("cache", None)
    return _without_folders(found)


def _without_folders(value: Any) -> Any:
    """A value of JSON; files, functions in them and folders without where they are."""
    if isinstance(value, dict):
        return {key: _without_folders(x) for key, x in value.items()}
    if isinstance(value, list):
        return [_without_folders(x) for x in value]
    if not isinstance(value, str):
        return value
    path, (file, _, _) = PurePath(value), value.partition(".py:")
    # `exists` takes any text, also one that cannot be a path.
    is_here = path.is_absolute() or exists(value) or exists(f"{file}.py")
    return path.name if is_here else value
