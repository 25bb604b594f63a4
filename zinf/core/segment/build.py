"""From a traced function to a `Program`: cuts, names, and finds shared bodies."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from os.path import commonprefix
from typing import Any

import jax.numpy as jnp

from zinf.core.jaxpr import Graph, Piece, Shared, share, variables
from zinf.core.jaxpr.compat import Atom, Equation, Literal, Var
from zinf.core.jaxpr.keys import to_words
from zinf.core.problem.source import Source
from zinf.core.program import ArrayId, Chosen, Leaf, Program, Role, SegmentSpec
from zinf.core.segment.chosen import (
    NO_TABLES,
    Tables,
    must_be_cut,
    slot_names,
    slots_of,
)
from zinf.core.segment.cut import choose_cuts, read_tape
from zinf.core.segment.flops import equation_flops
from zinf.core.segment.index import index_by_literals
from zinf.core.segment.instead import NOTHING, Instead, read_instead
from zinf.core.segment.leaves import array_spec, layer_weights, leaf_of
from zinf.core.segment.order import Order, order_equations
from zinf.core.segment.rows import split_rows
from zinf.core.segment.tile import tile_leaves


@dataclass(frozen=True)
class Segmented:
    """A program, and for each of its segments the body that runs it.

    `consts` holds the values of `program.consts`; `structure` is the pytree of the
    outputs.
    """

    program: Program
    shared: tuple[Shared, ...]
    consts: dict[str, Any]
    structure: Any


def segment_loss(
    source: Source,
    *,
    frozen: Collection[str],
    splittable: Collection[str],
    max_bytes: int | None,
    tables: Tables = NO_TABLES,
) -> Segmented:
    """Cuts a traced loss into segments with a backward pass.

    Args:
        frozen: key paths of leaves that get no gradient. Leaves that are not
            floating-point are frozen in any case.
        splittable: leaves that may be kept by row if they are read by row: those whose
            optimizer update works on rows.
        max_bytes: parameter bytes that a segment may hold; `None` cuts by layer.
            Splittable leaves that are larger are read by tile.
        tables: the inputs that are tables of experts in slots; see `in_slots`.
    """
    rest = set(frozen), splittable, max_bytes
    return _segmented(source, *rest, is_trained=True, tables=tables)


def segment_function(
    source: Source,
    *,
    splittable: Collection[str],
    max_bytes: int | None,
    caches: Mapping[str, int] | None = None,
    instead: Instead = NOTHING,
    tables: Tables = NO_TABLES,
) -> Segmented:
    """Cuts a traced function into segments that only run forward.

    Each output is made by the segment that computes it. The other arguments are those
    of `segment_loss`.

    Args:
        caches: leaves of the batch, each with the output that takes its place in the
            next run. Those that one segment can overwrite become `Program.caches`; the
            others stay inputs and outputs.
        instead: state arrays that are read in place of parameters.
        tables: as in `segment_loss`.
    """
    return _segmented(
        source,
        set(source.params.values()),
        splittable,
        max_bytes,
        is_trained=False,
        caches=caches,
        instead=instead,
        tables=tables,
    )


def _segmented(
    source: Source,
    frozen: Collection[str],
    splittable: Collection[str],
    max_bytes: int | None,
    *,
    is_trained: bool,
    caches: Mapping[str, int] | None = None,
    instead: Instead = NOTHING,
    tables: Tables = NO_TABLES,
) -> Segmented:
    graph, arrays, stacked = split_rows(source.graph, source.params, splittable)
    tiled = tile_leaves(graph, arrays, tileable=splittable, max_bytes=max_bytes)
    graph, arrays = read_instead(tiled.graph, tiled.arrays, instead)
    leaves = tuple(
        leaf_of(v, path, path in stacked, path in frozen)
        for v, path in source.params.items()
    )
    weights = layer_weights({v: array.path for v, array in arrays.items()})
    order = order_equations(index_by_literals(graph, weights), weights)
    fixed = {v for v, array in arrays.items() if array.path in frozen}
    forced = must_be_cut(order.anchored, fixed, graph.consts)
    cuts = choose_cuts(read_tape(order, forced), max_bytes=max_bytes)
    builder = _Builder(source, order, arrays, leaves, is_trained, caches or {}, tables)
    made = builder.build(cuts)
    program = replace(made.program, tilings=tiled.tilings, untiled=dict(tiled.refused))
    return replace(made, program=program)


@dataclass
class _Draft:
    """A segment before it has a name: equations in order, inputs and outputs.

    `caches` has the variable of each cache that it overwrites, before and after.
    """

    equations: list[Equation]
    params: list[Var]
    inputs: list[Var]
    outputs: list[Atom]
    caches: dict[Var, Var] = field(default_factory=dict)


class _Builder:
    def __init__(
        self,
        source: Source,
        order: Order,
        arrays: dict[Var, ArrayId],
        leaves: Sequence[Leaf],
        is_trained: bool,
        caches: Mapping[str, int],
        tables: Tables,
    ):
        self.tables = tables
        self.source, self.order, self.arrays = source, order, arrays
        self.given_caches = caches
        self.graph: Graph = order.graph
        self.leaves = tuple(leaves)
        self.is_trained = is_trained
        # The outputs that the segments make which compute them; others, such as
        # literals and parameters, are outputs of the last segment.
        made = {v for e in order.anchored for v in e.outvars}
        found = () if is_trained else variables(self.graph.outvars)
        self.own_outputs = made.intersection(found)
        self.stacked = {leaf.path for leaf in leaves if leaf.num_layers is not None}
        trainable = {leaf.path for leaf in leaves if leaf.is_trainable}
        self.trainable = {v for v, a in arrays.items() if a.path in trainable}
        self.active = _active(self.graph, self.trainable)

    def build(self, cuts: Sequence[int]) -> Segmented:
        drafts = self.draft(cuts)
        if self.is_trained:
            self.adopt_unused(drafts)
        names = _unique_names([self.title(d) for d in drafts])
        value_names = dict(self.source.batch)
        value_names.update({v: f"const/{i}" for i, v in enumerate(self.graph.consts)})
        value_names.update({v: f"experts/{i}" for i, v in enumerate(self.tables)})
        value_names.update(slot_names(self.graph))
        # Before and after it is overwritten, a cache is the same array.
        for draft in drafts:
            value_names |= {new: value_names[old] for old, new in draft.caches.items()}
        caches = [value_names[old] for draft in drafts for old in draft.caches]
        for name, draft in zip(names, drafts, strict=True):
            fresh = [v for v in draft.outputs if not isinstance(v, Literal)]
            for i, v in enumerate(v for v in fresh if v not in value_names):
                value_names[v] = f"{name}.{i}"
        last = drafts[-1]
        shared = share([self.piece(d, self.is_trained and d is last) for d in drafts])
        bodies = {id(s.body): None for s in shared}
        numbers = {b: i for i, b in enumerate(bodies)}
        segments = tuple(
            self.spec(name, draft, value_names, numbers[id(s.body)])
            for name, draft, s in zip(names, drafts, shared, strict=True)
        )
        # Outputs that no other segment makes are named by their position, since such
        # an output may be a literal or an input and appear more than once.
        values = {n: array_spec(v.aval) for v, n in value_names.items()}
        new = {v for draft in drafts for v in draft.caches.values()}
        returned = {
            i: a
            for i, a in enumerate(self.graph.outvars)
            if not (_is_variable(a) and a in new)
        }
        outputs = tuple(
            value_names[a] if self.is_own(a) else f"out/{i}"
            for i, a in returned.items()
        )
        pairs = zip(outputs, returned.values(), strict=True)
        finals = {name: atom for name, atom in pairs if not self.is_own(atom)}
        values.update({name: array_spec(a.aval) for name, a in finals.items()})
        own = [value_names[a] for a in last.outputs if self.is_own(a)]
        named = replace(segments[-1], outputs=(*own, *finals))
        segments = (*segments[:-1], named)
        program = Program(
            leaves=self.leaves,
            segments=segments,
            values=values,
            batch=tuple(n for n in self.source.batch.values() if n not in caches),
            consts=tuple(value_names[v] for v in self.graph.consts),
            outputs=outputs,
            is_trained=self.is_trained,
            caches=tuple(caches),
            chosen=self.chosen(drafts, value_names),
        )
        consts = {value_names[v]: to_words(x) for v, x in self.graph.consts.items()}
        return Segmented(program, tuple(shared), consts, self.source.structure)

    def draft(self, cuts: Sequence[int]) -> list[_Draft]:
        """The segments between the cuts, as drafts in program order.

        The last one also returns the outputs of the program that no segment returns as
        it computes them; see `is_own`.
        """
        pairs = zip(cuts, cuts[1:], strict=False)
        ranges = [self.order.anchored[a:b] for a, b in pairs if b > a] or [()]
        finals = [a for a in self.graph.outvars if not self.is_own(a)]
        drafts = [self.gather(equations, ()) for equations in ranges[:-1]]
        drafts.append(self.gather(ranges[-1], finals))
        self.assign_caches(drafts)
        new = {v for draft in drafts for v in draft.caches.values()}
        self.own_outputs -= new
        needed: set[Var] = set(self.own_outputs)
        for draft in reversed(drafts):
            defined = [v for e in draft.equations for v in e.outvars]
            draft.outputs = [v for v in defined if v in needed] + draft.outputs
            needed.update(v for v in draft.inputs if v not in new)
        return drafts

    def assign_caches(self, drafts: list[_Draft]) -> None:
        """Gives each cache to the segment that can overwrite it.

        The segment reads it and makes what replaces it, and no later segment reads the
        old content. Later segments may read the new content from the same array.
        """
        variables_of = {name: v for v, name in self.source.batch.items()}
        returned = self.graph.outvars
        for name, position in self.given_caches.items():
            old, new = variables_of[name], returned[position]
            if not _is_variable(new) or returned.count(new) > 1:
                continue
            makers = [d for d in drafts if any(new in e.outvars for e in d.equations)]
            is_same = array_spec(old.aval) == array_spec(new.aval)
            if (
                new not in self.own_outputs
                or not is_same
                or old not in makers[0].inputs
            ):
                continue
            (maker,) = makers
            later = drafts[drafts.index(maker) + 1 :]
            if all(old not in draft.inputs for draft in later):
                maker.caches[old] = new
                maker.inputs.remove(old)

    def chosen(
        self, drafts: Sequence[_Draft], value_names: Mapping[Var, str]
    ) -> tuple[Chosen, ...]:
        """The experts that each segment reads from slots."""
        found = []
        for k, draft in enumerate(drafts):
            for equation in draft.equations:
                if (own := slots_of(equation)) is None:
                    continue
                table, *slots = own
                paths = self.tables[table]
                made = Chosen(
                    segment=k,
                    arrays=tuple(ArrayId(Role.PARAM, path) for path in paths),
                    slots=tuple(value_names[v] for v in slots),
                    choice=value_names[equation.invars[0]],
                    table=value_names[table],
                    num_tokens=equation.invars[0].aval.shape[0],
                    k=equation.invars[0].aval.shape[1],
                    num_experts=table.aval.shape[0],
                    num_slots=slots[0].aval.shape[0],
                    num_sharing=0,
                )
                found.append(made)
        sharing: Counter = Counter()
        for made in found:
            sharing[made.slots] += made.num_experts
        return tuple(replace(x, num_sharing=sharing[x.slots]) for x in found)

    def is_own(self, atom: Atom) -> bool:
        """Whether an atom is an output that the segment computing it returns."""
        return _is_variable(atom) and atom in self.own_outputs

    def gather(self, anchored: Sequence[Equation], finals: Sequence[Atom]) -> _Draft:
        """A draft of these equations and the floating equations that they read."""
        equations: list[Equation] = []
        defined: set[Var] = set()
        params: dict[Var, None] = {}
        inputs: dict[Var, None] = {}
        placed: set[int] = set()

        def need(atoms: Sequence[Atom]) -> None:
            positions, roots = self.order.closure(atoms)
            for v in roots:
                if v in self.arrays:
                    params[v] = None
                elif v not in defined:
                    inputs[v] = None
            for position in positions:
                if position not in placed:
                    placed.add(position)
                    equations.append(self.graph.equations[position])

        for equation in anchored:
            need(equation.invars)
            equations.append(equation)
            defined.update(equation.outvars)
        need(finals)
        return _Draft(equations, list(params), list(inputs), list(finals))

    def adopt_unused(self, drafts: list[_Draft]) -> None:
        """Gives trainable arrays without a gradient path to the last segment.

        The loss does not depend on them, so their gradient is zero, as `jax.grad` says;
        the optimizer still decays and counts them.
        """
        covered = {v for d in drafts[:-1] if self.has_backward(d) for v in d.params}
        covered.update(drafts[-1].params)
        missing = [v for v in self.arrays if v in self.trainable and v not in covered]
        drafts[-1].params += missing

    def has_backward(self, draft: _Draft) -> bool:
        return any(v in self.active for v in variables(draft.outputs))

    def piece(self, draft: _Draft, is_last: bool) -> Piece:
        tags = (
            is_last,
            len(draft.caches),
            tuple(v in self.trainable for v in draft.params),
            tuple(v in self.active for v in draft.inputs),
            tuple(a in self.active for a in draft.outputs if _is_variable(a)),
        )
        invars = (*draft.params, *draft.inputs, *draft.caches)
        outvars = (*draft.outputs, *draft.caches.values())
        differentiated = frozenset(self.trainable.intersection(draft.params))
        differentiated |= self.active.intersection(draft.inputs)
        equations = tuple(draft.equations)
        return Piece(invars, outvars, equations, tags, differentiated)

    def spec(
        self, name: str, draft: _Draft, value_names: dict[Var, str], body: int
    ) -> SegmentSpec:
        outputs = variables(draft.outputs)
        return SegmentSpec(
            name=name,
            params=tuple(self.arrays[v] for v in draft.params),
            trainable=tuple(v in self.trainable for v in draft.params),
            inputs=tuple(value_names[v] for v in draft.inputs),
            outputs=tuple(value_names[v] for v in outputs),
            active_inputs=tuple(
                value_names[v] for v in draft.inputs if v in self.active
            ),
            active_outputs=tuple(value_names[v] for v in outputs if v in self.active),
            body=body,
            flops=sum(map(equation_flops, draft.equations)),
            caches=tuple(value_names[v] for v in draft.caches),
        )

    def title(self, draft: _Draft) -> str:
        """The common part of its parameters' paths: "blocks/3", or "blocks[3]".

        A segment of one tile has its name: "mlp/kernel[0:512]".
        """
        arrays = [self.arrays[v] for v in draft.params]
        tiles = [a for a in arrays if a.rows and a.path not in self.stacked]
        if len(tiles) == 1:
            return str(tiles[0]).removeprefix(f"{tiles[0].kind}/")
        rows = {a.rows for a in arrays if a.rows}
        if len(rows) == 1:
            arrays = [a for a in arrays if a.rows]
        parents = [a.path.split("/")[:-1] for a in arrays]
        common = commonprefix(parents) or (parents or [[]])[0][:1]
        row = f"[{min(rows)[0]}]" if len(rows) == 1 else ""
        return ("/".join(common) or "segment") + row


def _is_variable(atom: Atom) -> bool:
    return not isinstance(atom, Literal)


def _active(graph: Graph, trainable: Collection[Var]) -> set[Var]:
    """Floating-point values on a path from a trainable parameter to the loss.

    All values of the path are real or complex: a value that reaches the loss only
    through integers (an `argmax`, a choice of expert) has no cotangent.
    """
    depends = set(trainable)
    for equation in graph.equations:
        if not depends.isdisjoint(variables(equation.invars)):
            depends.update(
                v for v in equation.outvars if jnp.issubdtype(v.aval.dtype, jnp.inexact)
            )
    influences = set(variables(graph.outvars[:1]))
    for equation in reversed(graph.equations):
        if any(v in influences and v in depends for v in equation.outvars):
            influences.update(variables(equation.invars))
    return depends & influences


def _unique_names(titles: Sequence[str]) -> list[str]:
    names = []
    for i, title in enumerate(titles):
        twice = titles.count(title) > 1
        names.append(f"{title}.{titles[:i].count(title)}" if twice else title)
    return names
