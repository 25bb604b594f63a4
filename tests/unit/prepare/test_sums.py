"""What sums of gradients take of the device is what the plan sets aside for them."""

import jax
import jax.numpy as jnp
import pytest

from zinf.plan.schedule import ROW_SUM_COPIES
from zinf.segment.row_sums import add_rows

NUM_ROWS, WIDTH = 512, 64


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_adding_rows_takes_no_more_than_the_plan_sets_aside(dtype: str) -> None:
    rows = jax.ShapeDtypeStruct((NUM_ROWS, WIDTH), jnp.dtype(dtype))
    total = jax.ShapeDtypeStruct((4 * NUM_ROWS, WIDTH), jnp.float32)
    numbers = jax.ShapeDtypeStruct((NUM_ROWS, 1), jnp.int32)
    memory = add_rows.lower(total, rows, numbers).compile().memory_analysis()
    wide_bytes = NUM_ROWS * WIDTH * 4
    taken = memory.temp_size_in_bytes
    # At least the sums by row number, cast to the total's float32.
    assert wide_bytes <= taken <= ROW_SUM_COPIES * wide_bytes
