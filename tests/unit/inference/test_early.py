"""Outputs that are changed when they are computed: see zinf/inference/early.py."""

import jax
import jax.numpy as jnp

from zinf.inference.early import each_changed


def test_a_change_follows_the_equation_that_computes_its_output():
    def function(x, y):
        first = jnp.sin(x)
        return {"a": first, "b": jnp.cos(first), "c": y, "d": first, "e": 2.0}

    changes = {name: lambda value, n=n: value + n for n, name in enumerate("abcde", 1)}

    def changed(x, y):
        return each_changed(function, (x, y), changes)

    assert changed(0.0, 1.0) == {"a": 1, "b": 3, "c": 4, "d": 4, "e": 7}
    equations = [e.primitive.name for e in jax.make_jaxpr(changed)(0.0, 1.0).eqns]
    assert equations.index("sin") < equations.index("cos")
    assert (
        equations[equations.index("sin") + 1 : equations.index("cos")].count("add") == 2
    )
