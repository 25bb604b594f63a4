"""Steps of 0/1 Adam in which each device has parameters of its own.

Between two exchanges device i has the parameters p + u_i, where p is what all had after
the last exchange, and is what is at rest. It keeps u_i, the sum of its steps, and its
momentum among the errors (`sharding.local_steps.OwnSteps`). An exchange averages the
u_i by signs. Nothing is sent in between but the loss and the norm that a step reports.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from zinf.core.optim.separate import LeafUpdate
from zinf.core.program import ArrayId, Role
from zinf.core.sharding.local_steps import MOMENTUM_SLOT, STEPS_SLOT, LocalSteps
from zinf.core.sharding.signs import DEVICE, Phase, averaged, on_each_device
from zinf.core.sharding.wire import cut
from zinf.core.step.sums import sum_dtype, sum_squares
from zinf.core.step.whole.frame import Frame
from zinf.core.step.whole.gradients import MAX_NAMED, over_microbatches, scaled_loss

WHOLE, OWN = PartitionSpec(), PartitionSpec(None, DEVICE)


def local_step(frame: Frame, phase: Phase) -> Callable:
    """The step of a frame, to be compiled, in which each device takes its own step.

    Args:
        phase: whether the sums of steps are exchanged after it.

    Raises:
        NotImplementedError: a leaf is not float32 or of 16 bits.
    """
    layouts = frame.layouts
    ids, leaves = tuple(layouts.arrays), frame.separated.leaves
    others = [leaf.path for leaf in leaves if leaf.path not in layouts.parts]
    if others:
        raise NotImplementedError(
            f"ZeroOneAdam keeps steps of devices in float32, and {len(others)} leaves "
            f"({', '.join(others[:MAX_NAMED])}) have other dtypes. Cast them, or use "
            "Adam."
        )
    # A leaf of `batch` has a microbatch dim before its examples.
    by_device = jax.tree.map(lambda x: OWN if x.ndim else WHOLE, frame.batch)

    def step(
        values: Sequence[Any],
        batch: Any,
        keys: Any,
        scalars: Sequence[Any],
        loss_scale: Any,
        weight: Any,
    ) -> tuple[list[Any], Mapping[str, Any]]:
        specs = [OWN if a.role == Role.ERROR else WHOLE for a in ids]
        run = on_each_device(
            layouts.mesh,
            _StepHere(frame, phase),
            (specs, by_device, WHOLE, WHOLE, WHOLE),
            (specs, WHOLE, WHOLE),
        )
        rates = scalars[len(scalars) - LocalSteps.num_rates :]
        given = list(values), batch, keys, rates, loss_scale / weight
        new, losses, square = run(*given)
        judged = frame.judged(losses, square, loss_scale)
        pairs = zip(new, values, strict=True)
        kept = [jnp.where(judged[2], after, before) for after, before in pairs]
        outputs = {"losses": losses, "judged": judged, "extra": {}}
        return kept, {**outputs, "shared": []}

    return step


class _StepHere:
    """`(values, batch, keys, rates, seed) -> values, losses, square` of one device.

    `values` are the contents of all arrays of the layouts. `square` is the mean over
    devices of the squared norms of their gradients.
    """

    def __init__(self, frame: Frame, phase: Phase):
        assert isinstance(frame.layouts.rule.compression, LocalSteps)
        self._frame, self._rule = frame, frame.layouts.rule.compression
        self._is_exchanged = phase == Phase.STEPS

    def __call__(
        self,
        values: Sequence[Any],
        batch: Any,
        keys: Any,
        rates: Sequence[Any],
        seed: Any,
    ) -> tuple[list[Any], Any, Any]:
        params, layouts = self._frame.problem.params, self._frame.layouts
        # Errors are parts of this device, which no layout pads.
        forms = {a: layouts.of(a) for a in layouts.arrays if a.role != Role.ERROR}
        arrays = dict(zip(layouts.arrays, values, strict=True))
        arrays |= {a: form.unpadded(arrays[a]) for a, form in forms.items()}
        new = dict(arrays)
        own = {
            path: arrays[params[path].updated()]
            + arrays[_error(path, STEPS_SLOT)][0, 0]
            for path in layouts.parts
        }
        others = {p: arrays[ArrayId(Role.PARAM, p)] for p in params if p not in own}
        computed = {p: x.astype(params[p].compute.dtype) for p, x in own.items()}
        grads, losses = self._gradients(computed, others, batch, keys, seed)
        for leaf in self._frame.separated.leaves:
            new |= self._stepped(leaf, arrays, grads[leaf.path], own[leaf.path], rates)
        if self._is_exchanged:
            new |= self._exchanged(new, rates)
        square = jax.lax.pmean(sum_squares(list(grads.values())), DEVICE)
        new |= {a: cut(new[a], form) for a, form in forms.items()}
        return list(new.values()), losses, square

    def _gradients(
        self, trained: Any, others: Any, batch: Any, keys: Any, seed: Any
    ) -> tuple[dict[str, Any], Any]:
        """The gradients of this device, as if its examples were all, and the losses of
        all devices."""
        loss = scaled_loss(self._frame, self._frame.layouts.mesh.size)

        def run(microbatch: Any, key: Any) -> Any:
            if key is not None:
                key = jax.random.fold_in(key, jax.lax.axis_index(DEVICE))
            arguments = trained, others, seed, microbatch, key
            differentiated = jax.value_and_grad(loss, has_aux=True)
            (_, (value, extra)), grads = differentiated(*arguments)
            if extra:
                raise NotImplementedError(
                    f"{self._rule.name} takes losses without {' and '.join(extra)}: in "
                    "its local steps each device would have others. Return the loss "
                    "alone, or use Adam."
                )
            return grads, (value, extra)

        def zeros() -> dict[str, Any]:
            return {
                p: jnp.zeros(x.shape, sum_dtype(x.dtype)) for p, x in trained.items()
            }

        grads, losses, _ = over_microbatches(self._frame, run, zeros, batch, keys)
        grads = {p: g.astype(jnp.float32) for p, g in grads.items()}
        return grads, jax.lax.pmean(losses, DEVICE)

    def _stepped(
        self,
        leaf: LeafUpdate,
        arrays: Mapping[ArrayId, Any],
        gradient: Any,
        param: Any,
        rates: Sequence[Any],
    ) -> dict[ArrayId, Any]:
        """The new momentum of a leaf on this device, and the sum of its steps.

        Args:
            param: its master on this device.
        """
        rule, (rate, _, is_first) = self._rule, rates
        mu, nu = self._moments(leaf)
        steps, momentum = (_error(leaf.path, n) for n in (STEPS_SLOT, MOMENTUM_SLOT))
        before = jnp.where(is_first, arrays[mu], arrays[momentum][0, 0])
        after = rule.b1 * before + (1 - rule.b1) * gradient
        direction = after / (jnp.sqrt(arrays[nu]) + rule.eps)
        # See [Note: zero variance].
        direction = jnp.where(arrays[nu] > 0, direction, 0)
        if rule.weight_decay:
            direction = direction + rule.weight_decay * param
        taken = arrays[steps][0, 0] - rate * direction
        return {momentum: after[None, None], steps: taken[None, None]}

    def _exchanged(
        self, arrays: Mapping[ArrayId, Any], rates: Sequence[Any]
    ) -> dict[ArrayId, Any]:
        """What an exchange of the sums of steps makes of arrays with `_stepped`."""
        leaves, count = self._frame.separated.leaves, self._frame.layouts.mesh.size
        new: dict[ArrayId, Any] = {}
        variances = [arrays[self._moments(leaf)[1]] for leaf in leaves]
        roots = [jnp.sqrt(x) + self._rule.eps for x in variances]
        steps = [arrays[_error(leaf.path, STEPS_SLOT)][0, 0] for leaf in leaves]
        errors = [[arrays[_error(leaf.path, n)] for n in range(2)] for leaf in leaves]
        own = [x * root for x, root in zip(steps, roots, strict=True)]
        means, lost = averaged(count, own, errors)
        for i, leaf in enumerate(leaves):
            # Weights of no variance only decay, alike on all devices.
            is_varied = variances[i] > 0
            step = jnp.where(is_varied, means[i] / roots[i], steps[i])
            spec = self._frame.problem.params[leaf.path]
            master = arrays[spec.updated()] + step
            copy = spec.copy()
            if copy is not None:
                new[copy] = master.astype(spec.compute.dtype)
            new[spec.updated()] = master
            mu, _ = self._moments(leaf)
            # Steps at a rate of zero say nothing of a momentum.
            momentum = jnp.where(is_varied, -means[i] / rates[1], 0)
            new[mu] = jnp.where(rates[1] > 0, momentum, arrays[mu])
            new |= {_error(leaf.path, n): x for n, x in enumerate(lost[i])}
            zeros = jnp.zeros_like(arrays[_error(leaf.path, STEPS_SLOT)])
            new[_error(leaf.path, STEPS_SLOT)] = zeros
        return new

    def _moments(self, leaf: LeafUpdate) -> tuple[ArrayId, ArrayId]:
        states = leaf.named_states()
        return states["mu"].array(leaf.path), states["nu"].array(leaf.path)


def _error(path: str, slot: int) -> ArrayId:
    return ArrayId(Role.ERROR, path, slot=slot)
