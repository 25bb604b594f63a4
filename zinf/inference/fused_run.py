"""Runs fused generation: sequences join as others end, and prompts are read once."""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from zinf.core.memory import Stores, to_device
from zinf.core.program import ArrayId, Tier
from zinf.inference.fused import FusedPrograms, block_rows
from zinf.inference.generation import (
    AbstractGeneration,
    Job,
    Kept,
    filled,
    padded,
    starts,
)
from zinf.inference.plan import NAME
from zinf.inference.prompts import Request
from zinf.inference.rows import Shape
from zinf.inference.texts import Texts

# Passes between two looks at the signals of the process, such as Ctrl-C.
PASSES_AT_ONCE = 32


@dataclass(frozen=True)
class FusedGeneration(AbstractGeneration):
    """Generation whose loop over tokens runs on the device."""

    shape: Shape
    programs: FusedPrograms

    @property
    def why(self) -> str:
        return self.programs.plan.why

    def write(self, requests: Sequence[Request], job: Job, kept: Kept) -> Texts:
        ledger = job.stores[Tier.DEVICE].ledger
        workspace = self.programs.workspace_bytes
        job.current.leave()
        try:
            ledger.reserve(workspace, NAME)
            try:
                return _Run(self, requests, job).all()
            finally:
                ledger.release(workspace)
        finally:
            job.current.enter()


class _Run:
    """Writes sequences of one shape.

    Attributes:
        rows: the sequence in each row; None: none is.
        places: the tokens that were taken of the sequence in each row.
        waiting: sequences without a row, each with the number of its prompt. Equal
            prompts are neighbours, so a block of prompts is read once.
        block: the last block that was read, and its number.
    """

    def __init__(self, made: FusedGeneration, requests: Sequence[Request], job: Job):
        self.programs, self.shape, self.job = made.programs, made.shape, job
        self.texts = job.texts(requests)
        homes = self.programs.plan.homes
        self.weights = [
            _on_device(array, homes[array], nbytes, job.stores)
            for array, nbytes in self.programs.weights.items()
        ]
        by_prompt: dict[bytes, list[Request]] = {}
        for request in requests:
            by_prompt.setdefault(request.tokens.tobytes(), []).append(request)
        self.prompts = list(by_prompt.values())
        self.waiting = deque(
            (n, r) for n, equal in enumerate(self.prompts) for r in equal
        )
        self.rows: list[Request | None] = [None] * self.shape.rows
        self.places = [0] * self.shape.rows
        self.block_rows = block_rows(self.shape)
        self.block: tuple[int, Any] | None = None
        asks = job.drafts is not None and not self.programs.guesses_on_device
        is_one = asks or job.on_token is not None
        self.num_passes = 1 if is_one else PASSES_AT_ONCE

    def all(self) -> Texts:
        state = self.programs.empty()
        while self.waiting or self.open_rows():
            if self.is_time_to_join():
                state = self.join(state)
            if self.open_rows():
                state = self.next_tokens(state)
        return self.texts

    def is_time_to_join(self) -> bool:
        """Whether waiting sequences get rows now."""
        count = len(self.open_rows())
        most = len(self.rows) if self.programs.can_join else 1
        return bool(self.waiting) and count < most

    def open_rows(self) -> list[int]:
        """The rows whose texts go on."""
        return [
            row
            for row, request in enumerate(self.rows)
            if request is not None
            and request.number in self.texts.open
            and self.places[row] < self.job.part.end - self.job.part.first
        ]

    # Prompts.

    def join(self, state: Any) -> Any:
        """Give free rows to waiting sequences, with the first token of each."""
        is_taken = set(self.open_rows())
        free = [row for row in range(len(self.rows)) if row not in is_taken]
        joining: dict[int, dict[int, int]] = {}
        for row in free[: len(self.waiting)]:
            number, self.rows[row] = self.waiting.popleft()
            self.places[row] = 0
            block, place = divmod(number, self.block_rows)
            joining.setdefault(block, {})[row] = place
        given = self.given()
        for block, place_of in joining.items():
            rows, joins = np.zeros(self.shape.rows, np.int32), self.flags(place_of)
            rows[list(place_of)] = list(place_of.values())
            arrays = self.of_block(block)
            state = self.programs.join(state, arrays, rows, joins, given)
        if not self.waiting or self.waiting[0][0] // self.block_rows != block:
            self.block = None
        self.take(state)
        return state

    def of_block(self, block: int) -> Any:
        """The arrays of a block of prompts, read now or kept from the last call."""
        if self.block is not None and self.block[0] == block:
            return self.block[1]
        self.block = None
        first = block * self.block_rows
        prompts = self.prompts[first : first + self.block_rows]
        requests = [equal[0] for equal in prompts]
        self.block = block, self.read_block(filled(requests, self.block_rows))
        return self.block[1]

    def read_block(self, requests: Sequence[Request]) -> Any:
        length = self.shape.prompt
        tokens = padded(requests, length), starts(requests, length)
        return self.programs.prefill(self.weights, *tokens)

    # Tokens.

    def next_tokens(self, state: Any) -> Any:
        """Draw tokens until a row may be filled again, or all texts have ended."""
        rows, num_open = self.open_rows(), 1
        if self.waiting and self.programs.can_join:
            num_open = len(rows)
        limits = np.int32(self.num_passes), np.int32(num_open)
        rest = self.flags(rows), self.given(), self.guesses(rows), *limits
        state, _ = self.programs.decode(self.weights, state, *rest)
        self.take(state)
        return state

    def given(self) -> dict[str, Any]:
        """What the sequences in the rows are drawn with; see `Functions.given`."""
        job, part = self.job, self.job.part
        some = next(r for r in self.rows if r is not None)
        return {
            "words": np.stack([(r or some).words for r in self.rows]),
            "numbers": job.sampling.constants(),
            "ends": job.sampling.ends(),
            "first": np.int32(part.first),
            "count": np.int32(part.end - part.first),
        }

    def guesses(self, rows: Sequence[int]) -> np.ndarray:
        """Guesses for the texts in some rows, int32 (B, num_tokens); else zeros."""
        drafts = self.job.drafts
        if drafts is None or self.programs.guesses_on_device:
            return np.zeros((len(self.rows), 0), np.int32)
        found = np.zeros((len(self.rows), drafts.num_tokens), np.int32)
        requests = [r for row in rows if (r := self.rows[row]) is not None]
        texts = [self.texts.whole(r) for r in requests]
        numbers = [r.number for r in requests]
        found[rows] = drafts.guesses(numbers, texts, self.programs.vocab_size)
        return found

    def flags(self, rows: Iterable[int]) -> np.ndarray:
        """True for some rows, bool (B,)."""
        found = np.zeros(self.shape.rows, np.bool_)
        found[list(rows)] = True
        return found

    def take(self, state: Any) -> None:
        """Add what is new in the state to the texts, in the order of places."""
        written = jax.tree.map(np.asarray, state["written"])
        ends = np.asarray(state["place"])
        new = [
            (offset, row)
            for row in self.open_rows()
            for offset in range(ends[row] - self.places[row])
        ]
        for offset, row in sorted(new):
            request, place = self.rows[row], self.places[row] + offset
            assert request is not None
            if request.number in self.texts.open:
                results = {name: x[row, place] for name, x in written.items()}
                number = self.job.part.first + place
                self.texts.add(request.number, results, number)
        for row in self.open_rows():
            self.places[row] = int(ends[row])


def _on_device(array: ArrayId, tier: Tier, nbytes: int, stores: Stores) -> jax.Array:
    """An array as it rests on the device, or a copy of it there."""
    if tier == Tier.DEVICE:
        return stores.device.read(array).result()
    # What is read from a drive takes memory of the host meanwhile.
    taken, ledger = 0 if tier.row.is_memory else nbytes, stores.host.ledger
    ledger.reserve(taken, str(array))
    try:
        content = stores[tier].read(array).result()
        return to_device([content], stores.device.device)[0]
    finally:
        ledger.release(taken)
