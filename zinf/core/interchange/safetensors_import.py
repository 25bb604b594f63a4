"""Imports the parameters of safetensors files into an engine."""

from collections.abc import Collection
from pathlib import Path

from zinf.core.engine.engine import Engine
from zinf.core.interchange.names import Names, Terms, named
from zinf.core.interchange.place import place
from zinf.core.interchange.safetensors_files import SafetensorsFiles
from zinf.core.interchange.sources import EngineTensors


def import_safetensors(
    engine: Engine,
    path: Path | str,
    *,
    names: Names = None,
    keep: Collection[str] = (),
    ignore: Collection[str] = (),
    may_round: bool = False,
) -> None:
    """Begin training from the tensors of a safetensors file, or of a folder of them.

    The tensors are read in parts and written to the tiers of the engine, so the model
    need not fit in memory. The engine then has the state that initializing it with
    these tensors would give. Tensors in a narrower dtype than their leaf are widened.
    Tensors in a wider dtype are refused unless `may_round` is true.

    Args:
        engine: an engine that knows its batch and has not taken a step.
        names: names of tensors, by key path. By default, the tensor of
            "blocks/0/kernel" is "blocks.0.kernel".
        keep: patterns of key paths. A matching leaf without a tensor keeps its initial
            value.
        ignore: patterns of tensor names. A matching tensor without a leaf is skipped.
        may_round: round values to the nearest, ties to even, in the dtype of the leaf.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a file is damaged or is not a safetensors file, a leaf has no
            tensor, a tensor has no leaf, shapes or dtypes differ, or the engine has
            taken steps.
        StorageError: a file cannot be read. The engine gets its initial values back.
        BudgetExceeded: the host has no room for the parts.
    """
    name_of = named(EngineTensors(engine).specs, names)
    with SafetensorsFiles(path) as tensors:
        place(engine, tensors, name_of, Terms(keep, ignore, may_round))
