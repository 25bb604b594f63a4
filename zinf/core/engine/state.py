"""Makes the persistent arrays of a plan, and writes their initial values."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zinf.core.memory import Residents, Stores
from zinf.core.plan import Plan
from zinf.core.problem.problem import Problem
from zinf.core.problem.state_rules import combined
from zinf.core.program import ArrayId, Role, Rows
from zinf.core.sharding import Layouts
from zinf.core.step.run.outcome import Outcome
from zinf.core.step.run.run import StepRecord
from zinf.core.step.setup import Setup
from zinf.core.step.updates import block_bytes, block_rows, blocks, cpu_device
from zinf.distributed import Digests


def make_residents(
    stores: Stores, setup: Setup, plan: Plan, layouts: Layouts
) -> Residents:
    """The persistent arrays of a plan; space on nvme is checked and reserved.

    Raises:
        StorageError: a drive is not writable, or has less space than a step needs.
    """
    homes = {a: tier for a, tier in plan.homes.items() if a.role != Role.CONST}
    residents = Residents(stores, layouts, homes)
    for tier in stores.tiers:
        stores[tier].check_space(plan.peak_bytes[tier])
    by_row = {a.whole for a in homes if a.rows}
    # No chunk crosses the end of a block of its array. Those of a compute copy have
    # more rows than the blocks of its master, so updates may share such a chunk.
    limit = block_bytes(setup.separated)
    shares = {a: entry.share for a, entry in layouts.arrays.items()}
    chunks = {
        a: 1 if a in by_row else block_rows(share.shape, share.nbytes, limit)
        for a, share in shares.items()
    }
    residents.create(chunks)
    for role in (Role.ERROR, Role.SUM):
        set_to_zero(residents, role)
    return residents


def set_to_zero(residents: Residents, role: Role) -> None:
    """Set all arrays of a role to zero."""
    for piece in residents.homes:
        if piece.role == role:
            layout, spec = residents.layouts.of(piece), residents.specs[piece.whole]
            zeros = np.zeros(layout.share_shape, jnp.dtype(spec.dtype))
            residents.write_share(piece, zeros)


def initialize_arrays(setup: Setup, residents: Residents) -> Digests:
    """Write the initial value of every array to its home.

    Only one leaf at a time is in memory, with blocks of its optimizer state.

    Returns:
        Digests of all leaves, to compare them with those of the other processes.
    """
    digests = Digests(setup.group)
    problem, separated = setup.problem, setup.separated
    # Optimizer state is computed on the CPU: it does not go to an accelerator and back.
    device = cpu_device(setup.rule.mesh)
    updates = {leaf.path: (i, leaf) for i, leaf in enumerate(separated.leaves)}
    limit = block_bytes(separated)
    for path, leaf in setup.initial_leaves():
        spec = problem.params[path]
        digests.add(path, leaf)
        if spec.has_master:
            residents.write(spec.updated(), leaf)
        compute = np.asarray(leaf).astype(spec.compute.dtype, copy=False)
        residents.write(ArrayId(Role.PARAM, path), compute)
        del compute
        if path in updates:
            number, update = updates[path]
            may_block = residents.layouts.of(ArrayId(Role.PARAM, path)).has_whole_rows
            by_rows = update.is_elementwise and may_block
            for rows, block in _state_blocks(leaf, by_rows, limit):
                states = separated.init_state(number, block, device=device)
                for state, content in zip(update.states, states, strict=True):
                    array = state.array(path, rows)
                    residents.write_new(array, np.asarray(content))
                residents.stores.heap.relieve()
    residents.stores.heap.rest()
    return digests


def read_leaf(residents: Residents, problem: Problem, path: str) -> np.ndarray:
    """A copy of a leaf: of its master, or of its parameter if it has no master."""
    return np.array(residents.read(problem.params[path].updated()))


def write_model_state(
    residents: Residents, problem: Problem, outcome: Outcome, record: StepRecord
) -> None:
    """Replace the model state by that of a step.

    `record.is_mixed` is set until all arrays are written, and stays set on failure.
    """
    new = jax.tree.leaves(outcome.extra["model_state"])
    record.is_mixed = True
    for path, content in zip(problem.state_paths, new, strict=True):
        array = ArrayId(Role.PARAM, path)
        rule = problem.state_rules[path]
        # Only a sum reads the state before the step.
        old = residents.read(array) if rule == "sum" else content[0]
        residents.write(array, combined(rule, np.asarray(old), np.asarray(content)))
    record.is_mixed = False


def _state_blocks(
    leaf: np.ndarray, by_rows: bool, limit: int
) -> Iterator[tuple[Rows, Any]]:
    """Yields `(rows, block of the leaf)`, to make optimizer state block by block.

    `rows` is None if the block is the whole leaf.
    """
    for rows in blocks(leaf.shape, leaf.nbytes, limit) if by_rows else [None]:
        yield rows, leaf if rows is None else leaf[slice(*rows)]
