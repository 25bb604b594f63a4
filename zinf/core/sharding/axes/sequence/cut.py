"""Cuts the positions of a sequence over devices: Ulysses, found in a jaxpr.

Each device computes some positions of all layers. Attention needs all positions of a
head at once, so around it heads are cut in place of positions (DeepSpeed-Ulysses,
arXiv:2309.14509): one all-to-all for each of query, key and value, and one for the
result. A model is not changed for this. An attention of `zinf_kernels` is one equation
with known dims. Where a model writes products, the product whose two operands both have
positions as a free dim makes the scores of an attention; a batch dim of this product
that does not hold examples holds heads; the later product that contracts the scores'
positions makes the result.

Only sharding constraints are added, so numbers do not change but for the order of sums.
With fewer heads of keys than devices along `seq`, those of the equation are copied. If
copies do not divide evenly, or there are products, no constraint is added, and XLA
gathers keys and values.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from zinf.core.jaxpr import Graph, written
from zinf.core.jaxpr.compat import Atom, Equation, Literal, Var, open_jaxpr, with_inner
from zinf.core.jaxpr.dims import factor_of
from zinf.core.jaxpr.emit import Emitter
from zinf.core.jaxpr.rewrite import rewriting, rewritten_program
from zinf.core.jaxpr.walk import CUSTOM, REMAT, Inner, inner
from zinf.core.problem.source import named_leaves
from zinf.core.sharding import AxisRule, Dim, batch_dims
from zinf.core.sharding.axes.convolution import without_groups
from zinf.core.sharding.axes.sequence.follow import Mark, Marks, results
from zinf.core.sharding.mesh import SEQ

OPENED = REMAT | CUSTOM | {"scan"}
MARK_OF = {Dim.BATCH: Mark.EXAMPLES, Dim.SEQUENCE: Mark.POSITIONS}
SCORES = (Mark.HEADS, Mark.FIRST, Mark.SECOND)
# Dims of the operands and the result of an attention: (batch, tokens, heads, width).
AROUND = {Mark.EXAMPLES: 0, Mark.POSITIONS: 1}


def along_sequence(loss: Callable, rule: AxisRule) -> Callable:
    """`loss(params, batch, ...)` with positions cut along `seq`.

    The function is traceable only. Without a `seq` axis it is `loss` itself.
    """
    if not rule.axes(Dim.SEQUENCE):
        return loss

    def write(closed: Any, arguments: Sequence[Any]) -> Graph:
        closed = without_groups(closed, SEQ)
        params, batch, *_ = arguments
        first = len(jax.tree.leaves(params))
        of_batch = open_jaxpr(closed)[0].invars[first:]
        pairs = zip(of_batch, _batch_marks(batch, rule), strict=False)
        return written(_Cutter(rule, {v: marks for v, marks in pairs if marks}), closed)

    return rewriting(loss, write)


def _batch_marks(batch: Any, rule: AxisRule) -> list[Marks]:
    """The marks of the leaves of a batch."""
    shapes = {name: jnp.shape(x) for name, x in named_leaves(batch).items()}
    return [
        {MARK_OF[dim]: d for d, dim in enumerate(dims) if dim in MARK_OF}
        for dims in batch_dims(shapes, rule).values()
    ]


class _Cutter(Emitter):
    """Writes a program again, with sharding constraints.

    Attributes:
        marks: the marked dims of values of the program that is written.
    """

    def __init__(self, rule: AxisRule, marks: dict[Var, Marks]):
        super().__init__()
        self.rule, self.marks = rule, marks
        self.axes = {
            Mark.EXAMPLES: rule.axes(Dim.BATCH),
            Mark.POSITIONS: rule.axes(Dim.SEQUENCE),
            Mark.HEADS: rule.axes(Dim.HEADS),
        }
        self.size = rule.size(Dim.SEQUENCE)

    def emit(self, equation: Equation, arguments: list[Atom]) -> list[Atom]:
        equation = equation.replace(invars=arguments)
        name = equation.primitive.name
        if name in OPENED:
            (inside,) = inner(equation)
            return self.open(equation, inside)
        if name == "dot_general":
            return self.product(equation)
        if name == "attention":
            return self.attention(equation)
        outvars = super().emit(equation, arguments)
        if outvars and self.is_first_cut(equation):
            outvars = [self.constrain(outvars[0], Mark.POSITIONS)]
        return outvars

    def append(self, equation: Equation) -> list[Atom]:
        outvars = super().append(equation)
        marked = results(equation, self.marks) if outvars else {}
        for v in outvars if marked else ():
            shape = getattr(v.aval, "shape", ())
            self.mark(v, {m: d for m, d in marked.items() if d < len(shape)})
        return outvars

    def known(self, atom: Atom) -> Marks:
        return {} if isinstance(atom, Literal) else self.marks.get(atom, {})

    def mark(self, atom: Atom, marks: Marks) -> None:
        if marks and not isinstance(atom, Literal):
            self.marks[atom] = marks

    # Where constraints are added.

    def is_first_cut(self, equation: Equation) -> bool:
        """Whether positions of a batch may be cut here for the first time.

        A batch of S inputs and their labels has S + 1 tokens, so it is cut only when
        it was sliced; tokens are looked up in a table that has no positions.
        """
        if equation.primitive.name not in ("slice", "gather"):
            return False
        return any(Mark.POSITIONS in self.known(a) for a in equation.invars)

    def constrain(self, atom: Atom, cut: Mark) -> Atom:
        """A value with its examples and one other marked dim cut."""
        marks = self.known(atom)
        shape = atom.aval.shape
        if cut not in marks or shape[marks[cut]] < self.size:
            return atom
        if cut == Mark.POSITIONS and shape[marks[cut]] % self.size:
            return atom
        spec: list[Any] = [None] * len(shape)
        examples = marks.get(Mark.EXAMPLES)
        if examples is None:
            spec = [PartitionSpec.UNCONSTRAINED] * len(shape)
        elif shape[examples] % self.rule.size(Dim.BATCH) == 0:
            spec[examples] = self.axes[Mark.EXAMPLES] or None
        spec[marks[cut]] = self.axes[cut]
        form = NamedSharding(self.rule.mesh, PartitionSpec(*spec))
        (new,) = self.apply(lambda x: jax.lax.with_sharding_constraint(x, form), atom)
        self.mark(new, marks)
        return new

    def attention(self, equation: Equation) -> list[Atom]:
        """An attention of `zinf_kernels`, with heads cut in place of positions."""
        operands = list(equation.invars)
        positions = self.known(operands[0]).get(Mark.POSITIONS)
        copies = self.copies_of_keys(*(x.aval.shape[2] for x in operands[:2]))
        if positions != 1 or not copies:
            return self.append(equation)
        for n in (1, 2) if copies > 1 else ():
            marks, repeat = self.known(operands[n]), partial(_repeated, copies=copies)
            (operands[n],) = self.apply(repeat, operands[n])
            self.mark(operands[n], marks)
        for n in range(3):
            operands[n] = self.to_heads(operands[n], {**AROUND, Mark.HEADS: 2})
        for n, atom in enumerate(operands):
            if atom.aval.ndim == 2:
                operands[n] = self.of_all_positions(atom)
        (out,) = self.append(equation.replace(invars=operands))
        self.mark(out, {**AROUND, Mark.HEADS: 2})
        by_positions = self.constrain(self.constrain(out, Mark.HEADS), Mark.POSITIONS)
        self.mark(by_positions, AROUND)
        return [by_positions]

    def of_all_positions(self, ids_BT: Atom) -> Atom:
        """Segments or positions of all tokens, on each device that has some heads.

        Otherwise XLA cuts the mask of each pair of blocks, and gathers it in the loop.
        """
        is_cut = ids_BT.aval.shape[0] % self.rule.size(Dim.BATCH) == 0
        examples = self.axes[Mark.EXAMPLES] if is_cut else ()
        form = NamedSharding(self.rule.mesh, PartitionSpec(examples or None, None))
        (new,) = self.apply(lambda x: jax.lax.with_sharding_constraint(x, form), ids_BT)
        return new

    def copies_of_keys(self, num_heads: int, num_key_heads: int) -> int:
        """How often each head of keys is copied, so that each device has one; 0: never.

        Queries of one device then read one copy, whose cotangents are summed.
        """
        if num_key_heads >= self.size:
            return 1  # Heads that do not divide evenly are padded by XLA.
        is_even = self.size % num_key_heads == 0 and num_heads % self.size == 0
        return self.size // num_key_heads if is_even else 0

    def product(self, equation: Equation) -> list[Atom]:
        """A product, with heads cut in place of positions if it is of an attention."""
        first, second = equation.invars
        contracted, paired = equation.params["dimension_numbers"]
        positions = [self.known(a).get(Mark.POSITIONS) for a in (first, second)]
        free = [
            d is not None and d not in (*contracted[n], *paired[n])
            for n, d in enumerate(positions)
        ]
        if all(free):
            return self.scores(equation)
        for n in (0, 1):
            if self.reads_scores(equation, n):
                return self.weighted_sum(equation, n)
        return self.append(equation)

    def scores(self, equation: Equation) -> list[Atom]:
        """Positions meet positions: the scores of an attention."""
        place = self.head_place(equation)
        operands = list(equation.invars)
        paired = equation.params["dimension_numbers"][1]
        if place is not None:
            for n, atom in enumerate(operands):
                heads = self.known(atom) | {Mark.HEADS: paired[n][place]}
                operands[n] = self.to_heads(atom, heads)
        (out,) = self.append(equation.replace(invars=operands))
        examples = self.known(out).get(Mark.EXAMPLES)
        found = _marked(Mark.EXAMPLES, examples)
        if place is not None:
            found |= {Mark.HEADS: place}
            for n, mark in enumerate((Mark.FIRST, Mark.SECOND)):
                positions = self.known(equation.invars[n])[Mark.POSITIONS]
                found |= _marked(mark, factor_of(equation, {n: positions}).result)
        self.marks[out] = found
        return [out]

    def head_place(self, equation: Equation) -> int | None:
        """The place of heads among the batch dims of scores; None if they are few."""
        first = equation.invars[0]
        examples = self.known(first).get(Mark.EXAMPLES)
        sizes = {
            i: first.aval.shape[d]
            for i, d in enumerate(equation.params["dimension_numbers"][1][0])
            if d != examples and first.aval.shape[d] >= self.size
        }
        # Heads that do not divide evenly are padded by XLA.
        return max(sizes, key=lambda i: (sizes[i] % self.size == 0, -i), default=None)

    def reads_scores(self, equation: Equation, n: int) -> bool:
        """Whether operand `n` has scores, and the other one values at positions."""
        scores, values = (self.known(a) for a in equation.invars[:: 1 - 2 * n])
        contracted, paired = equation.params["dimension_numbers"]
        if not scores.keys() >= set(SCORES) or Mark.POSITIONS not in values:
            return False
        pairs = list(zip(contracted[n], contracted[1 - n], strict=True))
        ends = [(scores[m], values[Mark.POSITIONS]) for m in (Mark.FIRST, Mark.SECOND)]
        return any(e in pairs for e in ends) and scores[Mark.HEADS] in paired[n]

    def weighted_sum(self, equation: Equation, n: int) -> list[Atom]:
        """Values, weighted by scores and summed over positions."""
        contracted, paired = equation.params["dimension_numbers"]
        operands = list(equation.invars)
        scores = self.known(operands[n])
        place = list(paired[n]).index(scores[Mark.HEADS])
        values = operands[1 - n]
        heads = self.known(values) | {Mark.HEADS: paired[1 - n][place]}
        operands[1 - n] = self.to_heads(values, heads)
        (out,) = self.append(equation.replace(invars=operands))
        rest = Mark.FIRST if scores[Mark.SECOND] in contracted[n] else Mark.SECOND
        marks = _marked(Mark.EXAMPLES, self.known(out).get(Mark.EXAMPLES))
        positions = factor_of(equation, {n: scores[rest]}).result
        marks |= {Mark.HEADS: place} | _marked(Mark.POSITIONS, positions)
        self.marks[out] = marks
        by_positions = self.constrain(self.constrain(out, Mark.HEADS), Mark.POSITIONS)
        self.mark(by_positions, {m: d for m, d in marks.items() if m != Mark.HEADS})
        return [by_positions]

    def to_heads(self, atom: Atom, marks: Marks) -> Atom:
        """Cut a value's heads, and its positions before.

        So its cotangents are cut in the same way.
        """
        before = self.known(atom)
        self.mark(atom, marks)
        new = self.constrain(self.constrain(atom, Mark.POSITIONS), Mark.HEADS)
        self.mark(atom, before)
        if new is not atom:
            self.mark(new, before)
        return new

    # Equations with programs inside.

    def open(self, equation: Equation, inside: Inner) -> list[Atom]:
        """A call or a scan, with constraints in its program.

        A function with a derivative rule of its own stays as it is.
        """
        marks = [self.known(equation.invars[n]) for n in inside.operands]
        rows = [_moved(m, -1) for m in marks[inside.first_row :]]
        marks = [*marks[: inside.first_row], *rows]
        body, found = self.constrained(inside.program, marks)
        stacked = [_moved(m, 1) for m in found[inside.first_stacked :]]
        if equation.primitive.name not in CUSTOM:
            equation = with_inner(equation, body) or equation
        outvars = Emitter.append(self, equation)
        found = [*found[: inside.first_stacked], *stacked]
        for v, marked in zip(outvars, found, strict=True):
            self.mark(v, marked)
        return outvars

    def constrained(
        self, closed: Any, inside: Sequence[Marks]
    ) -> tuple[Any, list[Marks]]:
        """A closed jaxpr with constraints, and the marks of its results."""
        pairs = zip(open_jaxpr(closed)[0].invars, inside, strict=True)
        emitter = _Cutter(self.rule, {v: marks for v, marks in pairs if marks})
        body, outputs = rewritten_program(emitter, closed)
        return body, [emitter.known(a) for a in outputs]


def _marked(mark: Mark, dim: int | None) -> Marks:
    return {} if dim is None else {mark: dim}


def _repeated(x_BTKH: jax.Array, copies: int) -> jax.Array:
    return jnp.repeat(x_BTKH, copies, axis=2)


def _moved(marks: Mapping[Mark, int], by: int) -> Marks:
    return {mark: dim + by for mark, dim in marks.items() if dim + by >= 0}
