"""The engine: wires a planner, its plans and the stores into training steps."""

import json
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from hashlib import sha256
from html import escape
from os import PathLike
from pathlib import Path
from time import perf_counter
from typing import Any, Self
from weakref import WeakSet, finalize

import jax
import numpy as np

from zinf.checkpoint import read_arrays, write_arrays
from zinf.executor.run import StepRecord
from zinf.executor.runner import AbstractRunner
from zinf.executor.runners import make_runner, switch
from zinf.memory import Residents, Stores, close_when_dropped
from zinf.optim.decision import MIXED
from zinf.plan import Plan
from zinf.prepare.batch import check_values, signature, with_shapes_before
from zinf.prepare.planner import Planner
from zinf.session.condition import Condition
from zinf.session.metrics import step_metrics
from zinf.session.named import GRADIENT, MASTER, check_path, read_named, writes_of
from zinf.session.pending_save import PendingSave
from zinf.session.random_key import key_from_json, key_to_json, step_keys
from zinf.session.scalars import Scalars
from zinf.session.state import (
    initialize_arrays,
    make_residents,
    make_stores,
    read_leaf,
    write_model_state,
)
from zinf.session.turn import Turn

logger = logging.getLogger(__name__)
_ENGINES: WeakSet["Engine"] = WeakSet()


class Engine:
    """Training steps on state that rests on up to three tiers.

    One thread at a time uses an engine: a call while another one runs raises
    `ConcurrentUseError` and touches nothing.

    `close` gives back memory, threads and the NVMe folder. So does leaving a block
    `with zinf.initialize(...) as engine:`, and so does dropping the last reference to
    an engine, soon after; what was read through `stores` or `residents` ends then.

    Attributes:
        num_steps: steps taken, skipped ones included.
        last_step: what the latest step moved, and when each instruction ran.
    """

    stores: Stores
    _residents: Residents
    _closing: finalize

    def __init__(self, planner: Planner, rng: jax.Array | None):
        # Nothing that the engine keeps may refer back to it, or it would stay until
        # garbage is collected when it is dropped.
        self.planner, self.config, self.rng = planner, planner.config, rng
        self._pending_save = PendingSave()
        self._turn = Turn(planner.problem.modes)
        self.last_step = StepRecord()
        self._scalars = Scalars(planner.separated, self.config.loss_scaling)
        self._runners: dict[tuple, AbstractRunner] = {}
        self._current: AbstractRunner | None = None
        self._restore_from: tuple[Path, bool] | None = None
        self._condition = Condition()
        self._has_warned = False
        _ENGINES.add(self)

    @property
    def num_steps(self) -> int:
        return self._scalars.num_steps

    @property
    def pending_save(self) -> Future[None] | None:
        """A save that still reads arrays; fused steps wait for it (`Holds`)."""
        return self._pending_save.future

    @pending_save.setter
    def pending_save(self, save: Future[None] | None) -> None:
        self._pending_save.future = save

    @property
    def residents(self) -> Residents:
        """Every persistent array by `ArrayId`, with no update due.

        Writing a master here leaves its compute copy as it was; `set` writes both.
        """
        with self._turn.of("residents"):
            return self._current_residents()

    @property
    def is_placed(self) -> bool:
        """True once a batch was given, and so every array has its place."""
        return self._current is not None

    @property
    def plan(self) -> Plan:
        """For the latest batch; `print` shows every transfer."""
        if self._current is None:
            raise ValueError(
                "The plan depends on the shape of the batch, and none was given yet. "
                "Pass batch= to zinf.initialize, or take a step first."
            )
        return self._current.plan

    def step(self, batch: Any) -> dict[str, Any]:
        """One optimizer step on a batch; returns its metrics.

        The batch is a pytree of arrays that share a leading dim, which is cut into
        `gradient_accumulation_steps` microbatches. Metrics: `step` (from 1), `loss`,
        `grad_norm` (before clipping), `learning_rate` (None if the optimizer does not
        say), `step_seconds`, `tokens_per_second`, peaks `device_bytes`, `host_bytes`,
        `nvme_bytes`, traffic `nvme_read_bytes`, `nvme_write_bytes`, `h2d_bytes`,
        `d2h_bytes`, `skipped`, with fp16 `loss_scale`, and `aux` if the loss has it
        (with a leading microbatch dim if there are several).

        Raises:
            NonFiniteError: nothing was updated, unless the message says so.
            KeyboardInterrupt: after the step was completed and counted.
            ConcurrentUseError: another call to this engine is running; nothing was
                touched. So do all other methods.
        """
        with self._turn.of("step"):
            return self._step(batch)

    def evaluate(self, batch: Any) -> float:
        """The mean loss of a batch, of a shape that `step` takes; changes nothing.

        Computes `eval_loss_fn` if `zinf.initialize` was given one, otherwise `loss_fn`,
        with `train=False` if it takes that. A loss that takes neither is computed as in
        training, with the random key of the next step: then dropout is on, and a
        warning says so once.
        """
        with self._turn.of("evaluate"):
            self._condition.check()
            check_values(batch)
            self._warn_of_randomness()
            runner = self._prepare(batch)
            self._flush()
            return runner.evaluate(batch, self._keys())

    def flush(self) -> None:
        """Does the updates that the last step left to the next one, if there are any.

        `params`, `evaluate`, `save` and `residents` do so first.
        """
        with self._turn.of("flush"):
            self._flush()

    def params(self) -> Any:
        """The whole parameter pytree, in the precision it is kept in, on the host."""
        with self._turn.of("params"):
            return self._read_params()

    def model_state(self) -> Any:
        """The model state pytree as the last step left it (None if there is none)."""
        with self._turn.of("model_state"):
            return self._read_model_state()

    def get(self, path: str, kind: str = MASTER) -> Any:
        """A copy of one whole array on the host, such as `engine.get("layers/0/w")`.

        Of several processes all have to call. What a step left to the next one is done
        first, unless the gradient is asked for.

        Args:
            path: the key path of a leaf of the parameters, joined by "/"; of the model
                state, "model_state/" and the key path.
            kind: "master", in the precision that it is kept in; "compute", as the loss
                reads it; a name of optax's state, such as "mu" or "nu"; or "gradient":
                of the last step, before clipping, as long as its update is due. That
                depends on the plan; `gradient_clipping` leaves most updates to the next
                step of a plan that is streamed.

        Returns:
            an np.ndarray; of a leaf that is a random key, the key.

        Raises:
            ValueError: the leaf or kind is unknown, the gradient is not kept, or there
                was no batch yet.
        """
        with self._turn.of("get"):
            self._condition.check()
            if kind == GRADIENT:
                return self._gradient(path)
            check_path(self.planner, path)
            return read_named(self.planner, self._current_residents(), path, kind)

    def set(self, path: str, value: Any, kind: str = MASTER) -> None:
        """Replaces one whole array, on whatever tiers it rests.

        Setting the master sets the compute copy as well. Updates that a step left to
        the next one are done first. Of several processes all have to call, with one
        value.

        Args:
            path: as for `get`.
            value: of the shape of the array; it is cast to the array's dtype.
            kind: "master", or a name of optax's state.

        Raises:
            ValueError: the leaf, kind, shape or sort of number does not fit, or there
                was no batch yet. Nothing was set.
        """
        with self._turn.of("set"):
            self._condition.check()
            residents = self._current_residents()
            writes = writes_of(self.planner, residents, path, value, kind)
            for array, content in writes.items():
                digest = sha256(np.ascontiguousarray(content).tobytes()).hexdigest()
                self.planner.group.agree({f"engine.set, {array}": digest})
            record = StepRecord()
            with self._condition.updating(f"Setting {path!r}", record):
                record.is_mixed = True
                for array, content in writes.items():
                    residents.write(array, content)

    def save(self, directory: str | PathLike) -> None:
        """Saves all state in a new folder; what is on nvme is linked, not copied."""
        with self._turn.of("save"):
            self._condition.check()
            assert self.plan, "there is no state before there is a plan"
            meet = partial(self.planner.group.barrier, timeout=None)
            residents, scalars = self._current_residents(), self._all_scalars()
            write_arrays(Path(directory), residents, scalars, barrier=meet)

    def restore(self, directory: str | PathLike, *, verify: bool = True) -> None:
        """Takes all state from a folder that `save` wrote, whatever its placement was.

        Done when the first batch is known. `verify`: compare it with its checksums.
        """
        with self._turn.of("restore"):
            if not self.is_placed:
                self._condition.check()
                self._restore_from = Path(directory), verify
                return
            self._pending_save.wait()
            self._read_state(Path(directory), verify)

    def scalars(self) -> dict[str, Any]:
        """Everything but arrays that a resumed run needs, as JSON."""
        with self._turn.of("scalars"):
            return self._all_scalars()

    def set_scalars(self, scalars: Mapping[str, Any]) -> None:
        """Takes what `scalars` gave, the random key included.

        Whoever restores calls this before overwriting the arrays: it refuses the state
        of another run, and ends that of a step that failed half-way.
        """
        with self._turn.of("set_scalars"):
            self._take_scalars(scalars)

    def before_update(self) -> None:
        """Waits for a save that still reads the arrays."""
        self._pending_save.wait()

    def close(self) -> None:
        """Frees every tier; files on nvme are scratch and go with the next run.

        A save under way is waited for. Closing once more does nothing.
        """
        with self._turn.of("close"):
            self._condition.end(
                "This engine was closed. Make another: zinf.initialize."
            )
            if self.is_placed:
                self._pending_save.close(self.stores)
                self._closing.detach()
                self._runners.clear()
                self._current = None

    def __repr__(self) -> str:
        return f"<Engine: {self._brief()}>"

    def _repr_html_(self) -> str:
        """In a notebook: how far it is, and what its plan comes to."""
        current = self._current
        brief, tables = self._brief(), ""
        if current is not None:
            # The tables begin with what the plan says of itself in a line.
            brief = brief.removesuffix(f"; {current.plan!r}")
            tables = current.plan._repr_html_()
        return f"<p><b>Engine</b>: {escape(brief)}</p>{tables}"

    def _brief(self) -> str:
        """How far the engine is, in one line; asked also while a step runs."""
        taken = f"{self.num_steps} step{'s' * (self.num_steps != 1)} taken"
        if self._condition.refusal is not None:
            return f"{taken}; {self._condition.refusal}"
        current = self._current
        if current is None:
            return f"{taken}; it is planned when the first batch is known"
        return f"{taken}; {current.plan!r}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def prepare(self, batch: Any) -> AbstractRunner:
        """Plans for the shape of a batch, if it is new; the first one places all state.

        Raises:
            InfeasibleError: this shape does not fit beside what is placed already.
        """
        with self._turn.of("prepare"):
            self.planner.check_batch(batch)
            return self._prepare(batch)

    def initialize_state(self) -> None:
        """Gives every array its initial value, at its home.

        Raises:
            ValueError: another process begins with other values, and no restore is to
                replace them.
        """
        digests = initialize_arrays(self.planner, self._residents)
        for name, value in self._all_scalars().items():
            digests.add_text(name, json.dumps(value))
        if self._restore_from is None:
            digests.agree()

    # What runs in the turn of a call above.

    def _step(self, batch: Any) -> dict[str, Any]:
        start = perf_counter()
        self._condition.check()
        check_values(batch)
        self.planner.check_batch(batch)
        runner = self._prepare(batch)
        self.stores.reset_peaks()
        record = self.last_step = StepRecord()
        advance = self._scalars.advance()
        with self._condition.updating(f"Step {self.num_steps + 1}", record):
            outcome = runner.step(
                batch,
                self._keys(),
                advance=advance,
                loss_scale=self._scalars.loss_scale,
                record=record,
            )
            if self.planner.problem.state_paths and not outcome.skips:
                write_model_state(self._residents, self.planner, outcome, record)
        seconds = perf_counter() - start
        metrics = step_metrics(
            outcome, runner, self._scalars, self.stores, advance.after, seconds
        )
        self._scalars.commit(advance.after, skipped=outcome.skips)
        if outcome.interrupted:
            raise KeyboardInterrupt
        return metrics

    def _gradient(self, path: str) -> np.ndarray:
        check_path(self.planner, path)
        found = None
        if self._current is not None:
            found = self._current.gradient(self.planner, path)
        if found is None:
            raise ValueError(
                f"The gradient of {path!r} is not kept: there was no step, or its "
                "update has run, and no array is left for it. Return it from loss_fn "
                "as an auxiliary output, or set gradient_clipping in a config that "
                "streams, which leaves most updates to the next step."
            )
        return found

    def _warn_of_randomness(self) -> None:
        is_training_loss = self.planner.problem.evaluation_loss is None
        if self.rng is not None and is_training_loss and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "evaluate computes the loss of training, with its random key: with "
                "dropout, if the loss has it. Give zinf.initialize an eval_loss_fn=, "
                "or a loss_fn with a parameter `train`, to evaluate without."
            )

    def _flush(self) -> None:
        if self._current is not None:
            record = StepRecord()
            with self._condition.updating("What a step left to do", record):
                self._current.flush(record)

    def _current_residents(self) -> Residents:
        if self._current is None:
            raise ValueError(
                "Arrays have their places when the first batch is known, and none was "
                "given yet. Pass batch= to zinf.initialize, or take a step first."
            )
        self._flush()
        return self._residents

    def _prepare(self, batch: Any) -> AbstractRunner:
        shape = signature(batch)
        if self._runners.get(shape) is not self._current:
            self._flush()
        if shape not in self._runners:
            spec = self.planner.batch_spec(batch)
            homes = self._residents.homes if self.is_placed else None
            with with_shapes_before(batch, self._runners):
                made = self.planner.plan(spec, homes)
            if homes is None:
                self._place(made.plan)
            pending = self._pending_save if made.plan.is_fused else PendingSave()
            rest = self.planner, self.stores, spec, pending.wait
            self._runners[shape] = make_runner(made, *rest)
        self._current = switch(self._current, self._runners[shape])
        return self._current

    def _place(self, plan: Plan) -> None:
        stores = make_stores(plan, self.config, self.planner.rule.mesh)
        close = self._pending_save.close
        self.stores, self._closing = stores, close_when_dropped(self, close, stores)
        try:
            self._residents = make_residents(self.stores, self.planner, plan)
            self.initialize_state()
            if self._restore_from is not None:
                self._read_state(*self._restore_from)
        except BaseException:
            self.stores.close()
            self._closing.detach()
            raise

    def _read_state(self, directory: Path, verify: bool) -> None:
        def take(scalars: Mapping[str, Any]) -> None:
            self._take_scalars(scalars)
            self._condition.end(f"A restore failed half-way. {MIXED}")
            if self._current is not None:
                self._current.drop_pending()

        read_arrays(directory, self._residents, take_scalars=take, verify=verify)
        self._condition.mend()

    def _all_scalars(self) -> dict[str, Any]:
        return {**self._scalars.to_json(), "rng": key_to_json(self.rng)}

    def _take_scalars(self, scalars: Mapping[str, Any]) -> None:
        rng = key_from_json(scalars.get("rng"), self.rng)
        self._scalars.from_json(scalars)
        self.rng = rng
        self._condition.mend()

    def _read_params(self) -> Any:
        return self.planner.problem.restore_tree(self._reader())

    def _read_model_state(self) -> Any:
        return self.planner.problem.restore_state(self._reader())

    def _keys(self) -> list[jax.Array]:
        return step_keys(self.rng, self.num_steps, self.config.num_microbatches)

    def _reader(self) -> Callable[[str], np.ndarray]:
        """What reads a leaf by its path; before the first batch, its initial value."""
        self._condition.check()
        if self.is_placed:
            residents = self._current_residents()
            return partial(read_leaf, residents, self.planner.problem)
        return dict(self.planner.initial_leaves()).__getitem__


def close_all() -> int:
    """Closes every engine of this process that holds anything, and counts them.

    For notebooks: after an error, the traceback that is kept refers to the engine, also
    when no name does any more.

    Raises:
        ConcurrentUseError: one is inside a call, in another thread.
    """
    placed = [engine for engine in _ENGINES if engine.is_placed]
    for engine in placed:
        engine.close()
    return len(placed)
