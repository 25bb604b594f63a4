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
    COUNT,
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
        prompts = [padded(batch, self.planned.shape.prompt) for batch in self.batches]
        with _Program(self.planned.prefill, self.stores) as program:
            self.next_tokens(program, prompts)
        with _Program(self.planned.decode, self.stores) as program:
            while any(map(self.goes_on, self.requests)):
                self.next_tokens(program, self.known_tokens())

    def number(self, request: Request) -> int:
        """The number of the next new token of a sequence."""
        return self.job.part.first + len(self.texts.made[request.number].tokens)

    def goes_on(self, request: Request) -> bool:
        is_open = request.number in self.texts.open
        return is_open and self.number(request) < self.job.part.end

    def known_tokens(self) -> list[np.ndarray]:
        """The last token of each sequence and the guesses after it, (B, S) each."""
        last = [[self.texts.made[r.number].tokens[-1]] for r in self.requests]
        known = np.asarray(last, np.int32)
        if (drafts := self.job.drafts) is not None:
            going = [i for i, r in enumerate(self.requests) if self.goes_on(r)]
            numbers = [self.requests[i].number for i in going]
            texts = [self.text(self.requests[i]) for i in going]
            guesses = np.repeat(known, drafts.num_tokens, axis=1)
            vocab_size = self.planned.vocab_size
            assert vocab_size is not None
            guesses[going] = drafts.guesses(numbers, texts, vocab_size)
            known = np.concatenate([known, guesses], axis=1)
        absent = sum(map(len, self.batches)) - len(known)
        return np.split(np.pad(known, ((0, absent), (0, 0))), len(self.batches))

    def text(self, request: Request) -> np.ndarray:
        """A prompt with what was written after it."""
        new = np.asarray(self.texts.made[request.number].tokens, np.int32)
        return np.concatenate([request.tokens, new])

    def next_tokens(self, program: "_Program", tokens: Sequence[np.ndarray]) -> None:
        """Read tokens (B, S) of each microbatch, and note what comes next."""
        numbers = self.job.sampling.constants()
        inputs = []
        for m, batch in enumerate(self.batches):
            leaves = {f"batch/numbers/{n}": np.asarray(x) for n, x in numbers.items()}
            next_numbers = [self.number(request) for request in batch]
            leaves["batch/num_tokens"] = np.asarray(next_numbers, np.int32)
            leaves["batch/words"] = np.stack([r.words for r in batch])
            leaves["batch/tokens"] = tokens[m]
            inputs.append(leaves | self.passed[m])
        outputs = program.run(inputs)
        passed = [n for n in self.planned.names if n not in self.caches]
        num_results = len(self.planned.results)
        rows = self.planned.shape.rows
        for m, arrays in enumerate(outputs):
            told = zip(self.planned.results, arrays[:num_results], strict=True)
            self.passed[m] = dict(zip(passed, arrays[num_results:], strict=True))
            self.take(self.requests[m * rows : (m + 1) * rows], dict(told))

    def take(
        self, requests: Sequence[Request], results: Mapping[str, np.ndarray]
    ) -> None:
        """Note the next tokens of a microbatch, place by place."""
        counts, results = results[COUNT], {k: results[k] for k in results if k != COUNT}
        for place in range(results["token"].shape[1]):
            for row, request in enumerate(requests):
                if place < counts[row] and self.goes_on(request):
                    own = {name: values[row, place] for name, values in results.items()}
                    self.texts.add(request.number, own, self.number(request))


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
