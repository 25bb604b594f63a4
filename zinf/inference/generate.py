"""Streamed generation: a prefill, then a decode a token, between steps of training."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from zinf.core.memory import Stores
from zinf.core.plan import cache
from zinf.core.program import ArraySpec
from zinf.core.step.forward import Forward
from zinf.core.step.run.passes import Passes
from zinf.core.step.run.run import StepRecord, Work
from zinf.inference.generation import (
    AbstractGeneration,
    Job,
    Kept,
    filled,
    padded,
    seen,
    starts,
)
from zinf.inference.plan import (
    CACHE,
    SEEN,
    Generation,
    GenerationPlanner,
    Shape,
)
from zinf.inference.prompts import Request
from zinf.inference.texts import Texts


@dataclass(frozen=True)
class StreamedGeneration(AbstractGeneration):
    """Generation that runs segment by segment, with all sequences in each segment.

    Attributes:
        one: the programs for one microbatch.
        reason: see `why`.
    """

    planner: GenerationPlanner
    one: Generation
    reason: str

    @property
    def shape(self) -> Shape:
        return self.one.shape

    @property
    def why(self) -> str:
        return self.reason

    def most(self, count: int, kept: Kept) -> int:
        num_microbatches = self._fitting(count, kept).prefill.num_microbatches
        return min(count, self.shape.rows * num_microbatches)

    def write(self, requests: Sequence[Request], job: Job, kept: Kept) -> Texts:
        run = _Run(self._fitting(len(requests), kept), requests, job)
        job.current.leave()
        try:
            run.fill_caches()
            run.generate()
        finally:
            run.free_caches()
            job.current.enter()
        return run.texts

    def _fitting(self, count: int, kept: Kept) -> Generation:
        """The programs for as many microbatches as fit, up to those of `count`."""
        wanted = -(-count // self.shape.rows)
        make = partial(self.planner.most, self.one, wanted)
        return kept((self.shape, wanted), make)


class _Run:
    def __init__(self, planned: Generation, requests: Sequence[Request], job: Job):
        self.planned, self.requests, self.job = planned, requests, job
        self.stores, self.texts = job.stores, job.texts(requests)
        self.homes = planned.prefill.cache_homes
        self.caches = set(planned.prefill.segmented.program.caches)
        count, rows = planned.prefill.num_microbatches, planned.shape.rows
        # Leaves of the cache that no segment can overwrite, by microbatch and name.
        self.passed: list[dict[str, np.ndarray]] = [{} for _ in range(count)]
        whole = filled(requests, count * rows)
        self.batches = [whole[m * rows : (m + 1) * rows] for m in range(count)]

    def fill_caches(self) -> None:
        for m, batch in enumerate(self.batches):
            for name, content in self.initial(batch):
                array = cache(name, m)
                if name in self.caches:
                    # A copy: the programs overwrite it.
                    home = self.stores[self.homes[array]]
                    home.write(array, np.array(content)).result()
                else:
                    self.passed[m][name] = np.array(content)

    def initial(self, batch: Sequence[Request]) -> Iterator[tuple[str, Any]]:
        """The leaves of the cache before the first token, one after another."""
        made = self.planned.first(starts(batch, self.planned.shape.prompt))
        for path, content in made:
            yield CACHE + path, content
        if self.job.sampling.penalizes:
            yield CACHE + SEEN, seen(batch, self.spec(CACHE + SEEN).shape[1])

    def spec(self, name: str) -> ArraySpec:
        return self.planned.prefill.segmented.program.values[name]

    def free_caches(self) -> None:
        for array, tier in self.homes.items():
            if self.stores[tier].contains(array):
                self.stores[tier].free(array)

    def generate(self) -> None:
        part = self.job.part
        prompts = [padded(batch, self.planned.shape.prompt) for batch in self.batches]
        with _Program(self.planned.prefill, self.stores) as program:
            tokens = self.next_tokens(program, prompts, part.first)
        with _Program(self.planned.decode, self.stores) as program:
            for number in range(part.first + 1, part.end):
                if not self.texts.open:
                    return
                tokens = self.next_tokens(program, tokens, number)

    def next_tokens(
        self, program: "_Program", tokens: Sequence[np.ndarray], number: int
    ) -> list[np.ndarray]:
        """Token `number` of each sequence, (B, 1) for each microbatch."""
        numbers = self.job.sampling.constants()
        inputs = []
        for m, batch in enumerate(self.batches):
            leaves = {f"batch/numbers/{n}": np.asarray(x) for n, x in numbers.items()}
            leaves["batch/num_tokens"] = np.asarray(number, np.int32)
            leaves["batch/words"] = np.stack([r.words for r in batch])
            leaves["batch/tokens"] = tokens[m]
            inputs.append(leaves | self.passed[m])
        outputs = program.run(inputs)
        passed = [n for n in self.planned.names if n not in self.caches]
        num_results = len(self.planned.results)
        rows = self.planned.shape.rows
        found = []
        for m, arrays in enumerate(outputs):
            told = zip(self.planned.results, arrays[:num_results], strict=True)
            results = dict(told)
            self.passed[m] = dict(zip(passed, arrays[num_results:], strict=True))
            own = self.requests[m * rows : (m + 1) * rows]
            self.texts.take(own, results, number)
            found.append(results["token"][:, None])
        return found


class _Program:
    """Runs one program; its constants are on the device while it is entered."""

    def __init__(self, forward: Forward, stores: Stores):
        self.forward = forward
        self.passes = Passes(
            forward.segmented,
            forward.segments,
            forward.layouts,
            stores,
            None,
            forward.num_microbatches,
        )

    def __enter__(self) -> "_Program":
        self.passes.put_consts()
        return self

    def __exit__(self, *_: object) -> None:
        self.passes.free_consts()

    def run(self, inputs: Sequence[Mapping[str, np.ndarray]]) -> list[list[np.ndarray]]:
        record, passes = StepRecord(), self.passes
        work = Work(segments=passes.segments, layouts=passes.layouts)
        outputs = passes.run_on(self.forward.plan, work, inputs, (), None, record)
        if record.interrupted:
            raise KeyboardInterrupt
        return outputs
