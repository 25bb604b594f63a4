"""The update of Adam and AdamW on the device, one pass over memory."""

from zinf_kernels.adam_on_device.api import Updated, adam_update, obstacles

__all__ = ["Updated", "adam_update", "obstacles"]
