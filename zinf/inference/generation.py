"""What all ways to generate have in common: they write texts of one shape."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from zinf.core.memory import Stores
from zinf.core.step.run.runner import AbstractRunner
from zinf.inference.drafts import Drafts
from zinf.inference.prompts import Part, Request
from zinf.inference.sampling import Sampling
from zinf.inference.texts import OnToken, Texts

Kept = Callable[[Hashable, Callable[[], Any]], Any]
"""`(key, make)`: what was made before for a key, or new."""


@dataclass(frozen=True)
class Job:
    """One run of generation: the tokens to write, and the arrays to do it with.

    Attributes:
        part: which tokens of the sequences.
        on_token: see `Texts`; None for nothing.
        drafts: guesses of next tokens; None for none.
        batch_size: the most sequences that are written together; None: as many as fit.
        stores: of the engine.
        current: the runner that the arrays at rest belong to. No deferred update may be
            pending.
    """

    sampling: Sampling
    part: Part
    on_token: OnToken | None
    drafts: Drafts | None
    batch_size: int | None
    stores: Stores
    current: AbstractRunner

    def texts(self, requests: Sequence[Request]) -> Texts:
        """The texts of some requests, before the first token."""
        ends = self.sampling.eos_token_ids
        return Texts(requests, ends, self.on_token or (lambda number, token: None))


class AbstractGeneration(ABC):
    """Compiled programs that write sequences of one shape."""

    @property
    @abstractmethod
    def why(self) -> str:
        """Why the programs are of this kind: a sentence."""

    @abstractmethod
    def write(self, requests: Sequence[Request], job: Job, kept: Kept) -> Texts:
        """Write the tokens of `job.part` of all requests.

        Raises:
            NonFiniteError: the logits of a sequence are not finite.
            KeyboardInterrupt: Ctrl-C was pressed; the caches are freed.
        """


def padded(requests: Sequence[Request], length: int) -> np.ndarray:
    """The tokens of requests as int32 (B, length), with zeros before them.

    The cache knows where they begin.
    """
    tokens_BT = np.zeros((len(requests), length), np.int32)
    for row, request in enumerate(requests):
        tokens_BT[row, length - len(request.tokens) :] = request.tokens
    return tokens_BT


def starts(requests: Sequence[Request], length: int) -> np.ndarray:
    """The first slot of each request that holds a token, int32 (B,)."""
    return np.asarray([length - len(r.tokens) for r in requests], np.int32)


def seen(requests: Sequence[Request], vocab_size: int) -> np.ndarray:
    """Whether each word is among the tokens of each request, bool (B, V)."""
    found_BV = np.zeros((len(requests), vocab_size), np.bool_)
    for row, request in enumerate(requests):
        found_BV[row, request.tokens] = True
    return found_BV


def filled(requests: Sequence[Request], rows: int) -> list[Request]:
    """As many requests as a microbatch has rows; the first one is repeated.

    What is written for the repeated ones is dropped.
    """
    return [*requests, *[requests[0]] * (rows - len(requests))]
