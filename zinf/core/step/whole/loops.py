"""The passes of a loop over layers, inside an offloaded step.

An iteration fetches the parameters of the next one, which XLA's scheduler hides behind
its own matmuls.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zinf.core.memory.host.pinned import Stack
from zinf.core.program import SegmentSpec
from zinf.core.segment.loops import Part
from zinf.core.sharding import Dim
from zinf.core.step.whole.microbatches import cotangents_of, outputs_of
from zinf.core.step.whole.offloading import Offloading
from zinf.core.step.whole.stack_update import ON_DEVICE, ON_HOST
from zinf.core.step.whole.transfers import Rest, Traced, Transfers

# Two iterations are one in the compiled loop. What a loop carries has one buffer, so
# the parameters of the next iteration could arrive only after the last use of those of
# this one; of two, one set has a buffer of its own.
UNROLLED = 2


@dataclass(frozen=True, eq=False)
class LayerLoop:
    """Segments with one body.

    Attributes:
        num_examples: of a microbatch; None if no leaf of the batch has examples.
    """

    plan: Offloading
    part: Part
    num_examples: int | None

    @property
    def first(self) -> int:
        return self.part.segments[0]

    @property
    def spec(self) -> SegmentSpec:
        return self.plan.specs[self.first]

    @property
    def carried(self) -> list[int]:
        """The inputs that are outputs of the iteration before."""
        return list(self.part.from_output)

    @property
    def results(self) -> Mapping[int, str]:
        """For each carried input, the name of what the last iteration makes of it."""
        outputs = self.plan.specs[self.part.segments[-1]].outputs
        return {j: outputs[o] for j, o in self.part.from_output.items()}

    @cached_property
    def transfers(self) -> Transfers:
        return Transfers(self.plan)

    def forward(self, run: Traced) -> None:
        spec, passes, count = self.spec, self.plan.passes, len(self.part.segments)
        initial = [run.values[spec.inputs[j]] for j in self.carried]
        dtypes = [x.dtype for x in initial]
        same, fetch = self._same(run), self.transfers.params

        def layer(carry: Any, x: Any) -> tuple[Any, Any]:
            given, params = carry
            number, hoisted = x
            ahead = fetch(run.rest, spec, jnp.minimum(number + 1, count - 1))
            inputs = self._merged(same, given)
            wholes = self.transfers.wholes(spec, params)
            rest = hoisted, inputs, self.plan.frame.num_microbatches
            outputs = outputs_of(passes[self.first], wholes, *rest)
            new = [
                self._as_batch(outputs[o].astype(dtype))
                for o, dtype in zip(self.part.from_output.values(), dtypes, strict=True)
            ]
            waiting = given
            if self.plan.offloads_values:
                waiting = [jax.device_put(x, ON_HOST) for x in given]
            return (new, ahead), waiting

        start = [self._as_batch(x) for x in initial], fetch(run.rest, spec, 0)
        xs = jnp.arange(count, dtype=jnp.int32), self._columns
        (last, ahead), saved = jax.lax.scan(layer, start, xs, unroll=UNROLLED)
        for name, value in zip(self.results.values(), last, strict=True):
            run.values[name] = value
        run.saved[self.first] = saved, ahead

    def backward(self, run: Traced) -> None:
        plan, spec, count = self.plan, self.spec, len(self.part.segments)
        passes, from_output = plan.passes[self.first], self.part.from_output
        saved, params = run.saved.pop(self.first)
        same = self._same(run)
        active = [j for j, n in enumerate(spec.inputs) if n in spec.active_inputs]
        # The cotangent of an output is the sum over the inputs that it becomes.
        positions = [o for o in range(len(spec.outputs)) if passes.are_active[o]]
        given: dict[int, Any] = {}
        for j in active:
            if j in from_output:
                name = self.results[j]
                zeros = jnp.zeros_like(run.values[name])
                given[j] = run.cotangents.pop(name, zeros)
        all_stacks = plan.stacks_of(spec)
        stacks = [s for s in all_stacks if s not in plan.in_passes]
        early = [s for s in all_stacks if s in plan.in_passes]
        written = [s for params in early for s in plan.updates[params].written]

        def layer(carry: Any, x: Any) -> tuple[Any, Any]:
            of_carried, of_same, gradients, params, contents = carry
            gradients = dict(zip(stacks, gradients, strict=True))
            rest = run.rest | dict(zip(written, contents, strict=True))
            number, hoisted, waiting = x
            if plan.offloads_values:
                waiting = [jax.device_put(x, ON_DEVICE) for x in waiting]
            before = jnp.maximum(number - 1, 0)
            ahead = self.transfers.params(rest, spec, before)
            ahead = self._fetched(rest, early, ahead)
            state = self._states(rest, early, number)
            of_outputs = [
                sum(
                    (of_carried[j] for j in of_carried if from_output[j] == position),
                    start=0,
                )
                for position in positions
            ]
            inputs = self._merged(same, waiting)
            wholes = self.transfers.wholes(spec, params)
            counted = of_outputs, plan.frame.num_microbatches
            found, cotangents = cotangents_of(passes, wholes, hoisted, inputs, *counted)
            by_input = dict(zip(active, cotangents, strict=True))
            of_carried = {j: self._as_batch(by_input[j]) for j in of_carried}
            of_same = {j: x + by_input[j] for j, x in of_same.items()}
            found_squares = []
            read = dict(zip(spec.params, params, strict=True))
            for array, gradient in zip(spec.trained_params, found, strict=True):
                stack = plan.stack(array)
                if stack in early:
                    gradient, square = self.transfers.complete(array, gradient)
                    old = state[early.index(stack)]
                    self._update(run, rest, stack, gradient, read[array], old, number)
                else:
                    square = self.transfers.keep(gradients, array, gradient, number)
                found_squares.append(square)
            contents = [rest[s] for s in written]
            gradients = [gradients[s] for s in stacks]
            return (of_carried, of_same, gradients, ahead, contents), found_squares

        start = (
            given,
            {j: jnp.zeros_like(same[j]) for j in active if j in same},
            [run.gradients[s] for s in stacks],
            params,
            [run.rest[s] for s in written],
        )
        xs = jnp.arange(count, dtype=jnp.int32), self._columns, saved
        (of_carried, of_same, gradients, _, contents), found_squares = jax.lax.scan(
            layer, start, xs, reverse=True, unroll=UNROLLED
        )
        run.gradients.update(zip(stacks, gradients, strict=True))
        run.rest.update(zip(written, contents, strict=True))
        run.squares += found_squares
        for j, cotangent in (of_carried | of_same).items():
            run.add_cotangent(spec.inputs[j], cotangent)

    def _same(self, run: Traced) -> dict[int, Any]:
        """The inputs that have one value in all iterations."""
        names = enumerate(self.spec.inputs)
        return {j: run.values[name] for j, name in names if j not in self.carried}

    def _merged(self, same: Mapping[int, Any], given: Sequence[Any]) -> list[Any]:
        """The inputs of an iteration, in order."""
        inputs = {**same, **dict(zip(self.carried, given, strict=True))}
        return [inputs[j] for j in sorted(inputs)]

    @property
    def _columns(self) -> list[Any]:
        """The hoisted literals of the body, each with one row for each iteration."""
        rows = [self.plan.segmented.shared[k].hoisted for k in self.part.segments]
        return [jnp.asarray(np.stack(column)) for column in zip(*rows, strict=True)]

    def _as_batch(self, value: Any) -> Any:
        """A value of all microbatches; one with their examples is sharded like them.

        Otherwise the compiler may hold whole what a loop carries. It is a guess: a
        wrong one costs exchanges, and changes no number.
        """
        rule = self.plan.layouts.rule
        if rule.size(Dim.BATCH) == 1 or value.shape[1:2] != (self.num_examples,):
            return value
        return jax.lax.with_sharding_constraint(value, rule.sharding([None, Dim.BATCH]))

    # Updates of each layer.

    def _states(self, rest: Rest, early: Sequence[Stack], number: Any) -> list[Any]:
        """The optimizer state of one layer, for each stack of `early`.

        Args:
            early: the stacks of parameters that the loop updates.
        """
        updates = [self.plan.updates[stack] for stack in early]
        return [
            [update.take(rest[x], number) for x in update.read if x is not stack]
            for stack, update in zip(early, updates, strict=True)
        ]

    def _fetched(
        self, rest: Rest, early: Sequence[Stack], params: Sequence[Any]
    ) -> list[Any]:
        """Make later writes of parameters in `rest` wait until these rows are read.

        Without an order of the two, the TPU compiler copies each stack as a whole, on
        the host and in every iteration, so that both may run at once.
        """
        params = list(params)
        for n, array in enumerate(self.spec.params):
            stack = self.plan.stack(array)
            if stack in early:
                held = jax.lax.optimization_barrier((params[n], rest[stack]))
                params[n], rest[stack] = held
        return params

    def _update(
        self,
        run: Traced,
        rest: Rest,
        params: Stack,
        gradient: Any,
        param: Any,
        state: Sequence[Any],
        number: Any,
    ) -> None:
        """Update one layer of a stack in `rest`.

        Args:
            param: the parameters of the layer, as they rest.
            state: what `_states` returned for the layer.
        """
        update = self.plan.updates[params]
        assert run.decided is not None
        old = state if update.has_master else [param, *state]
        new = update.new(*run.decided, gradient, old, number)
        contents = [rest[stack] for stack in update.written]
        contents = update.put(contents, new, number)
        rest.update(zip(update.written, contents, strict=True))
