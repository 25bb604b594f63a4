"""Nothing looks for garbage while a step is planned, and everything does afterwards."""

import gc
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

from zinf.core.engine.initialize import make_planner
from zinf.core.plan import Arrangement, build_placed
from zinf.core.process.uncollected import uncollected


@pytest.fixture(autouse=True)
def collector() -> Iterator[None]:
    """On before each test, and after it as it was."""
    was_enabled = gc.isenabled()
    gc.enable()
    yield
    (gc.enable if was_enabled else gc.disable)()


def test_the_collector_is_afterwards_what_it_was_before() -> None:
    with pytest.raises(ValueError, match="here"), uncollected():
        assert not gc.isenabled()
        raise ValueError("here")
    assert gc.isenabled()
    gc.disable()
    with uncollected(), uncollected():
        assert not gc.isenabled()
    assert not gc.isenabled()


def test_steps_are_planned_without_it() -> None:
    enabled: list[bool] = []

    def note(*arguments: Any) -> Arrangement:
        enabled.append(gc.isenabled())
        return build_placed(*arguments)

    planner = make_planner(
        lambda params, batch: jnp.sum(batch["x"] @ params["w"]),
        {"w": jnp.zeros((8, 8))},
        optax.sgd(0.1),
        {"execution": "streamed"},
    )
    planner = replace(planner, build_placed=note)
    planner.plan({"x": jax.ShapeDtypeStruct((4, 8), jnp.float32)})
    assert enabled == [False]
    assert gc.isenabled()
