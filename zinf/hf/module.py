"""Builds a `transformers` model whose parameters have shapes and no values."""

import json
import re
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.overrides import TorchFunctionMode
from transformers.initialization import no_init_weights

from zinf.hf import attention, casts, experts, gradients, lookups, rotary
from zinf.hf.quantized import METHODS, refusal

CONFIG = "config.json"
# Far more layers, experts and labels than published models have.
COUNTS = {
    re.compile(r"^(num|n)_(\w+_)?(layers?|experts|blocks)$|_layers$"): 4096,
    re.compile(r"^num_labels$"): 2**20,
}
# Kimi K2 has 61 layers of 384 experts: 23,424.
MAX_EXPERTS = 2**17
# No constructor computes a buffer of so many bytes.
LARGE_BYTES = 2**30
# Classes of `transformers` whose outputs are the states of the last layer, not logits.
ENCODER = "AutoModel"
# The encoders of encoder-decoders, such as T5's.
TEXT_ENCODER = "AutoModelForTextEncoding"


def output_name(auto_class: str) -> str:
    """The name of the output of an Auto class's models that zinf reads."""
    is_encoder = auto_class in (ENCODER, TEXT_ENCODER)
    return "last_hidden_state" if is_encoder else "logits"


def read_config(folder: Path) -> transformers.PretrainedConfig:
    """The configuration of the model in a folder.

    Raises:
        FileNotFoundError: the folder has no config.json.
        ValueError: it is no JSON, or of an architecture that `transformers` lacks.
        NotImplementedError: the model needs code from its folder, or is quantized.
    """
    path = folder / CONFIG
    if not path.is_file():
        raise FileNotFoundError(
            f"{folder} has no {CONFIG}. Name a folder that `save_pretrained` wrote, or "
            "that was downloaded whole."
        )
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}. Get it again.") from None
    except RecursionError:
        raise ValueError(f"{path} is nested too deeply. Get it again.") from None
    kind = raw.get("model_type") if isinstance(raw, dict) else None
    if not isinstance(kind, str):
        raise ValueError(f"{path} has no model_type, so its architecture is unknown.")
    if "auto_map" in raw and kind not in transformers.CONFIG_MAPPING:
        raise NotImplementedError(
            f"{path} needs the code beside it (trust_remote_code), which zinf does not "
            f"run. Use a version of the model that transformers has built in."
        )
    if kind not in transformers.CONFIG_MAPPING:
        raise ValueError(
            f"{path} is of the architecture {kind!r}, which transformers "
            f"{transformers.__version__} does not have. Install a version that has it."
        )
    _check_counts(raw, path)
    quantization = raw.get("quantization_config")
    if quantization and not isinstance(quantization, Mapping):
        raise ValueError(
            f"{path} says quantization_config = {quantization!r:.40}, which is no "
            "section. Get it again."
        )
    reason = refusal(quantization) if quantization else None
    if reason is not None:
        raise NotImplementedError(
            f"{path} says that the weights are quantized ({reason}), and zinf reads "
            f"plain ones, {', '.join(METHODS)}. Use the checkpoint in bfloat16, or "
            "dequantize this one in transformers and save it."
        )
    try:
        config = transformers.AutoConfig.from_pretrained(
            folder, trust_remote_code=False
        )
    except Exception as error:
        # Each architecture computes with the values, and raises what it likes.
        raise ValueError(
            f"transformers cannot read {path}: {type(error).__name__}: {error}. Get it "
            "again."
        ) from error
    if quantization:
        # The model computes with plain weights, and is exported so.
        del config.quantization_config
    return config


def read_quantization(folder: Path) -> Mapping[str, Any] | None:
    """How the weights in a folder are quantized, as its config.json says."""
    raw = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    return raw.get("quantization_config") or None


def _check_counts(raw: Mapping[str, Any], path: Path) -> None:
    """Raise if a config.json asks for more of something than any model has.

    `transformers` makes an entry of a list, and a module, for each, which takes hours
    and all memory long before a budget is looked at.
    """
    numbers = {
        key: value
        for key, value in raw.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
    for key, value in raw.items():
        if isinstance(value, Mapping):
            _check_counts(value, path)
        for pattern, largest in COUNTS.items():
            if key in numbers and pattern.search(key) and value > largest:
                raise ValueError(
                    f"{path} says {key} = {value:,}, and zinf takes at most "
                    f"{largest:,}. Get it again."
                )
    layers, experts = (
        max((x for key, x in numbers.items() if re.search(name, key)), default=1)
        for name in ("layers?$", "experts$")
    )
    if layers * experts > MAX_EXPERTS:
        raise ValueError(
            f"{path} says that {layers:,} layers have {experts:,} experts, and zinf "
            f"takes at most {MAX_EXPERTS:,} in all. Get it again."
        )


def class_of(
    config: transformers.PretrainedConfig, auto_class: str
) -> type[transformers.PreTrainedModel]:
    """The class of models that an Auto class has for a configuration.

    Raises:
        ValueError: `transformers` has no such Auto class, or no model of it for the
            configuration.
    """
    kinds = getattr(getattr(transformers, auto_class, None), "_model_mapping", None)
    if kinds is None:
        raise ValueError(
            f"transformers has no class of models {auto_class!r}. Name one such as "
            "AutoModelForCausalLM or AutoModelForSequenceClassification."
        )
    if type(config) not in kinds:
        raise ValueError(
            f"transformers has no {auto_class} for the architecture "
            f"{config.model_type!r}. Use a model of another architecture, or another "
            "class (zinf.hf.load_head)."
        )
    kind = kinds[type(config)]
    return kind[0] if isinstance(kind, (list, tuple)) else kind


def own_part(
    config: transformers.PretrainedConfig, auto_class: str
) -> transformers.PretrainedConfig:
    """The part of a configuration that the class of an Auto class is made of.

    Files of Qwen3.5 and Llama 4 have images too, and their causal class has text alone.

    Raises:
        ValueError: see `class_of`.
    """
    text = config.sub_configs.get("text_config")
    own = getattr(class_of(config, auto_class), "config_class", None)
    if text is None or own is not text:
        return config
    part = config.get_text_config()
    part.dtype = part.dtype or config.dtype
    return part


def build(
    config: transformers.PretrainedConfig, dtype: torch.dtype, auto_class: str
) -> transformers.PreTrainedModel:
    """The model of a configuration: parameters on the meta device, buffers computed.

    Args:
        auto_class: of `transformers`, such as AutoModelForCausalLM.

    Raises:
        ValueError: `transformers` has no such class, or no model of it for the
            configuration, or cannot make it with these values.
    """
    attention.register()
    casts.register()
    experts.register()
    gradients.register()
    lookups.register()
    kind = class_of(config, auto_class)
    config = own_part(config, auto_class)
    options: dict[str, Any] = {"attn_implementation": _attention_of(kind)}
    config._experts_implementation = experts.NAME
    try:
        with no_init_weights(), _meta_parameters():
            model = kind._from_config(config, dtype=dtype, **options)
            model.tie_weights()
            rotary.make_pure(model)
            experts.make_static(model)
    except Exception as error:
        # Each architecture computes with the values, and raises what it likes.
        raise ValueError(
            f"transformers cannot make the model of {Path(config.name_or_path, CONFIG)}"
            f": {type(error).__name__}: {error}. Get it again."
        ) from error
    return model


def _attention_of(kind: type) -> str:
    if not getattr(kind, "_supports_attention_backend", False):
        return "eager"
    takes_booleans = getattr(kind, "_supports_sdpa", False)
    return attention.NAME if takes_booleans else attention.ADDING


@contextmanager
def _meta_parameters() -> Generator[None, None, None]:
    """Modules made in the `with` block get their parameters on the meta device.

    A whole model made there has no buffers either, and some are computed once, by a
    constructor. So each parameter is allocated for a moment, and never touched, unless
    it is large.
    """
    original = torch.nn.Module.register_parameter

    def register(
        module: torch.nn.Module, name: str, param: torch.nn.Parameter | None
    ) -> None:
        original(module, name, param)
        if param is not None and not param.is_meta:
            module._parameters[name] = torch.nn.Parameter(
                param.detach().to("meta"), requires_grad=param.requires_grad
            )

    torch.nn.Module.register_parameter = register
    try:
        with _LargeOnMeta():
            yield
    finally:
        torch.nn.Module.register_parameter = original


class _LargeOnMeta(TorchFunctionMode):
    """Large tensors without values are on the meta device.

    A machine refuses to allocate more than it has, even for a moment: the experts of
    one layer of DeepSeek-V3 have 30 GB.
    """

    def __torch_function__(
        self,
        func: Callable,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named = dict(kwargs or {})
        if func is torch.empty and named.get("device") is None:
            found = func(*args, **{**named, "device": "meta"})
            if found.nbytes >= LARGE_BYTES:
                return found
        return func(*args, **named)
