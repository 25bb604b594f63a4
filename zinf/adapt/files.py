"""Adapters in files of their own, as the PEFT library writes them, and merged weights.

A folder has `adapter_model.safetensors`, `adapter_config.json` and, with what PEFT does
not know, `zinf_adapter.json`. The factors of a weight are matrices there: `lora_A` is
[r, inputs] and `lora_B` is [outputs, r], after the dims of a stack or of experts.
"""

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from zinf.adapt.adapted import ADAPTER, Adapted
from zinf.adapt.peft import (
    BASE_LAYER,
    Naming,
    from_peft,
    module_of,
    peft_tensors,
    to_peft,
)
from zinf.adapt.weight import LORA_A, LORA_B
from zinf.checkpoint.grid import whole_box
from zinf.checkpoint.saved import Saved
from zinf.core.engine.engine import Engine
from zinf.core.interchange.folder import complete_folder
from zinf.core.interchange.header import ordered, write_header
from zinf.core.interchange.safetensors_files import SafetensorsFiles
from zinf.core.interchange.sources import parameters
from zinf.core.interchange.tensors import AbstractTensors
from zinf.core.memory.nvme.system import sync
from zinf.core.memory.storage_error import INTERCHANGE
from zinf.core.program import ArraySpec

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
OWN_CONFIG = "zinf_adapter.json"
# How the frozen weights were kept, if otherwise than in the base's files.
ENCODING_KEYS = ("quantize_base", "quantize_block")
# Leaves that a file of a base does not have.
LORA_PATTERNS = [f"{ADAPTER}/*/{name}" for name in (LORA_A, LORA_B)]


def save_adapter(
    adapted: Adapted,
    source: Engine | Saved | AbstractTensors,
    directory: Path | str,
    *,
    base: str | None = None,
    task: str | None = None,
    naming: Naming | None = None,
    own_settings: Mapping[str, Any] | None = None,
    beside: Callable[[Path], None] | None = None,
) -> None:
    """Write the adapters of an engine or a checkpoint, without the base.

    Args:
        directory: absent or empty. It appears only when it is complete.
        base, task: what PEFT's `base_model_name_or_path` and `task_type` say.
        naming: of the model of PEFT. A tied leaf is written under each of its names:
            PEFT would leave the base's weight in the places that are not.
        own_settings: further keys of `zinf_adapter.json`, of the model.
        beside: called with the folder before it gets its name, to add other files.

    Raises:
        FileExistsError: the folder is not empty.
        StorageError: a file cannot be written.
    """
    naming = naming or Naming()
    tensors = parameters(source)
    arrays: dict[str, np.ndarray] = {}
    for name, place in peft_tensors(adapted, naming).items():
        path = place.path
        found = tensors.read(path, whole_box(tensors.specs[path].shape))
        arrays[name] = to_peft(place, found)
    specs = {n: ArraySpec(x.shape, str(x.dtype), x.itemsize) for n, x in arrays.items()}
    names = ordered(specs)
    header = write_header(specs, names, {"format": "pt"})
    nbytes = sum(x.nbytes for x in arrays.values()) + len(header)
    own = _own_config(adapted) | dict(own_settings or {})
    with complete_folder(Path(directory), nbytes) as fresh:
        parts = [header, *(np.ascontiguousarray(arrays[n]).tobytes() for n in names)]
        _write(fresh / WEIGHTS, parts)
        config = _peft_config(adapted, naming)
        config |= {"base_model_name_or_path": base, "task_type": task}
        _write(fresh / CONFIG, [_json(config)])
        _write(fresh / OWN_CONFIG, [_json(own)])
        if beside is not None:
            beside(fresh)


def load_adapter(
    adapted: Adapted, directory: Path | str, *, naming: Naming | None = None
) -> Adapted:
    """`adapted` with first values from a folder that `save_adapter` or PEFT wrote.

    Args:
        naming: of the model of PEFT. Tensors of a tied leaf must be the same under each
            of its names. Frozen weights that PEFT writes beside are not read.

    Raises:
        FileNotFoundError: the folder or a file of it is absent.
        ValueError: the adapter is of another base: a tensor is missing or left over, or
            a shape or an option differs; or it has a tied leaf under one name alone, or
            other values under the other. The message names the first one.
    """
    directory, naming = Path(directory), naming or Naming()
    _check_base(adapted, directory)
    values: dict[str, Any] = {path: {} for path in adapted.targets}
    with SafetensorsFiles(directory / WEIGHTS) as tensors:
        present = {name for name in tensors.specs if BASE_LAYER not in name}
        wanted = peft_tensors(adapted, naming)
        if (directory / OWN_CONFIG).exists():
            # zinf's adapters are for all places of a tied leaf, although they name one.
            wanted = {n: x for n, x in wanted.items() if n in present or not x.is_again}
        _check_names(wanted, present, directory)
        for name, place in wanted.items():
            spec = tensors.specs[name]
            found = tensors.read(name, whole_box(spec.shape))
            _check_shape(name, found.shape, place.shape(adapted), directory)
            value = from_peft(adapted, place, found)
            if place.is_again:
                first = values[place.leaf]
                first = first if place.part is None else first[place.part]
                _check_tied(name, first, value, directory)
            elif place.part is None:
                values[place.leaf] = value
            else:
                values[place.leaf][place.part] = value
    loaded = {path: value for path, value in values.items() if len(value)}
    params = adapted.params
    if callable(params):
        begun: Any = lambda: {**params(), ADAPTER: loaded}  # noqa: E731
    else:
        begun = {**params, ADAPTER: loaded}
    return replace(adapted, params=begun, loaded=loaded)


def _peft_config(adapted: Adapted, naming: Naming) -> dict[str, Any]:
    adapter = adapted.adapter
    trained = [path for path, target in adapted.targets.items() if target.r]

    def modules(paths: Collection[str]) -> list[str]:
        return sorted({module_of(name) for path in paths for name in naming.of(path)})

    return {
        "peft_type": "LORA",
        "base_model_name_or_path": None,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "task_type": None,
        "r": adapter.r,
        "lora_alpha": adapter.lora_alpha,
        "lora_dropout": adapter.lora_dropout,
        "target_modules": modules(trained),
        "modules_to_save": modules(adapted.saved) or None,
        "use_rslora": adapter.use_rslora,
        "use_dora": adapter.use_dora,
        "init_lora_weights": adapter.init_lora_weights,
    }


def _own_config(adapted: Adapted) -> dict[str, Any]:
    """What a saved adapter must match: the base's leaves and how they are stored."""
    layout, adapter = adapted.layout, adapted.adapter
    kept = ENCODING_KEYS if adapter.quantize_base is not None else ()
    return {key: getattr(adapter, key) for key in kept} | {
        "base": {path: list(spec.shape) for path, spec in layout.specs.items()},
        "targets": {p: asdict(t.contraction) for p, t in layout.targets.items()},
    }


def _check_base(adapted: Adapted, directory: Path) -> None:
    """Raises if the options or the base differ from those of the folder."""
    for name in (CONFIG, WEIGHTS):
        if not (directory / name).is_file():
            raise FileNotFoundError(
                f"{directory} has no adapter: {name} is absent. Name a folder that "
                "zinf.adapt.save_adapter or PEFT wrote."
            )
    with INTERCHANGE.explained("Cannot read an adapter", directory / CONFIG):
        config = json.loads((directory / CONFIG).read_text(encoding="utf-8"))
    for key in ("r", "lora_alpha", "use_rslora", "use_dora"):
        asked = getattr(adapted.adapter, key)
        if key in config and config[key] != asked:
            raise ValueError(
                f"The adapter in {directory} has {key} = {config[key]}, and here it is "
                f"{asked}. Set adapter.{key} to {config[key]}."
            )
    if not (directory / OWN_CONFIG).exists():
        return  # PEFT wrote it: names and shapes of the tensors are compared.
    base = json.loads((directory / OWN_CONFIG).read_text(encoding="utf-8"))["base"]
    here = {p: list(spec.shape) for p, spec in adapted.layout.specs.items()}
    for path in {**base, **here}:
        if base.get(path) != here.get(path):
            raise ValueError(
                f"The adapter in {directory} is of another base: {path!r} has "
                f"{_shape(base.get(path))} there and {_shape(here.get(path))} here. "
                "Load the model that it was trained on."
            )


def _check_names(
    wanted: Collection[str], found: Collection[str], directory: Path
) -> None:
    for name in [*wanted, *sorted(found)]:
        if name not in found or name not in wanted:
            where = "is in the file and not here" if name in found else "is not in it"
            raise ValueError(
                f"The adapter in {directory} is of other weights: {name!r} {where}. "
                "Give target_modules and modules_to_save as they were when it was "
                "trained, and the model that it was trained on."
            )


def _check_tied(name: str, first: Any, value: Any, directory: Path) -> None:
    one, two = np.asarray(first, np.float32), np.asarray(value, np.float32)
    if not np.array_equal(one, two):
        off = np.abs(one - two).max() / max(np.abs(one).max(), np.abs(two).max())
        raise ValueError(
            f"The adapter in {directory} has two values for one weight: {name!r} "
            f"differs by {off:.1%} of the largest entry from what it has for the tied "
            "weight under its other name. Use a base that is not tied."
        )


def _check_shape(
    name: str, found: tuple[int, ...], wanted: tuple[int, ...], directory: Path
) -> None:
    if tuple(found) != tuple(wanted):
        raise ValueError(
            f"The adapter in {directory} is of another base: {name!r} has "
            f"{_shape(found)}, and {_shape(wanted)} here. Load the model that it was "
            "trained on."
        )


def _shape(shape: Any) -> str:
    return "no such leaf" if shape is None else f"the shape {list(shape)}"


def _json(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, indent=2).encode()


def _write(path: Path, parts: list[bytes]) -> None:
    with (
        INTERCHANGE.explained(f"Cannot write {path.name}", path),
        open(path, "xb") as file,
    ):
        for part in parts:
            file.write(part)
        file.flush()
        sync(file.fileno())
