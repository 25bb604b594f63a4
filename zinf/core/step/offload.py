"""Plans the offloaded step: everything is on the host, and one program moves it."""

import logging

import jax

from zinf.core.memory.host.pages import check_pinned
from zinf.core.plan import offloaded_plan
from zinf.core.program import Tier
from zinf.core.segment import Segmented
from zinf.core.sharding.mesh import local_devices
from zinf.core.step.arrays import resting_pieces
from zinf.core.step.run.offloaded import Offloaded
from zinf.core.step.setup import Setup, StepRequest
from zinf.core.step.shrink import cut
from zinf.core.step.whole.frame import Frame
from zinf.core.step.whole.offloaded import (
    OffloadedProgram,
    check_offloadable,
    compile_offloaded,
)
from zinf.core.step.whole.sound import check_sound

logger = logging.getLogger(__name__)


def offload(setup: Setup, request: StepRequest) -> Offloaded:
    check_offloadable(setup.rule)
    if setup.separated.norm_groups:
        raise NotImplementedError(
            "execution is 'offloaded', and the optimizer clips some parameters by "
            "a norm of their own, which offloaded steps do not take. Use "
            "execution: streamed or fused, or put optax.clip_by_global_norm first "
            "in the chain of all parameters."
        )
    layouts = request.layouts
    segmented = cut(setup, request.source, layouts, setup.config.segment_max_bytes)
    program = _program(setup, request.frame(setup), segmented)
    plan = offloaded_plan(
        dict.fromkeys(resting_pieces(layouts, segmented.program), Tier.HOST),
        program.moved,
        sum(stack.nbytes for stack in program.stacks),
        {Tier.DEVICE: program.device_bytes, Tier.HOST: program.host_bytes},
        setup.capacity(),
        program.flops,
        setup.rates(),
    )
    if setup.topology is None:
        devices = local_devices(setup.rule.mesh)
        check_pinned(devices, program.host_bytes)
        if setup.computes_elsewhere:
            check_sound(devices[0])
    rest = {"layouts": layouts, "weight": request.weight}
    return Offloaded(plan=plan, program=program, **rest)


def _program(setup: Setup, frame: Frame, segmented: Segmented) -> OffloadedProgram:
    """The first form that fits the device, or else the last one.

    Updates in passes have the state of a whole layer on the device, and fewer bytes to
    move. Inputs of layers that wait on the host are the last resort.
    """
    is_host = setup.config.activation_tier == Tier.HOST
    forms = [
        (offloads_values, updates_in_passes)
        for offloads_values in ((True,) if is_host else (False, True))
        for updates_in_passes in ((False,) if setup.waits else (True, False))
    ]
    for form in forms:
        offloads_values, updates_in_passes = form
        try:
            program = compile_offloaded(
                frame,
                segmented,
                offloads_values=offloads_values,
                updates_in_passes=updates_in_passes,
            )
        except jax.errors.JaxRuntimeError as error:
            # Also where the compiler fails by itself: another form is another program.
            if form == forms[-1]:
                raise
            logger.info("A form of the offloaded step is not taken: %s", error)
            continue
        is_last = form == forms[-1]
        if is_last or program.device_bytes <= setup.capacity()[Tier.DEVICE]:
            return program
    raise AssertionError("no form")
