"""Counts floating-point operations of equations, for the cost model of a plan."""

from math import prod

from zinf.core.jaxpr.compat import Equation, open_jaxpr
from zinf.core.jaxpr.walk import programs
from zinf_kernels.attention import attention_flops


def equation_flops(equation: Equation) -> int:
    """Multiply-adds count two; everything but contractions counts one an element.

    A loop counts its body once an iteration where the number is known (`scan`), a
    `while` once, a `cond` its dearest branch. A Pallas kernel counts what its cost
    estimate says; without one, an operation for each element of its results. An
    attention counts the pairs of queries and keys that its positions allow.
    """
    params = equation.params
    name = equation.primitive.name
    if name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        shape = equation.invars[0].aval.shape
        return 2 * _num_elements(equation) * prod(shape[d] for d in contracted)
    if name == "conv_general_dilated":
        kernel = equation.invars[1].aval.shape
        out_features = params["dimension_numbers"].rhs_spec[0]
        return 2 * _num_elements(equation) * prod(kernel) // kernel[out_features]
    if name == "attention":
        avals = [v.aval for v in equation.invars]
        return attention_flops(
            params["spec"], dict(zip(params["names"], avals, strict=True))
        )
    if "cost_estimate" in params:
        estimate = params["cost_estimate"]
        return _num_elements(equation) if estimate is None else estimate.flops
    inner = [
        sum(map(equation_flops, open_jaxpr(program)[0].eqns))
        for program in programs(equation)
    ]
    if name == "scan":
        return params["length"] * sum(inner)
    if name == "cond":
        return max(inner)
    return sum(inner) if inner else _num_elements(equation)


def _num_elements(equation: Equation) -> int:
    return sum(prod(v.aval.shape) for v in equation.outvars)
