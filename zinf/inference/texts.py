"""The texts of some requests while they are written, token by token."""

from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np

from zinf.core.optim.decision import NonFiniteError
from zinf.inference.prompts import Request
from zinf.inference.scores import Written
from zinf.inference.steps import NEEDED

OnToken = Callable[[int, int], object]


class Texts:
    """The texts of some requests as they grow, and which of them go on.

    Args:
        ends: tokens that end a text.
        on_token: called with the number of a prompt and its next token, as soon as the
            token is known. If it returns True, the text ends with this token.

    Attributes:
        made: what is new of each request, by its number.
        open: the numbers of the requests that no token has ended.
    """

    def __init__(
        self, requests: Sequence[Request], ends: Collection[int], on_token: OnToken
    ):
        self.ends, self.on_token = ends, on_token
        self.made = {request.number: Written() for request in requests}
        self.open = {request.number for request in requests}

    def whole(self, request: Request) -> np.ndarray:
        """A prompt and what was written after it, int32 (T,)."""
        new = np.asarray(self.made[request.number].tokens, np.int32)
        return np.concatenate([request.tokens, new])

    def add(self, number: int, results: Mapping[str, np.ndarray], place: int) -> None:
        """Add the next token of one request whose text goes on.

        Args:
            results: `token` and `is_finite`, with what `Scores.of` gives.
            place: the number of the token in its sequence.

        Raises:
            NonFiniteError: its logits are not finite.
        """
        if not results["is_finite"]:
            raise NonFiniteError(
                f"The logits of prompt {number} are not finite at new token "
                f"{place + 1}. A weight is, or the prompt has a token outside the "
                "vocabulary, or the dtype is too narrow for the model."
            )
        token = int(results["token"])
        scores = {n: x for n, x in results.items() if n not in NEEDED}
        self.made[number].add(token, scores)
        is_over = self.on_token(number, token) is True
        if is_over or token in self.ends:
            self.open.remove(number)
