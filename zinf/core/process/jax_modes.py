"""jax's global modes: which ones zinf overrides, and which ones an engine keeps.

A program may call zinf under `jax.set_mesh`, `jax.transfer_guard` and so on. These
modes are meant for the program's own code. A mode set by a `with` block also holds only
in its thread, so zinf's worker threads would not see it.
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
    """The modes of jax under which an engine was made.

    Attributes:
        enable_x64: an engine always runs with this setting, in every thread, even if
            the caller changes it later: compiled code is for fixed dtypes.
        dtype_promotion: used while the user's functions are traced. Optimizers are
            traced with standard promotion, because optax promotes dtypes.
        has_mesh: whether there is a surrounding mesh. zinf overrides it: `mesh=` or the
            config says which devices train.
        default_device: the default device while the user's functions are traced, by
            which they may choose kernels. None for jax's own.
    """

    enable_x64: bool
    dtype_promotion: str
    has_mesh: bool
    default_device: jax.Device | None = None

    @classmethod
    def current(cls) -> "Modes":
        """The modes of the calling thread.

        Raises:
            ValueError: `jax.disable_jit` is on.
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
        """Set the modes for zinf's own code while the `with` block runs.

        They are jax's defaults, with the `enable_x64` of this object. Transfers are not
        guarded, because all transfers of zinf are intended.
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
        """Wrap a function of the user, so that it is traced in the user's modes."""

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
    """The part of a traceback that begins in the user's function.

    The frames of jax and zinf above it say nothing about the mistake. If no frame is of
    a function of the user, the whole traceback.
    """
    frame = error.__traceback__
    while frame is not None:
        code = frame.tb_frame.f_code
        if code.co_name == "in_modes" and code.co_filename == __file__:
            return frame.tb_next or error.__traceback__
        frame = frame.tb_next
    return error.__traceback__


def with_own_modes(function: Callable) -> Callable:
    """Wrap a function for another thread, to run in zinf's modes.

    It gets the `enable_x64` of the thread that wraps it.
    """
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
    """A setting in this thread: from a `with` block, or else from `jax.config`."""
    return getattr(jax.config, name)
