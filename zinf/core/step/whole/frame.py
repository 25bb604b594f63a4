"""The frame of steps that are one executable, wherever their arrays rest."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from zinf.core.optim.clipping import Clipping
from zinf.core.optim.decision import judge
from zinf.core.optim.separate import Separated
from zinf.core.problem.problem import Problem
from zinf.core.problem.source import named_leaves
from zinf.core.sharding import Layouts, batch_layouts
from zinf.core.sharding.mesh import replicated
from zinf.core.topology import compile_for


@dataclass(frozen=True)
class Frame:
    """What a step computes, for one mesh and shape of microbatch.

    The compiled step is `step(*arrays, batch, keys, scalars, loss_scale, weight) ->
    (arrays, outputs)`, and donates the first group of arrays. `batch` and `keys` have a
    leading microbatch dim. `weight` is what the sum of the microbatches' losses is
    divided by. `outputs` are `losses`, `judged` (what `judge` returns) and `extra` (the
    loss function's other outputs, by microbatch). A step whose losses or gradient are
    not finite changes no array.

    `scalars` are the step values. If the optimizer reads the loss, or clips some leaves
    apart, they are its shared state instead, and `outputs["shared"]` is the shared
    state of the next step. After them come the rates of a compression
    (`AbstractCompression.rates`).

    Attributes:
        batch: shapes and dtypes of one microbatch.
        key: shape and dtype of the random key, or None.
    """

    problem: Problem
    separated: Separated
    batch: Any
    key: jax.ShapeDtypeStruct | None
    num_microbatches: int
    clipping: Clipping
    layouts: Layouts

    @cached_property
    def inputs(self) -> tuple[Any, ...]:
        """Shapes and shardings of the arguments after the arrays."""
        separated, everywhere = self.separated, replicated(self.layouts.mesh)
        scalars = separated.step_value_specs
        if separated.reads_step:
            scalars = separated.shared_specs
        compression = self.layouts.rule.compression
        if compression is not None:
            rate = jax.ShapeDtypeStruct((), jnp.float32)
            scalars = (*scalars, *(rate,) * compression.num_rates)
        scale = jax.ShapeDtypeStruct((), jnp.float32)
        batch, keys = map(self._stacked, (self.batch, self.key))
        shardings = batch_shardings(self.batch, self.layouts)
        rest = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere),
            (keys, list(scalars), scale, scale),
        )
        placed = jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
            batch,
            shardings,
        )
        return placed, *rest

    @property
    def input_bytes(self) -> int:
        """Bytes of `inputs` on one device."""
        return sum(map(device_bytes, jax.tree.leaves(self.inputs)))

    def _stacked(self, tree: Any) -> Any:
        count = self.num_microbatches
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((count, *x.shape), x.dtype), tree
        )

    def step_values(
        self, scalars: Sequence[Any], losses: Any, weight: Any, norms: Sequence[Any]
    ) -> tuple[Sequence[Any], Sequence[Any]]:
        """`(new shared state, step values)`, from the scalars of a step.

        Args:
            norms: see `Separated.advance`.
        """
        if not self.separated.reads_step:
            return [], scalars
        loss = jnp.sum(losses.astype(jnp.float32)) / weight
        return self.separated.advance(scalars, loss, norms)

    def judged(self, losses: Any, square: Any, loss_scale: Any) -> Any:
        """`judge` with the clipping of this step, in traced code."""
        return judge(
            losses, square, clipping=self.clipping, loss_scale=loss_scale, xp=jnp
        )

    def compile(
        self, step: Callable, arrays: Sequence[Any], results: Sequence[NamedSharding]
    ) -> jax.stages.Compiled:
        """The compiled step.

        Args:
            arrays: shapes and shardings of the groups of arrays; the first is donated.
            results: shardings of the new arrays of that group.
        """
        mesh = self.layouts.mesh
        shardings = results, replicated(mesh)
        jitted = jax.jit(step, donate_argnums=0, out_shardings=shardings)
        return compile_for(mesh, jitted.lower(*arrays, *self.inputs))


def batch_shardings(batch: Any, layouts: Layouts) -> Any:
    """The shardings of stacked microbatches.

    Args:
        batch: shapes of one microbatch.

    Raises:
        ValueError: a microbatch cannot be divided among the devices.
    """
    shapes = {f"batch/{n}": leaf.shape for n, leaf in named_leaves(batch).items()}
    leaves = [
        NamedSharding(layouts.mesh, PartitionSpec(None, *layout.device.spec))
        for layout in batch_layouts(shapes, layouts.rule).values()
    ]
    return jax.tree.unflatten(jax.tree.structure(batch), leaves)


def device_bytes(argument: jax.ShapeDtypeStruct) -> int:
    """Bytes of an argument on one device."""
    assert argument.sharding is not None
    shape = argument.sharding.shard_shape(argument.shape)
    return prod(shape) * argument.dtype.itemsize
