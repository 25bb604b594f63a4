"""Folders of `sentence-transformers`: what becomes of a text before its vector."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import numpy as np

from zinf.core.interchange.names import listed
from zinf.core.interchange.safetensors_files import SafetensorsFiles
from zinf.hf.encoder import Pooling
from zinf.hf.folder import find_folder, weights_path

MODULES = "modules.json"
# The settings of a pooling that zinf has, by the name in a folder.
POOLINGS: Mapping[str, Pooling] = {
    "mean": "mean",
    "mean_tokens": "mean",
    "lasttoken": "last",
    "cls": "cls",
    "cls_token": "cls",
}
MODE = "pooling_mode_"
ACTIVATIONS = {"Identity": lambda x: x, "Tanh": np.tanh}


@dataclass(frozen=True)
class Dense:
    """A layer behind the pooling.

    Attributes:
        weight: float32 (out, in).
        bias: float32 (out,), or None.
        activation: one of `ACTIVATIONS`.
    """

    weight: np.ndarray
    bias: np.ndarray | None
    activation: str

    def __call__(self, vectors: np.ndarray) -> np.ndarray:
        found = vectors @ self.weight.T
        if self.bias is not None:
            found = found + self.bias
        return ACTIVATIONS[self.activation](found)


@dataclass(frozen=True)
class Recipe:
    """How a text becomes a vector.

    Attributes:
        model: the folder or the name of the model on the hub.
        pooling: of the states of the tokens.
        normalizes: whether vectors get the length 1.
        max_length: most tokens of a text; None: what the model was made for.
        strips, lowers: whether a text loses spaces at its ends, or capital letters.
        keeps_prompt: whether a mean has the tokens of the prompt.
        prompts: texts that stand before a text, by name.
        default_prompt: the name of the prompt that is taken if none is named.
        layers: what vectors go through behind the pooling.
    """

    model: str
    pooling: Pooling = "mean"
    normalizes: bool = True
    max_length: int | None = None
    strips: bool = False
    lowers: bool = False
    keeps_prompt: bool = True
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    layers: Sequence[Dense] = ()

    def finished(self, vectors: np.ndarray) -> np.ndarray:
        """Vectors as they leave the last layer: float32 (N, D) of pooled ones."""
        for layer in self.layers:
            vectors = layer(vectors)
        if self.normalizes:
            # The least length is torch's.
            lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
            vectors = vectors / np.maximum(lengths, 1e-12)
        return vectors.astype(np.float32)


def read_recipe(path_or_id: str | Path, pooling: Pooling | None = None) -> Recipe:
    """The recipe of vectors that the folder of a model describes.

    A folder without modules.json is that of a model alone: vectors are means, of length
    1.

    Args:
        pooling: in place of that of the folder, or None.

    Raises:
        FileNotFoundError, OSError: see `find_folder`.
        ValueError: a file is damaged.
        NotImplementedError: a module or a setting is none that zinf has.
    """
    folder = find_folder(path_or_id)
    if not (folder / MODULES).is_file():
        return Recipe(str(path_or_id), pooling or "mean")
    modules = _read(folder / MODULES, list)
    kinds = [_kind(module, folder) for module in modules]
    layout = [kind for kind in kinds if kind != "Dense"]
    if layout not in (
        ["Transformer", "Pooling"],
        ["Transformer", "Pooling", "Normalize"],
    ):
        raise NotImplementedError(
            f"{folder / MODULES} has the modules {listed(kinds)}, and zinf takes a "
            "Transformer, a Pooling, layers Dense, and Normalize at the end. Use "
            "sentence-transformers for this model."
        )
    places = [folder / str(module.get("path", "")) for module in modules]
    has_weights = places[0] != folder or "Dense" in kinds
    if has_weights and not Path(path_or_id).expanduser().exists():
        whole = find_folder(path_or_id, weights=True)
        places = [whole / place.relative_to(folder) for place in places]
    found = dict(zip(kinds, places, strict=True))
    # Earlier versions had the kind of the model in the name.
    files = sorted(places[0].glob("sentence_*_config.json"))
    settings = _settings(files[0]) if files else {}
    told = _settings(folder / "config_sentence_transformers.json")
    pooled = _read(found["Pooling"] / "config.json", dict)
    layers = [p for kind, p in zip(kinds, places, strict=True) if kind == "Dense"]
    return Recipe(
        str(path_or_id if places[0] == folder else places[0]),
        pooling=pooling or _pooling(pooled, found["Pooling"]),
        normalizes="Normalize" in kinds,
        max_length=settings.get("max_seq_length"),
        strips=True,
        lowers=bool(settings.get("do_lower_case", False)),
        keeps_prompt=bool(pooled.get("include_prompt", True)),
        prompts=told.get("prompts") or {},
        default_prompt=told.get("default_prompt_name"),
        layers=[_dense(place) for place in layers],
    )


def _pooling(settings: Mapping[str, Any], folder: Path) -> Pooling:
    modes = settings.get("pooling_mode")
    if modes is None:
        named = (n for n, on in settings.items() if n.startswith(MODE) and on)
        modes = [name.removeprefix(MODE) for name in named]
    modes = [modes] if isinstance(modes, str) else list(modes)
    if len(modes) != 1 or modes[0] not in POOLINGS:
        raise NotImplementedError(
            f"{folder / 'config.json'} asks for the pooling {listed(modes)}, and zinf "
            f"has one of {', '.join(get_args(Pooling))}. Name one with --pooling "
            "(pooling=), which makes other vectors, or use sentence-transformers."
        )
    return POOLINGS[modes[0]]


def _dense(folder: Path) -> Dense:
    settings = _read(folder / "config.json", dict)
    name = str(settings.get("activation_function", "Tanh")).rpartition(".")[2]
    if name not in ACTIVATIONS:
        raise NotImplementedError(
            f"{folder} is a layer with the activation {name}, and zinf has "
            f"{' and '.join(ACTIVATIONS)}. Use sentence-transformers for this model."
        )
    with SafetensorsFiles(weights_path(folder)) as files:
        arrays = {
            tensor.rpartition(".")[2]: files.read(
                tensor, tuple((0, size) for size in spec.shape)
            ).astype(np.float32)
            for tensor, spec in files.specs.items()
        }
    return Dense(arrays["weight"], arrays.get("bias"), name)


def _kind(module: Any, folder: Path) -> str:
    if not isinstance(module, Mapping) or "type" not in module:
        raise ValueError(
            f"{folder / MODULES} has {module!r:.40} in place of a module with its "
            "type. Get it again."
        )
    return str(module["type"]).rpartition(".")[2]


def _settings(path: Path) -> Mapping[str, Any]:
    return _read(path, dict) if path.is_file() else {}


def _read(path: Path, kind: type) -> Any:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FileNotFoundError(
            f"{path} is absent, which {MODULES} asks for. Get the folder anew."
        ) from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no JSON: {error}. Get it again.") from None
    if not isinstance(found, kind):
        raise ValueError(f"{path} has {found!r:.40}, no {kind.__name__}. Get it again.")
    return found
