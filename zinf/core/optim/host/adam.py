"""Recognises Adam and AdamW in the code of a leaf's update.

The update that `separate` cut out is compared with what optax traces to, term by term
from the outputs. An update that matches is Adam, however it was built (`optax.adamw`, a
chain by hand, injected hyperparameters). An update with any term more or less (Nesterov
momentum, AMSGrad, a clip) does not match.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import permutations, product
from typing import Any

import ml_dtypes
import numpy as np

from zinf.core.jaxpr import Body
from zinf.core.jaxpr.compat import Atom, Equation, Jaxpr, Literal, Var
from zinf_kernels.adam import Scalars

FLOAT32 = np.dtype(np.float32)
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)

# A term is the name of an array or a scalar, or an operation and its terms. Operations
# are named like `_operation` names them.
Term = str | tuple

ARRAYS = ("gradient", "master", "m", "v")
COMMUTATIVE = ("add", "mul")
WIDEN = "convert_element_type new_dtype=float32"
NARROW = "convert_element_type new_dtype=bfloat16"


@dataclass(frozen=True)
class AdamForm:
    """The positions of the arrays and scalars of an update that is Adam's.

    Attributes:
        m, v: positions of the two moments among the states.
        scalars: for each field of the kernel's `Scalars` that the update defines, its
            value, or its position among the step values and hoisted literals. The
            learning rate has the opposite sign: it is what the change is multiplied by.
    """

    m: int
    v: int
    m_dtype: np.dtype
    scalars: Mapping[str, int | np.generic]

    @property
    def decays(self) -> tuple[float, ...]:
        """The weight decay; if it may change each step, zero and one other number."""
        decay = self.scalars.get("weight_decay", np.float32(0))
        return (0.0, 1.0) if isinstance(decay, int) else (float(decay),)

    def values(self, arguments: Sequence[Any], factor: Any) -> Scalars:
        """The scalars of one step.

        Args:
            arguments: the step values that the leaf reads, then its hoisted literals.
        """

        def value(name: str) -> np.float32:
            found = self.scalars[name]
            return np.float32(arguments[found] if isinstance(found, int) else found)

        values = {name: value(name) for name in self.scalars}
        values["learning_rate"] = -values["learning_rate"]
        values.setdefault("weight_decay", np.float32(0))
        return Scalars(**values, factor=np.float32(factor))


def match_adam(body: Body) -> AdamForm | None:
    """The form of a leaf's update if it is Adam's, else None.

    Args:
        body: from `(gradient, master, *states, *scalars)` to `(change, *new states)`.
    """
    jaxpr = body.jaxpr
    if len(jaxpr.outvars) != 3:
        return None
    gradient, master, *states = jaxpr.invars[:4]
    if {_dtype(a) for a in (gradient, master)} != {FLOAT32}:
        return None
    # States are in optax's order, which a chain may change: m is the one whose new
    # value holds the gradient, v the one that holds its square.
    for (m, v), may_decay in product(permutations((0, 1)), (True, False)):
        arrays = dict(
            zip(ARRAYS, (gradient, master, states[m], states[v]), strict=True)
        )
        m_dtype = _dtype(states[m])
        if _dtype(states[v]) != FLOAT32 or m_dtype not in (FLOAT32, BFLOAT16):
            continue
        outputs = dict(zip((m, v), _moments(m_dtype), strict=True))
        terms = _change(m_dtype, may_decay), outputs[0], outputs[1]
        matcher = _Matcher(jaxpr, arrays)
        if matcher.matches_outputs(terms):
            return AdamForm(m, v, m_dtype, matcher.scalars)
    return None


def _moments(m_dtype: np.dtype) -> tuple[Term, Term]:
    """The new m and v."""
    wide_m = _wide_m(m_dtype)
    new_v = (
        "add",
        ("mul", "one_minus_b2", ("integer_pow y=2", "gradient")),
        ("mul", "b2", "v"),
    )
    return (wide_m if m_dtype == FLOAT32 else (NARROW, wide_m)), new_v


def _wide_m(m_dtype: np.dtype) -> Term:
    # In the jaxpr an average in bfloat16 decays in bfloat16. XLA:CPU compiles that to
    # float32, as in the kernel.
    decayed = ("mul", "b1", "m")
    return (
        "add",
        ("mul", "one_minus_b1", ("integer_pow y=1", "gradient")),
        decayed if m_dtype == FLOAT32 else (WIDEN, decayed),
    )


def _change(m_dtype: np.dtype, may_decay: bool) -> Term:
    _, new_v = _moments(m_dtype)
    root = ("sqrt", ("add", ("div", new_v, "correction2"), "eps_root"))
    change = ("div", ("div", _wide_m(m_dtype), "correction1"), ("add", root, "eps"))
    if may_decay:
        change = ("add", change, ("mul", "weight_decay", "master"))
    return ("mul", "learning_rate", change)


class _Matcher:
    """Compares a jaxpr with terms, and binds their scalars as it goes."""

    def __init__(self, jaxpr: Jaxpr, arrays: Mapping[str, Var]):
        self.jaxpr, self.arrays = jaxpr, arrays
        self.producers = {e.outvars[0]: e for e in jaxpr.eqns}
        self.positions = {v: i for i, v in enumerate(jaxpr.invars[len(ARRAYS) :])}
        self.scalars: dict[str, int | np.generic] = {}
        self.used: set[Var] = set()

    def matches_outputs(self, terms: Sequence[Term]) -> bool:
        """Whether the outputs are these terms and no other equation is left."""
        return (
            all(map(self.matches, self.jaxpr.outvars, terms))
            and self.used == self.producers.keys()
            and _are_all_bound(self.scalars)
        )

    def matches(self, atom: Atom, term: Term) -> bool:
        if isinstance(term, str):
            is_array = term in self.arrays
            return atom is self.arrays[term] if is_array else self.binds(atom, term)
        equation = None if isinstance(atom, Literal) else self.producers.get(atom)
        operation, *inner = term
        if equation is None or _operation(equation) != operation:
            return False
        self.used.add(atom)
        orders = [inner]
        if operation in COMMUTATIVE:
            orders.append(inner[::-1])
        return any(self.matches_all(equation.invars, order) for order in orders)

    def matches_all(self, atoms: Sequence[Atom], terms: Sequence[Term]) -> bool:
        before = dict(self.scalars), set(self.used)
        if len(atoms) == len(terms) and all(map(self.matches, atoms, terms)):
            return True
        self.scalars, self.used = before
        return False

    def binds(self, atom: Atom, name: str) -> bool:
        """Binds a scalar to this name; False if another one is bound to it."""
        if atom.aval.shape != ():
            return False
        if isinstance(atom, Literal):
            value: Any = np.asarray(atom.val, atom.aval.dtype)[()]
        elif atom in self.positions:
            value = self.positions[atom]
        else:
            return False
        known = self.scalars.setdefault(name, value)
        return type(known) is type(value) and known == value


def _are_all_bound(scalars: Mapping[str, Any]) -> bool:
    needed = {field.name for field in fields(Scalars)} - {"factor", "weight_decay"}
    return needed <= scalars.keys()


def _operation(equation: Equation) -> str:
    """The name of a primitive with the parameters that are set."""
    params = equation.params.items()
    words = [f"{k}={v}" for k, v in params if v is not None and v is not False]
    return " ".join([equation.primitive.name, *words])


def _dtype(variable: Var) -> np.dtype:
    return np.dtype(variable.aval.dtype)
