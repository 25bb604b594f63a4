"""What an engine computes without taking a step: losses, functions, texts."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, overload

import jax
import numpy as np

from zinf.core.engine.condition import Condition
from zinf.core.engine.named import MASTER, instead_of
from zinf.core.engine.programs import Programs
from zinf.core.engine.runners import Runners
from zinf.core.engine.turn import Turn
from zinf.core.problem.weighted import Weighted
from zinf.core.step.batch import check_values
from zinf.core.step.prepared import AbstractPrepared
from zinf.core.step.run.runner import Evaluate
from zinf.inference import (
    ROWS,
    Asked,
    Decoder,
    Drafts,
    Sampling,
    Scored,
    Scores,
)

logger = logging.getLogger(__name__)


class ForwardOnly(ABC):
    """The methods of an engine that only run forward, over the arrays of training."""

    rng: jax.Array | None
    _runners: Runners
    _condition: Condition
    _programs: Programs
    _turn: Turn
    _has_warned: bool

    def evaluate(self, batch: Any, *, kind: str = MASTER) -> float:
        """The mean loss of a batch. Takes no step; see `evaluate_weighted`."""
        return self.evaluate_weighted(batch, kind=kind).mean

    def evaluate_weighted(self, batch: Any, *, kind: str = MASTER) -> Weighted:
        """The loss of a batch and its weight, as floats. Takes no step.

        Over several batches, the mean is the sum of totals over the sum of weights:
        then it does not depend on how samples are batched. The weight is the one that
        the loss function returns (`zinf.Weighted`). For a function that returns a mean,
        it is the number of samples of the batch.

        Computes `eval_loss_fn` if `zinf.initialize` was given one, otherwise `loss_fn`,
        with `train=False` if it takes that. Without either, the loss is computed as in
        training, with the random key of the next step. Then dropout is on, and a
        warning says so once.

        Args:
            batch: a pytree as for `step`. The number of samples may differ; then only a
                forward pass is compiled for it.
            kind: "master" computes with the weights as trained; "ema" with the average
                that `zinf.with_ema` keeps, read from where it rests and cast segment by
                segment. Leaves that have no average are read as they are.

        Raises:
            ValueError: the optimizer keeps no average of that kind.
            InfeasibleError: the evaluation does not fit beside the arrays at rest.
        """
        with self._turn.of("evaluate"):
            self._condition.check()
            check_values(batch)
            self._warn_of_randomness()
            evaluate = self._evaluation(batch, kind)
            self._runners.flush()
            return evaluate(batch, self._keys(), self._runners.placed())

    def prepare_evaluation(self, batch: Any, *, kind: str = MASTER) -> None:
        """Plan and compile `evaluate` for the shape of a batch, if the shape is new.

        Raises:
            ValueError: the optimizer keeps no average of that kind.
            InfeasibleError: the evaluation does not fit beside the arrays at rest.
        """
        with self._turn.of("prepare_evaluation"):
            self._evaluation(batch, kind)

    def apply(
        self,
        function: Callable,
        batch: Any,
        *,
        key: jax.Array | None = None,
        num_microbatches: int = 1,
        kind: str = MASTER,
    ) -> Any:
        """What a function computes from the parameters and a batch. Takes no step.

        The function runs as training does: segment by segment, with the arrays streamed
        from where they rest. It may return logits, features or anything else. The
        values do not depend on where arrays rest.

        A function is traced once for each shape of batch, as by `jax.jit`: pass the
        same function again, not a new lambda.

        Args:
            function: a pure function `(params, batch)`, or with model state
                `(params, model_state, batch)`, that returns a pytree of arrays.
                Parameters have the dtypes that the loss sees. If it has a parameter
                `train`, it is called with `train=False`.
            batch: a pytree of arrays, of any size. If there are several processes, all
                must call `apply`, and each gives its part of the rows.
            key: a random key, which the function gets as its last argument.
            num_microbatches: the batch is cut into so many along the leading dim. All
                go through a segment before the next segment starts, so arrays are
                fetched once. Then every output must have one row for each row of the
                microbatch.
            kind: of the weights; see `evaluate_weighted`.

        Returns:
            what the function returns, as NumPy arrays in memory of the caller. Until
            they are complete, they count in the host budget. All processes get the
            whole arrays.

        Raises:
            ValueError: no batch was given yet, or the function takes other arguments,
                or returns no array.
            InfeasibleError: the pass does not fit beside the arrays at rest, or the
                host has no room for the outputs.
        """
        with self._turn.of("apply"):
            given = function, batch, key, num_microbatches
            instead = instead_of(self._runners.planner, kind)
            return self._programs.apply(*given, instead=instead)

    @overload
    def generate(
        self,
        prompts: Sequence[Any],
        *,
        max_new_tokens: int,
        scores: None = None,
        **rest: Any,
    ) -> list[list[int]]: ...
    @overload
    def generate(
        self,
        prompts: Sequence[Any],
        *,
        max_new_tokens: int,
        scores: Scores,
        **rest: Any,
    ) -> list[Scored]: ...

    def generate(
        self,
        prompts: Sequence[Any],
        *,
        decoder: Decoder | None = None,
        max_new_tokens: int,
        temperature: float = 0.0,
        key: jax.Array | None = None,
        rows: int = ROWS,
        batch_size: int | None = None,
        on_token: Callable[[int, int], object] | None = None,
        scores: Scores | None = None,
        drafts: Drafts | None = None,
        **sampling: Any,
    ) -> list[list[int]] | list[Scored]:
        """The tokens that the model writes after each prompt. Takes no step.

        If parameters and a cache fit the device, the loop over tokens runs there as one
        program, unless `execution` is "streamed" or `offload_param` is set. Else
        parameters are streamed from where they rest, once a token for all sequences
        that are completed together, and the cache rests on the fastest tier that has
        room for it. Programs are kept for later calls; the cache is freed at the end.
        The tokens of a sequence depend neither on the other prompts nor, but for
        rounding, on where arrays rest. If there are several processes, all must call
        it with the same arguments, and all get all texts.

        Args:
            prompts: token ids, a sequence of whole numbers for each prompt.
            decoder: the model as a function of tokens and a cache; not needed for
                models that have one of their own.
            temperature: 0 takes the likeliest token; above 0 a token is drawn.
            key: a random key, of which each prompt gets its own by its position, or one
                a prompt. Needed if tokens are drawn.
            rows: sequences that run as one array. Results depend on it within rounding:
                use 1 for the fastest answer to one prompt.
            batch_size: the most sequences that are streamed together; by default as
                many as the budgets allow. The others join as texts end.
            on_token: called with the number of a prompt and its next token. If it
                returns True, the text ends with this token.
            scores: if given, each text comes as a `Scored`, with log-probabilities of
                its tokens, entropies, and maybe the likeliest tokens of each place.
            drafts: guesses of next tokens, such as `zinf.inference.prompt_lookup(4)`. A
                pass checks all of them, so streamed weights are read less often. The
                tokens are those without drafts, but for rounding.
            sampling: `top_k`, `top_p`, `min_p`, `repetition_penalty`, `eos_token_ids`
                and `min_new_tokens`; see `zinf.inference.Sampling`.

        Returns:
            the new tokens of each prompt, with the one of `eos_token_ids` that ended
            it, if one did.

        Raises:
            ValueError: a prompt is empty or too long, or no batch was given yet.
            InfeasibleError: the programs or the cache of one microbatch do not fit
                beside the arrays at rest.
            NonFiniteError: the logits of a prompt are not finite.
            KeyboardInterrupt: Ctrl-C was pressed; the caches are freed.
        """
        with self._turn.of("generate"):
            asked = Asked(
                max_new_tokens=max_new_tokens,
                rows=rows,
                batch_size=batch_size,
                on_token=on_token,
                scores=scores,
                drafts=drafts,
            )
            how = Sampling(temperature=temperature, **sampling)
            rest = how, asked, key, self._of_params()
            decoder = self._decoder(decoder)
            texts = self._programs.generate(prompts, decoder, *rest)
            if scores is not None:
                return [text.scored() for text in texts]
            return [text.tokens for text in texts]

    def sample(
        self,
        prompts: Sequence[Any],
        *,
        num_samples: int = 1,
        max_new_tokens: int,
        key: jax.Array,
        temperature: float = 1.0,
        **how: Any,
    ) -> list[list[Scored]]:
        """Several completions of each prompt, with log-probabilities of their tokens.

        Those of a prompt that get rows together read it once. The call has the name
        that Tinker and SkyRL give it.

        Args:
            num_samples: completions of a prompt.
            key: a random key, of which completion j of prompt i gets its own, number
                `i * num_samples + j`.
            how: as for `generate`, which also says what is raised.
        """
        repeated = [prompt for prompt in prompts for _ in range(num_samples)]
        scored = self.generate(
            repeated,
            max_new_tokens=max_new_tokens,
            key=key,
            temperature=temperature,
            **{"scores": Scores(), **how},
        )
        return [
            scored[first : first + num_samples]
            for first in range(0, len(scored), num_samples)
        ]

    def log_probabilities(
        self,
        batch: Any,
        *,
        temperature: float = 1.0,
        num_microbatches: int = 1,
        kind: str = MASTER,
    ) -> np.ndarray:
        """The log-probability of each token of a batch given those before it.

        Args:
            batch: as for the loss of the model.
            temperature: logits are divided by it first.
            num_microbatches, kind: see `apply`.

        Returns:
            float32 (sequences, tokens - 1) in nats. Tokens without a label have 0.

        Raises:
            ValueError: the engine trains a function, not a model that it knows.
        """
        function = self._token_scores(temperature)
        how = {"num_microbatches": num_microbatches, "kind": kind}
        return self.apply(function, batch, **how)

    def pass_seconds(
        self, function: Callable, batch: Any, *, num_microbatches: int = 1
    ) -> float:
        """Predicted seconds of `apply` with these arguments, by the engine's rates.

        Args:
            batch: as for `apply`, or its shapes and dtypes.

        Raises:
            ValueError, InfeasibleError: see `apply`.
        """
        with self._turn.of("pass_seconds"):
            return self._programs.pass_seconds(function, batch, num_microbatches)

    def _warn_of_randomness(self) -> None:
        is_training_loss = self._runners.planner.problem.evaluation_loss is None
        if self.rng is not None and is_training_loss and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "evaluate computes the loss of training, with its random key: with "
                "dropout, if the loss has it. Give zinf.initialize an eval_loss_fn=, "
                "or a loss_fn with a parameter `train`, to evaluate without."
            )

    def _evaluation(self, batch: Any, kind: str) -> Evaluate:
        """The evaluation of batches of one shape; the first batch places all state."""
        instead = instead_of(self._runners.planner, kind)
        current = self._runners.current
        if current is None:
            current = self._runners.prepare(batch, self._place)
        return self._programs.evaluation(batch, kind, instead, current)

    def _of_params(self) -> Callable[[Callable], Callable] | None:
        """The argument `of_params` of `user_function`; an engine of modules sets it."""
        return None

    def _decoder(self, given: Decoder | None) -> Decoder:
        """The given decoder, or the one of the model.

        Raises:
            ValueError: there is none.
        """
        if given is None:
            raise ValueError(
                "This engine trains a function, so it does not know how the model "
                "decodes. Pass decoder=zinf.inference.Decoder(apply, init_cache)."
            )
        return given

    def _token_scores(self, temperature: float) -> Callable:
        """The function that `log_probabilities` applies, if the model is known."""
        raise ValueError(
            "This engine trains a function, so it does not know how the model scores "
            "tokens. Use engine.apply with a function that returns log-probabilities."
        )

    @abstractmethod
    def _keys(self) -> list[jax.Array]:
        """The random keys of the next step, one for each microbatch."""

    @abstractmethod
    def _place(self, made: AbstractPrepared) -> None:
        """Place all state as a step has it."""
