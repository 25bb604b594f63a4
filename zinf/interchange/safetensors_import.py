"""Parameters of safetensors files, taken by an engine."""

from collections.abc import Collection
from pathlib import Path

from zinf.engine import Engine
from zinf.interchange.names import Names, Terms, named
from zinf.interchange.place import place
from zinf.interchange.safetensors_files import SafetensorsFiles
from zinf.interchange.sources import EngineTensors


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

    They go straight to the tiers of the engine, a part at a time: the model need not
    fit in memory. The engine is then as if it were initialized with them. A tensor in a
    narrower dtype is widened; one in a wider dtype is refused unless `may_round`.

    Args:
        engine: placed (a batch is known), and before its first step.
        names: of tensors, by key path; "blocks.0.kernel" for "blocks/0/kernel" without.
        keep: patterns of key paths; a leaf that matches and has no tensor keeps its
            initial value.
        ignore: patterns of names; a tensor that matches and is no leaf's is left out.
        may_round: round to the nearest value, ties to even, of the dtype of a leaf.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a file is damaged or no safetensors file, tensors are missing, left
            over or of another shape or dtype, or the engine has taken steps.
        StorageError: a file cannot be read. The engine has its initial values then.
        BudgetExceeded: the host has no room for the parts.
    """
    name_of = named(EngineTensors(engine).specs, names)
    with SafetensorsFiles(path) as tensors:
        place(engine, tensors, name_of, Terms(keep, ignore, may_round))
