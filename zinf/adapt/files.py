"""Adapters in files of their own, as the PEFT library writes them, and merged weights.

A folder has `adapter_model.safetensors`, `adapter_config.json` and, with what PEFT does
not know, `zinf_adapter.json`. The factors of a weight are matrices there: `lora_A` is
[r, inputs] and `lora_B` is [outputs, r], after the dims of a stack or of experts.
"""

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zinf.adapt.lora import ADAPTER, BASE, Adapted
from zinf.adapt.weight import LORA_A, LORA_B, MAGNITUDE, WEIGHT, Target, merged, whole
from zinf.checkpoint.grid import whole_box
from zinf.checkpoint.saved import Saved
from zinf.core.config.adapter import Adapter
from zinf.core.engine.engine import Engine
from zinf.core.interchange.folder import complete_folder
from zinf.core.interchange.header import ordered, write_header
from zinf.core.interchange.safetensors_files import SafetensorsFiles
from zinf.core.interchange.sources import parameters
from zinf.core.interchange.tensors import AbstractTensors
from zinf.core.memory.nvme.system import sync
from zinf.core.memory.storage_error import INTERCHANGE
from zinf.core.program import ArraySpec
from zinf.core.sharding import Box

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
OWN_CONFIG = "zinf_adapter.json"
# How the frozen weights were kept, if otherwise than in the base's files.
ENCODING_KEYS = ("quantize_base", "quantize_block")
PREFIX = "base_model.model."
KERNELS = ("kernel", "weight", "w")
EMBEDDING_A, EMBEDDING_B = "lora_embedding_A", "lora_embedding_B"
# PEFT writes the frozen weight too, if an embedding or an output head has an adapter.
BASE_LAYER = ".base_layer."
# Leaves that a file of a base does not have.
LORA_PATTERNS = [f"{ADAPTER}/*/{name}" for name in (LORA_A, LORA_B)]


@dataclass(frozen=True)
class Naming:
    """What the model of PEFT is, where key paths of leaves do not say it.

    Attributes:
        tied: all names of a leaf that the model has in several places, with ".", by
            its key path. PEFT has an adapter for each of them.
        embeddings: names of leaves of which rows are looked up. Their factors have
            other names there.
    """

    tied: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    embeddings: frozenset[str] = frozenset()

    def of(self, path: str) -> tuple[str, ...]:
        """The names of a leaf."""
        return self.tied.get(path, (path.replace("/", "."),))


def save_adapter(
    adapted: Adapted,
    source: Engine | Saved | AbstractTensors,
    directory: Path | str,
    *,
    base: str | None = None,
    task: str | None = None,
    naming: Naming | None = None,
    beside: Callable[[Path], None] | None = None,
) -> None:
    """Write the adapters of an engine or a checkpoint, without the base.

    Args:
        directory: absent or empty. It appears only when it is complete.
        base, task: what PEFT's `base_model_name_or_path` and `task_type` say.
        naming: of the model of PEFT. A tied leaf is written under each of its names:
            PEFT would leave the base's weight in the places that are not.
        beside: called with the folder before it gets its name, to add other files.

    Raises:
        FileExistsError: the folder is not empty.
        StorageError: a file cannot be written.
    """
    naming = naming or Naming()
    tensors = parameters(source)
    arrays: dict[str, np.ndarray] = {}
    for name, place in _names(adapted, naming).items():
        path = place.path
        found = tensors.read(path, whole_box(tensors.specs[path].shape))
        arrays[name] = _outgoing(place, found)
    specs = {n: ArraySpec(x.shape, str(x.dtype), x.itemsize) for n, x in arrays.items()}
    names = ordered(specs)
    header = write_header(specs, names, {"format": "pt"})
    nbytes = sum(x.nbytes for x in arrays.values()) + len(header)
    with complete_folder(Path(directory), nbytes) as fresh:
        parts = [header, *(np.ascontiguousarray(arrays[n]).tobytes() for n in names)]
        _write(fresh / WEIGHTS, parts)
        config = _peft_config(adapted, naming)
        config |= {"base_model_name_or_path": base, "task_type": task}
        _write(fresh / CONFIG, [_json(config)])
        _write(fresh / OWN_CONFIG, [_json(_own_config(adapted))])
        if beside is not None:
            beside(fresh)


def load_adapter(
    adapted: Adapted, directory: Path | str, *, naming: Naming | None = None
) -> Adapted:
    """The same, with first values from a folder that `save_adapter` or PEFT wrote.

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
        wanted = _names(adapted, naming)
        if (directory / OWN_CONFIG).exists():
            # Of zinf an adapter is of all places of a tied leaf, whatever it names.
            wanted = {n: x for n, x in wanted.items() if n in present or not x.is_again}
        _check_names(wanted, present, directory)
        for name, place in wanted.items():
            spec = tensors.specs[name]
            found = tensors.read(name, whole_box(spec.shape))
            _check_shape(name, found.shape, place.shape(adapted), directory)
            value = _incoming(adapted, place, found)
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


class MergedTensors(AbstractTensors):
    """The user's parameters with the adapters added, read from an engine or checkpoint.

    `zinf.interchange.export_safetensors` writes them. A weight is merged whole, or a
    row of its stack at a time.
    """

    copies = 4

    def __init__(
        self, adapted: Adapted, source: Engine | Saved | AbstractTensors
    ) -> None:
        self._layout, self._inner = adapted.layout, parameters(source)
        # A merged weight has the dtype that the base is kept in.
        self.specs = {p: self._spec(p) for p in adapted.layout.specs}
        state = (p for p in self._inner.specs if p.startswith("model_state/"))
        self._state = frozenset(state)
        self.specs |= {p: self._inner.specs[p] for p in self._state}

    def block(self, name: str) -> tuple[int, ...]:
        target = self._layout.targets.get(name)
        if target is None:
            return self._inner.block(self._path(name))
        sizes = tuple(max(1, size) for size in target.shape)
        return (1, *sizes[1:]) if 0 in target.lead else sizes

    def read(self, name: str, box: Box) -> np.ndarray:
        target = self._layout.targets.get(name)
        if target is None:
            return self._inner.read(self._path(name), box)
        names = (WEIGHT,) if target.encoding is None else target.encoding.names
        base = f"{BASE}/{name}"
        paths = {n: base if n == WEIGHT else f"{base}/{n}" for n in names}
        paths |= {n: f"{ADAPTER}/{name}/{n}" for n in target.factor_shapes}
        rows = box[0] if 0 in target.lead else None
        parts = {n: jnp.asarray(self._part(path, rows)) for n, path in paths.items()}
        if rows is not None:
            target = replace(target, shape=(rows[1] - rows[0], *target.shape[1:]))
        # The factors are multiplied in float32, and the sum is rounded once.
        found = merged(whole(target, parts, "float32"))
        found = found.astype(self.specs[name].dtype)
        return np.ascontiguousarray(jax.device_get(found))

    def _part(self, path: str, rows: tuple[int, int] | None) -> np.ndarray:
        shape = self._inner.specs[path].shape
        box = whole_box(shape)
        if rows is None:
            return self._inner.read(path, box)
        # The parts of other tensors need not be cut where rows end.
        step = self._inner.block(path)[0]
        low, high = rows[0] // step * step, min(-(-rows[1] // step) * step, shape[0])
        read = [
            self._inner.read(path, ((i, min(i + step, shape[0])), *box[1:]))
            for i in range(low, high, step)
        ]
        return np.concatenate(read)[rows[0] - low : rows[1] - low]

    def _path(self, name: str) -> str:
        if name in self._state:
            return name
        return f"{ADAPTER if name in self._layout.saved else BASE}/{name}"

    def _spec(self, name: str) -> ArraySpec:
        target = self._layout.targets.get(name)
        if target is None:
            folder = ADAPTER if name in self._layout.saved else BASE
            return self._inner.specs[f"{folder}/{name}"]
        if target.encoding is None:
            return self._inner.specs[f"{BASE}/{name}"]
        return ArraySpec(target.shape, target.dtype, jnp.dtype(target.dtype).itemsize)


def names_of_base(
    adapter: Adapter, names: Mapping[str, str] | None
) -> Callable[[str], str]:
    """The name of a base's tensor by key path, to import a base under an adapter.

    Args:
        names: names by key path in the user's parameters; by default its own, with ".".

    Raises:
        ValueError: the base is stored otherwise than in the file, or the adapter has
            values that were computed from it.
    """
    if adapter.quantize_base is not None or adapter.use_dora:
        key = "use_dora" if adapter.use_dora else "quantize_base"
        raise ValueError(
            f"adapter.{key} needs the base when the adapters are made, so no base can "
            "be imported later. Make the parameters from the file in Python, and call "
            "zinf.adapt.lora."
        )

    def name(path: str) -> str:
        own = path.partition("/")[2]
        return (names or {}).get(own, own.replace("/", "."))

    return name


@dataclass(frozen=True)
class _Place:
    """The array of a tensor of a file.

    Attributes:
        leaf: its key path in the user's parameters.
        part: which factor; None: the leaf, which is trained whole.
        target: of the leaf; None if it is trained whole.
        is_turned: what is summed over in this place is the outputs elsewhere, so each
            factor is the other one.
        is_again: another tensor is the same, under another name of the leaf.
    """

    leaf: str
    part: str | None
    target: Target | None
    is_turned: bool = False
    is_again: bool = False

    @property
    def path(self) -> str:
        end = "" if self.part is None else f"/{self.part}"
        return f"{ADAPTER}/{self.leaf}{end}"

    def shape(self, adapted: Adapted) -> tuple[int, ...]:
        """That of the tensor."""
        if self.target is None or self.part is None:
            return tuple(adapted.layout.specs[self.leaf].shape)
        shape = _outgoing_shape(self.target, self.part)
        return shape[::-1] if self.is_turned else shape


def _names(adapted: Adapted, naming: Naming) -> dict[str, _Place]:
    """What each tensor of a file is, by name."""
    modules = [_module(path) for path in adapted.targets]
    found = {}
    for path, target in adapted.targets.items():
        for name in naming.of(path):
            module = _module(name)
            if modules.count(module) > 1:
                module = name
            is_again = name != naming.of(path)[0]
            for end, part, is_turned in _ends(path, name, target, naming):
                place = _Place(path, part, target, is_turned, is_again)
                found[f"{PREFIX}{module}.{end}"] = place
    for path in adapted.saved:
        for name in naming.of(path):
            is_again = name != naming.of(path)[0]
            found[f"{PREFIX}{name}"] = _Place(path, None, None, False, is_again)
    return found


def _ends(
    path: str, name: str, target: Target, naming: Naming
) -> Iterator[tuple[str, str, bool]]:
    """The end of a tensor's name, the part of the adapter, and whether it is turned."""
    is_embedding = name in naming.embeddings
    parts = tuple(target.factor_shapes)
    is_turned = False
    if any(each in naming.embeddings for each in naming.of(path)):
        # PEFT sums over words in an embedding, and over the hidden dim in a head.
        is_turned = target.contraction.inputs != ((0,) if is_embedding else (1,))
    for part in parts:
        if part == MAGNITUDE:
            yield part, part, False
            continue
        as_named = {LORA_A: LORA_B, LORA_B: LORA_A}[part] if is_turned else part
        ending = f"{as_named}.weight"
        if is_embedding:
            ending = EMBEDDING_A if as_named == LORA_A else EMBEDDING_B
        yield ending, part, is_turned


def _module(path: str) -> str:
    dotted = path.replace("/", ".")
    module, _, last = dotted.rpartition(".")
    return module if module and last in KERNELS else dotted


def _outgoing(place: _Place, array: np.ndarray) -> np.ndarray:
    target, part = place.target, place.part
    if target is None or part is None:
        return array
    count = len(target.lead)
    if part == MAGNITUDE:
        return array.reshape(_outgoing_shape(target, part))
    sizes = (-1, target.r) if part == LORA_A else (target.r, -1)
    flat = array.reshape(*array.shape[:count], *sizes)
    return np.ascontiguousarray(flat if place.is_turned else np.swapaxes(flat, -1, -2))


def _outgoing_shape(target: Target, part: str) -> tuple[int, ...]:
    lead = target.sizes(target.lead)
    inputs = prod(target.sizes(target.contraction.inputs))
    outputs = prod(target.sizes(target.contraction.outputs))
    if part == MAGNITUDE:
        return (*lead, outputs)
    return (*lead, target.r, inputs) if part == LORA_A else (*lead, outputs, target.r)


def _incoming(adapted: Adapted, place: _Place, array: np.ndarray) -> Any:
    target, part = place.target, place.part
    if target is None or part is None:
        return array.astype(adapted.layout.specs[place.leaf].dtype)
    if part != MAGNITUDE and not place.is_turned:
        array = np.swapaxes(array, -1, -2)
    shape = target.factor_shapes[part]
    return jnp.asarray(array.reshape(shape)).astype(jnp.float32)


def _peft_config(adapted: Adapted, naming: Naming) -> dict[str, Any]:
    adapter = adapted.adapter
    trained = [path for path, target in adapted.targets.items() if target.r]

    def modules(paths: Collection[str]) -> list[str]:
        return sorted({_module(name) for path in paths for name in naming.of(path)})

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
    """The base's leaves, and how they were kept: an adapter is for just these."""
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
