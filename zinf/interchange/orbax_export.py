"""Parameters written as a plain Orbax checkpoint."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint.path import atomicity_types

from zinf.checkpoint.saved import Saved
from zinf.engine import Engine
from zinf.interchange.folder import check_target
from zinf.interchange.names import named
from zinf.interchange.orbax_leaf import StreamedLeaf, leaf_handlers
from zinf.interchange.outgoing import as_dtype, held_bytes
from zinf.interchange.sources import parameters
from zinf.interchange.tensors import block_bytes
from zinf.program import ArraySpec
from zinf.segment import named_leaves
from zinf.segment.problem import STATE_PREFIX

# What the parameters are called beside model state.
PARAMS = "params"
# TensorStore has a chunk as it is given, encoded, and in the file that it writes.
COPIES_WRITTEN = 2


def export_orbax(
    source: Engine | Saved, directory: Path | str, *, dtype: str | None = None
) -> None:
    """Write the parameters of an engine or a checkpoint as a plain Orbax checkpoint.

    `ocp.StandardCheckpointer().restore(directory)` gives the tree of `engine.params()`;
    of a checkpoint, which has no code, a tree of dicts alone: keys that were indices of
    a list are then text. With model state the tree is `{"params": ..., "model_state":
    ...}`. Values are those of `export_safetensors`, and as few are in memory: leaf by
    leaf, part by part, each part a chunk of its own.

    Args:
        directory: absent or empty.
        dtype: see `export_safetensors`.

    Raises:
        ValueError: as in `export_safetensors`, or a leaf without elements, which Orbax
            does not store.
        FileExistsError, StorageError: as in `export_safetensors`.
        BudgetExceeded: the host has no room for the parts.
    """
    tensors, directory = parameters(source), Path(directory).absolute()
    # Orbax joins keys with dots: two leaves of one name would overwrite each other.
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
        # Numbers of chance hardly shrink, and compressing them took most of the time.
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
        # Once it is closed: its threads go on a while after the first has failed.
        _delete_incomplete(directory)
        raise


def _delete_incomplete(directory: Path) -> None:
    """Deletes what Orbax has written until something failed."""
    begun = f"{directory.name}{atomicity_types.TMP_DIR_SUFFIX}"
    for path in directory.parent.iterdir():
        if path.name.startswith(begun):
            shutil.rmtree(path, ignore_errors=True)


def tree(leaves: Mapping[str, Any], structure: Any = None) -> Any:
    """The pytree of leaves: as the parameters of `structure`, or of dicts."""
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
    """Dicts of dicts, by the parts of key paths.

    Raises:
        ValueError: a leaf would be within another.
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
    """What `export_orbax` calls each leaf: its keys, joined by "/"."""
    has_state = any(path.startswith(STATE_PREFIX) for path in paths)
    return {
        path: f"{PARAMS}/{path}"
        if has_state and not path.startswith(STATE_PREFIX)
        else path
        for path in paths
    }
