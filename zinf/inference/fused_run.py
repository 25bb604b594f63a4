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

    def most(self, count: int, kept: Kept) -> int:
        """All: one microbatch is on the device at a time."""
        return count

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
        # Equal prompts are neighbours: a block is kept for the next microbatch only.
        self.prompts: dict[bytes, int] = {}
        for request in requests:
            self.prompts.setdefault(_content(request), len(self.prompts))
        ordered = sorted(requests, key=lambda r: self.prompts[_content(r)])
        self.firsts = {self.prompts[_content(r)]: r for r in reversed(ordered)}
        rows = self.shape.rows
        self.batches = [ordered[i : i + rows] for i in range(0, len(ordered), rows)]
        self.block_rows = block_rows(self.shape)
        self.block: tuple[int, Any] | None = None

    def all(self) -> Texts:
        for number, batch in enumerate(self.batches):
            self.write(batch, self.read(number))
        return self.texts

    def read(self, number: int) -> Any:
        """The arrays of a microbatch, whose prompts have been read."""
        places = [self.prompts[_content(r)] for r in self.batches[number]]
        needed = sorted({place // self.block_rows for place in places})
        coming = [r for batch in self.batches[number + 1 :] for r in batch[:1]]
        last = needed[-1]
        is_kept = any(
            self.prompts[_content(r)] // self.block_rows == last for r in coming
        )
        is_whole = self.block_rows == self.shape.rows and len(needed) == 1
        rows = [place % self.block_rows for place in places]
        if is_whole and not is_kept and rows == list(range(len(rows))):
            arrays = self.of_block(last)
            self.block = None
            return arrays
        arrays = self.programs.empty()
        spread = np.zeros(self.shape.rows, np.int32)
        spread[: len(rows)] = rows
        for block in needed:
            is_of = np.zeros(self.shape.rows, np.bool_)
            is_of[: len(rows)] = [p // self.block_rows == block for p in places]
            content = self.of_block(block)
            arrays = self.programs.spread(arrays, content, spread, is_of)
            del content
        if not is_kept:
            self.block = None
        return arrays

    def of_block(self, block: int) -> Any:
        """The arrays of a block of prompts, read now or just before."""
        if self.block is not None and self.block[0] == block:
            return self.block[1]
        self.block = None
        first = block * self.block_rows
        end = min(first + self.block_rows, len(self.prompts))
        requests = [self.firsts[place] for place in range(first, end)]
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
        """Note the tokens of some places of a microbatch."""
        written = jax.tree.map(np.asarray, state["written"])
        for place in range(first, end):
            results = {name: x[:, place] for name, x in written.items()}
            self.texts.take(batch, results, self.job.part.first + place)

    def is_open(self, batch: Sequence[Request]) -> np.ndarray:
        """Which rows go on; those that are only filled do not."""
        found = np.zeros(self.shape.rows, np.bool_)
        found[: len(batch)] = [r.number in self.texts.open for r in batch]
        return found


def _on_device(array: ArrayId, tier: Tier, nbytes: int, stores: Stores) -> jax.Array:
    """An array as it rests on the device, or a copy of it there."""
    if tier == Tier.DEVICE:
        return stores.device.read(array).result()
    # What is read from a drive takes memory of the host meanwhile.
    taken, ledger = nbytes if tier == Tier.NVME else 0, stores.host.ledger
    ledger.reserve(taken, str(array))
    try:
        content = stores[tier].read(array).result()
        return to_device([content], stores.device.device)[0]
    finally:
        ledger.release(taken)


def _content(request: Request) -> bytes:
    return request.tokens.tobytes()
