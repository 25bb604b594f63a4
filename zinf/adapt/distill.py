"""A loss that compares each layer of a model with a changed copy of itself.

ZeroQuant (https://arxiv.org/abs/2206.01861, section 4.3) distills a model layer by
layer: a layer of the model is the teacher of its own quantized version, and both get
the outputs of the teacher's layers before. So no layer's error depends on the weights
of another's student, and one loss, the sum of all errors, trains all students at once.
Its gradients stay within a layer; an engine streams them like those of any other loss.

Layers are read from the flat program of the loss: no architecture is named.
"""

import re
from collections import ChainMap
from collections.abc import (
    Callable,
    Iterable,
    Iterator,
    Mapping,
    MutableMapping,
    Sequence,
)
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import jax
import jax.numpy as jnp

from zinf.adapt.adapted import ADAPTER, BASE, Adapted
from zinf.adapt.contraction import Found
from zinf.adapt.record import beside
from zinf.core.interchange.names import listed
from zinf.core.jaxpr import Graph, flatten, variables
from zinf.core.jaxpr.compat import Equation, Literal, Var
from zinf.core.jaxpr.graph import variable_bytes
from zinf.core.jaxpr.walk import apply
from zinf.core.problem.leafwise import abstract_leaves
from zinf.core.problem.source import named_leaves

SHIFT = "shift"
# A weight and its shift -> the student's weight, of the weight's shape and dtype.
Change = Callable[[Any, Any], Any]


@dataclass(frozen=True)
class Layer:
    """Equations of a program that one teacher and one student compute.

    Attributes:
        name: such as "model.layers.3"; of a weight outside of lists, its module's.
        paths: the weights of which the student has its own.
        stop: the first equation after it.
    """

    name: str
    paths: tuple[str, ...]
    stop: int


def distilling(
    loss_fn: Callable,
    params: Callable[[], Any],
    found: Found,
    changes: Mapping[str, Change],
) -> Adapted:
    """A loss that is the sum of the squared errors of each layer's student.

    The arrays "adapter/PATH/shift" are trained, float32 of the shapes of the weights
    and 0 at first, and the weights are frozen. The loss returns `(loss, aux)`, and
    `aux` has the mean squared error of each layer by name.

    Args:
        found: of `contractions_of`.
        changes: by path, what makes a student's weight.
    """
    specs = named_leaves(abstract_leaves(params))
    arrays = {path: {SHIFT: tuple(specs[path].shape)} for path in changes}
    loss = _Distilling(loss_fn, changes)
    return beside(lambda targets: loss, params, found, arrays)


@dataclass(frozen=True)
class _Distilling:
    """A loss of `{"base": weights, "adapter": {path: {"shift": ...}}}`."""

    loss_fn: Callable
    changes: Mapping[str, Change]

    def __call__(self, params: Any, *rest: Any) -> tuple[Any, dict[str, Any]]:
        base, shifts = named_leaves(params[BASE]), params[ADAPTER]
        graph = flatten(jax.make_jaxpr(self.loss_fn)(params[BASE], *rest))
        names = dict(zip(graph.invars, base, strict=False))
        layers = layers_of(graph, names, self.changes)
        own = {
            path: partial(change, base[path], shifts[path][SHIFT])
            for path, change in self.changes.items()
        }
        values = [*base.values(), *jax.tree.leaves(rest)]
        errors = {}
        loss = jnp.float32(0)
        for layer, gaps in _gaps(graph, names, layers, own, values):
            squares = sum(jnp.sum(gap * gap) for gap in gaps)
            errors[layer.name] = squares / sum(gap.size for gap in gaps)
            loss += squares
        return loss, errors


def layers_of(
    graph: Graph, names: Mapping[Var, str], paths: Iterable[str]
) -> tuple[Layer, ...]:
    """The layers that have some of the weights, in the order of their ends.

    A layer ends where the fewest bytes are live, after activations met the last of its
    parameters and before they meet the next one of another layer.

    Args:
        names: the parameters among the inputs of the graph.
    """
    reads, active = _reads(graph, names)
    live = _live_bytes(graph, active)
    groups: dict[str, list[str]] = {}
    for path in paths:
        groups.setdefault(layer_name(path), []).append(path)
    last = dict.fromkeys(groups, 0)
    for i, own in enumerate(reads):
        last.update((layer_name(p), i) for p in own if layer_name(p) in groups)
    layers = []
    for name, own in groups.items():
        first = last[name] + 1
        later = (i for i in range(first, len(reads)) if reads[i])
        stop = next(later, len(reads))
        stop = min(range(first, stop + 1), key=live.__getitem__)
        layers.append(Layer(name, tuple(own), stop))
    return tuple(sorted(layers, key=lambda layer: layer.stop))


def layer_name(path: str) -> str:
    """The layer of a parameter: its name up to the first number, or its module's."""
    numbered = re.match(r"(?:[^./]+[./])*?\d+(?=[./])", path)
    return numbered.group() if numbered else re.sub(r"[./][^./]*$", "", path)


def _reads(
    graph: Graph, names: Mapping[Var, str]
) -> tuple[list[frozenset[str]], frozenset[Var]]:
    """The parameters that each equation lets activations meet; and the activations.

    An equation that reads no activation lets them meet nothing: its result is one with
    the parameters that it was made of.
    """
    roots = {v: frozenset([path]) for v, path in names.items()}
    active = set(graph.invars) - set(names)
    reads = []
    for equation in graph.equations:
        given = variables(equation.invars)
        own = frozenset(path for v in given for path in roots.get(v, ()))
        if active.isdisjoint(given):
            roots.update(dict.fromkeys(equation.outvars, own))
            reads.append(frozenset())
        else:
            active.update(equation.outvars)
            reads.append(own)
    return reads, frozenset(active)


def _last_reads(graph: Graph) -> dict[Var, int]:
    """The last equation that reads a variable; of outputs the number of equations."""
    last = {v: i for i, e in enumerate(graph.equations) for v in variables(e.invars)}
    return last | dict.fromkeys(variables(graph.outvars), len(graph.equations))


def _live_bytes(graph: Graph, active: frozenset[Var]) -> list[int]:
    """Bytes of activations that are made before each equation and read from it on."""
    last = _last_reads(graph)
    change = [0] * (len(graph.equations) + 2)
    for i, equation in enumerate(graph.equations):
        for v in active.intersection(equation.outvars):
            change[i + 1] += variable_bytes(v)
            change[max(last.get(v, i), i) + 1] -= variable_bytes(v)
    return list(accumulate(change))


def _gaps(
    graph: Graph,
    names: Mapping[Var, str],
    layers: Sequence[Layer],
    own: Mapping[str, Callable[[], Any]],
    values: Sequence[Any],
) -> Iterator[tuple[Layer, list[Any]]]:
    """For each layer, its student's outputs less the teacher's, in float32.

    A student computes only what depends on its weights; all else is the teacher's.

    Args:
        own: makes a weight of a student.
        values: of the inputs of the graph.

    Raises:
        ValueError: nothing that depends on a layer's weights is read after it.
    """
    last = _last_reads(graph)
    teacher = {**graph.consts, **dict(zip(graph.invars, values, strict=True))}
    layer_of = {path: layer for layer in layers for path in layer.paths}
    # The values of the layers that have begun and have not ended, and their weights.
    students: dict[Layer, dict[Var, Any]] = {}
    left = list(layers)
    for position, equation in enumerate(graph.equations, 1):
        given = variables(equation.invars)
        for v in given:
            layer = layer_of.get(names.get(v, ""))
            if layer is not None:
                students.setdefault(layer, {}).setdefault(v, own[names[v]]())
        for student in students.values():
            if not student.keys().isdisjoint(given):
                _run(equation, ChainMap(student, teacher))
        _run(equation, teacher)
        while left and left[0].stop == position:
            layer = left.pop(0)
            student = students.pop(layer)
            outputs = [
                v
                for v in student
                if v not in names
                and last.get(v, 0) >= position
                and jnp.issubdtype(v.aval.dtype, jnp.floating)
            ]
            if not outputs:
                raise ValueError(
                    f"Nothing that {layer.name} computes of {listed(layer.paths)} is "
                    "read after it in floating point, so there is nothing to compare."
                )
            pairs = ((student[v], teacher[v]) for v in outputs)
            yield layer, [jnp.float32(x) - jnp.float32(y) for x, y in pairs]
        if not left:
            return


def _run(equation: Equation, known: MutableMapping[Var, Any]) -> None:
    """Add the results of an equation to the values that are known."""
    given = [a if isinstance(a, Literal) else known[a] for a in equation.invars]
    known.update(zip(equation.outvars, apply(equation, given), strict=True))
