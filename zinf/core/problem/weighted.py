"""Losses that say their weight: a sum and the weight of what is in it.

The mean of a step is `sum(totals) / sum(weights)` over all its microbatches, devices
and processes. A mean of the microbatches' means would give a token of a microbatch with
few tokens more weight than others. The weight of a step must be known before its first
backward pass, which begins with the cotangent `1 / weight`. So it may depend on the
batch alone, and zinf computes it from the batch before the step.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zinf.core.jaxpr import Graph, inlined, renamed
from zinf.core.jaxpr.compat import Atom, Var
from zinf.core.jaxpr.keys import from_words, to_words
from zinf.core.problem.source import Source, WrongResult, listed, named_leaves
from zinf.core.program import KEY

WEIGHT = "weight"  # among the outputs of a loss, beside "aux" and "model_state"


@partial(
    jax.tree_util.register_dataclass, data_fields=["total", "weight"], meta_fields=[]
)
@dataclass(frozen=True)
class Weighted:
    """What a loss function may return in place of a mean.

    `return zinf.Weighted(jnp.sum(losses * mask), jnp.sum(mask))` makes every token of a
    step count alike, whatever its microbatch, device or process.

    Attributes:
        total: the sum of the losses, a floating-point scalar.
        weight: the sum of their weights, a scalar that depends on the batch (and the
            random key) alone. It is a sum over the rows of the batch.
    """

    total: Any
    weight: Any

    @property
    def mean(self) -> Any:
        return self.total / self.weight


def weighed(loss: Any, extra: Mapping[str, Any], batch: Any) -> Weighted:
    """The loss of a microbatch with its weight.

    The weight of a mean is the number of samples, which is the leading dim of the first
    leaf of `batch` that has one.
    """
    if WEIGHT in extra:
        return Weighted(loss, extra[WEIGHT])
    num_samples = num_rows(batch)
    return Weighted(loss * num_samples, num_samples)


def num_rows(batch: Any) -> int:
    """The number of samples of a batch or of its shapes."""
    shapes = map(np.shape, jax.tree.leaves(batch))
    return next((shape[0] for shape in shapes if shape), 1)


def with_weight(
    loss: Any, extra: Mapping[str, Any], *, averages_microbatches: bool
) -> tuple[Any, Mapping[str, Any]]:
    """`(loss, extra)` of a loss function's result; `extra` has the weight, if any.

    Args:
        averages_microbatches: the loss of a weighted result is its mean, as if the
            function had returned that.

    Raises:
        WrongResult: the weight is no scalar.
    """
    if not isinstance(loss, Weighted):
        return loss, extra
    if jnp.shape(loss.weight) != ():
        raise WrongResult(
            "loss_fn returned a zinf.Weighted whose weight has the shape "
            f"{list(jnp.shape(loss.weight))}; it must be one number. Sum it."
        )
    weight = jnp.asarray(loss.weight, jnp.float32)
    if averages_microbatches:
        return loss.total / weight.astype(jnp.result_type(loss.total)), extra
    return loss.total, {**extra, WEIGHT: weight}


@dataclass(frozen=True)
class LossWeight:
    """The weight of a loss as a function of one microbatch.

    Attributes:
        graph: the equations that compute it.
        names: of the inputs of the graph, "batch/<key path>" or "key"; None for inputs
            that the weight does not read.
    """

    graph: Graph
    names: tuple[str | None, ...]

    def total(self, batches: Any, keys: Any) -> float:
        """The sum of the weights of some microbatches, computed on the CPU.

        Args:
            batches: a pytree of NumPy arrays with a leading microbatch dim.
            keys: the random keys of the microbatches, or None.
        """
        given = {f"batch/{n}": x for n, x in named_leaves(batches).items()}
        if keys is not None:
            given[KEY] = np.asarray(to_words(keys))
        read = [given[n] for n in self.names if n is not None]
        (cpu, *_) = jax.local_devices(backend="cpu")
        if not read:
            # It depends on the shapes alone, as the number of all entries does.
            with jax.default_device(cpu):
                (weight,) = replace(self.graph, invars=())()
            num_microbatches = len(next(iter(given.values())))
            return float(weight) * num_microbatches
        weights = self._weights(jax.device_put(read, cpu))
        return float(np.sum(np.asarray(weights, np.float64)))

    @cached_property
    def _weights(self) -> Callable[[Sequence[Any]], jax.Array]:
        """`inputs -> weights`, each with a leading microbatch dim."""
        invars = [
            v
            for v, name in zip(self.graph.invars, self.names, strict=True)
            if name is not None
        ]
        graph = replace(self.graph, invars=tuple(invars))

        def one(read: Sequence[jax.Array]) -> jax.Array:
            pairs = zip(read, invars, strict=True)
            return graph(*[from_words(x, v.aval) for x, v in pairs])[0]

        return jax.jit(lambda read: jax.lax.map(one, read))


def split_weight(source: Source) -> tuple[Source, LossWeight | None]:
    """A traced loss without the weight among its outputs, and the weight.

    Raises:
        WrongResult: the weight depends on a parameter.
    """
    numbers = range(len(source.graph.outvars))
    loss, extra = jax.tree.unflatten(source.structure, numbers)
    if not isinstance(extra, Mapping) or WEIGHT not in extra:
        return source, None
    outputs = loss, {n: x for n, x in extra.items() if n != WEIGHT}
    outvars = source.graph.outvars
    kept = [outvars[i] for i in jax.tree.leaves(outputs)]
    graph = _alone(source.graph, outvars[extra[WEIGHT]])
    read = set(graph.used_invars())
    params = [path for v, path in source.params.items() if v in read]
    if params:
        raise WrongResult(
            "loss_fn returned a zinf.Weighted whose weight depends on the parameters "
            f"{listed(params)}. The weight must be known before the step, from the "
            "batch alone. Move what depends on parameters into the total."
        )
    names = tuple(source.batch[v] if v in read else None for v in graph.invars)
    rest = replace(
        source,
        graph=source.graph.needed_for(kept),
        structure=jax.tree.structure(outputs),
    )
    return rest, LossWeight(graph, names)


def _alone(graph: Graph, weight: Atom) -> Graph:
    """The equations of one output, for one device: without effects and shardings."""
    whole: dict[Var, Atom] = {}

    equations = []
    for equation in graph.equations:
        if equation.primitive.name == "sharding_constraint":
            (whole[equation.outvars[0]],) = renamed(equation.invars, whole)
        elif not equation.effects:
            invars = renamed(equation.invars, whole)
            equations.append(equation.replace(invars=invars))
    pure = replace(graph, equations=tuple(equations))
    # A part of the loss in jax.checkpoint reads all that any of its outputs needs.
    opened = inlined(pure.needed_for(renamed([weight], whole)))
    return opened.needed_for(opened.outvars)
