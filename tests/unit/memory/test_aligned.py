import ml_dtypes
import numpy as np
import pytest

from zinf.memory.aligned import PAGED_FROM_BYTES, address, aligned_copy, aligned_empty


@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 5), (1000,)])
@pytest.mark.parametrize("dtype", [np.float32, np.bool_, ml_dtypes.bfloat16])
def test_arrays_start_at_64_bytes_and_can_be_written(shape, dtype) -> None:
    array = aligned_empty(shape, dtype)
    assert (array.shape, array.dtype) == (shape, np.dtype(dtype))
    assert address(array) % 64 == 0
    assert array.flags.c_contiguous and array.flags.writeable


def test_large_arrays_start_at_a_page() -> None:
    assert address(aligned_empty((PAGED_FROM_BYTES,), np.uint8)) % 4096 == 0


def test_a_copy_shares_no_memory_with_its_source() -> None:
    source = np.arange(12.0).reshape(3, 4)
    copy = aligned_copy(source.T)
    np.testing.assert_array_equal(copy, source.T, strict=True)
    assert not np.shares_memory(copy, source)
    assert address(copy) % 64 == 0
