"""Attention that keeps no scores, as one equation of a traced program."""

from zinf_kernels.attention.api import attention, obstacles
from zinf_kernels.attention.equation import attention_flops, attention_p
from zinf_kernels.attention.multimodal import multimodal_attention
from zinf_kernels.attention.rows import asked_row, best, choosing
from zinf_kernels.attention.spec import Operands, Spec

__all__ = [
    "Operands",
    "Spec",
    "asked_row",
    "attention",
    "attention_flops",
    "attention_p",
    "best",
    "choosing",
    "multimodal_attention",
    "obstacles",
]
