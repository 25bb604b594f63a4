"""Reads weights that are larger than a segment may hold one tile at a time.

Memory-centric tiling (Rajbhandari et al. 2021, "ZeRO-Infinity", section 5.1.3) without
a change to the model: a leaf is cut into tiles of consecutive rows, and every equation
that reads it becomes one for each tile. The results are summed where a matmul contracts
the leaf's rows, and concatenated elsewhere; but the cross entropy of logits is computed
by tile too. The cuts between segments then fall between
tiles, so that a tile is fetched, used and freed before the next one, forward and
backward.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from math import ceil

from zinf.core.jaxpr import Emitter, Graph, renamed
from zinf.core.jaxpr.compat import Atom, Equation, Literal, Var, fresh
from zinf.core.jaxpr.graph import variable_bytes
from zinf.core.program import ArrayId, Role, Tiling
from zinf.core.segment.tile_loss import IN_LOSS, Chain, find_chains, write_losses
from zinf.core.segment.tile_rules import (
    BESIDE,
    Split,
    Untileable,
    follow,
    result_split,
    write,
)


@dataclass(frozen=True)
class Tiled:
    """A program whose large leaves are read by tile.

    Attributes:
        graph: its extra invars are the tiles.
        arrays: what each parameter invar is: an array, or a tile of it.
        tilings: the leaves that were tiled. `refused` has the reason, by path, for
            other leaves that are too large.
    """

    graph: Graph
    arrays: Mapping[Var, ArrayId]
    tilings: tuple[Tiling, ...]
    refused: Mapping[str, str]


def tile_leaves(
    graph: Graph,
    arrays: Mapping[Var, ArrayId],
    *,
    tileable: Collection[str],
    max_bytes: int | None,
) -> Tiled:
    """Cuts the arrays that are larger than `max_bytes` into tiles of at most that.

    Args:
        arrays: the array of each invar of `graph` that is a parameter.
        tileable: paths of leaves whose rows may be fetched and updated separately.
    """
    large = {
        v: a
        for v, a in arrays.items()
        if max_bytes is not None and variable_bytes(v) > max_bytes and v.aval.shape
    }
    if max_bytes is None or not large:
        return Tiled(graph, arrays, (), {})
    refused = {}
    for a in large.values():
        if a.rows is not None:
            refused[a.path] = "it is stacked over layers, and tiles are rows of a leaf"
        elif a.path not in tileable:
            refused[a.path] = (
                "its rows cannot be updated one by one, or are on several devices"
            )
    tilings = {
        v: _cut(v, a.path, max_bytes) for v, a in large.items() if a.path not in refused
    }
    chains = find_chains(graph)
    uses = _uses(graph, tilings, chains, refused)
    tilings = {v: t for v, t in tilings.items() if t.path not in refused}
    if not tilings:
        return Tiled(graph, arrays, (), refused)
    writer = _Writer(tilings, chains)
    outvars = writer.run(graph)
    tiles = {tile: a for v in tilings for tile, a in writer.tiles(v)}
    invars = tuple(v for v in graph.invars if v not in tilings)
    consts = {**graph.consts, **writer.consts}
    tiled = Graph((*invars, *tiles), outvars, tuple(writer.equations), consts)
    kept = {v: a for v, a in arrays.items() if v not in tilings}
    named = tuple(replace(t, uses=tuple(uses[v])) for v, t in tilings.items())
    return Tiled(tiled, kept | tiles, named, refused)


def _cut(variable: Var, path: str, max_bytes: int) -> Tiling:
    """Equal tiles if fewer than twice as many are needed; else the last is smaller."""
    num_rows = variable.aval.shape[0]
    row_bytes = variable_bytes(variable) // num_rows
    least = ceil(num_rows / max(1, max_bytes // row_bytes))
    even = (n for n in range(least, 2 * least) if num_rows % n == 0)
    rows = ceil(num_rows / next(even, least))
    edges = (*range(0, num_rows, rows), num_rows)
    return Tiling(path, variable_bytes(variable), max_bytes, edges)


def _uses(
    graph: Graph,
    tilings: Mapping[Var, Tiling],
    chains: Mapping[Var, Chain],
    refused: dict[str, str],
) -> dict[Var, list[str]]:
    """How each leaf is read by tile; adds leaves that cannot be to `refused`."""
    uses: dict[Var, list[str]] = {v: [] for v in tilings}
    splits = {v: (v, Split(0, t.edges)) for v, t in tilings.items()}
    in_chains: set[Var] = set()
    for equation in graph.equations:
        read = [
            (n, *splits[a])
            for n, a in enumerate(equation.invars)
            if not isinstance(a, Literal) and a in splits
        ]
        try:
            if len(read) > 1:
                raise Untileable(f"`{equation.primitive.name}` reads two such weights")
            if read and not in_chains.isdisjoint(equation.outvars):
                raise Untileable(f"`{equation.primitive.name}` reads it beside logits")
            for number, leaf, split in read:
                chain = _chain_of(equation, number, split, chains)
                if chain is not None:
                    in_chains.update(chain.between)
                    uses[leaf].append(IN_LOSS)
                    continue
                result = follow(equation, number, split)
                if isinstance(result, Split):
                    splits[equation.outvars[0]] = leaf, result
                else:
                    uses[leaf].append(result)
        except Untileable as error:
            for _, leaf, _ in read:
                refused[tilings[leaf].path] = str(error)
                _forget(splits, leaf)
    for v in graph.outvars:
        if not isinstance(v, Literal) and v in splits:
            refused[tilings[splits[v][0]].path] = "it is an output of the loss"
    return uses


def _chain_of(
    equation: Equation, number: int, split: Split, chains: Mapping[Var, Chain]
) -> Chain | None:
    """The chain of a product, if pieces of its operand are words of the logits."""
    chain = chains.get(equation.outvars[0])
    if chain is None or follow(equation, number, split) != BESIDE:
        return None
    last = equation.outvars[0].aval.ndim - 1
    return chain if result_split(equation, number, split).dim == last else None


def _forget(splits: dict[Var, tuple[Var, Split]], leaf: Var) -> None:
    for v in [v for v, (owner, _) in splits.items() if owner is leaf]:
        del splits[v]


class _Writer(Emitter):
    """Rewrites a program so that values from tiled leaves are in pieces."""

    def __init__(self, tilings: Mapping[Var, Tiling], chains: Mapping[Var, Chain]):
        super().__init__()
        self.tilings, self.chains = tilings, chains
        self.pieces: dict[Var, tuple[Split, list[Atom]]] = {}
        for v, tiling in tilings.items():
            sizes = (b - a for a, b in tiling.tiles)
            tiles = [fresh(v.aval.update(shape=(n, *v.aval.shape[1:]))) for n in sizes]
            self.pieces[v] = Split(0, tiling.edges), tiles

    def tiles(self, leaf: Var) -> list[tuple[Var, ArrayId]]:
        """The tiles of a leaf, as invars and as arrays."""
        tiling = self.tilings[leaf]
        arrays = [ArrayId(Role.PARAM, tiling.path, rows) for rows in tiling.tiles]
        return list(zip(self.pieces[leaf][1], arrays, strict=True))

    def run(self, graph: Graph) -> tuple[Atom, ...]:
        """Writes all equations; returns the outputs of the program."""
        env: dict[Var, Atom] = {}

        def there(equation: Equation) -> Equation:
            return equation.replace(invars=renamed(equation.invars, env))

        # Chains are written at their losses, one tile after another.
        waiting: dict[Var, tuple[Chain, int, Split, list[Atom]]] = {}
        skipped: set[Var] = set()
        for equation in graph.equations:
            out, *_ = equation.outvars
            if out in skipped:
                continue
            if out in waiting:
                chain, number, split, pieces = waiting[out]
                mapped = chain.mapped(there)
                env[out] = write_losses(self, mapped, number, split, pieces)
                continue
            numbers = [
                n
                for n, a in enumerate(equation.invars)
                if not isinstance(a, Literal) and a in self.pieces
            ]
            if not numbers:
                results = self.append(there(equation))
                env.update(zip(equation.outvars, results, strict=True))
                continue
            (number,) = numbers
            split, pieces = self.pieces[equation.invars[number]]
            chain = _chain_of(equation, number, split, self.chains)
            if chain is not None:
                waiting[chain.loss.outvars[0]] = chain, number, split, pieces
                skipped.update(chain.between)
                continue
            written = write(self, there(equation), number, split, pieces)
            result = follow(equation, number, split)
            if isinstance(result, Split):
                self.pieces[out] = result, written
            else:
                (env[out],) = written
        return tuple(renamed(graph.outvars, env))
