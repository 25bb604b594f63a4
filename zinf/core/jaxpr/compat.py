"""The only module that depends on the version of jax.

jax 0.11 merged `ClosedJaxpr` into `Jaxpr`, and jax 0.12 changed the parameters of
`scan`. Other modules use only the names below.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.extend import core as jcore
from jax.extend import linear_util
from jax.interpreters import ad, batching, mlir

Atom = Any  # Var | Literal
Var = jcore.Var
Literal = jcore.Literal
Equation = jcore.JaxprEqn
Jaxpr = jcore.Jaxpr
JAXPR_TYPES = (jcore.Jaxpr, jcore.ClosedJaxpr)


def open_jaxpr(jaxpr: Any) -> tuple[Any, Sequence[Any]]:
    """The jaxpr of an open or closed jaxpr, and the values of its constvars."""
    if isinstance(jaxpr, jcore.ClosedJaxpr):
        return jaxpr.jaxpr, jaxpr.consts
    assert not jaxpr.constvars, "an open jaxpr with constants has no values for them"
    return jaxpr, ()


def inner_jaxpr(jaxpr: Any) -> tuple[Any, Sequence[Any]]:
    """The jaxpr in an equation's parameters, and the values of its constvars.

    The constvars of a Pallas kernel get their values from operands of the equation, so
    these are left out. jax 0.12 has tracers in their place.
    """
    if not isinstance(jaxpr, jcore.ClosedJaxpr):
        return jaxpr, ()
    consts = [c for c in jaxpr.consts if not isinstance(c, jax.core.Tracer)]
    return jaxpr.jaxpr, consts


def is_function(value: Any) -> bool:
    """Whether an equation's parameter is code, such as the rule of a `custom_jvp`.

    jax 0.10 keeps that rule as a `WrappedFun`, which is not callable.
    """
    if isinstance(value, (type, np.dtype)):
        return False
    return callable(value) or isinstance(value, linear_util.WrappedFun)


def scan_arity(equation: Equation) -> tuple[int, int]:
    """`(num_consts, num_carry)` of a scan equation."""
    params = equation.params
    if "num_carry" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()
    return len(consts), len(carry)


def with_inner(equation: Equation, closed: Any) -> Equation | None:
    """An equation of `scan` or `checkpoint` with another program inside.

    None if the program has constants that the equation cannot hold.
    """
    is_closed = isinstance(equation.params["jaxpr"], jcore.ClosedJaxpr)
    jaxpr, consts = open_jaxpr(closed)
    if consts and not is_closed:
        return None
    inner = closed if is_closed else jaxpr
    return equation.replace(params={**equation.params, "jaxpr": inner})


def fresh(aval: Any) -> Var:
    return Var(aval)


def new_operation(
    name: str, compute: Callable, result: Callable, gradients: Callable
) -> jcore.Primitive:
    """An operation that is one equation of a trace, and is lowered as `compute`.

    Args:
        compute: `(*arrays, **params) -> array`. It is mapped as the equations that it
            traces to, and differentiated in reverse mode only.
        result: `(*avals, **params) -> aval` of that array.
        gradients: `(cotangent, *arrays, needed, **params) -> cotangents` of the
            operands whose flag in the tuple `needed` is True, in order.
    """
    made = jcore.Primitive(name)
    made.def_abstract_eval(result)
    made.def_impl(lambda *arrays, **p: jax.jit(partial(compute, **p))(*arrays))

    def mapped(arrays: Any, dims: Any, **params: Any) -> tuple[Any, int]:
        return jax.vmap(partial(compute, **params), tuple(dims))(*arrays), 0

    batching.primitive_batchers[made] = mapped
    mlir.register_lowering(made, mlir.lower_fun(compute, multiple_results=False))
    _differentiate(made, result, gradients)
    return made


def _differentiate(
    operation: jcore.Primitive, result: Callable, gradients: Callable
) -> None:
    """Give an operation the reverse-mode derivative of `new_operation`."""
    # It is linear in the tangents, and nothing but transposed: it has no lowering.
    tangent_of = jcore.Primitive(f"{operation.name}_tangent")

    def abstract(*avals: Any, needed: tuple[bool, ...], **params: Any) -> Any:
        return result(*avals[: len(needed)], **params)

    def jvp(arrays: Any, tangents: Any, **params: Any) -> tuple[Any, Any]:
        needed = tuple(not isinstance(t, ad.Zero) for t in tangents)
        given = [t for t in tangents if not isinstance(t, ad.Zero)]
        tangent = tangent_of.bind(*arrays, *given, needed=needed, **params)
        return operation.bind(*arrays, **params), tangent

    def transpose(
        cotangent: Any, *operands: Any, needed: tuple[bool, ...], **params: Any
    ) -> list[Any]:
        arrays = operands[: len(needed)]
        if isinstance(cotangent, ad.Zero):
            return [None] * len(operands)
        found = gradients(cotangent, *arrays, needed=needed, **params)
        return [*[None] * len(arrays), *found]

    tangent_of.def_abstract_eval(abstract)
    ad.primitive_jvps[operation] = jvp
    ad.primitive_transposes[tangent_of] = transpose


def literal(value: Any) -> Literal:
    """A scalar literal of a NumPy value's own dtype."""
    value = np.asarray(value)
    return Literal(value[()], jax.core.ShapedArray(value.shape, value.dtype))


def build_jaxpr(
    invars: Sequence[Var], outvars: Sequence[Atom], equations: Sequence[Equation]
) -> Jaxpr:
    """A jaxpr without constants over the given equations."""
    effects = frozenset().union(*(e.effects for e in equations))
    names = {"arg_names": None, "result_paths": None}
    debug_info = jcore.DebugInfo("zinf", "segment", **names)
    arguments = list(invars), list(outvars), list(equations)
    return Jaxpr((), *arguments, effects, debug_info)


def evaluate(jaxpr: Jaxpr, arguments: Sequence[Any]) -> list[Any]:
    """The outputs of a jaxpr without constants; traceable and differentiable."""
    return jax.core.eval_jaxpr(jaxpr, (), *arguments)
