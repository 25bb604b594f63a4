"""Chooses between fused and streamed generation, and says why."""

import logging

from zinf.inference.fused import CANNOT, fuse, why_not_fused, why_refused
from zinf.inference.fused_run import FusedGeneration
from zinf.inference.generate import StreamedGeneration
from zinf.inference.generation import AbstractGeneration
from zinf.inference.plan import GenerationPlanner, Shape

logger = logging.getLogger(__name__)


def make_generation(planner: GenerationPlanner, shape: Shape) -> AbstractGeneration:
    """Fused if weights and cache fit the device, else streamed.

    Raises:
        InfeasibleError: the streamed programs do not fit beside the arrays at rest.
        ValueError: the decoder returned something else than a decoder must.
    """
    why = why_not_fused(planner)
    found: AbstractGeneration | None = None
    if why is None:
        try:
            found = FusedGeneration(shape, fuse(planner, shape))
        except CANNOT as error:
            why = why_refused(error)
    if found is None:
        assert why is not None
        found = StreamedGeneration(planner, planner.plan(shape), why)
    logger.info("generation: %s", found.why)
    return found
