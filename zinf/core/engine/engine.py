"""The engine: connects a planner, its plans and the stores into training steps."""

import json
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from functools import partial
from hashlib import sha256
from html import escape
from os import PathLike
from time import perf_counter
from typing import Any, Self
from weakref import WeakSet, finalize

import jax
import numpy as np

from zinf.checkpoint import Place, Saved, as_place, read_arrays, write_arrays
from zinf.core.engine.forward_only import ForwardOnly
from zinf.core.engine.metrics import step_metrics
from zinf.core.engine.named import (
    GRADIENT,
    MASTER,
    check_path,
    read_named,
    writes_of,
)
from zinf.core.engine.programs import Programs
from zinf.core.engine.random_key import (
    key_from_json,
    key_to_json,
    step_keys,
)
from zinf.core.engine.recent import SameFunction
from zinf.core.engine.runners import OtherLoss, Runners
from zinf.core.engine.saved_scalars import roles_without_content
from zinf.core.engine.scalars import Scalars
from zinf.core.engine.settled_errors import settle_errors
from zinf.core.engine.state import (
    initialize_arrays,
    make_residents,
    read_leaf,
    set_to_zero,
    write_model_state,
)
from zinf.core.engine.turn import Turn
from zinf.core.engine.verbs import Verbs
from zinf.core.memory import Residents, Stores, close_when_dropped
from zinf.core.optim.decision import MIXED
from zinf.core.plan import Plan
from zinf.core.program import ArrayId, Role
from zinf.core.step.batch import (
    check_values,
)
from zinf.core.step.planner import Planner
from zinf.core.step.prepared import AbstractPrepared
from zinf.core.step.run.calibrate import StepsBesideRates
from zinf.core.step.run.run import StepRecord
from zinf.core.step.run.runner import AbstractRunner
from zinf.distributed import Digests

_ENGINES: WeakSet["Engine"] = WeakSet()


class Engine(ForwardOnly, Verbs):
    """Training steps on state that rests on up to three tiers.

    Only one thread at a time may use an engine. A call while another call runs raises
    `ConcurrentUseError` and changes nothing.

    `close` frees memory, threads and the NVMe folder. The end of a block
    `with zinf.initialize(...) as engine:` closes the engine too. After the last
    reference to an engine is dropped, it is closed soon; then arrays that were read
    through `stores` or `residents` are no longer valid.

    Attributes:
        num_steps: number of steps taken, with skipped steps.
        last_step: the bytes that the latest step moved, and when each instruction ran.
    """

    _closing: finalize

    def __init__(self, planner: Planner, rng: jax.Array | None):
        # No attribute may refer back to the engine: a dropped engine would then keep
        # its tiers until the next garbage collection.
        self.config, self.rng = planner.config, rng
        self._runners = Runners(planner)
        self._condition = self._runners.condition
        # An engine that only runs a model streams its "steps", and not its texts.
        self._programs = Programs(self._runners, self.config.execution)
        self._turn = Turn(planner.problem.modes)
        self.last_step = StepRecord()
        self._scalars = Scalars(
            planner.separated,
            self.config.loss_scaling,
            max_skipped=self.config.skip_nonfinite,
        )
        self._restore_from: tuple[Place, bool] | None = None
        self._has_warned = False
        self._beside_rates = StepsBesideRates()
        _ENGINES.add(self)

    @property
    def num_steps(self) -> int:
        return self._scalars.num_steps

    @property
    def planner(self) -> Planner:
        """Plans the steps, from the user's loss, parameters and config."""
        return self._runners.planner

    @planner.setter
    def planner(self, planner: Planner) -> None:
        self._runners.planner = planner

    @property
    def stores(self) -> Stores:
        """The stores of all tiers; they exist from the first batch on."""
        return self._runners.stores

    @property
    def pending_save(self) -> Future[None] | None:
        """The save that still reads arrays, if any.

        A fused step waits for the whole save; a streamed step waits for each array that
        it changes (`Holds`).
        """
        return self._runners.pending_save.future

    @pending_save.setter
    def pending_save(self, save: Future[None] | None) -> None:
        self._runners.pending_save.future = save

    @property
    def residents(self) -> Residents:
        """Every persistent array by `ArrayId`. Deferred updates are run first.

        Writing a master here does not change its compute copy; `set` writes both.
        """
        with self._turn.of("residents"):
            return self._current_residents()

    @property
    def is_placed(self) -> bool:
        """Whether every array has a home, as it has from the first batch on."""
        return self._runners.current is not None

    @property
    def plan(self) -> Plan:
        """The plan for the shape of the latest batch; `print` shows every transfer."""
        if self._runners.current is None:
            raise ValueError(
                "The plan depends on the shape of the batch, and none was given yet. "
                "Pass batch= to zinf.initialize, or take a step first."
            )
        return self._runners.current.plan

    def step(self, batch: Any) -> dict[str, Any]:
        """Take one optimizer step on a batch and return its metrics.

        With `forward_backward: true` in the config it is `forward_backward` and
        `optim_step`, so it also applies the gradients that wait in sums.

        Args:
            batch: a pytree of arrays with the same leading dim, which is cut into
                `gradient_accumulation_steps` microbatches.

        Returns:
            `step` (from 1), `loss`, `grad_norm` (before clipping), `learning_rate`
            (None if the optimizer does not give it), `step_seconds`, `plan_seconds` of
            which the step waited for its plan, `tokens_per_second` (of a batch without
            rows of integers its samples: then `samples_per_second` is the same); peak
            bytes
            `device_bytes`, `host_bytes`, `nvme_bytes`; bytes moved `nvme_read_bytes`,
            `nvme_write_bytes`, `h2d_bytes`, `d2h_bytes`; `skipped`, and with fp16 or
            `skip_nonfinite` the number of skipped steps, `num_skipped`; with fp16
            `loss_scale`; and `aux` if the loss returns it (with a leading microbatch
            dim if there are several).

        Raises:
            NonFiniteError: a loss or gradient is not finite, and `skip_nonfinite` does
                not let the step be skipped. Nothing was updated, unless the message
                says so.
            KeyboardInterrupt: Ctrl-C was pressed; the step is complete and counted.
            ConcurrentUseError: another call to this engine is running; nothing was
                changed. All other methods raise it too.
        """
        with self._turn.of("step"):
            if self.planner.problem.sums_gradients:
                return self._both(batch)
            return self._step(batch)

    def flush(self) -> None:
        """Run the updates that the last step deferred to the next one, if any.

        `params`, `model_state`, `evaluate`, `apply`, `get`, `set`, `save` and
        `residents` do this first.
        """
        with self._turn.of("flush"):
            self._runners.flush()

    def params(self) -> Any:
        """The whole parameter pytree on the host, with masters where there are any."""
        with self._turn.of("params"):
            return self._read_params()

    def model_state(self) -> Any:
        """The model state pytree after the last step; None if there is none."""
        with self._turn.of("model_state"):
            return self._read_model_state()

    def get(self, path: str, kind: str = MASTER) -> Any:
        """A copy of one whole array on the host, such as `engine.get("layers/0/w")`.

        If there are several processes, all must call it. Deferred updates are run
        first, except for the kind "gradient".

        Args:
            path: the key path of a leaf of the parameters, joined by "/". For a leaf of
                the model state, "model_state/" and its key path.
            kind: "master" is the leaf in the precision that the optimizer updates;
                "compute" is the copy that the loss reads; a name of optax's state is,
                for example, "mu" or "nu", or "ema" (`zinf.with_ema`). "gradient" is the
                gradient of the last step, before clipping. It exists only while its
                update is deferred, which depends on the plan. With `gradient_clipping`,
                streamed plans defer most updates.

        Returns:
            an np.ndarray; for a leaf that is a random key, the key.

        Raises:
            ValueError: the leaf or kind is unknown, the gradient does not exist any
                more, or no batch was given yet.
        """
        with self._turn.of("get"):
            self._condition.check()
            if kind == GRADIENT:
                return self._gradient(path)
            check_path(self.planner, path)
            return read_named(self.planner, self._current_residents(), path, kind)

    def set(self, path: str, value: Any, kind: str = MASTER) -> None:
        """Replace one whole array, on any tiers.

        Setting the master sets the compute copy too. Deferred updates are run first. If
        there are several processes, all must call it with the same value.

        Args:
            path: as for `get`.
            value: has the shape of the array; it is cast to the array's dtype.
            kind: "master", or a name of optax's state.

        Raises:
            ValueError: the leaf, kind, shape or kind of number is wrong, or no batch
                was given yet. Nothing was set.
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

    def save(self, directory: str | PathLike | Place) -> None:
        """Save all state in a new folder, or below a URL such as s3://BUCKET/PREFIX.

        In a folder, files on nvme are linked, not copied.
        """
        with self._turn.of("save"):
            self._condition.check()
            assert self.plan, "there is no state before there is a plan"
            meet = partial(self.planner.group.barrier, timeout=None)
            residents, scalars = self._current_residents(), self._all_scalars()
            write_arrays(directory, residents, scalars, barrier=meet)

    def save_state(self, directory: str | PathLike | Place) -> None:
        """`save`, by the name that Tinker and SkyRL give it."""
        self.save(directory)

    def restore(
        self, directory: str | PathLike | Place, *, verify: bool = True
    ) -> None:
        """Restore all state from what `save` wrote, with any placement.

        Before the first batch, the call only notes the folder; the state is read when
        the first batch is known.

        Args:
            verify: compare what is read with its checksums.
        """
        with self._turn.of("restore"):
            if not self.is_placed:
                self._condition.check()
                self._restore_from = as_place(directory), verify
                return
            self._runners.pending_save.wait()
            self._read_state(as_place(directory), verify)

    def scalars(self) -> dict[str, Any]:
        """The JSON values that a resumed run needs besides the arrays."""
        with self._turn.of("scalars"):
            return self._all_scalars()

    def set_scalars(self, scalars: Mapping[str, Any]) -> None:
        """Restore what `scalars` returned, with the random key.

        A restore must call this before it overwrites the arrays: it refuses the state
        of another run. It also makes an engine usable again whose step failed half-way.
        """
        with self._turn.of("set_scalars"):
            self._take_scalars(scalars)

    def before_update(self) -> None:
        """Wait for a save that still reads the arrays."""
        self._runners.pending_save.wait()

    def close(self) -> None:
        """Free every tier, after a save in progress is complete.

        Files on nvme are scratch; the next run deletes them. Closing again does
        nothing.
        """
        with self._turn.of("close"):
            self._condition.end(
                "This engine was closed. Make another: zinf.initialize."
            )
            if self.is_placed:
                self._runners.close()
                self._closing.detach()
                self._programs.made.clear()

    def __repr__(self) -> str:
        return f"<Engine: {self._brief()}>"

    def _repr_html_(self) -> str:
        """For notebooks: the steps taken, and the tables of the plan."""
        current = self._runners.current
        brief, tables = self._brief(), ""
        if current is not None:
            # The tables begin with what the plan says of itself in a line.
            brief = brief.removesuffix(f"; {current.plan!r}")
            tables = current.plan._repr_html_()
        return f"<p><b>Engine</b>: {escape(brief)}</p>{tables}"

    def _brief(self) -> str:
        """The steps taken and the plan, in one line. Safe to call while a step runs."""
        taken = f"{self.num_steps} step{'s' * (self.num_steps != 1)} taken"
        if self._condition.refusal is not None:
            return f"{taken}; {self._condition.refusal}"
        current = self._runners.current
        if current is None:
            return f"{taken}; it is planned when the first batch is known"
        return f"{taken}; {current.plan!r}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def prepare(self, batch: Any) -> AbstractRunner:
        """Make the plan for the shape of a batch, if the shape is new.

        The first batch places all state.

        Raises:
            InfeasibleError: the shape does not fit the budgets beside the state that is
                already placed.
        """
        with self._turn.of("prepare"):
            self.planner.check_batch(batch)
            return self._runners.prepare(batch, self._place)

    def prepare_ahead(self, batch: Any) -> None:
        """Have the plan for the shape of a coming batch made while steps run.

        The plans are made in a thread, one after another. A batch whose plan is not
        complete waits for it. Errors are raised when the batch comes. If there are
        several processes, the plan is made before this returns, as they must agree.

        Args:
            batch: an example, or its shapes. State must have been placed before, for
                the largest batch best.
        """
        with self._turn.of("prepare_ahead"):
            self._condition.check()
            self.planner.check_batch(batch)
            self._runners.prepare_ahead(batch)

    def initialize_state(self) -> None:
        """Write the initial value of every array to its home.

        Raises:
            ValueError: another process begins with other values, and no restore will
                replace them.
        """
        self._agree(initialize_arrays(self.planner, self._runners.residents))

    # The methods below run within the turn of a public call.

    def _agree(self, digests: Digests) -> None:
        """Compare initial arrays, and scalars, with those of the other processes."""
        for name, value in self._all_scalars().items():
            digests.add_text(name, json.dumps(value))
        if self._restore_from is None:
            digests.agree()

    def _step(self, batch: Any) -> dict[str, Any]:
        start = perf_counter()
        self._condition.check()
        check_values(batch)
        self.planner.check_batch(batch)
        runner = self._runners.prepare(batch, self._place)
        waited = perf_counter() - start
        self._reset_errors()
        self.stores.reset_peaks()
        record = self.last_step = StepRecord(number=self.num_steps)
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
                problem = self.planner.problem
                write_model_state(self._runners.residents, problem, outcome, record)
        self._beside_rates.see(record)
        seconds = perf_counter() - start
        metrics = step_metrics(
            outcome, runner, self._scalars, self.stores, advance.after, seconds, waited
        )
        self._scalars.commit(advance.after, skipped=outcome.skips)
        if outcome.interrupted:
            raise KeyboardInterrupt
        return metrics

    def _reset_errors(self) -> None:
        """Forget, before some steps, what exchanges of gradients lost."""
        every = self.config.zero_optimization.reset_errors_every
        is_due = bool(every and self.num_steps and self.num_steps % every == 0)
        compression = self.planner.rule.compression
        if is_due or (compression is not None and compression.forgets(self.num_steps)):
            set_to_zero(self._runners.residents, Role.ERROR)

    def _other_loss(self, loss: Callable, has_aux: bool) -> OtherLoss:
        return OtherLoss(SameFunction(loss), has_aux, loss)

    def _gradient(self, path: str) -> np.ndarray:
        check_path(self.planner, path)
        found = None
        problem = self.planner.problem
        if self._scalars.num_summed and path in problem.trainable:
            total = problem.params[path].sum
            return np.array(self._current_residents().read(total))
        if self._runners.current is not None:
            found = self._runners.current.gradient(path)
        if found is None:
            raise ValueError(
                f"The gradient of {path!r} is not kept: there was no step, or its "
                "update has run, and no array is left for it. Return it from loss_fn "
                "as an auxiliary output, or set gradient_clipping in a config that "
                "streams, which leaves most updates to the next step."
            )
        return found

    def _current_residents(self) -> Residents:
        self._runners.placed()
        self._runners.flush()
        return self._runners.residents

    def _place(self, made: AbstractPrepared) -> None:
        plan, layouts = made.plan, made.layouts
        stores = made.open_stores(self.planner)
        close = self._runners.pending_save.close
        self._runners.stores = stores
        self._closing = close_when_dropped(self, close, stores)
        try:
            self._runners.residents = make_residents(
                self.stores, self.planner, plan, layouts
            )
            self.initialize_state()
            if self._restore_from is not None:
                self._read_state(*self._restore_from)
        except BaseException:
            self.stores.close()
            self._closing.detach()
            raise

    def _read_state(self, directory: Place, verify: bool) -> None:
        def take(scalars: Mapping[str, Any]) -> None:
            self._take_scalars(scalars)
            self._condition.end(f"A restore failed half-way. {MIXED}")
            if self._runners.current is not None:
                self._runners.current.drop_pending()

        residents = self._runners.residents
        settle = partial(settle_errors, self.planner, residents, self._scalars)
        read_arrays(
            directory,
            residents,
            take_scalars=take,
            empty=roles_without_content,
            apart=self._in_other_forms,
            settle=settle,
            verify=verify,
        )
        self._condition.mend()

    def _in_other_forms(self, saved: Saved) -> Collection[ArrayId]:
        """See `apart` of `read_arrays`."""
        del saved
        return ()

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
        """A function that reads a leaf by its path.

        Before the first batch it returns initial values.
        """
        self._condition.check()
        if self.is_placed:
            residents = self._current_residents()
            return partial(read_leaf, residents, self.planner.problem)
        return dict(self.planner.initial_leaves()).__getitem__


def close_all() -> int:
    """Close every engine of this process that holds state; return how many there were.

    This is for notebooks: after an error, the stored traceback refers to the engine
    even if no name does.

    Raises:
        ConcurrentUseError: a call to one of the engines runs in another thread.
    """
    placed = [engine for engine in _ENGINES if engine.is_placed]
    for engine in placed:
        engine.close()
    return len(placed)
