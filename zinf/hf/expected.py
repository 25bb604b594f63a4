"""The files of a quantized model that are not here, by its config.json alone."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from transformers import PreTrainedModel

from zinf.core.program import ArraySpec
from zinf.hf.exported import ExportedWeights
from zinf.hf.quantized import METHODS
from zinf.hf.quantized.expected import Expected
from zinf.hf.quantized.layer import LINEAR, WEIGHT, Layer

# An expert of its own, in files; the model has all of them in one parameter.
EXPERT = frozenset([LINEAR])


def expected_files(
    specs: Mapping[str, ArraySpec], module: PreTrainedModel, section: Mapping[str, Any]
) -> tuple[Expected, list[str]]:
    """The tensors of the files, and what is assumed of them; a sentence each.

    Args:
        specs: of the parameters, by name.
        module: the torch module of the model.
        section: `quantization_config` of config.json.
    """
    keeping = METHODS[section["quant_method"]].keeping
    plain = ExportedWeights(Expected(specs), module, {})
    if keeping is None:
        return Expected(plain.specs), []
    weights = list(_weights(plain, module))
    found = dict(plain.specs)
    for weight in weights:
        tensors = keeping.tensors(weight, section)
        if tensors:
            del found[weight.tensor]
            found |= tensors
    named = module.named_modules(remove_duplicate=False)
    modules = [Layer(name, name, _kinds(own)) for name, own in named if name]
    return Expected(found), keeping.assumed(weights, modules, section)


def _weights(plain: ExportedWeights, module: PreTrainedModel) -> Iterator[Layer]:
    """The tensors of plain files that have several dims."""
    sources = {name: source for source, name in plain.plain_names().items()}
    for name, spec in plain.specs.items():
        if len(spec.shape) < 2:
            continue
        if name in sources:
            place = sources[name].rpartition(".")[0]
            kinds = _kinds(module.get_submodule(place))
        else:
            place, kinds = name.removesuffix(WEIGHT), EXPERT
        yield Layer(name, place, kinds, spec.shape)


def _kinds(module: torch.nn.Module) -> frozenset[str]:
    return frozenset(kind.__name__ for kind in type(module).__mro__)
