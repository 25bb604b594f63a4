"""Streamed generation: passes that decode running sequences and read waiting prompts.

Sequences have rows of microbatches. One that ends leaves its row, and a waiting one
joins there, beside those that run (Orca, OSDI 2022, section 3.1). Its prompt is read in
parts, by passes in which the others go on (Dynamic SplitFuse, arXiv:2401.08671, section
3). A prompt that several sequences have is read in one row, and its cache is copied to
the rows of the others.

Several processes all have the same sequences and decide alike; each gives the rows of
its own devices to a program, and gets the tokens of all.
"""

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import numpy as np

from zinf.core.memory import Stores
from zinf.core.program import Tier
from zinf.core.sharding.mesh import first_cpu
from zinf.core.step.forward import Forward
from zinf.core.step.run.passes import Passes
from zinf.core.step.run.run import StepRecord
from zinf.inference.caches import Caches
from zinf.inference.generation import (
    AbstractGeneration,
    Job,
    Kept,
    padded,
    seen,
    starts,
)
from zinf.inference.plan import PROMPTS, Generation, GenerationPlanner
from zinf.inference.prompts import Request
from zinf.inference.rows import Shape
from zinf.inference.steps import COUNT
from zinf.inference.texts import Texts

# Moving rows copies the caches of two microbatches through the host. That is assumed to
# take as long as so many passes of one microbatch; nothing else depends on it.
MOVING_PASSES = 8


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
        host_bytes = planner.planner.capacity()[Tier.HOST]
        job.current.leave()
        try:
            with Caches(planned, job.stores, host_bytes) as caches:
                run = _Run(planner, planned, caches, requests, count, job)
                run.generate()
        finally:
            job.current.enter()
        return run.texts


class _Run:
    """Writes sequences of one shape.

    Attributes:
        rows: the sequence in each row, microbatch after microbatch; None: none is.
        waiting: sequences without a row. Equal prompts are neighbours.
        unread: for each row whose prompt is being read, the slot of the padded prompt
            where the next part begins; those that joined first come first.
        copies: by such a row, the rows that get its cache.
        num_idle: rows without a sequence, summed over the passes since the last one
            joined.
        num_spare: microbatches that were not needed, summed over the passes since
            sequences last moved to others.
    """

    def __init__(
        self,
        planner: GenerationPlanner,
        planned: Generation,
        caches: Caches,
        requests: Sequence[Request],
        count: int,
        job: Job,
    ):
        self.planner, self.planned, self.job = planner, planned, job
        self.caches, self.texts = caches, job.texts(requests)
        self.rows: list[Request | None] = [None] * count
        by_prompt: dict[bytes, list[Request]] = {}
        for request in requests:
            by_prompt.setdefault(request.tokens.tobytes(), []).append(request)
        self.waiting = deque(r for equal in by_prompt.values() for r in equal)
        self.unread: dict[int, int] = {}
        self.copies: dict[int, list[int]] = defaultdict(list)
        self.num_idle = 0
        self.num_spare = 0

    def generate(self) -> None:
        while self.waiting or self.unread or self.running():
            if self.is_time_to_join():
                self.join()
            if self.unread:
                self.read_parts()
            else:
                self.decode()

    def number(self, request: Request) -> int:
        """The number of the next new token of a sequence."""
        return self.job.part.first + len(self.texts.made[request.number].tokens)

    def goes_on(self, request: Request | None) -> bool:
        if request is None or request.number not in self.texts.open:
            return False
        return self.number(request) < self.job.part.end

    def in_use(self) -> list[int]:
        """The rows whose sequences go on, with those whose prompts are being read."""
        return [row for row, request in enumerate(self.rows) if self.goes_on(request)]

    def running(self) -> list[int]:
        """The rows whose sequences get more tokens after the first."""
        copied = {row for rows in self.copies.values() for row in rows}
        return [x for x in self.in_use() if x not in self.unread and x not in copied]

    # Prompts.

    def is_time_to_join(self) -> bool:
        """Whether waiting sequences get rows now, rather than after another token.

        Reading prompts costs each running sequence some share of a token. It is worth
        that as soon as as many tokens were lost by rows without a sequence.
        """
        count = len(self.in_use())
        if not self.waiting or count == len(self.rows):
            return False
        if not self.running():
            return not count or self.planned.can_join
        cost = len(self.running()) * self.planner.seconds_beside(self.planned)
        return self.planned.can_join and self.num_idle >= cost

    def join(self) -> None:
        """Give free rows to waiting sequences; those with equal prompts read one."""
        is_taken = set(self.in_use())
        free = [row for row in range(len(self.rows)) if row not in is_taken]
        joining = [self.waiting.popleft() for _ in free[: len(self.waiting)]]
        first_of = {self.request(row).tokens.tobytes(): row for row in self.unread}
        can_copy, others = self.caches.can_copy(), []
        # Prompts that are read come first, so few microbatches have some.
        rows = iter(free)
        for request in joining:
            name = request.tokens.tobytes()
            if can_copy and name in first_of:
                others.append((request, first_of[name]))
                continue
            row = first_of[name] = next(rows)
            self.rows[row] = request
            self.unread[row] = self.first_slot(request)
        for (request, source), row in zip(others, rows, strict=False):
            self.rows[row] = request
            self.copies[source].append(row)
        self.num_idle = 0

    def first_slot(self, request: Request) -> int:
        """Where the first part of a padded prompt begins that has a token."""
        padding, length = starts([request], self.planned.shape.prompt)[0], self.length
        return int(padding) // length * length

    @property
    def length(self) -> int:
        """Tokens of a part of a prompt."""
        return self.planned.parts.length

    def read_parts(self) -> None:
        """Read parts of some prompts, while running sequences get their next tokens."""
        forward, running = None, self.running()
        some = self.reading_microbatches(self.num_beside())
        if running and self.planned.can_read_beside:
            forward = self.planner.reading(self.planned, some, is_beside=True)
        is_beside = forward is not None
        if forward is None:
            some = self.reading_microbatches(self.planned.num_microbatches)
            forward = self.planner.reading(self.planned, some, is_beside=False)
            assert forward is not None
        read = {
            m: [row for row in self.unread if row in self.planned.of_microbatch(m)]
            for m in some
        }
        read = {m: rows[: self.planned.parts.rows] for m, rows in read.items()}
        if is_beside:
            inputs, prefix = self.decode_inputs(running), PROMPTS
        else:
            running, prefix = [], ""
            inputs = [{} for _ in self.caches.passed]
        for m, rows in read.items():
            leaves = self.part_inputs(m, rows) | self.caches.passed[m]
            inputs[m] |= {prefix + name: leaf for name, leaf in leaves.items()}
        with _Program(forward, self.job.stores) as program:
            self.take_outputs(program.run(inputs), running, read)

    def num_beside(self) -> int:
        """Microbatches whose prompts a pass reads beside decoding: at least one."""
        decode, shape = self.planned.decode, self.planned.shape
        num_tokens = self.planner.tokens_beside(decode, shape.rows)
        return max(1, num_tokens // self.planned.parts.num_tokens)

    def reading_microbatches(self, most: int) -> range:
        """The first microbatches that read prompts, with those between them."""
        numbers = {row // self.planned.shape.rows for row in self.unread}
        return range(min(numbers), min(max(numbers) + 1, min(numbers) + most))

    def part_inputs(self, m: int, rows: Sequence[int]) -> dict[str, np.ndarray]:
        """The next parts of the prompts in some rows of a microbatch."""
        shape, parts = self.planned.shape, self.planned.parts
        tokens = np.zeros((parts.rows, parts.length), np.int32)
        first, is_first = np.zeros(parts.rows, np.int32), np.zeros(parts.rows, np.bool_)
        which = np.full(parts.rows, shape.rows, np.int32)
        for number, row in enumerate(rows):
            local = row - self.planned.of_microbatch(m).start
            # If there is a part for each row, it has the number of its row.
            part = local if parts.rows == shape.rows else number
            request, slot = self.request(row), self.unread[row]
            whole = padded([request], shape.prompt)[0]
            tokens[part], which[part] = whole[slot : slot + parts.length], local
            is_first[part] = slot == self.first_slot(request)
            first[part] = max(0, starts([request], shape.prompt)[0] - slot)
        return {
            "batch/tokens": tokens,
            "batch/starts": first,
            "batch/rows": which,
            "batch/is_first": is_first,
        }

    def take_parts(self, m: int, rows: Sequence[int], logits: np.ndarray) -> None:
        """Go on behind parts that were read; draw the first tokens after the last."""
        parts, ends = self.planned.parts, {}
        for number, row in enumerate(rows):
            self.unread[row] += parts.length
            if self.unread[row] == self.planned.shape.prompt:
                is_every = parts.rows == self.planned.shape.rows
                ends[row] = logits[row % parts.rows if is_every else number]
        for row in ends:
            del self.unread[row]
        sources = {to: row for row in ends for to in self.copies.pop(row, ())}
        if sources:
            self.caches.copy_rows(sources)
        ends |= {to: ends[row] for to, row in sources.items()}
        if ends:
            self.draw_first(ends)

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
            told = self.planner.planner.group.broadcast(
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

    def decode(self) -> None:
        """Draw tokens until prompts are read, or fewer microbatches have sequences."""
        self.move_rows()
        count = self.num_decoded()
        forward = self.planner.decoding(self.planned, count)
        with _Program(forward, self.job.stores) as program:
            while (running := self.running()) and not self.is_time_to_join():
                if self.num_decoded() < count or self.is_time_to_move():
                    break
                inputs = self.decode_inputs(running)
                inputs[count:] = [{} for _ in inputs[count:]]
                self.take_outputs(program.run(inputs), running, {})
                self.num_spare += count - self.num_needed()

    def num_decoded(self) -> int:
        """The microbatches of a pass: up to the last one with a running sequence.

        All of them as long as sequences wait for free rows.
        """
        running = self.running()
        if self.waiting or not running or not self.planned.can_join:
            return self.planned.num_microbatches
        return 1 + max(running) // self.planned.shape.rows

    def num_needed(self) -> int:
        """The fewest microbatches that have a row for each running sequence."""
        return max(1, -(-len(self.running()) // self.planned.shape.rows))

    def is_time_to_move(self) -> bool:
        """Whether sequences move to rows of fewer microbatches.

        Nothing must wait for these rows, and it is worth the time as soon as passes
        have spent as much on microbatches that were not needed.
        """
        is_spread = self.num_needed() < self.num_decoded()
        is_late = self.num_spare >= MOVING_PASSES and not self.waiting
        return is_spread and is_late and self.caches.can_copy()

    def move_rows(self) -> None:
        """Move sequences to free rows of the fewest microbatches, if it is time."""
        if not self.is_time_to_move():
            return
        running = set(self.running())
        end = self.num_needed() * self.planned.shape.rows
        free = (row for row in range(end) if row not in running)
        late = sorted(row for row in running if row >= end)
        sources = dict(zip(free, late, strict=False))
        self.caches.copy_rows(sources)
        for row, source in sources.items():
            self.rows[row], self.rows[source] = self.rows[source], None
        self.num_spare = 0

    def decode_inputs(self, running: Sequence[int]) -> list[dict[str, np.ndarray]]:
        """For each microbatch, the last tokens of the running sequences and more."""
        numbers = self.job.sampling.constants()
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
        goes_on = np.isin(np.arange(num_rows), running)
        by_row = {"tokens": tokens, "words": words}
        by_row |= {"num_tokens": num_tokens, "goes_on": goes_on}
        inputs = []
        for m, passed in enumerate(self.caches.passed):
            own = self.planned.of_microbatch(m)
            leaves = {f"batch/numbers/{n}": np.asarray(x) for n, x in numbers.items()}
            for name, values in by_row.items():
                leaves[f"batch/{name}"] = values[own.start : own.stop]
            inputs.append(leaves | passed)
        return inputs

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

    def take_outputs(
        self,
        outputs: Sequence[Sequence[np.ndarray]],
        running: Sequence[int],
        read: Mapping[int, Sequence[int]],
    ) -> None:
        """Keep the cache leaves that pass through the host, and the new tokens.

        Args:
            running: the rows that were decoded.
            read: by microbatch, the rows whose prompts a part was read of.
        """
        names = self.caches.passed_names
        num_rows, logits = self.planned.shape.rows, {}
        self.num_idle += len(self.rows) - len(self.in_use())
        for m, arrays in enumerate(outputs):
            rest = list(arrays)
            if running and rest:
                results = {name: rest.pop(0) for name in self.planned.results}
                self.caches.passed[m] = {name: rest.pop(0) for name in names}
                own = [row for row in running if row in self.planned.of_microbatch(m)]
                self.take(((row % num_rows, self.request(row)) for row in own), results)
            if m in read:
                logits[m] = rest.pop(0)
                leaves = dict(zip(names, rest, strict=True))
                self.caches.pass_rows(m, leaves, read[m])
        for m, rows in read.items():
            self.take_parts(m, rows, logits[m])

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
        try:
            self.passes.put_consts()
            self.work = self.passes.work()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.passes.free_consts()

    def run(self, inputs: Sequence[Mapping[str, np.ndarray]]) -> list[list[np.ndarray]]:
        """Run it; inputs and outputs are whole arrays, the same on all processes."""
        record, plan = StepRecord(), self.forward.plan
        outputs = self.passes.run_on(plan, self.work, inputs, (), None, record)
        if record.interrupted:
            raise KeyboardInterrupt
        return [self.passes.wholes(m, arrays) for m, arrays in enumerate(outputs)]
