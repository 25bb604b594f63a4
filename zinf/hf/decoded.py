"""Checkpoints that hold frozen weights decoded, where a run keeps them in few bits.

zinf decoded weights in nvfp4 and mxfp4 as it read them, before it kept them as files
have them. Frozen weights are those of the files, so they need not be restored if a
checkpoint says the same of them.
"""

import logging
from collections.abc import Mapping
from math import prod

import numpy as np

from zinf.adapt import Adapted
from zinf.adapt.adapted import BASE
from zinf.checkpoint.saved import Saved
from zinf.checkpoint.stripes import counted
from zinf.core.interchange.names import listed
from zinf.core.interchange.tensors import boxes, read_bytes, stream
from zinf.core.memory.residents import Residents
from zinf.core.memory.zarr_format import numpy_dtype
from zinf.core.program import ArrayId, Role, Tier
from zinf.core.sharding import Box
from zinf.hf.model import Model
from zinf.hf.weights import AbstractWeights

logger = logging.getLogger(__name__)


def decoded_arrays(
    saved: Saved, residents: Residents, model: Model, adapted: Adapted
) -> set[ArrayId]:
    """The frozen weights that a checkpoint has decoded, and the arrays in their place.

    Raises:
        ValueError: they are not what the files of the model decode to.
        FileNotFoundError, NotImplementedError: see `Model.open_weights`.
        BudgetExceeded: the host has no room for a part of one.
    """
    decoded = {
        path: ArrayId(Role.PARAM, f"{BASE}/{path}")
        for path in model.encodings
        if path in adapted.targets and adapted.adapter.quantize_base is None
    }
    decoded = {
        path: array
        for path, array in decoded.items()
        if array in saved.arrays
        and array not in residents.specs
        and saved.arrays[array].shape == adapted.targets[path].shape
    }
    if not decoded:
        return set()
    files, weights = model.open_weights()
    with files:
        most = max(_held_bytes(weights, *item, saved) for item in decoded.items())
        with counted({Tier.HOST: most}, residents, "comparing frozen weights"):
            _compare(weights, saved, decoded, model.name)
    logger.info(
        f"Checkpoint {saved.directory} has {len(decoded)} frozen weights decoded. They "
        f"are those of the files of {model.name}, and stay in few bits: "
        f"{listed(decoded)}."
    )
    found = set(decoded.values())
    for path, array in decoded.items():
        encoding = adapted.targets[path].encoding
        assert encoding is not None
        found |= {ArrayId(Role.PARAM, f"{array.path}/{x}") for x in encoding.names}
    return found


def _held_bytes(
    weights: AbstractWeights, path: str, array: ArrayId, saved: Saved
) -> int:
    """Most host bytes while a weight is compared.

    They are parts of files, one part in the dtype of the checkpoint, and what is read
    there: whole chunks, of which two may be larger than the part.
    """
    spec, shape = saved.arrays[array], weights.specs[path].shape
    part = prod(map(min, weights.block(path), shape))
    there = 2 * part * spec.itemsize + 2 * saved.grid(array).chunk_bytes
    here = read_bytes(weights, path, part * weights.specs[path].itemsize)
    return here + there + saved.staging_bytes


def _compare(
    weights: AbstractWeights,
    saved: Saved,
    decoded: Mapping[str, ArrayId],
    name: str,
) -> None:
    """Raise ValueError unless a checkpoint has the numbers of the files, to the bit."""

    def compare(path: str, box: Box, content: np.ndarray) -> None:
        array = decoded[path]
        dtype = saved.arrays[array].dtype
        there = saved.begin_read(array, box).result()
        here = content.astype(numpy_dtype(dtype))
        if here.tobytes() != there.tobytes():
            raise ValueError(
                f"Checkpoint {saved.directory} has {path!r} decoded in {dtype}, as "
                f"zinf kept it before; here it is in few bits, and rows {box[0][0]:,} "
                f"to {box[0][1]:,} of it are not what the files of {name} decode to. "
                "Restore it with the files of the model that the run began with, or "
                f"with the zinf that saved it ({saved.written_by or 'unknown'}). "
                "Nothing was overwritten."
            )

    wanted = (
        (path, box)
        for path in decoded
        for box in boxes(weights.specs[path].shape, weights.block(path))
    )
    stream(weights, wanted, compare)
