"""Programs over the arrays of a run that take no step: evaluation, functions, texts."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zinf.core.engine.random_key import microbatch_keys
from zinf.core.engine.recent import Recent, SameFunction
from zinf.core.engine.runners import Runners
from zinf.core.plan import InfeasibleError
from zinf.core.segment import NOTHING, Function, Instead, user_function
from zinf.core.step.batch import (
    batch_spec,
    check_values,
    signature,
    with_shapes_before,
)
from zinf.core.step.forward import (
    Forward,
    check_rows_of_outputs,
    plan_again,
    plan_forward,
)
from zinf.core.step.planner import Planner
from zinf.core.step.run.evaluation import evaluation_by_segment
from zinf.core.step.run.forward import ForwardRunner, joined
from zinf.core.step.run.runner import AbstractRunner, Evaluate
from zinf.inference import (
    Asked,
    Decoder,
    GenerationPlanner,
    Sampling,
    Steps,
    Written,
    complete,
)

# Forward-only programs whose executables an engine keeps.
MAX_FORWARD = 32
# Turns a function of the user's model into one of its parameters; see `user_function`.
OfParams = Callable[[Callable], Callable] | None


class Programs:
    """The programs of a run that only run forward, with their executables.

    Attributes:
        made: the latest of them.
        execution: of generation, "auto" or as the config asks.
    """

    def __init__(self, runners: Runners, execution: str) -> None:
        self.runners = runners
        self.made: Recent[Any] = Recent(MAX_FORWARD)
        self.execution = execution

    @property
    def planner(self) -> Planner:
        return self.runners.planner

    def evaluation(
        self,
        batch: Any,
        kind: str,
        instead: Instead,
        current: AbstractRunner,
    ) -> Evaluate:
        """The evaluation of batches of one shape, with weights of a kind.

        Args:
            instead: of a kind that is not "master": what is read in their place.
        """
        shape, by_shape = signature(batch), self.runners.by_shape

        def make() -> Evaluate:
            spec = self.planner.batch_spec(batch)
            with with_shapes_before(batch, by_shape):
                if not instead:
                    training = by_shape.get(shape, current)
                    return training.evaluation(self.planner, spec)
                rest = self.planner, self.runners.stores, spec, self.runners.at_rest()
                return evaluation_by_segment(*rest, instead=instead)

        return self.made.get(("evaluate", kind, shape), make)

    def apply(
        self,
        function: Callable,
        batch: Any,
        key: jax.Array | None,
        num_microbatches: int,
        of_params: OfParams = None,
        *,
        instead: Instead = NOTHING,
    ) -> Any:
        """See `Engine.apply`.

        Args:
            instead: state arrays that are read in place of parameters.
        """
        self.runners.condition.check()
        check_values(batch)
        current = self.runners.placed()

        given = function, batch, key, num_microbatches, of_params
        runner = self._runner_of(*given, instead=instead)
        self.runners.flush()
        keys = [] if key is None else microbatch_keys(key, num_microbatches)
        outputs = runner.outputs(runner.run(batch, keys, current))
        return joined(outputs, self.planner.num_shares)

    def pass_seconds(
        self, function: Callable, batch: Any, num_microbatches: int
    ) -> float:
        """See `Engine.pass_seconds`."""
        self.runners.condition.check()
        self.runners.placed()
        runner = self._runner_of(function, batch, None, num_microbatches)
        return runner.plan.timeline.seconds

    def _runner_of(
        self,
        function: Callable,
        batch: Any,
        key: jax.Array | None,
        num_microbatches: int,
        of_params: OfParams = None,
        *,
        instead: Instead = NOTHING,
    ) -> ForwardRunner:
        """The runner of a function on batches of one shape, planned once."""
        rest = num_microbatches, self.planner.num_shares
        spec = batch_spec(batch, *rest, setting="num_microbatches")
        kind = None if key is None else (np.shape(key), str(jnp.result_type(key)))
        read = tuple(instead.items())
        named = SameFunction(function), kind, signature(spec), read

        def make(before: ForwardRunner | None) -> ForwardRunner:
            found = user_function(function, self.planner.problem, key, of_params)
            rest = {"before": before, "instead": instead}
            forward = self._pass(found, spec, num_microbatches, **rest)
            return ForwardRunner(forward, self.runners.stores, spec)

        # By the number of microbatches.
        runners: dict[int, ForwardRunner] = self.made.get(
            named, lambda: {num_microbatches: make(None)}
        )
        if num_microbatches not in runners:
            runners[num_microbatches] = make(next(iter(runners.values())))
        return runners[num_microbatches]

    def _pass(
        self,
        function: Function,
        spec: Any,
        num_microbatches: int,
        *,
        before: ForwardRunner | None,
        instead: Instead,
    ) -> Forward:
        """The forward pass of a function over so many microbatches.

        Args:
            spec: shapes and dtypes of one microbatch.
            before: the runner of the function for another number of microbatches: its
                executables are used, if they fit for this number too.
        """
        at_rest, count = self.runners.at_rest(), {"num_microbatches": num_microbatches}
        forward = None
        if before is not None and before.forward.is_worthwhile(num_microbatches):
            rest = before.forward.compiled, function.name, at_rest
            with suppress(InfeasibleError):
                segmented = before.forward.segmented
                forward = plan_again(self.planner, segmented, *rest, **count)
        if forward is None:
            rest = self.planner, function, spec, at_rest
            forward = plan_forward(*rest, **count, instead=instead)
        if num_microbatches > 1:
            check_rows_of_outputs(forward, spec, function.name)
        return forward

    def generate(
        self,
        prompts: Sequence[Any],
        decoder: Decoder,
        sampling: Sampling,
        asked: Asked,
        key: jax.Array | None,
        of_params: OfParams = None,
    ) -> list[Written]:
        """See `Engine.generate`."""
        self.runners.condition.check()
        current = self.runners.placed()
        if key is None and not sampling.is_greedy:
            raise ValueError(
                f"With temperature = {sampling.temperature} tokens are drawn: pass "
                "key=jax.random.key(0), or temperature=0."
            )
        problem = self.planner.problem
        steps = Steps(
            problem,
            decoder,
            sampling,
            lambda f: problem.bound(f if of_params is None else of_params(f)),
            jax.random.key(0) if key is None else key.reshape(-1)[0],
            asked.scores,
            0 if asked.drafts is None else asked.drafts.num_tokens,
            None if asked.drafts is None else asked.drafts.on_device,
        )
        at_rest = self.runners.at_rest()
        planner = GenerationPlanner(self.planner, at_rest, steps, self.execution)
        kind = str(steps.key.dtype)
        drafts = steps.num_guesses, steps.guess_on_device
        how = sampling.steps, kind, asked.scores, *drafts
        same = SameFunction(decoder.apply), *how
        self.runners.flush()
        return complete(
            prompts,
            asked,
            planner,
            key,
            self.runners.stores,
            current,
            lambda which, make: self.made.get((*same, which), make),
        )
