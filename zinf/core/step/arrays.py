"""The persistent arrays of a problem: their shapes, pieces and configured tiers."""

from collections.abc import Iterable, Mapping
from math import prod
from types import MappingProxyType
from typing import Any

import jax

from zinf.core.config import Config
from zinf.core.optim.separate import Separated
from zinf.core.plan import Catalog, Resident
from zinf.core.problem.problem import STATE_PREFIX, Problem
from zinf.core.program import ArrayId, ArraySpec, Program, Role, Tier
from zinf.core.sharding import Layouts
from zinf.core.step.sums import sum_dtype

# Transfers per step of an array that rests on another tier than the one that uses it.
PARAM_MOVES, STATE_MOVES = 3, 2


def array_specs(problem: Problem, separated: Separated) -> dict[ArrayId, ArraySpec]:
    """Every persistent array as a whole."""
    specs = {}
    states = {leaf.path: leaf.states for leaf in separated.leaves}
    for path, param in problem.params.items():
        specs[ArrayId(Role.PARAM, path)] = _spec(param.compute)
        if param.has_master:
            specs[ArrayId(Role.MASTER, path)] = _spec(param.master)
        for state in states.get(path, ()):
            specs[state.array(path)] = _spec(state.spec)
        if problem.sums_gradients and param.is_trainable:
            total = jax.ShapeDtypeStruct(
                param.compute.shape, sum_dtype(param.compute.dtype)
            )
            specs[param.sum] = _spec(total)
    return specs


def describe_state(
    problem: Problem, separated: Separated, *, num_parameters: int
) -> str:
    """The bytes of all persistent arrays for each parameter, in one line.

    Args:
        num_parameters: those of the model, without adapters, however they are stored.
    """
    count = num_parameters
    trained = sum(prod(leaf.spec.shape) for leaf in separated.leaves)
    words = {
        Role.PARAM: "parameters",
        Role.MASTER: "masters",
        Role.STATE: "optimizer",
        Role.SUM: "sums of gradients",
    }
    nbytes = dict.fromkeys(words, 0)
    for array, spec in array_specs(problem, separated).items():
        if not array.path.startswith(STATE_PREFIX):
            nbytes[array.role] += spec.nbytes
    parts = [f"{words[r]} {n / count:.2f}" for r, n in nbytes.items() if n]
    frozen = "" if trained == count else f"; {trained:,} numbers are trained"
    total = sum(nbytes.values()) / count
    return f"{total:.2f} bytes at rest a parameter: {', '.join(parts)}{frozen}"


def resting_pieces(
    layouts: Layouts, program: Program, homes: Mapping[ArrayId, Tier] | None = None
) -> list[ArrayId]:
    """Every persistent array in the pieces in which it rests.

    A leaf that is stacked over layers has one piece per row; any other leaf has one.

    Args:
        homes: the tiers of pieces that are already placed; None if none is placed.
    """
    leaves = {leaf.path: leaf for leaf in program.leaves}
    pieces: dict[ArrayId, None] = {}
    for whole in layouts.arrays:
        for piece in leaves[whole.path].pieces(whole):
            pieces[piece if homes is None or piece in homes else whole] = None
    return list(pieces)


def make_catalog(
    program: Program,
    layouts: Layouts,
    pieces: Iterable[ArrayId],
    homes: Mapping[ArrayId, Tier] | None,
    *,
    caches: Mapping[ArrayId, Tier] = MappingProxyType({}),
    **rest: Any,
) -> Catalog:
    """The catalog of a compiled program, with the bytes of this process's shares.

    Args:
        pieces: the persistent arrays, as they rest.
        homes: the tiers of those that are already placed; None if none is. The
            constants of the program are placed beside them, on the device.
        caches: the tiers of the program's caches.
    """
    shares = layouts.share_of(program)
    consts = [ArrayId(Role.CONST, name) for name in program.consts]
    specs = {array: layouts.share(array) for array in pieces}
    specs |= {array: shares.values[array.path] for array in (*consts, *caches)}
    if homes is not None:
        homes = {**homes, **dict.fromkeys(consts, Tier.DEVICE), **caches}
    parts = layouts.device_parts()
    return Catalog(shares, specs, homes or {}, device_parts=parts, **rest)


def residents(catalog: Catalog, config: Config) -> list[Resident]:
    """The arrays of a catalog, each with the tier that the config asks for."""
    found = []
    readers = catalog.program.first_readers()
    for array, spec in catalog.specs.items():
        if array.role == Role.CONST:
            asked, moves = Tier.DEVICE, PARAM_MOVES
        elif array.role == Role.PARAM:
            asked, moves = config.param_tier, PARAM_MOVES
        else:
            asked, moves = config.optimizer_tier, STATE_MOVES
        on_device = catalog.nbytes(array, Tier.DEVICE)
        reader = readers.get((array.path, array.rows), 0)
        found.append(Resident(array, spec.nbytes, asked, moves, on_device, reader))
    return found


def kept_off_nvme(
    homes: Mapping[ArrayId, Tier], specs: Mapping[ArrayId, ArraySpec], config: Config
) -> str | None:
    """A warning if `device: nvme` has no effect, or None.

    That happens if the persistence threshold keeps all parameters, or all masters and
    optimizer state, off nvme although the config asks for nvme.

    Args:
        homes: the tier where each array rests in the plan.
        specs: one process's share of each array.
    """
    asked = {"offload_param": config.param_tier}
    asked["offload_optimizer"] = config.optimizer_tier
    kept: dict[str, list[ArrayId]] = {key: [] for key in asked}
    for array in homes:
        if array.role != Role.CONST:
            is_param = array.role == Role.PARAM
            kept["offload_param" if is_param else "offload_optimizer"].append(array)
    sections = [
        key
        for key, arrays in kept.items()
        if asked[key] is Tier.NVME
        and arrays
        and all(homes[array] is not Tier.NVME for array in arrays)
    ]
    if not sections:
        return None
    sizes = [specs[array].nbytes for key in sections for array in kept[key]]
    return (
        f"zero_optimization.{' and '.join(sections)}: device is nvme, but all "
        f"{len(sizes)} arrays are smaller than {config.persistence_key} "
        f"({config.persistence_bytes:,} bytes; the largest has {max(sizes):,}) and "
        f"rest in host memory. Lower {config.persistence_key}; 0 lets all go to nvme."
    )


def _spec(abstract: jax.ShapeDtypeStruct) -> ArraySpec:
    dtype = abstract.dtype
    return ArraySpec(tuple(abstract.shape), str(dtype), dtype.itemsize)
