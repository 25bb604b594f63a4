"""The update of Adam and AdamW on host memory, in place."""

from zinf_kernels.adam.api import adam_update, adam_update_scalars
from zinf_kernels.adam.arguments import Scalars, adam_scalars

__all__ = ["Scalars", "adam_scalars", "adam_update", "adam_update_scalars"]
