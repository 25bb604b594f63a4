"""jax's global modes: which of them zinf sets aside, and which go with an engine.

A surrounding program may run under `jax.set_mesh`, `jax.transfer_guard` and so on. They
are meant for its own code, and jax keeps them by thread: zinf's worker threads would
not see those that are set by a `with` block.
"""

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import wraps
from types import TracebackType
from typing import Any

import jax

NO_JIT = (
    "jax.disable_jit is on (a `with` block, JAX_DISABLE_JIT or jax.config), and zinf "
    "compiles every step before it runs: loss_fn would not run line by line. Turn "
    "disable_jit off for zinf. To debug loss_fn, call loss_fn(params, batch) yourself."
)

IN_A_TRACE = (
    "zinf was called inside of a function that jax traces (jax.jit, grad, vmap, scan). "
    "An engine compiles and runs by itself: call zinf outside of that function."
)


@dataclass(frozen=True)
class Modes:
    """The modes of jax in which an engine was made.

    Attributes:
        enable_x64: with it an engine runs all its life, in every thread, whatever the
            caller has later: compiled code fits only the dtypes that it was made for.
        dtype_promotion: the user's functions are traced with it. The optimizer is not:
            optax promotes dtypes.
        has_mesh: whether there is a surrounding mesh. zinf arranges devices by `mesh=`
            or its config, and sets this mesh aside.
        default_device: of the user's functions while they are traced, from which they
            may choose kernels; None for jax's own.
    """

    enable_x64: bool
    dtype_promotion: str
    has_mesh: bool
    default_device: jax.Device | None = None

    @classmethod
    def current(cls) -> "Modes":
        """The modes of the calling thread.

        Raises:
            ValueError: jax compiles nothing now.
        """
        if _setting("jax_disable_jit"):
            raise ValueError(NO_JIT)
        return cls(
            enable_x64=_setting("jax_enable_x64"),
            dtype_promotion=_setting("jax_numpy_dtype_promotion"),
            has_mesh=not jax.sharding.get_abstract_mesh().empty,
        )

    @contextmanager
    def own(self) -> Generator[None, None, None]:
        """What zinf's own code runs in: plain jax, with these modes' 64 bits.

        Every transfer of zinf is meant, so none is guarded.
        """
        with (
            _without_mesh(),
            jax.transfer_guard("allow"),
            jax.numpy_dtype_promotion("standard"),
            jax.disable_jit(False),
            jax.enable_x64(self.enable_x64),
        ):
            yield

    def of_user(self, function: Callable) -> Callable:
        """A function of the user that zinf traces, in the user's modes."""

        @wraps(function, updated=())
        def in_modes(*arguments: Any) -> Any:
            try:
                with jax.numpy_dtype_promotion(self.dtype_promotion), self._device():
                    return function(*arguments)
            except Exception as error:
                if self.has_mesh:
                    error.add_note(
                        "zinf sets the mesh of jax.set_mesh aside while it runs "
                        "your function: pass mesh= to zinf.initialize, and leave "
                        "sharding constraints out of the function."
                    )
                raise

        return in_modes

    def _device(self) -> AbstractContextManager:
        device = self.default_device
        return nullcontext() if device is None else jax.default_device(device)


def traceback_of_user(error: BaseException) -> TracebackType | None:
    """The frames of the user's function in which an error was raised.

    Those of jax and zinf around it say nothing about the mistake. Without such a frame,
    all of them.
    """
    frame = error.__traceback__
    while frame is not None:
        code = frame.tb_frame.f_code
        if code.co_name == "in_modes" and code.co_filename == __file__:
            return frame.tb_next or error.__traceback__
        frame = frame.tb_next
    return error.__traceback__


def with_own_modes(function: Callable) -> Callable:
    """For another thread: runs in zinf's modes, with the caller's 64 bits."""
    enable_x64 = _setting("jax_enable_x64")

    @wraps(function, updated=())
    def in_thread(*arguments: Any) -> Any:
        with Modes(enable_x64, "standard", False).own():
            return function(*arguments)

    return in_thread


def _without_mesh() -> AbstractContextManager:
    try:
        return jax.set_mesh(None)
    except ValueError:
        raise ValueError(IN_A_TRACE) from None


def _setting(name: str) -> Any:
    """A setting as this thread has it: by a `with` block, or else by `jax.config`."""
    return getattr(jax.config, name)
