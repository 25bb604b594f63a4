"""What a model reads beside the tokens of a prompt, such as images."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from zinf.core.engine.engine import Engine
from zinf.core.rollouts.sizes import Prompt
from zinf.inference import Scored


class AbstractBeside(ABC):
    """Draws completions of prompts with more than tokens, and adds that to rows."""

    @abstractmethod
    def spec(self, rows: int, length: int) -> Mapping[str, jax.ShapeDtypeStruct]:
        """Shapes and dtypes of the leaves that it adds to a batch."""

    @abstractmethod
    def leaves(
        self, prompts: Sequence[Prompt], tokens: np.ndarray
    ) -> Mapping[str, np.ndarray]:
        """Those leaves, of rows that begin with prompts.

        Args:
            tokens: int32 (rows, length).
        """

    @abstractmethod
    def sample(
        self,
        engine: Engine,
        prompts: Sequence[Prompt],
        tokens: Sequence[np.ndarray],
        *,
        key: jax.Array,
        num_samples: int = 1,
        **how: Any,
    ) -> list[list[Scored]]:
        """As `Engine.sample`, after `tokens`, which begin with those of `prompts`.

        Args:
            key: one, or as many as completions.
        """
