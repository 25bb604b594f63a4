"""Programs inside equations: calls, `checkpoint`, custom rules, loops and branches.

`inner` describes such programs by their inputs and outputs. A `Follower` carries facts
about values from the inputs of a program to its outputs, through the programs inside.
An `Evaluator` computes the outputs from values of which some stand for arrays.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp

from zinf.core.jaxpr.compat import (
    JAXPR_TYPES,
    Atom,
    Equation,
    Literal,
    Var,
    build_jaxpr,
    evaluate,
    fresh,
    open_jaxpr,
    scan_arity,
)

# Calls that change nothing, those of functions with derivatives of their own, and of
# `jax.checkpoint`.
CALLS = frozenset({"jit", "pjit", "closed_call", "core_call"})
CUSTOM = frozenset({"custom_jvp_call", "custom_vjp_call"})
REMAT = frozenset({"remat", "remat2", "remat3", "checkpoint"})

Fact = TypeVar("Fact")


@dataclass(frozen=True)
class Inner:
    """A program inside an equation.

    Attributes:
        program: an open or closed jaxpr.
        operands: the numbers of the operands that its inputs are.
        first_row: from this input on, inputs are rows of operands along the leading
            dim, and from output `first_stacked` on, outputs are rows of results.
        carried: start and stop of the inputs of a loop that are, from the second
            iteration on, the first outputs of the iteration before.
        has_results: whether its outputs are results; a loop's condition has none.
    """

    program: Any
    operands: range | tuple[int, ...]
    first_row: int
    first_stacked: int
    carried: tuple[int, int] = (0, 0)
    has_results: bool = True


def inner(equation: Equation) -> tuple[Inner, ...]:
    """The programs inside a call, a `scan`, a `while` or a `cond`; else none."""
    name, params = equation.primitive.name, equation.params
    count, everything = len(equation.invars), range(len(equation.invars))
    num_results = len(equation.outvars)
    if name in CALLS | CUSTOM | REMAT:
        program = params["jaxpr"] if "jaxpr" in params else params["call_jaxpr"]
        return (Inner(program, everything, count, num_results),)
    if name == "scan":
        consts, carry = scan_arity(equation)
        rows = consts + carry
        return (Inner(params["jaxpr"], everything, rows, carry, (consts, rows)),)
    if name == "while":
        test, consts = params["cond_nconsts"], params["body_nconsts"]
        carry = range(test + consts, count)
        of_test, of_body = (*range(test), *carry), range(test, count)
        rest = count, num_results
        return (
            Inner(params["cond_jaxpr"], of_test, *rest, has_results=False),
            Inner(params["body_jaxpr"], of_body, *rest, (consts, count - test)),
        )
    if name == "cond":
        rest = range(1, count), count, num_results
        return tuple(Inner(branch, *rest) for branch in params["branches"])
    return ()


def programs(equation: Equation) -> Iterator[Any]:
    """Every jaxpr in the parameters of an equation, of whatever primitive."""
    leaves = jax.tree.leaves(
        list(equation.params.values()), is_leaf=lambda x: isinstance(x, JAXPR_TYPES)
    )
    return (x for x in leaves if isinstance(x, JAXPR_TYPES))


class Follower(ABC, Generic[Fact]):
    """Carries facts about values through a program, and through those inside it.

    Attributes:
        nothing: the fact of constants, and of values that nothing is known of.
    """

    nothing: Fact

    @abstractmethod
    def visit(self, equation: Equation, facts: list[Fact]) -> Sequence[Fact]:
        """The facts of the results of an equation in which `inner` finds no program."""

    @abstractmethod
    def meet(self, first: Fact, second: Fact) -> Fact:
        """The fact of a value that is one of two, as after a `cond`."""

    def row(self, equation: Equation, fact: Fact) -> Fact:
        """The fact of a row of an operand of a `scan`, along its leading dim."""
        return self.nothing

    def stack(self, equation: Equation, fact: Fact) -> Fact:
        """The fact of a stacked result of a `scan`, from the fact of one row of it."""
        return self.nothing

    def carry(self, fact: Fact) -> Fact:
        """The fact to begin a loop with, for a value that each iteration replaces."""
        return fact

    def chosen(self, by: Fact, fact: Fact) -> Fact:
        """The fact of a `cond`'s result, given the fact `by` of its predicate."""
        return fact

    def walk(self, closed: Any, facts: Sequence[Fact]) -> list[Fact]:
        """The facts of the outputs of a jaxpr, from those of its inputs."""
        jaxpr, _ = open_jaxpr(closed)
        known: dict[Var, Fact] = dict(zip(jaxpr.invars, facts, strict=True))

        def fact(atom: Atom) -> Fact:
            is_known = not isinstance(atom, Literal) and atom in known
            return known[atom] if is_known else self.nothing

        for equation in jaxpr.eqns:
            results = self._results(equation, [fact(a) for a in equation.invars])
            known.update(zip(equation.outvars, results, strict=True))
        return [fact(a) for a in jaxpr.outvars]

    def _results(self, equation: Equation, facts: list[Fact]) -> Sequence[Fact]:
        inside = inner(equation)
        if not inside:
            return self.visit(equation, facts)
        found, *others = (
            results
            for each in inside
            for results in [self._of_inner(equation, each, facts)]
            if each.has_results
        )
        for other in others:
            found = [self.meet(*pair) for pair in zip(found, other, strict=True)]
        if equation.primitive.name == "cond":
            found = [self.chosen(facts[0], fact) for fact in found]
        return found

    def _of_inner(
        self, equation: Equation, inside: Inner, facts: list[Fact]
    ) -> list[Fact]:
        """The facts of an equation's results, from the program inside it.

        The facts of a loop's results hold in each iteration.
        """
        given = [
            facts[n] if i < inside.first_row else self.row(equation, facts[n])
            for i, n in enumerate(inside.operands)
        ]
        first, last = inside.carried
        count, carried = last - first, slice(first, last)
        given[carried] = map(self.carry, given[carried])
        while True:
            found = self.walk(inside.program, given)
            pairs = zip(given[carried], found[:count], strict=True)
            found[:count] = [self.meet(*pair) for pair in pairs]
            if found[:count] == given[carried]:
                break
            given[carried] = found[:count]
        stacked = inside.first_stacked
        return found[:stacked] + [self.stack(equation, x) for x in found[stacked:]]


class Evaluator(ABC):
    """Evaluates programs on values of which some stand for arrays; traceable.

    Functions with a derivative of their own get arrays.
    """

    @abstractmethod
    def stands_for_array(self, value: Any) -> bool:
        """Whether a value stands for an array, instead of being one."""

    @abstractmethod
    def as_array(self, value: Any) -> Any:
        """The array that a value stands for; an array itself."""

    @abstractmethod
    def as_rows(self, value: Any) -> Any:
        """A value as a pytree whose leaves `jax.lax.scan` slices into rows."""

    @abstractmethod
    def visit(self, equation: Equation, values: list[Any]) -> list[Any]:
        """The results of an equation that reads a value which stands for an array.

        `inner` finds no program in the equation.

        Literals are values too.
        """

    def call(self, closed: Any, values: Sequence[Any]) -> list[Any]:
        """The outputs of a jaxpr."""
        jaxpr, consts = open_jaxpr(closed)
        known = dict(zip(jaxpr.constvars, consts, strict=True))
        known.update(zip(jaxpr.invars, values, strict=True))
        for equation in jaxpr.eqns:
            given = [a if isinstance(a, Literal) else known[a] for a in equation.invars]
            run = self._run if any(map(self.stands_for_array, given)) else apply
            known.update(zip(equation.outvars, run(equation, given), strict=True))
        return [a.val if isinstance(a, Literal) else known[a] for a in jaxpr.outvars]

    def arrays(self, closed: Any, values: Sequence[Any]) -> list[Any]:
        """The outputs of a jaxpr as arrays of their own dtypes."""
        jaxpr, _ = open_jaxpr(closed)
        found = [self.as_array(x) for x in self.call(closed, values)]
        return [
            with_dtype(a) if isinstance(a, Literal) else x
            for a, x in zip(jaxpr.outvars, found, strict=True)
        ]

    def _run(self, equation: Equation, values: list[Any]) -> list[Any]:
        name, params, inside = equation.primitive.name, equation.params, inner(equation)
        if not inside or name in CUSTOM:
            return self.visit(equation, values)
        values = [with_dtype(x) for x in values]
        if name in CALLS:
            return self.call(inside[0].program, values)

        def run(program: Inner, *given: Any) -> list[Any]:
            """Evaluates it with `given` as its last inputs, and operands before."""
            consts = program.operands[: len(program.operands) - len(given)]
            return self.arrays(program.program, [*(values[n] for n in consts), *given])

        if name in REMAT:
            options = {key: params[key] for key in ("prevent_cse", "policy")}
            return jax.checkpoint(partial(run, *inside), **options)(*values)
        if name == "cond":
            branches = [partial(run, branch) for branch in inside]
            return jax.lax.switch(self.as_array(values[0]), branches, *values[1:])
        first, last = inside[-1].carried
        carry = [self.as_array(values[n]) for n in inside[-1].operands[first:last]]
        if name == "while":
            test, body = (partial(run, program) for program in inside)
            return jax.lax.while_loop(lambda c: test(*c)[0], lambda c: body(*c), carry)

        def step(carry: list[Any], rows: list[Any]) -> tuple[list[Any], list[Any]]:
            found = run(*inside, *carry, *rows)
            return found[: last - first], found[last - first :]

        names = {"length", "reverse", "unroll"} & params.keys()
        options = {name: params[name] for name in names}
        rows = [self.as_rows(x) for x in values[last:]]
        after, stacks = jax.lax.scan(step, carry, rows, **options)
        return [*after, *stacks]


def apply(equation: Equation, values: Sequence[Any]) -> list[Any]:
    """The results of one equation; traceable. Literals are values too."""
    given = {
        v: x
        for v, x in zip(equation.invars, values, strict=True)
        if not isinstance(v, Literal)
    }
    outvars = [fresh(v.aval) for v in equation.outvars]
    jaxpr = build_jaxpr(tuple(given), outvars, [equation.replace(outvars=outvars)])
    return evaluate(jaxpr, tuple(given.values()))


def with_dtype(value: Any) -> Any:
    """A literal as an array of its own dtype; any other value itself."""
    if isinstance(value, Literal):
        return jnp.asarray(value.val, dtype=value.aval.dtype)
    return value
