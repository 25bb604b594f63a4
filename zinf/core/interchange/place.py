"""Writes imported parameters to the tiers of an engine before its first step."""

from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, wait
from math import lcm, prod
from typing import Self

import numpy as np

from zinf.checkpoint.stripes import counted, room
from zinf.core.engine.engine import Engine
from zinf.core.interchange.names import Terms, match
from zinf.core.interchange.rounding import MASK_BYTES, rounded
from zinf.core.interchange.sources import EngineTensors, kept
from zinf.core.interchange.tensors import AbstractTensors, read_bytes, stream
from zinf.core.memory import Residents
from zinf.core.memory.chunk import MAX_CHUNK_BYTES
from zinf.core.optim.separate import LeafUpdate
from zinf.core.program import ArrayId, Role, Tier
from zinf.core.sharding import Box
from zinf.core.step.planner import Planner
from zinf.core.step.updates import cpu_device
from zinf.distributed import Digests

# Writes under way while the next part is read: a drive takes several chunks at once.
WRITING_BYTES = 4 * MAX_CHUNK_BYTES


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
        own_bytes = room(residents)[Tier.HOST] - residents.unwritten_bytes(Tier.HOST)
        # All processes cut leaves into the same parts.
        self.room_bytes = min(planner.group.gather("room for weights", own_bytes))
        self.rows = {path: self._rows(path) for path in found}
        self.part_bytes = max(
            (self._part_bytes(*x) for x in self.rows.items()), default=0
        )
        left_bytes = max(0, self.room_bytes - self.part_bytes)
        most = min(WRITING_BYTES, left_bytes, self._drive_bytes())
        self.writes = _Writes(residents, most)

    def run(self) -> None:
        path_of = {name: path for path, name in self.found.items()}
        wanted = (
            (name, box) for path, name in self.found.items() for box in self.cut(path)
        )

        def write(name: str, box: Box, content: np.ndarray) -> None:
            self.write(path_of[name], box, content)
            self.residents.stores.heap.relieve()

        with self.writes:
            stream(self.tensors, wanted, write)

    def cut(self, path: str) -> Iterator[Box]:
        """The parts in which a leaf is read and written: blocks of rows."""
        shape = self.params[path].master.shape
        rows = self.rows[path]
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

    def _rows(self, path: str) -> int:
        """Number of rows of a leaf that are moved at once.

        They fill whole chunks of the tiers that they go to, if the host has room.
        """
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
        block = self.tensors.block(self.found[path])[0]
        arrays = self._arrays(path)
        step = lcm(*map(self.residents.rows_per_chunk, arrays))
        rows = step * max(1, round(block / step))
        fits = self._part_bytes(path, rows) <= self.room_bytes
        return rows if fits else block

    def _arrays(self, path: str) -> list[ArrayId]:
        """The arrays that a leaf is kept as."""
        roles = (
            [Role.MASTER, Role.PARAM] if self.params[path].has_master else [Role.PARAM]
        )
        update = self.updates.get(path)
        states = [] if update is None else update[1].states
        return [ArrayId(role, path) for role in roles] + [
            state.array(path) for state in states
        ]

    def _drive_bytes(self) -> int:
        """Bytes that go to drives: no other writes are waited for."""
        residents = self.residents
        return sum(
            residents.layouts.share(piece).nbytes
            for path in self.found
            for array in self._arrays(path)
            for piece in residents.pieces(array)
            if residents.homes[piece] == Tier.NVME
        )

    def held_bytes(self) -> int:
        """Most host bytes that the import holds: a part, and writes under way."""
        return self.part_bytes + self.writes.capacity_bytes

    def _part_bytes(self, path: str, rows: int) -> int:
        """Most host bytes of a part of a leaf: as read, as kept, state, and shares."""
        name, spec = self.found[path], self.params[path]
        read, shape = self.tensors.specs[name], spec.master.shape
        each = read_bytes(self.tensors, name, read.itemsize)
        if read.dtype != spec.master.dtype.name:
            each += spec.master.dtype.itemsize + MASK_BYTES
        if spec.has_master:
            each += spec.compute.dtype.itemsize
        if path in self.updates:
            states = self.updates[path][1].states
            each += sum(state.spec.dtype.itemsize for state in states)
        numel = prod((*(min(rows, size) for size in shape[:1]), *shape[1:]))
        return numel * each + sum(
            self._copied_bytes(array, rows) for array in self._arrays(path)
        )

    def _copied_bytes(self, array: ArrayId, rows: int) -> int:
        """Bytes of the share of some rows of an array; 0 if the rows are the share.

        A share that is cut from the array, or padded, is a copy beside it.
        """
        layouts = self.residents.layouts
        if layouts.of(array).is_whole:
            return 0
        # Of an array that is cut by rows, all rows are moved at once.
        height = layouts.of(array).shape[0]
        return layouts.share(array).nbytes * min(rows, height) // max(1, height)

    def write(self, path: str, box: Box, content: np.ndarray) -> None:
        """Begins to write one part of a leaf, and its state, to their tiers."""
        spec = self.params[path]
        self.digests.add(f"{path}{[*box]}", content)
        is_whole = content.shape == spec.master.shape
        rows = None if is_whole else box[0]
        kept = rounded(content, spec.master.dtype.name, name=path)
        compute = kept.astype(spec.compute.dtype, copy=False)
        if spec.has_master:
            self.writes.begin(ArrayId(Role.MASTER, path, rows), kept)
        self.writes.begin(ArrayId(Role.PARAM, path, rows), compute)
        if path in self.updates:
            number, update = self.updates[path]
            states = self.separated.init_state(number, kept, device=self.device)
            for state, value in zip(update.states, states, strict=True):
                self.writes.begin(state.array(path, rows), np.asarray(value))
        self.writes.make_room()


class _Writes:
    """Writes to `residents` that are under way, and waited for in order.

    In `with`, which ends when none is under way and raises the error of one that
    failed.
    """

    def __init__(self, residents: Residents, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self._residents, self._nbytes = residents, 0
        self._begun: deque[tuple[int, list[Future[None]]]] = deque()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, *error: object) -> None:
        # What failed is written again, so nothing may still be on its way there.
        wait([future for _, begun in self._begun for future in begun])
        if kind is None:
            self._wait_down_to(0)

    def begin(self, array: ArrayId, content: np.ndarray) -> None:
        begun = self._residents.begin_write_new(array, content)
        # What waits for a drive is this process's share.
        is_done = all(future.done() for future in begun)
        nbytes = 0 if is_done else self._residents.layouts.share(array).nbytes
        self._begun.append((nbytes, begun))
        self._nbytes += nbytes

    def make_room(self) -> None:
        """Wait until at most `capacity_bytes` are under way."""
        self._wait_down_to(self.capacity_bytes)

    def _wait_down_to(self, nbytes: int) -> None:
        while self._begun and (self._nbytes > nbytes or not nbytes):
            moved_bytes, begun = self._begun[0]
            for future in begun:
                future.result()
            self._begun.popleft()
            self._nbytes -= moved_bytes
