"""An adapter in a folder of its own, as zinf and PEFT write it, and its base."""

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zinf.adapt.files import CONFIG, ENCODING_KEYS, KERNELS, OWN_CONFIG, PREFIX, WEIGHTS
from zinf.adapt.weight import LORA_A, LORA_B, MAGNITUDE
from zinf.config import Config
from zinf.config.adapter import Adapter
from zinf.hf.folder import find_folder
from zinf.interchange.safetensors_files import INDEX_SUFFIX, SUFFIX, SafetensorsFiles

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
FACTORS = re.compile(rf"(.+)\.(?:(?:{LORA_A}|{LORA_B})\.weight|{MAGNITUDE})")


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

    def section(self, leaves: Collection[str]) -> Adapter:
        """The `adapter` section that begins with these values, without dropout.

        Args:
            leaves: names of the parameters of the base.

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
        for name in names:
            found = FACTORS.fullmatch(name)
            (saved if found is None else targets).add(self._leaf(name, leaves))
        options = {key: self.settings[key] for key in OPTIONS if key in self.settings}
        own = self.folder / OWN_CONFIG
        if own.is_file():
            kept = json.loads(own.read_text(encoding="utf-8"))
            options |= {key: kept[key] for key in ENCODING_KEYS if key in kept}
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

    def _leaf(self, name: str, leaves: Collection[str]) -> str:
        """The parameter that a tensor belongs to."""
        own = name.removeprefix(PREFIX)
        if "lora_embedding_" in own:
            raise NotImplementedError(
                f"The adapter in {self.folder} changes an embedding ({name!r}), which "
                "zinf does not read as PEFT writes it. Merge it in PEFT, and use that."
            )
        found = FACTORS.fullmatch(own)
        module = own if found is None else found[1]
        ends = KERNELS if found is not None else ()
        for leaf in (module, *(f"{module}.{end}" for end in ends)):
            if name.startswith(PREFIX) and leaf in leaves:
                return leaf
        raise ValueError(
            f"The adapter in {self.folder} is of another base: it has {name!r}, and "
            f"the base has no parameter {module!r}. Name the model that it was trained "
            f"on; its {CONFIG} names {self.base!r}."
        )


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
    """A pattern of these names alone."""
    return "|".join(map(re.escape, sorted(paths)))
