"""Splits an optax transform into one update for each parameter leaf.

The jaxpr of `tx.update` shows which gradients every output depends on. A transform is
separable when no update and no state array depends on two leaves; then the equations
behind one leaf's update and state are a program of their own, which runs wherever that
leaf's state lives and needs nothing else in memory.

State that depends on no leaf (step counts, schedules, injected hyperparameters, values
made from the loss) is *shared*. It advances once per step, together with the *step
values*: the few numbers, such as the learning rate of this step, that leaf updates
read. They are computed once and not in every update, so that all leaves and all blocks
see the same bits.
"""

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from zinf.core.jaxpr import Graph, Piece, Shared, abstract, share
from zinf.core.jaxpr.compat import Var
from zinf.core.jaxpr.slice import Slicer, merge_equal
from zinf.core.optim.apart import NormGroups
from zinf.core.optim.coupling import dependencies
from zinf.core.optim.elementwise import at_shape, is_elementwise
from zinf.core.optim.ownership import Ownership, find_owners
from zinf.core.optim.rate import rate_of
from zinf.core.optim.transform import Transform, trace_transform
from zinf.core.program import ArrayId, Role, Rows


@dataclass(frozen=True)
class State:
    """A state array of a leaf; `slot` counts those of the leaf in optax's order.

    `is_average`: it is an average of the leaf (`zinf.with_ema`).
    """

    slot: int
    spec: jax.ShapeDtypeStruct
    optax_path: str
    is_average: bool = False

    def array(self, path: str, rows: Rows = None) -> ArrayId:
        """Its name, of the leaf `path` or of rows of it."""
        return ArrayId(Role.STATE, path, rows, slot=self.slot)


@dataclass(frozen=True)
class LeafUpdate:
    """How one trainable leaf is updated.

    Attributes:
        spec: shape and dtype of the master parameter.
        is_elementwise: the update may run on blocks of rows; all states have the
            leaf's shape, and those of a block the block's.
        step_values: which of the step values the update reads, in argument order.
    """

    path: str
    spec: jax.ShapeDtypeStruct
    states: tuple[State, ...]
    is_elementwise: bool
    step_values: tuple[int, ...]

    def named_states(self) -> dict[str, State]:
        """Its state arrays by optax's names, such as "mu".

        If several have the same name, their names are their paths in optax's tree, such
        as "0/trace".
        """
        paths = [s.optax_path.removesuffix(f"/{self.path}") for s in self.states]
        short = Counter(path.rpartition("/")[2] for path in paths)
        named = {}
        for path, state in zip(paths, self.states, strict=True):
            last = path.rpartition("/")[2]
            named[last if short[last] == 1 else path] = state
        return named


@dataclass(frozen=True)
class SharedState:
    """State that depends on no gradient, with its initial value."""

    optax_path: str
    value: np.ndarray


@dataclass(frozen=True)
class Separated:
    """A transform as one update per leaf, in the order of the parameter tree.

    Attributes:
        clip_bounds: the updates take gradients that are clipped by these global norms,
            one after the other (`core.optim.Clipping`).
        reads_loss: shared state or step values are made from the loss of the step.
        norm_groups: leaves that are clipped apart: step values are made from the norms
            of their gradients.
        rate: the learning rate by the number of updates done, if it is known.
        replaces: what the transform returns for a leaf is its new value, and not what
            is added to it.
    """

    leaves: tuple[LeafUpdate, ...]
    shared: tuple[SharedState, ...]
    clip_bounds: tuple[float, ...]
    reads_loss: bool
    norm_groups: NormGroups
    step: Graph = field(repr=False)
    inits: tuple[Graph, ...] = field(repr=False)
    updates: tuple[Piece, ...] = field(repr=False)
    rate: Callable[[Any], Any] | None = field(default=None, repr=False)
    replaces: bool = False

    @property
    def reads_step(self) -> bool:
        """Whether step values are known only after the backward pass of the step."""
        return self.reads_loss or bool(self.norm_groups)

    def advance(
        self, shared: Sequence[Any], loss: Any = None, norms: Sequence[Any] = ()
    ) -> tuple[list[Any], list[Any]]:
        """`(new shared state, step values)` of one step; traceable.

        Args:
            loss: float32 scalar, the mean over the batch; only if `reads_loss`.
            norms: float32 scalars, of the gradients of each of `norm_groups`, as their
                updates take them.
        """
        results = self.step(*shared, *((loss,) if self.reads_loss else ()), *norms)
        return results[: len(self.shared)], results[len(self.shared) :]

    def averages(self) -> dict[str, dict[str, State]]:
        """The averages of weights (`zinf.with_ema`) by name, such as "ema", and path.

        A leaf that has no average is absent.
        """
        found: dict[str, dict[str, State]] = {}
        for leaf in self.leaves:
            for name, state in leaf.named_states().items():
                if state.is_average:
                    found.setdefault(name, {})[leaf.path] = state
        return found

    @property
    def shared_specs(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        return tuple(abstract(state.value) for state in self.shared)

    @property
    def step_value_specs(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        outvars = self.step.outvars[len(self.shared) :]
        return tuple(abstract(a.aval) for a in outvars)

    def bodies(self, blocks: Sequence[tuple[int, tuple[int, ...]]]) -> list[Shared]:
        """The update code of `(leaf, block shape)` pairs; equal ones share a body.

        A body takes `(grad, master, *states, *step_values, *hoisted)` and gives
        `(update, *new_states)`; `step_values` are those that the leaf names.

        Raises:
            ValueError: a block of a leaf whose update is not element-wise.
        """
        wanted = tuple(blocks)
        if wanted not in self._bodies:
            pieces = [self._at_block(self.updates, i, b) for i, b in wanted]
            self._bodies[wanted] = share(pieces)
        return self._bodies[wanted]

    # Updates on devices, on the host and in place have the same blocks on one device,
    # and comparing the pieces of thousands takes seconds.
    @cached_property
    def _bodies(self) -> dict[tuple[tuple[int, tuple[int, ...]], ...], list[Shared]]:
        return {}

    def init_state(
        self, leaf: int, param: Any, *, device: jax.Device | None = None
    ) -> list[jax.Array]:
        """The initial state of a leaf, or of a block of it, given that block.

        Returns:
            New arrays on `device` (jax's default for `None`), in the order of
            `states`; none of them shares memory with a NumPy `param`.
        """
        graph = self._at_block(self.inits, leaf, param.shape)
        with jax.default_device(device):
            # Most initial states are zeros: do not copy a parameter that init does not
            # read.
            param = jnp.array(param) if graph.used_invars() else param
            return [jnp.asarray(x) for x in graph(param)]

    def _at_block(self, programs: Sequence[Any], leaf: int, block: Any) -> Any:
        shape, block = self.leaves[leaf].spec.shape, tuple(block)
        if block != shape and not self.leaves[leaf].is_elementwise:
            raise ValueError(
                f"The update of {self.leaves[leaf].path!r} is not element-wise, so it "
                f"needs the whole leaf {shape}, not a block {block}."
            )
        return at_shape(programs[leaf], shape=shape, block=block)


def separate(
    tx: optax.GradientTransformation,
    params: Any,
    *,
    trainable: Collection[str] | None = None,
) -> Separated:
    """Separates a transform by parameter leaf.

    Args:
        tx: any transform whose update of a leaf depends on that leaf, the loss (which
            it gets as `value=`) and the norms by which `optax.clip_by_global_norm`
            clips the gradients of all leaves or of some.
        params: the whole parameter tree, abstract or not, with the dtypes in which
            parameters are updated (those of the masters).
        trainable: key paths of the leaves that take part ("blocks/0/mlp/kernel");
            `None` for all. To `tx` the others are `optax.MaskedNode()`, exactly as
            inside `optax.masked`: masks and labels given as trees keep the structure
            of the whole tree (or a prefix of it), and those given as functions see
            the tree with the masked nodes in it.

    Raises:
        ValueError: the transform couples leaves, or accumulates gradients (the message
            names the config key for it), needs arguments beyond gradients, state,
            parameters and `value`, or changes the dtype of its state.
    """
    traced = trace_transform(tx, params, trainable)
    ownership = find_owners(traced)
    update = merge_equal(traced.update, ownership.leaf_bits)
    pieces, step_values = _cut_updates(traced, update, ownership)
    inits = _cut_inits(traced, ownership)
    leaves = []
    for i, (path, spec) in enumerate(traced.leaves.items()):
        own = ownership.of_leaf[i]
        states = [
            State(n, traced.states[k][1], traced.states[k][0], k in traced.averages)
            for n, k in enumerate(own)
        ]
        num_arrays = 2 + len(own)
        blockwise = is_elementwise(
            inits[i], shape=spec.shape, num_arrays=1
        ) and is_elementwise(pieces[i], shape=spec.shape, num_arrays=num_arrays)
        values = tuple(step_values[v] for v in pieces[i].invars[num_arrays:])
        leaves.append(LeafUpdate(path, spec, tuple(states), blockwise, values))
    step = _step(traced, update, ownership, tuple(step_values))
    reads_loss = traced.loss in step.used_invars()
    if not reads_loss:
        invars = tuple(v for v in step.invars if v is not traced.loss)
        step = replace(step, invars=invars)
    return Separated(
        leaves=tuple(leaves),
        shared=_shared_states(traced, ownership),
        clip_bounds=traced.clip_bounds,
        reads_loss=reads_loss,
        norm_groups=traced.norm_groups,
        step=step,
        inits=inits,
        updates=pieces,
        rate=rate_of(tx),
    )


def _cut_updates(
    traced: Transform, update: Graph, ownership: Ownership
) -> tuple[tuple[Piece, ...], dict[Var, int]]:
    """The update of each leaf, and the numbers of the step values that they read."""
    grads, states, masters = traced.update_inputs()
    first_state = len(traced.leaves)
    shared = [states[k] for k in ownership.shared]
    given = (*shared, *traced.of_step)
    cuts = _possible_step_values(update, given, ownership)
    slicer = Slicer(update)
    pieces = []
    step_values: dict[Var, int] = {}
    for i, own in enumerate(ownership.of_leaf):
        numbers = (i, *(first_state + k for k in own))
        outvars = tuple(update.outvars[n] for n in numbers)
        piece = slicer.behind(outvars, stop=cuts)
        values = [v for v in piece.inputs if v in cuts]
        for variable in values:
            step_values.setdefault(variable, len(step_values))
        arrays = grads[i], masters[i], *(states[k] for k in own)
        pieces.append(Piece((*arrays, *values), outvars, piece.equations))
    return tuple(pieces), step_values


def _possible_step_values(
    update: Graph, inputs: Sequence[Var], ownership: Ownership
) -> set[Var]:
    """The possible step values: inputs that belong to no leaf, and scalars from them.

    Larger values that depend on no leaf (noise of a leaf's shape, say) are computed in
    the update, and so are random keys, which cannot leave a program as plain numbers.
    """
    given = {*inputs, *update.consts}
    derived = dependencies(update, dict.fromkeys(given, 1))
    return given | {
        v
        for v in derived
        if v.aval.shape == ()
        and v not in ownership.leaf_bits
        and not jnp.issubdtype(v.aval.dtype, jax.dtypes.prng_key)
    }


def _cut_inits(traced: Transform, ownership: Ownership) -> tuple[Graph, ...]:
    init = traced.init
    slicer = Slicer(init)
    inits = []
    for own, param in zip(ownership.of_leaf, init.invars, strict=True):
        outvars = tuple(init.outvars[k] for k in own)
        piece = slicer.behind(outvars)
        consts = {v: init.consts[v] for v in piece.inputs if v in init.consts}
        inits.append(Graph((param,), outvars, piece.equations, consts))
    return tuple(inits)


def _shared_states(traced: Transform, ownership: Ownership) -> tuple[SharedState, ...]:
    outvars = tuple(traced.init.outvars[k] for k in ownership.shared)
    start = traced.init.needed_for(outvars)
    values = replace(start, invars=())()
    return tuple(
        SharedState(traced.states[k][0], np.asarray(value))
        for k, value in zip(ownership.shared, values, strict=True)
    )


def _step(
    traced: Transform, update: Graph, ownership: Ownership, values: Sequence[Var]
) -> Graph:
    """The program from shared state, loss and norms to new state and step values."""
    _, states, _ = traced.update_inputs()
    new = [update.outvars[len(traced.leaves) + k] for k in ownership.shared]
    step = update.needed_for((*new, *values))
    shared = (states[k] for k in ownership.shared)
    return replace(step, invars=(*shared, *traced.of_step))
