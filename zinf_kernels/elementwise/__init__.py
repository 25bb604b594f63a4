"""Any element-wise update of arrays in host memory, in place."""

from zinf_kernels.elementwise.api import elementwise_update
from zinf_kernels.elementwise.program import Operation, Program

__all__ = ["Operation", "Program", "elementwise_update"]
