"""Which weights get adapters, and which are trained whole."""

import re
from collections.abc import Mapping, Sequence
from math import prod, sqrt
from typing import Any

import jax.numpy as jnp

from zinf.adapt.blocks import Encoding
from zinf.adapt.contraction import Contraction, Found
from zinf.adapt.forms import OF_BITS
from zinf.adapt.weight import Target
from zinf.core.config.adapter import ALL_LINEAR, Adapter
from zinf.core.config.nearest import did_you_mean
from zinf.core.config.quantization import WeightQuantization
from zinf.core.problem.source import listed


def stored_targets(
    encodings: Mapping[str, Encoding], found: Found, leaves: Mapping[str, Any]
) -> dict[str, Target]:
    """The weights that are stored in blocks, by key path. None gets an adapter.

    Args:
        encodings: those of some weights in `found`, by key path, without stacks.
        leaves: shapes and dtypes of all parameters by key path.
    """
    return {
        path: Target(
            path=path,
            shape=tuple(leaves[path].shape),
            dtype=str(leaves[path].dtype),
            contraction=found.contractions[path],
            encoding=encoding.stacked(
                found.contractions[path].stack, tuple(leaves[path].shape)
            ),
        )
        for path, encoding in encodings.items()
    }


def published(encodings: Mapping[str, Encoding], found: Found) -> dict[str, Encoding]:
    """The encodings of weights that can stay as they are published, by key path.

    Those of embeddings are left out: all rows would be decoded to look up some.
    """
    left = found.contractions.keys() - found.looked_up
    return {path: x for path, x in encodings.items() if path in left}


def in_groups(quantization: WeightQuantization, found: Found) -> dict[str, Encoding]:
    """The encodings that a section of a config asks for, by key path.

    Raises:
        ValueError: no weight is stored in blocks, or a key matches none.
    """
    named = {path: module_of(path) for path in found.linear}
    for key in quantization.post_init_quant:
        if not any(key in name for name in named.values()):
            raise ValueError(
                f"weight_quantization.post_init_quant: no linear layer has {key!r} in "
                f"its name. They are {listed(dict.fromkeys(named.values()))}."
            )
    encodings = {}
    for path in found.linear:
        groups = quantization.groups_of(named[path])
        if groups is not None:
            name = OF_BITS[groups.num_bits, groups.symmetric]
            encodings[path] = Encoding(name, groups.group_size)
    if not encodings:
        raise ValueError(
            "weight_quantization keeps weights of linear layers in blocks, and the "
            "model multiplies no parameter by an activation. Remove it."
        )
    return encodings


def choose_targets(
    adapter: Adapter,
    found: Found,
    leaves: Mapping[str, Any],
    encodings: Mapping[str, Encoding],
) -> dict[str, Target]:
    """The weights that get an adapter or are stored otherwise, by key path.

    Args:
        leaves: shapes and dtypes of all parameters by key path.
        encodings: of weights that are published so, by key path; `quantize_base` has
            others in their place.

    Raises:
        ValueError: a name matches no weight, or the rank is too large for one.
    """
    saved = saved_leaves(adapter, leaves)
    excluded = {p for p in leaves if _is_named(p, adapter.exclude_modules)}
    names = adapter.target_modules
    if names == ALL_LINEAR:
        chosen = [p for p in found.linear if p not in saved]
        if not chosen:
            raise ValueError(
                "adapter.target_modules is all-linear, but the loss multiplies no "
                "parameter by an activation. Name leaves: "
                f"{listed(leaves)}."
            )
    else:
        chosen = _named(names, leaves, found)
        both = sorted(saved & {*chosen})
        if both:
            raise ValueError(
                f"adapter.modules_to_save and adapter.target_modules both name "
                f"{both[0]!r}. Leave it out of one of them."
            )
    chosen = [p for p in chosen if p not in excluded]
    if not chosen:
        raise ValueError(
            "adapter.exclude_modules leaves no weight. Name fewer of them."
        )
    encodings = published(encodings, found)
    if adapter.quantize_base is not None:
        own = Encoding(adapter.quantize_base, adapter.quantize_block)
        encodings = dict.fromkeys(found.linear, own)
    encodings = {path: x for path, x in encodings.items() if path not in saved}
    stored = stored_targets(encodings, found, leaves)
    targets = {}
    for path, leaf in leaves.items():
        if path not in chosen:
            if path in stored:
                targets[path] = stored[path]
            continue
        contraction = found.contractions.get(path) or _as_kernel(leaf.shape)
        _check_rank(adapter.r, path, leaf.shape, contraction)
        targets[path] = Target(
            path=path,
            shape=tuple(leaf.shape),
            dtype=str(leaf.dtype),
            contraction=contraction,
            r=adapter.r,
            scale=_scale(adapter),
            is_dora=adapter.use_dora,
            encoding=stored[path].encoding if path in stored else None,
        )
    return targets


def saved_leaves(adapter: Adapter, leaves: Mapping[str, Any]) -> set[str]:
    """The leaves that are trained whole."""
    if not adapter.modules_to_save:
        return set()
    _refuse_unmatched("modules_to_save", adapter.modules_to_save, leaves)
    return {path for path in leaves if _is_named(path, adapter.modules_to_save)}


def module_of(path: str) -> str:
    """The name of the module that holds a leaf, or of the leaf itself at the top."""
    parts = path.replace("/", ".").split(".")
    return ".".join(parts[:-1] or parts)


def _named(
    names: str | Sequence[str], leaves: Mapping[str, Any], found: Found
) -> list[str]:
    """Key paths of the weights that `target_modules` names.

    A leaf that is named by itself, not by its module, must be able to have an adapter.
    """
    _refuse_unmatched("target_modules", names, leaves)
    chosen = []
    refused: dict[str, str] = {}
    for path, leaf in leaves.items():
        if not _is_named(path, names):
            continue
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            refused[path] = f"is {leaf.dtype}"
        elif path in found.contractions:
            chosen.append(path)
        elif sum(size > 1 for size in leaf.shape) < 2:
            refused[path] = f"has the shape {list(leaf.shape)}"
        elif _matches(path, names):
            chosen.append(path)
        else:
            refused[path] = "is not multiplied by an activation"
    if not chosen:
        path, reason = next(iter(refused.items()))
        raise ValueError(
            f"adapter.target_modules is {names!r}, which matches no matrix: {path!r} "
            f"{reason}. Name weights, or write {ALL_LINEAR}."
        )
    return chosen


def _refuse_unmatched(
    key: str, names: str | Sequence[str], leaves: Mapping[str, Any]
) -> None:
    for name in [names] if isinstance(names, str) else names:
        wanted: str | Sequence[str] = names if isinstance(names, str) else (name,)
        if not any(_is_named(path, wanted) for path in leaves):
            modules = {part for p in leaves for part in (p, *re.split("[./]", p))}
            raise ValueError(
                f"adapter.{key}: no parameter matches {name!r}."
                f"{did_you_mean(name, sorted(modules))} The parameters are "
                f"{listed(leaves)}."
            )


def _is_named(path: str, names: str | Sequence[str]) -> bool:
    return _matches(path, names) or _matches(module_of(path), names)


def _matches(path: str, names: str | Sequence[str]) -> bool:
    dotted = path.replace("/", ".")
    if isinstance(names, str):
        found = (re.fullmatch(names, text) for text in (path, dotted))
        return any(match is not None for match in found)
    ends = (name.replace("/", ".") for name in names)
    return any(dotted == end or dotted.endswith(f".{end}") for end in ends)


def _as_kernel(shape: tuple[int, ...]) -> Contraction:
    """The contraction of a kernel as in Flax and Haiku: outputs in the last dim."""
    dims = tuple(i for i, size in enumerate(shape) if size != 1)
    return Contraction(0, (), dims[:-1], dims[-1:], is_product=False)


def _check_rank(
    r: int, path: str, shape: tuple[int, ...], contraction: Contraction
) -> None:
    inputs = prod(shape[i] for i in contraction.inputs)
    outputs = prod(shape[i] for i in contraction.outputs)
    if r > min(inputs, outputs):
        raise ValueError(
            f"adapter.r is {r}, but {path!r} maps {inputs} numbers to {outputs}: a "
            f"product of rank {min(inputs, outputs)} can be any change of it. Lower r, "
            "or name the leaf in adapter.exclude_modules or modules_to_save."
        )


def _scale(adapter: Adapter) -> float:
    ranks = sqrt(adapter.r) if adapter.use_rslora else adapter.r
    return adapter.lora_alpha / ranks
