"""Plans the fused step: everything is on the device."""

from zinf.core.program import Tier
from zinf.core.step.run.whole import Fused
from zinf.core.step.setup import Setup, StepRequest
from zinf.core.step.whole.fused import compile_fused


def fits_fused(setup: Setup, request: StepRequest) -> bool:
    """Whether all arrays rest on the device, or may and have room."""
    homes = request.homes
    if homes is not None:
        return set(homes.values()) == {Tier.DEVICE} and not any(a.rows for a in homes)
    tiers = {setup.config.param_tier, setup.config.optimizer_tier}
    state = request.layouts.device_bytes
    return tiers <= {None, Tier.DEVICE} and state <= setup.capacity()[Tier.DEVICE]


def fuse(setup: Setup, request: StepRequest) -> Fused:
    program = compile_fused(request.frame(setup))
    return Fused.planned(setup, request.layouts, program, request.weight)
