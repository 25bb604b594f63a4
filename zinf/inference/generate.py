"""Streamed generation: a prefill of the sequences that join, then a decode a token.

Sequences have rows of microbatches. One that ends leaves its row, and a waiting one
joins there, beside those that run (Orca, OSDI 2022, section 3.1). A prompt that several
sequences have is read in one row, and its cache is copied to the rows of the others.

Several processes all have the same sequences and decide alike; each gives the rows of
its own devices to a program, and gets the tokens of all.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np

from zinf.core.memory import Stores, gathered, to_devices, to_shares
from zinf.core.plan import cache
from zinf.core.program import ArraySpec, Tier
from zinf.core.sharding import Layout
from zinf.core.sharding.mesh import first_cpu
from zinf.core.step.forward import Forward
from zinf.core.step.run.passes import Passes
from zinf.core.step.run.run import StepRecord
from zinf.inference.generation import (
    AbstractGeneration,
    Job,
    Kept,
    padded,
    seen,
    starts,
)
from zinf.inference.plan import (
    COUNT,
    NO_AXIS,
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

    def write(self, requests: Sequence[Request], job: Job, kept: Kept) -> Texts:
        most = len(requests) if job.batch_size is None else job.batch_size
        count = min(len(requests), most)
        wanted = -(-count // self.shape.rows)
        planner, shape = self.planner, self.shape

        def whole(other: GenerationPlanner) -> Generation:
            return kept((shape, "whole experts"), partial(other.plan, shape))

        def make() -> Generation:
            return planner.suited(planner.most(self.one, wanted), whole)

        planned = kept((shape, wanted), make)
        count = min(count, self.shape.rows * planned.num_microbatches)
        run = _Run(planner, planned, requests, count, job)
        job.current.leave()
        try:
            run.fill_caches()
            run.generate()
        finally:
            run.free_caches()
            job.current.enter()
        return run.texts


class _Run:
    """Writes sequences of one shape.

    Attributes:
        rows: the sequence in each row, microbatch after microbatch; None: none is.
        waiting: sequences without a row. Equal prompts are neighbours.
        num_idle: rows without a sequence, summed over the passes since the last one
            that read prompts.
    """

    def __init__(
        self,
        planner: GenerationPlanner,
        planned: Generation,
        requests: Sequence[Request],
        count: int,
        job: Job,
    ):
        self.planner, self.planned, self.job = planner, planned, job
        self.stores, self.texts = job.stores, job.texts(requests)
        self.group = planner.planner.group
        self.homes = planned.decode.cache_homes
        self.caches = set(planned.decode.segmented.program.caches)
        # Leaves of the cache that no segment can overwrite, by microbatch and name.
        self.passed: list[dict[str, np.ndarray]] = [
            {} for _ in range(planned.num_microbatches)
        ]
        self.rows: list[Request | None] = [None] * count
        by_prompt: dict[bytes, list[Request]] = {}
        for request in requests:
            by_prompt.setdefault(request.tokens.tobytes(), []).append(request)
        self.waiting = deque(r for equal in by_prompt.values() for r in equal)
        self.num_idle = 0

    def fill_caches(self) -> None:
        """Allocate the caches, filled with zeros, before the first prefill."""
        for m, passed in enumerate(self.passed):
            for name in self.planned.axes:
                spec, is_kept = self.spec(name), name in self.caches
                shape = self.layout(name).share_shape if is_kept else spec.shape
                zeros = np.zeros(shape, jax.numpy.dtype(spec.dtype))
                if is_kept:
                    self.keep(name, m, zeros)
                else:
                    passed[name] = zeros

    def free_caches(self) -> None:
        for array, tier in self.homes.items():
            if self.stores[tier].contains(array):
                self.stores[tier].free(array)

    def spec(self, name: str) -> ArraySpec:
        return self.planned.decode.segmented.program.values[name]

    def layout(self, name: str) -> Layout:
        """The layout of a leaf of the cache of a microbatch, where it rests."""
        return self.planned.decode.layouts.values[name]

    def home(self, name: str) -> Any:
        """The store of a leaf of the caches."""
        return self.stores[self.homes[cache(name, 0)]]

    def generate(self) -> None:
        while self.waiting or self.running():
            if self.is_time_to_join():
                self.join()
            with _Program(self.planned.decode, self.stores) as program:
                while self.running() and not self.is_time_to_join():
                    self.next_tokens(program)

    def number(self, request: Request) -> int:
        """The number of the next new token of a sequence."""
        return self.job.part.first + len(self.texts.made[request.number].tokens)

    def goes_on(self, request: Request | None) -> bool:
        if request is None or request.number not in self.texts.open:
            return False
        return self.number(request) < self.job.part.end

    def running(self) -> list[int]:
        """The rows whose sequences go on."""
        return [row for row, request in enumerate(self.rows) if self.goes_on(request)]

    # Prompts.

    def is_time_to_join(self) -> bool:
        """Whether waiting prompts are read now, rather than after another token.

        A pass that reads prompts costs each running sequence a token. It is worth that
        as soon as as many tokens were lost by rows without a sequence.
        """
        count = len(self.running())
        if not self.waiting or count == len(self.rows):
            return False
        return not count or (self.planned.can_join and self.num_idle >= count)

    def join(self) -> None:
        """Read prompts of waiting sequences into the rows that are free."""
        is_taken = set(self.running())
        free = [row for row in range(len(self.rows)) if row not in is_taken]
        joining = [self.waiting.popleft() for _ in free[: len(self.waiting)]]
        first_of: dict[bytes, Request] = {}
        if self.can_copy():
            for request in joining:
                first_of.setdefault(request.tokens.tobytes(), request)
        read = list(first_of.values()) or joining
        numbers = {request.number for request in read}
        others = [r for r in joining if r.number not in numbers]
        # Prompts that are read come first, so few microbatches have some.
        row_of = dict(zip((r.number for r in (*read, *others)), free, strict=False))
        for request in joining:
            self.rows[row_of[request.number]] = request
        logits = self.read_prompts({row_of[r.number]: r for r in read})
        sources = {
            row_of[r.number]: row_of[first_of[r.tokens.tobytes()].number]
            for r in others
        }
        if sources:
            self.copy_rows(sources)
        self.draw_first({row: logits[sources.get(row, row)] for row in row_of.values()})
        self.num_idle = 0

    def read_prompts(self, requests: Mapping[int, Request]) -> dict[int, np.ndarray]:
        """The logits (V,) after each prompt, by row. The caches of other rows stay."""
        shape = self.planned.shape
        count = 1 + max(requests) // shape.rows
        forward = self.planner.prefix(self.planned, count)
        inputs = []
        for m in range(forward.num_microbatches):
            # Rows that do not join read the first request; their results are dropped.
            some = next(iter(requests.values()))
            whole = [requests.get(row, some) for row in self.of_microbatch(m)]
            leaves = {
                "batch/tokens": padded(whole, shape.prompt),
                "batch/starts": starts(whole, shape.prompt),
                "batch/joins": np.isin(self.of_microbatch(m), list(requests)),
            }
            inputs.append(leaves | self.passed[m])
        with _Program(forward, self.stores) as program:
            outputs = self.take_caches(program.run(inputs), 1)
        rows = shape.rows
        return {row: outputs[row // rows][0][row % rows] for row in requests}

    def of_microbatch(self, m: int) -> range:
        rows = self.planned.shape.rows
        return range(m * rows, (m + 1) * rows)

    def can_copy(self) -> bool:
        """Whether the host has room for a leaf of the caches of all microbatches."""
        room = self.planner.planner.capacity()[Tier.HOST]
        held = self.planned.decode.plan.home_bytes[Tier.HOST]
        return self.copied_bytes() <= room - held

    def copied_bytes(self) -> int:
        return (1 + self.planned.num_microbatches) * self.planned.leaf_bytes()

    def copy_rows(self, sources: Mapping[int, int]) -> None:
        """Give rows the caches of other rows."""
        nbytes, ledger = self.copied_bytes(), self.stores.host.ledger
        ledger.reserve(nbytes, "a leaf of the caches of all microbatches")
        try:
            for name, axis in self.planned.axes.items():
                self.copy_leaf(name, axis, sources)
        finally:
            ledger.release(nbytes)

    def copy_leaf(self, name: str, axis: int, sources: Mapping[int, int]) -> None:
        num_rows = self.planned.shape.rows
        # No row is read after it was written: a source is never written.
        read = {row // num_rows for row in sources.values()}
        contents = {m: self.content(name, m) for m in read}
        for m in sorted({row // num_rows for row in sources}):
            content = contents.get(m)
            content = self.content(name, m) if content is None else content
            for row in self.of_microbatch(m):
                if row not in sources:
                    continue
                number, place = divmod(sources[row], num_rows)
                if axis == NO_AXIS:
                    content[...] = contents[number]
                else:
                    of = np.moveaxis(contents[number], axis, 0)
                    np.moveaxis(content, axis, 0)[row % num_rows] = of[place]
            self.replace(name, m, content)

    def content(self, name: str, m: int) -> np.ndarray:
        """A copy of a leaf of the cache of a microbatch, whole."""
        if name not in self.caches:
            return np.array(self.passed[m][name])
        found, layout = self.home(name).read(cache(name, m)).result(), self.layout(name)
        if isinstance(found, jax.Array):
            (found,) = to_shares([found], [layout])
        elif layout.is_whole:
            found = np.array(found)
        return gathered(found, layout)

    def replace(self, name: str, m: int, content: np.ndarray) -> None:
        if name in self.caches:
            self.keep(name, m, self.layout(name).take_share(content))
        else:
            self.passed[m][name] = content

    def keep(self, name: str, m: int, share: np.ndarray) -> None:
        """Write this process's share of a leaf of the caches where it rests."""
        array, kept = cache(name, m), [share]
        if self.homes[array] == Tier.DEVICE:
            kept = to_devices(kept, [self.layout(name)])
        self.home(name).write(array, kept[0]).result()

    def draw_first(self, logits: Mapping[int, np.ndarray]) -> None:
        """Draw the first token of the sequences in some rows."""
        rows, sampling = self.planned.shape.rows, self.job.sampling
        order = sorted(logits)
        for some in (order[i : i + rows] for i in range(0, len(order), rows)):
            # Tokens that are drawn for repeated rows are dropped.
            places = [*some, *[some[0]] * (rows - len(some))]
            whole = [self.request(row) for row in places]
            logits_BV = np.stack([logits[row] for row in places])
            before = None
            if sampling.penalizes:
                before = seen(whole, logits_BV.shape[1])
            numbers = np.asarray([self.number(r) for r in whole], np.int32)
            words = np.stack([r.words for r in whole])
            with jax.default_device(first_cpu()):
                given = logits_BV, sampling.constants(), numbers, words, before
                results, _ = self.planned.draw(*given)
            # Two kinds of processor may round otherwise, and so draw another token.
            found = {name: np.asarray(x) for name, x in results.items()}
            told = self.group.broadcast(
                "first tokens", {name: x.tolist() for name, x in found.items()}
            )
            results = {
                n: np.asarray(told[n], x.dtype)[:, None] for n, x in found.items()
            }
            results[COUNT] = np.ones(rows, np.int32)
            self.take(enumerate(whole[: len(some)]), results)

    def request(self, row: int) -> Request:
        request = self.rows[row]
        assert request is not None
        return request

    # Tokens after prompts.

    def next_tokens(self, program: "_Program") -> None:
        """Read the last tokens of the running sequences, and note what comes next."""
        running, numbers = self.running(), self.job.sampling.constants()
        known = self.known_tokens(running)
        num_rows = self.planned.num_microbatches * self.planned.shape.rows
        shape = (num_rows, *next(iter(known.values())).shape)
        tokens, num_tokens = np.zeros(shape, np.int32), np.zeros(num_rows, np.int32)
        some_words = self.request(running[0]).words
        words = np.zeros((num_rows, *some_words.shape), some_words.dtype)
        for row in running:
            request = self.request(row)
            tokens[row], words[row] = known[row], request.words
            num_tokens[row] = self.number(request)
        inputs = []
        for m, passed in enumerate(self.passed):
            own = self.of_microbatch(m)
            leaves = {f"batch/numbers/{n}": np.asarray(x) for n, x in numbers.items()}
            leaves["batch/num_tokens"] = num_tokens[own.start : own.stop]
            leaves["batch/words"] = words[own.start : own.stop]
            leaves["batch/tokens"] = tokens[own.start : own.stop]
            inputs.append(leaves | passed)
        outputs = self.take_caches(program.run(inputs), len(self.planned.results))
        for m, arrays in enumerate(outputs):
            results = dict(zip(self.planned.results, arrays, strict=True))
            own = (row for row in running if row in self.of_microbatch(m))
            rows = self.planned.shape.rows
            self.take(((row % rows, self.request(row)) for row in own), results)
        self.num_idle += len(self.rows) - len(running)

    def known_tokens(self, running: Sequence[int]) -> dict[int, np.ndarray]:
        """By row, the last token of each running sequence and guesses after it."""
        requests = [self.request(row) for row in running]
        texts = [self.texts.whole(request) for request in requests]
        known = np.stack([text[-1:] for text in texts])
        if (drafts := self.job.drafts) is not None:
            numbers = [request.number for request in requests]
            found = drafts.guesses(numbers, texts, self.planned.vocab_size)
            known = np.concatenate([known, found], axis=1)
        return dict(zip(running, known, strict=True))

    def take_caches(
        self, outputs: Sequence[Sequence[np.ndarray]], num_results: int
    ) -> list[Sequence[np.ndarray]]:
        """Keep the cache leaves that pass through the host; return the results."""
        names = [name for name in self.planned.axes if name not in self.caches]
        for m, arrays in enumerate(outputs):
            self.passed[m] = dict(zip(names, arrays[num_results:], strict=True))
        return [arrays[:num_results] for arrays in outputs]

    def take(
        self,
        requests: Iterable[tuple[int, Request]],
        results: Mapping[str, np.ndarray],
    ) -> None:
        """Add the next tokens of sequences, each from its row of the results."""
        counts, requests = results[COUNT], list(requests)
        told = {name: values for name, values in results.items() if name != COUNT}
        for place in range(results["token"].shape[1]):
            for row, request in requests:
                if place < counts[row] and self.goes_on(request):
                    own = {name: values[row, place] for name, values in told.items()}
                    self.texts.add(request.number, own, self.number(request))


class _Program:
    """Runs one program; its constants are on the device in the `with` block.

    So are experts that it reads on demand, as long as there are slots for them.
    """

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
        self.work = self.passes.work()
        return self

    def __exit__(self, *_: object) -> None:
        self.passes.free_consts()

    def run(self, inputs: Sequence[Mapping[str, np.ndarray]]) -> list[list[np.ndarray]]:
        """Run it; inputs and outputs are whole arrays, the same on all processes."""
        record, plan = StepRecord(), self.forward.plan
        layouts = self.forward.layouts.values
        own = [
            {name: layouts[name].take_share(x) for name, x in leaves.items()}
            for leaves in inputs
        ]
        outputs = self.passes.run_on(plan, self.work, own, (), None, record)
        if record.interrupted:
            raise KeyboardInterrupt
        return [self.passes.wholes(arrays) for arrays in outputs]
