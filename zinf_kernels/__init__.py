"""Kernels that zinf uses and that know nothing of zinf: one function per op."""

from zinf_kernels.adam import adam_update

__all__ = ["adam_update"]
