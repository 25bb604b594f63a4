"""Chooses between fused and streamed generation, and says why."""

import logging

from zinf.inference.fused import (
    CANNOT,
    FusedPrograms,
    fuse,
    why_not_fused,
    why_refused,
)
from zinf.inference.fused_run import FusedGeneration
from zinf.inference.generate import StreamedGeneration
from zinf.inference.generation import AbstractGeneration
from zinf.inference.plan import GenerationPlanner
from zinf.inference.rows import Shape

logger = logging.getLogger(__name__)


def make_generation(planner: GenerationPlanner, shape: Shape) -> AbstractGeneration:
    """Fused if weights and cache fit the device, else streamed.

    Raises:
        InfeasibleError: the streamed programs do not fit beside the arrays at rest.
        ValueError: the decoder returned something else than a decoder must.
    """
    programs, why = fused_or_not(planner, shape)
    found: AbstractGeneration
    if programs is not None:
        found = FusedGeneration(shape, programs)
    else:
        found = StreamedGeneration(planner, planner.plan(shape), why)
    logger.info("generation: %s", found.why)
    return found


def fused_or_not(
    planner: GenerationPlanner, shape: Shape
) -> tuple[FusedPrograms | None, str]:
    """The fused programs if weights and cache fit the device, else None; and why."""
    why = why_not_fused(planner)
    if why is not None:
        return None, why
    try:
        programs = fuse(planner, shape)
    except CANNOT as error:
        return None, why_refused(error)
    return programs, programs.plan.why
