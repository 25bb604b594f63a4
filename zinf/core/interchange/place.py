"""Writes imported parameters to the tiers of an engine before its first step."""

from collections.abc import Iterator, Mapping

import numpy as np

from zinf.checkpoint.stripes import counted
from zinf.core.engine.engine import Engine
from zinf.core.interchange.names import Terms, match
from zinf.core.interchange.rounding import MASK_BYTES, rounded
from zinf.core.interchange.sources import EngineTensors, kept
from zinf.core.interchange.tensors import AbstractTensors, read_bytes, stream
from zinf.core.memory import Residents
from zinf.core.optim.separate import LeafUpdate
from zinf.core.program import ArrayId, ArraySpec, Role, Tier
from zinf.core.sharding import Box
from zinf.core.step.planner import Planner
from zinf.core.step.updates import cpu_device
from zinf.distributed import Digests


def place(
    engine: Engine,
    tensors: AbstractTensors,
    name_of: Mapping[str, str],
    terms: Terms,
) -> None:
    """Set an engine to the state that initializing it with `tensors` would give.

    Optimizer state is initialized from the new values. All names, shapes and dtypes are
    compared before the first array is overwritten. If a read fails halfway, all arrays
    get their initial values back.

    Raises:
        ValueError: the engine has taken steps, or the tensors are of another model.
        StorageError: a file cannot be read.
        BudgetExceeded: the host has no room for two parts and the state of one.
    """
    here = EngineTensors(engine)
    if engine.num_steps:
        raise ValueError(
            f"The engine has taken {engine.num_steps} steps, and parameters are "
            "imported before the first. Make another: zinf.initialize."
        )
    found = match(here.specs, tensors.specs, name_of, terms)
    engine.before_update()
    placing = _Placing(engine.planner, engine.residents, tensors, found)
    with here.holding(placing.held_bytes()):
        try:
            placing.run()
        except BaseException as error:
            engine.initialize_state()
            error.add_note("All parameters have their initial values again.")
            raise


def fill(
    planner: Planner,
    residents: Residents,
    tensors: AbstractTensors,
    name_of: Mapping[str, str],
    terms: Terms,
) -> Digests:
    """Write the initial state of a new engine, made of `tensors`, to its tiers.

    Nothing else need have been written there, so each byte is written once. All of
    several processes must call this, and each keeps its shares.

    Returns:
        Digests of all parts, to compare them with those of the other processes.

    Raises:
        ValueError: the tensors are of another model.
        StorageError: a file cannot be read.
        BudgetExceeded: the host has no room for two parts and the state of one.
    """
    arrays = kept(residents.specs)
    leaves = {path: residents.specs[array] for path, array in arrays.items()}
    found = match(leaves, tensors.specs, name_of, terms)
    placing = _Placing(planner, residents, tensors, found)
    held = {Tier.HOST: placing.held_bytes()}
    with counted(held, residents, "reading weights"):
        placing.run()
    return placing.digests


class _Placing:
    """One import; `found` maps the key path of each leaf to the name of its tensor."""

    def __init__(
        self,
        planner: Planner,
        residents: Residents,
        tensors: AbstractTensors,
        found: Mapping[str, str],
    ) -> None:
        self.tensors, self.found = tensors, found
        self.residents, self.digests = residents, Digests(planner.group)
        self.params, self.separated = planner.problem.params, planner.separated
        self.updates: dict[str, tuple[int, LeafUpdate]] = {
            leaf.path: (number, leaf)
            for number, leaf in enumerate(planner.separated.leaves)
        }
        # Initialize state on the CPU: it need not go to an accelerator and back.
        self.device = cpu_device(planner.rule.mesh)

    def run(self) -> None:
        path_of = {name: path for path, name in self.found.items()}
        wanted = (
            (name, box) for path, name in self.found.items() for box in self.cut(path)
        )

        def write(name: str, box: Box, content: np.ndarray) -> None:
            self.write(path_of[name], box, content)
            self.residents.stores.heap.relieve()

        stream(self.tensors, wanted, write)

    def cut(self, path: str) -> Iterator[Box]:
        """The parts in which a leaf is read and written: blocks of rows."""
        shape = self.params[path].master.shape
        rows = self.rows(path)
        rest = [(0, size) for size in shape[1:]]
        pieces = self.residents.pieces(ArrayId(Role.PARAM, path))
        if not shape:
            yield ()
        elif pieces[0].rows is not None:
            # Some rows of a piece cannot be written before the piece is there.
            for piece in pieces:
                assert piece.rows is not None
                yield (piece.rows, *rest)
        elif 0 not in shape:
            for start in range(0, shape[0], rows):
                yield ((start, min(start + rows, shape[0])), *rest)

    def rows(self, path: str) -> int:
        """Number of rows of a leaf that are moved at once."""
        shape = self.params[path].master.shape
        if not shape:
            return 1
        pieces = self.residents.pieces(ArrayId(Role.PARAM, path))
        if pieces[0].rows is not None:
            return max(b - a for a, b in (p.rows for p in pieces if p.rows))
        has_rows = self.residents.layouts.of(ArrayId(Role.PARAM, path)).has_whole_rows
        update = self.updates.get(path)
        if not has_rows or (update is not None and not update[1].is_elementwise):
            return max(1, shape[0])
        return self.tensors.block(self.found[path])[0]

    def held_bytes(self) -> int:
        """Most host bytes that the import holds: parts as read, as kept, and state."""
        most = 0
        for path, name in self.found.items():
            spec, read = self.params[path], self.tensors.specs[name]
            shape = spec.master.shape
            rows = min(self.rows(path), shape[0]) if shape else 1
            numel = ArraySpec((rows, *shape[1:]), "bool", 1).nbytes
            each = read_bytes(self.tensors, name, read.itemsize)
            if read.dtype != spec.master.dtype.name:
                each += spec.master.dtype.itemsize + MASK_BYTES
            if spec.has_master:
                each += spec.compute.dtype.itemsize
            if path in self.updates:
                states = self.updates[path][1].states
                each += sum(state.spec.dtype.itemsize for state in states)
            most = max(most, numel * each)
        return most

    def write(self, path: str, box: Box, content: np.ndarray) -> None:
        """Writes one part of a leaf, and the state of that part, to their tiers."""
        spec = self.params[path]
        self.digests.add(f"{path}{[*box]}", content)
        is_whole = content.shape == spec.master.shape
        rows = None if is_whole else box[0]
        kept = rounded(content, spec.master.dtype.name, name=path)
        compute = kept.astype(spec.compute.dtype, copy=False)
        if spec.has_master:
            self.residents.write_new(ArrayId(Role.MASTER, path, rows), kept)
        self.residents.write_new(ArrayId(Role.PARAM, path, rows), compute)
        if path in self.updates:
            number, update = self.updates[path]
            states = self.separated.init_state(number, kept, device=self.device)
            for state, value in zip(update.states, states, strict=True):
                array = state.array(path, rows)
                self.residents.write_new(array, np.asarray(value))
