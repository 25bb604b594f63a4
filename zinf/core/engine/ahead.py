"""Plans of batches that come later, made in a thread while training goes on."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import jax

from zinf.core.step.run.runner import AbstractRunner

Make = Callable[[], AbstractRunner]


class Ahead:
    """The runners that a thread makes, one after another, by the shape of the batch.

    Compiling leaves the interpreter to other threads, and so does a step. Tracing does
    not, and slows a step down while it lasts.
    """

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None
        self._made: dict[tuple, Future[AbstractRunner]] = {}

    def __contains__(self, shape: tuple) -> bool:
        return shape in self._made

    def begin(self, shape: tuple, make: Make) -> None:
        """Have the runner for a shape made, after those that were asked for before."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="zinf-ahead")
        self._made[shape] = self._thread.submit(_in_settings_of_caller(make))

    def take(self, shape: tuple) -> AbstractRunner | None:
        """The runner for a shape, once it is made; None if nobody asked for it.

        Raises whatever making it raised.
        """
        made = self._made.pop(shape, None)
        return None if made is None else made.result()

    def is_waited_for(self, shape: tuple) -> bool:
        """Whether `take` would wait."""
        made = self._made.get(shape)
        return made is not None and not made.done()

    def wait(self) -> None:
        """Wait for all that were asked for; errors are raised by `take`."""
        for made in self._made.values():
            made.exception()

    def close(self) -> None:
        """Drop what is not begun, and wait for what is."""
        if self._thread is not None:
            self._thread.shutdown(wait=True, cancel_futures=True)
        self._thread = None
        self._made.clear()


def _in_settings_of_caller(make: Make) -> Make:
    """Wrap `make` to run in a thread with the caller's jax settings for numerics.

    A `with jax.default_matmul_precision(...)` around the training loop holds only in
    its own thread.
    """
    config: Any = jax.config
    settings: list[tuple[Any, Any]] = [
        (jax.default_matmul_precision, config.jax_default_matmul_precision),
        (jax.default_prng_impl, config.jax_default_prng_impl),
        (jax.threefry_partitionable, config.jax_threefry_partitionable),
    ]

    def made() -> AbstractRunner:
        with ExitStack() as stack:
            for set_to, value in settings:
                stack.enter_context(set_to(value))
            return make()

    return made
