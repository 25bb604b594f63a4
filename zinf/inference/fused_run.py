"""Runs fused generation: one microbatch after another, prompts read once."""

from collections.abc import Sequence
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
    seen,
    starts,
)
from zinf.inference.plan import NAME, Shape
from zinf.inference.prompts import Request
from zinf.inference.texts import Texts

# Tokens between two looks at the signals of the process, such as Ctrl-C.
TOKENS_AT_ONCE = 32


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
        # Equal prompts are neighbours: a block is kept for the next microbatch only.
        pairs = [(n, r) for n, equal in enumerate(self.prompts) for r in equal]
        rows = self.shape.rows
        cut = [pairs[i : i + rows] for i in range(0, len(pairs), rows)]
        self.batches = [[request for _, request in batch] for batch in cut]
        self.places = [[number for number, _ in batch] for batch in cut]
        self.block_rows = block_rows(self.shape)
        self.block: tuple[int, Any] | None = None

    def all(self) -> Texts:
        for number, batch in enumerate(self.batches):
            self.write(batch, self.read(number))
        return self.texts

    def read(self, number: int) -> Any:
        """The arrays of microbatch `number` after its prompts have been read."""
        places, size = self.places[number], self.block_rows
        needed = sorted({place // size for place in places})
        last = needed[-1]
        is_kept = any(x[0] // size == last for x in self.places[number + 1 :][:1])
        is_whole = size == self.shape.rows and len(needed) == 1
        rows = [place % size for place in places]
        if is_whole and not is_kept and rows == list(range(len(rows))):
            arrays = self.of_block(last)
            self.block = None
            return arrays
        arrays = self.programs.empty()
        spread = np.zeros(self.shape.rows, np.int32)
        spread[: len(rows)] = rows
        for block in needed:
            is_of = np.zeros(self.shape.rows, np.bool_)
            is_of[: len(rows)] = [place // size == block for place in places]
            content = self.of_block(block)
            arrays = self.programs.spread(arrays, content, spread, is_of)
            del content
        if not is_kept:
            self.block = None
        return arrays

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

    def write(self, batch: Sequence[Request], arrays: Any) -> None:
        """Draw the tokens of a microbatch."""
        job, part, programs = self.job, self.job.part, self.programs
        rows = filled(batch, self.shape.rows)
        given = {
            "words": np.stack([r.words for r in rows]),
            "numbers": job.sampling.constants(),
            "ends": job.sampling.ends(),
            "first": np.int32(part.first),
        }
        cache, logits = arrays.pop("cache"), arrays.pop("logits")
        before = None
        if job.sampling.penalizes:
            before = seen(rows, logits.shape[1])
        state, _ = programs.begin(logits, before, self.is_open(batch), given)
        del logits
        count, place = part.end - part.first, 1
        self.take(batch, state, 0, place)
        state = state | {"cache": cache}
        del cache
        at_once = TOKENS_AT_ONCE if job.on_token is None else 1
        while place < count and (is_open := self.is_open(batch)).any():
            end = np.int32(min(place + at_once, count))
            state, _, reached = programs.decode(
                self.weights, state, is_open, given, np.int32(place), end
            )
            self.take(batch, state, place, int(reached))
            place = int(reached)

    def take(self, batch: Sequence[Request], state: Any, first: int, end: int) -> None:
        """Add the tokens at places `first` to `end` of a microbatch to the texts."""
        written = jax.tree.map(np.asarray, state["written"])
        for place in range(first, end):
            results = {name: x[:, place] for name, x in written.items()}
            self.texts.take(batch, results, self.job.part.first + place)

    def is_open(self, batch: Sequence[Request]) -> np.ndarray:
        """The rows of a microbatch whose texts go on; filler rows do not.

        Bool (rows,).
        """
        found = np.zeros(self.shape.rows, np.bool_)
        found[: len(batch)] = [r.number in self.texts.open for r in batch]
        return found


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
