from collections.abc import Callable, Iterator
from typing import Any

import optax
import pytest

import zinf
from tests.robustness.small import init, loss_fn
from zinf import Engine


@pytest.fixture
def start() -> Iterator[Callable[..., Engine]]:
    """Makes engines of the small network, and closes them when the test is over."""
    engines = []

    def make(
        config: Any = None, *, loss: Any = loss_fn, tx: Any = None, **rest: Any
    ) -> Engine:
        tx = tx or optax.adam(1e-2)
        engines.append(
            zinf.initialize(loss, rest.pop("params", init), tx, config, **rest)
        )
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()
