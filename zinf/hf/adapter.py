"""An adapter in a folder of its own, as zinf and PEFT write it, and its base."""

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from zinf.adapt.files import CONFIG, ENCODING_KEYS, OWN_CONFIG, WEIGHTS
from zinf.adapt.peft import (
    BASE_LAYER,
    EMBEDDING_A,
    EMBEDDING_B,
    KERNELS,
    PREFIX,
    Naming,
)
from zinf.adapt.weight import LORA_A, LORA_B, MAGNITUDE
from zinf.checkpoint.grid import whole_box
from zinf.core.config import Config
from zinf.core.config.adapter import Adapter
from zinf.core.interchange.safetensors_files import (
    INDEX_SUFFIX,
    SUFFIX,
    SafetensorsFiles,
)
from zinf.core.interchange.tensors import AbstractTensors
from zinf.core.memory.zarr_format import numpy_dtype
from zinf.core.program import ArraySpec
from zinf.hf.folder import find_folder

PICKLE = "adapter_model.bin"
KIND, TASK = "LORA", "CAUSAL_LM"
OPTIONS = ("r", "lora_alpha", "use_rslora", "use_dora")
# Settings of PEFT that change what an adapter computes, and values that do not. Which
# modules have an adapter is not read: the names of the tensors say it.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "task_type": (TASK,),
    "bias": ("none",),
    "rank_pattern": (),
    "alpha_pattern": (),
    "layer_replication": (),
    "target_parameters": (),
    "trainable_token_indices": (),
    "alora_invocation_tokens": (),
    "arrow_config": (),
    "lora_bias": (False,),
    "use_qalora": (False,),
    # PiSSA, OLoRA, LoftQ and CorDA change the base as training begins.
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal"),
}
FACTORS = re.compile(
    rf"(.+)\.((?:{LORA_A}|{LORA_B})\.weight|{EMBEDDING_A}|{EMBEDDING_B}|{MAGNITUDE})"
)
# Rows of a base's weight that are compared at once with those of an adapter's file.
COMPARED_ROWS = 4096


@dataclass(frozen=True)
class SavedAdapter:
    """An adapter in files.

    Attributes:
        folder: has adapter_config.json and adapter_model.safetensors.
        settings: what adapter_config.json says.
    """

    folder: Path
    settings: Mapping[str, Any]

    @property
    def base(self) -> str | None:
        """The folder or the name of the model that it was trained on, if it says."""
        return self.settings.get("base_model_name_or_path") or None

    @property
    def own_settings(self) -> Mapping[str, Any]:
        """What zinf wrote beside PEFT's settings; nothing if PEFT wrote the folder."""
        path = self.folder / OWN_CONFIG
        return json.loads(path.read_text("utf-8")) if path.is_file() else {}

    def section(self, leaves: Collection[str], naming: Naming) -> Adapter:
        """The `adapter` section that begins with these values, without dropout.

        Args:
            leaves: names of the parameters of the base.
            naming: `naming_of` the base.

        Raises:
            FileNotFoundError: there are no values beside the settings.
            ValueError: the adapter is of another base.
            NotImplementedError: the values are a pickle, or a tensor is of a kind that
                zinf does not know.
        """
        self._check_files()
        with SafetensorsFiles(self.folder / WEIGHTS) as tensors:
            names = list(tensors.specs)
        targets, saved = set(), set()
        first = {name: path for path, tied in naming.tied.items() for name in tied}
        for name in names:
            if BASE_LAYER in name:
                continue
            found = FACTORS.fullmatch(name)
            leaf = self._leaf(name, leaves, first)
            (saved if found is None else targets).add(leaf)
        options = {key: self.settings[key] for key in OPTIONS if key in self.settings}
        own = self.own_settings
        options |= {key: own[key] for key in ENCODING_KEYS if key in own}
        given = options | {
            "target_modules": _just(targets),
            "modules_to_save": _just(saved) if saved else (),
            "begin_from": str(self.folder),
        }
        adapter = Config.load({"adapter": given}).adapter
        assert adapter is not None
        return adapter

    def _check_files(self) -> None:
        if (self.folder / WEIGHTS).is_file():
            return
        if (self.folder / PICKLE).is_file():
            raise NotImplementedError(
                f"The adapter in {self.folder} is a pickle ({PICKLE}), which runs code "
                "when it is read. Load it in PEFT and save it: that writes safetensors."
            )
        raise FileNotFoundError(
            f"{self.folder} has {CONFIG} and no {WEIGHTS}. Get the adapter again."
        )

    def parting(self, naming: Naming) -> str:
        """The first tied weight whose places the adapter changes differently.

        PEFT changes each place of a tied weight by itself: where the file has nothing
        for a place, that of the base stays.

        Returns:
            a phrase with the names and by how much they differ; empty if the adapter
            changes all places of each tied weight alike, or none.
        """
        self._check_files()
        is_own = (self.folder / OWN_CONFIG).is_file()
        with SafetensorsFiles(self.folder / WEIGHTS) as tensors:
            for names in naming.tied.values():
                found = {name: _values(tensors, name, naming) for name in names}
                has = [name for name in names if found[name]]
                # zinf's adapters are for all places, although they name one.
                if not has or is_own and has == [names[0]]:
                    continue
                left = [name for name in names if not found[name]]
                if left:
                    return f"it changes {has[0]!r} and not {left[0]!r}"
                for name in names[1:]:
                    off = _difference(found[names[0]], found[name])
                    if off:
                        return (
                            f"what it has for {names[0]!r} and for {name!r} differs by "
                            f"{off:.1%} of the largest entry"
                        )
        return ""

    def check_frozen(self, base: AbstractTensors, naming: Naming) -> None:
        """Compare the frozen weights that PEFT writes beside factors with the base's.

        Args:
            base: the weights of the base by name.

        Raises:
            ValueError: one differs by more than the rounding of its dtype.
        """
        first = {name: path for path, tied in naming.tied.items() for name in tied}
        with SafetensorsFiles(self.folder / WEIGHTS) as tensors:
            for name, spec in tensors.specs.items():
                if BASE_LAYER not in name:
                    continue
                own = name.removeprefix(PREFIX).replace(BASE_LAYER, ".")
                own = first.get(own, own)
                wanted = base.specs.get(own)
                if wanted is None or wanted.shape != spec.shape:
                    there = "none" if wanted is None else list(wanted.shape)
                    raise ValueError(
                        f"The adapter in {self.folder} was trained on a base whose "
                        f"{own!r} has the shape {list(spec.shape)}; here: {there}. "
                        "Save that base whole (save_pretrained), and name it."
                    )
                self._check_rows(tensors, name, base, own)

    def _check_rows(
        self, tensors: AbstractTensors, name: str, base: AbstractTensors, own: str
    ) -> None:
        largest = off = 0.0
        shape = base.specs[own].shape
        narrow = max(tensors.specs[name], base.specs[own], key=_digits_lost).dtype
        for i in range(0, shape[0], COMPARED_ROWS):
            box = ((i, min(i + COMPARED_ROWS, shape[0])), *whole_box(shape)[1:])
            one, two = (
                _rounded(x.read(n, box), narrow)
                for x, n in ((tensors, name), (base, own))
            )
            largest = max(largest, float(np.abs(two).max(initial=0.0)))
            off = max(off, float(np.abs(one - two).max(initial=0.0)))
        if off:
            raise ValueError(
                f"The adapter in {self.folder} was trained on another base: {name!r} "
                f"differs from {own!r} here by {off / max(largest, 1e-30):.1%} of the "
                "largest entry. Name the base that it was trained on."
            )

    def _leaf(
        self, name: str, leaves: Collection[str], first: Mapping[str, str]
    ) -> str:
        """The parameter that a tensor belongs to; `first` has those of tied names."""
        own = name.removeprefix(PREFIX)
        found = FACTORS.fullmatch(own)
        module = own if found is None else found[1]
        ends = KERNELS if found is not None else ()
        for leaf in (module, *(f"{module}.{end}" for end in ends)):
            leaf = first.get(leaf, leaf)
            if name.startswith(PREFIX) and leaf in leaves:
                return leaf
        raise ValueError(
            f"The adapter in {self.folder} is of another base: it has {name!r}, and "
            f"the base has no parameter {module!r}. Name the model that it was trained "
            f"on; its {CONFIG} names {self.base!r}."
        )


def naming_of(module: torch.nn.Module) -> Naming:
    """How PEFT names the parameters of a module that are tied, or embeddings."""
    groups: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    tied = {names[0]: tuple(names) for names in groups.values() if len(names) > 1}
    embeddings = frozenset(
        f"{name}.weight"
        for name, part in module.named_modules(remove_duplicate=False)
        if isinstance(part, torch.nn.Embedding)
    )
    return Naming(tied, embeddings)


def _values(
    tensors: SafetensorsFiles, name: str, naming: Naming
) -> dict[str, np.ndarray]:
    """What a file has for one place of a weight, in the form of an embedding's."""
    module = f"{PREFIX}{name.rpartition('.')[0]}."

    def read(end: str) -> np.ndarray:
        found = tensors.read(
            f"{module}{end}", whole_box(tensors.specs[module + end].shape)
        )
        return np.asarray(found, np.float32)

    ends = {n.removeprefix(module) for n in tensors.specs if n.startswith(module)}
    found = {end: read(end) for end in ends if not f".{end}".startswith(BASE_LAYER)}
    if name in naming.embeddings:
        return found
    turned = {f"{LORA_B}.weight": EMBEDDING_A, f"{LORA_A}.weight": EMBEDDING_B}
    return {turned.get(n, n): x.T if n in turned else x for n, x in found.items()}


def _difference(one: Mapping[str, np.ndarray], two: Mapping[str, np.ndarray]) -> float:
    """The largest difference, as a share of the largest entry."""
    off = 0.0
    for key in {**one, **two}:
        if key not in one or key not in two or one[key].shape != two[key].shape:
            return 1.0
        largest = max(np.abs(one[key]).max(), np.abs(two[key]).max(), 1e-30)
        off = max(off, float(np.abs(one[key] - two[key]).max() / largest))
    return off


def _digits_lost(spec: ArraySpec) -> int:
    return {"float32": 0, "float16": 1, "bfloat16": 2}.get(spec.dtype, 0)


def _rounded(array: np.ndarray, dtype: str) -> np.ndarray:
    return array.astype(numpy_dtype(dtype)).astype(np.float32)


def read_adapter(folder: Path) -> SavedAdapter | None:
    """The adapter in a folder; None if the folder has none, or a whole model.

    Raises:
        ValueError: its settings are no JSON, or lack what is needed.
        NotImplementedError: it is no LoRA adapter, or has a setting that is not
            supported.
    """
    path = folder / CONFIG
    if not path.is_file() or any(folder.glob(f"model*{SUFFIX}")):
        return None
    if any(folder.glob(f"*{INDEX_SUFFIX}")):
        return None
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}. Get it again.") from None
    if not isinstance(settings, dict):
        raise ValueError(f"{path} must be a JSON object. Get it again.")
    kind = settings.get("peft_type")
    if kind != KIND:
        raise NotImplementedError(
            f"{path} says peft_type = {kind!r}, and zinf reads adapters of the type "
            f"{KIND} only. Merge it in PEFT, and use the merged model."
        )
    for key, neutral in NEUTRAL.items():
        found = settings.get(key)
        if found not in neutral and found not in (None, [], {}):
            raise NotImplementedError(
                f"{path} says {key} = {found!r}, which zinf does not support. Merge "
                "the adapter in PEFT, and use the merged model."
            )
    if "r" not in settings:
        raise ValueError(f"{path} does not say the rank (r). Get it again.")
    return SavedAdapter(folder, settings)


def base_of(adapter: SavedAdapter, asked: str | Path | None) -> tuple[str, Path]:
    """The name and the folder of an adapter's base.

    Args:
        asked: the base in place of the one that the adapter names.

    Raises:
        ValueError: no base is named.
        FileNotFoundError: the base is not there.
    """
    name = adapter.base if asked is None else str(asked)
    if name is None:
        raise ValueError(
            f"{adapter.folder} has an adapter, and does not say of which model "
            "(base_model_name_or_path). Name it: --base, or base= in Python."
        )
    try:
        return name, find_folder(name)
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"The base of the adapter in {adapter.folder} is absent: {error} Or name "
            "another place of it: --base, or base= in Python."
        ) from error


def _just(paths: Collection[str]) -> str:
    """A regular expression that matches exactly these names."""
    return "|".join(map(re.escape, sorted(paths)))
