"""Runs generation: a prefill, then a decode a token, between the steps of training."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from zinf.core.memory import Stores
from zinf.core.optim.decision import NonFiniteError
from zinf.core.plan import cache
from zinf.core.step.forward import Forward
from zinf.core.step.run.passes import Passes
from zinf.core.step.run.run import StepRecord, Work
from zinf.core.step.run.runner import AbstractRunner
from zinf.inference.plan import CACHE, RESULTS, SEEN, Generation
from zinf.inference.prompts import Part, Request
from zinf.inference.sampling import Sampling

OnToken = Callable[[int, int], object]


@dataclass(frozen=True)
class Generator:
    """Completes sequences of one shape, or writes a part of them.

    Attributes:
        part: which tokens it writes.
        on_token: called with the number of a prompt and its next token, as soon as the
            token is known. If it returns True, the text ends with this token.
    """

    sampling: Sampling
    planned: Generation
    stores: Stores
    part: Part
    on_token: OnToken = field(default=lambda number, token: None)

    def run(
        self, requests: Sequence[Request], current: AbstractRunner
    ) -> tuple[dict[int, list[int]], set[int]]:
        """The new tokens of each request, by its number, with the token that ends it.

        Also the numbers of the requests that no token has ended.

        Args:
            requests: as many as the microbatches have rows, or fewer.
            current: the runner that the arrays at rest belong to. No deferred update
                may be pending.

        Raises:
            NonFiniteError: the logits of a sequence are not finite.
            KeyboardInterrupt: Ctrl-C was pressed; the caches are freed.
        """
        run = _Run(self, requests)
        current.leave()
        try:
            run.fill_caches()
            run.generate()
        finally:
            run.free_caches()
            current.enter()
        return run.made, run.open


class _Run:
    def __init__(self, generator: Generator, requests: Sequence[Request]):
        self.generator, self.requests = generator, requests
        self.planned, self.stores = generator.planned, generator.stores
        self.homes = self.planned.prefill.cache_homes
        self.caches = set(self.planned.prefill.segmented.program.caches)
        count = self.planned.prefill.num_microbatches
        # Leaves of the cache that no segment can overwrite, by microbatch and name.
        self.passed: list[dict[str, np.ndarray]] = [{} for _ in range(count)]
        self.made: dict[int, list[int]] = {r.number: [] for r in requests}
        rows = self.planned.shape.rows
        # Rows without a request repeat the first one; their tokens are dropped.
        filled = [*requests, *[requests[0]] * (count * rows - len(requests))]
        self.batches = [filled[m * rows : (m + 1) * rows] for m in range(count)]
        self.open = {request.number for request in requests}

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

    def initial(self, batch: Sequence[Request]) -> Any:
        """The leaves of the cache before the first token, one after another."""
        shape, generator = self.planned.shape, self.generator
        starts = [shape.prompt - len(request.tokens) for request in batch]
        for path, content in self.planned.first(np.asarray(starts, np.int32)):
            yield CACHE + path, content
        if generator.sampling.penalizes:
            seen = np.zeros(self.spec(CACHE + SEEN).shape, np.bool_)
            for row, request in enumerate(batch):
                seen[row, request.tokens] = True
            yield CACHE + SEEN, seen

    def spec(self, name: str) -> Any:
        return self.planned.prefill.segmented.program.values[name]

    def free_caches(self) -> None:
        for array, tier in self.homes.items():
            if self.stores[tier].contains(array):
                self.stores[tier].free(array)

    def generate(self) -> None:
        part = self.generator.part
        prompts = [
            np.stack([_padded(r.tokens, self.planned.shape.prompt) for r in batch])
            for batch in self.batches
        ]
        with _Program(self.planned.prefill, self.stores) as program:
            tokens = self.next_tokens(program, prompts, part.first)
        with _Program(self.planned.decode, self.stores) as program:
            for number in range(part.first + 1, part.end):
                if not self.open:
                    return
                tokens = self.next_tokens(program, tokens, number)

    def next_tokens(
        self, program: "_Program", tokens: Sequence[np.ndarray], number: int
    ) -> list[np.ndarray]:
        """Token `number` of each sequence, (B, 1) for each microbatch."""
        numbers = self.generator.sampling.numbers(number)
        inputs = []
        for m, batch in enumerate(self.batches):
            leaves = {f"batch/numbers/{n}": np.asarray(x) for n, x in numbers.items()}
            leaves["batch/words"] = np.stack([r.words for r in batch])
            leaves["batch/tokens"] = tokens[m]
            inputs.append(leaves | self.passed[m])
        outputs = program.run(inputs)
        names = [*RESULTS, *(n for n in self.planned.names if n not in self.caches)]
        found = []
        for m, arrays in enumerate(outputs):
            results = dict(zip(names, arrays, strict=True))
            self.passed[m] = {n: results[n] for n in names[len(RESULTS) :]}
            self.take(m, results, number)
            found.append(results["token"][:, None])
        return found

    def take(self, m: int, results: Mapping[str, np.ndarray], number: int) -> None:
        """Notes the new tokens of the sequences that have not ended."""
        ends = self.generator.sampling.eos_token_ids
        first = m * self.planned.shape.rows
        own = self.requests[first : first + self.planned.shape.rows]
        for row, request in enumerate(own):
            if request.number not in self.open:
                continue
            if not results["is_finite"][row]:
                raise NonFiniteError(
                    f"The logits of prompt {request.number} are not finite at new "
                    f"token {number + 1}. A weight is, or the prompt has a token "
                    "outside the vocabulary, or the dtype is too narrow for the model."
                )
            token = int(results["token"][row])
            self.made[request.number].append(token)
            is_over = self.generator.on_token(request.number, token) is True
            if is_over or token in ends:
                self.open.remove(request.number)


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


def _padded(tokens: np.ndarray, length: int) -> np.ndarray:
    """Tokens with zeros before them; the cache knows where they begin."""
    return np.concatenate([np.zeros(length - len(tokens), np.int32), tokens])
