"""Writes parameters as a plain Orbax checkpoint."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint.path import atomicity_types

from zinf.checkpoint.saved import Saved
from zinf.core.engine.engine import Engine
from zinf.core.engine.named import MASTER
from zinf.core.interchange.folder import check_target
from zinf.core.interchange.names import named
from zinf.core.interchange.orbax_leaf import StreamedLeaf, leaf_handlers
from zinf.core.interchange.outgoing import as_dtype, held_bytes
from zinf.core.interchange.sources import parameters
from zinf.core.interchange.tensors import block_bytes
from zinf.core.problem.problem import STATE_PREFIX
from zinf.core.program import ArraySpec
from zinf.core.segment import named_leaves

# Key of the parameters in a tree that also has model state.
PARAMS = "params"
# Besides the part to write, TensorStore holds its encoded chunk and the file's bytes.
COPIES_WRITTEN = 2


def export_orbax(
    source: Engine | Saved,
    directory: Path | str,
    *,
    kind: str = MASTER,
    dtype: str | None = None,
) -> None:
    """Write the parameters of an engine or a checkpoint as a plain Orbax checkpoint.

    `ocp.StandardCheckpointer().restore(directory)` then gives the tree of
    `engine.params()`. If `source` is a checkpoint, the tree has only dicts, because a
    checkpoint does not say which containers a model has: the indices of a list become
    text keys. With model state the tree is `{"params": ..., "model_state": ...}`.

    The values are those of `export_safetensors`. Leaves are written in parts, each a
    chunk of its own, so only two parts and their copies are in memory.

    Args:
        directory: absent or empty.
        kind, dtype: see `export_safetensors`.

    Raises:
        ValueError: as in `export_safetensors`, or a leaf has no elements: Orbax cannot
            store it.
        FileExistsError, StorageError: as in `export_safetensors`.
        BudgetExceeded: the host has no room for the parts.
    """
    tensors, directory = parameters(source, kind), Path(directory).absolute()
    # Raise if two leaves have one dotted name: Orbax would write both to one array.
    named(tensors.specs, None)
    leaves = {}
    for path, spec in tensors.specs.items():
        if not spec.nbytes:
            raise ValueError(
                f"{path!r} has shape {list(spec.shape)}, and Orbax stores no array "
                "without elements. Leave it out of the model, or export safetensors."
            )
        leaves[path] = StreamedLeaf(tensors, path, as_dtype(spec, dtype))
    needed_bytes = sum(leaf.spec.nbytes for leaf in leaves.values())
    check_target(directory, needed_bytes)
    if directory.exists():
        directory.rmdir()
    structure = None
    if isinstance(source, Engine):
        structure = source.planner.problem.abstract_params
    written = COPIES_WRITTEN * max(block_bytes(tensors, path) for path in leaves)
    handler = ocp.PyTreeCheckpointHandler(
        type_handler_registry=leaf_handlers(StreamedLeaf),
        # Compression took most of the time and hardly shrinks parameters.
        use_compression=False,
    )
    item = ocp.args.PyTreeSave(tree(leaves, structure))
    try:
        with (
            tensors.holding(held_bytes(tensors, dtype) + written),
            ocp.Checkpointer(handler) as checkpointer,
        ):
            checkpointer.save(directory, args=item)
    except BaseException:
        # Only after `checkpointer` is closed: its threads write on after one fails.
        _delete_incomplete(directory)
        raise


def _delete_incomplete(directory: Path) -> None:
    """Deletes the temporary folders of a save by Orbax that failed."""
    begun = f"{directory.name}{atomicity_types.TMP_DIR_SUFFIX}"
    for path in directory.parent.iterdir():
        if path.name.startswith(begun):
            shutil.rmtree(path, ignore_errors=True)


def tree(leaves: Mapping[str, Any], structure: Any = None) -> Any:
    """The pytree of `leaves`, with the containers of `structure` or only dicts."""
    state = {p: leaf for p, leaf in leaves.items() if p.startswith(STATE_PREFIX)}
    params = {p: leaf for p, leaf in leaves.items() if p not in state}
    if structure is None:
        made = nested(params)
    else:
        paths = named_leaves(structure)
        made = jax.tree.unflatten(
            jax.tree.structure(structure), [params[path] for path in paths]
        )
    return {PARAMS: made, **nested(state)} if state else made


def nested(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Nested dicts, whose keys are the parts of the key paths.

    Raises:
        ValueError: the key path of one leaf begins with that of another.
    """
    made: dict[str, Any] = {}
    for path, leaf in leaves.items():
        *folders, last = path.split("/")
        inside = made
        for folder in folders:
            inside = inside.setdefault(folder, {})
            if not isinstance(inside, dict):
                raise ValueError(f"The leaf {path!r} is within another.")
        if last in inside:
            raise ValueError(f"There are leaves within {path!r}.")
        inside[last] = leaf
    return made


def orbax_names(paths: Mapping[str, ArraySpec]) -> dict[str, str]:
    """The name of each leaf in an Orbax checkpoint: its keys there, joined by "/"."""
    has_state = any(path.startswith(STATE_PREFIX) for path in paths)
    return {
        path: f"{PARAMS}/{path}"
        if has_state and not path.startswith(STATE_PREFIX)
        else path
        for path in paths
    }
