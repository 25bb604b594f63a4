"""Chooses between the fused, the offloaded and the streamed step, and says why."""

import jax

from zinf.core.config import Config
from zinf.core.plan import InfeasibleError, Plan, Shortage
from zinf.core.program import Tier
from zinf.core.sharding import AxisRule, Layouts
from zinf.core.step.fuse import fits_fused, fuse
from zinf.core.step.offload import offload
from zinf.core.step.prepared import AbstractPrepared
from zinf.core.step.setup import Setup, StepRequest
from zinf.core.step.stream import stream
from zinf.core.step.whole.offloaded import not_offloadable
from zinf.core.topology import Topology

# A compiler's message may go on with pages of HLO.
SAID_CHARACTERS = 300

FUSED = "Fused, because everything fits the device."
# Why one of several steps cannot be made. The compiler's errors are of one type,
# whether memory is short or the compiler fails by itself.
CANNOT = (InfeasibleError, jax.errors.JaxRuntimeError)


def choose(
    setup: Setup, request: StepRequest, *, is_in_stacks: bool
) -> tuple[AbstractPrepared, str]:
    """The step, and why it runs this way if `execution: auto` had a choice.

    Args:
        is_in_stacks: the arrays rest as an offloaded step has them.

    Raises:
        InfeasibleError: no plan fits the budgets.
    """
    mode = setup.config.execution if setup.rule.compression is None else "fused"
    if mode == "offloaded" or is_in_stacks:
        return offload(setup, request), ""
    is_open = mode == "auto" and request.homes is None and setup.computes_elsewhere
    may_fuse = mode != "streamed" and fits_fused(setup, request)
    if mode == "fused" and not may_fuse:
        raise ValueError(
            "execution is 'fused', which keeps everything on the device, but "
            "arrays are placed elsewhere by offload_param or offload_optimizer, or "
            "the state alone exceeds the device budget of "
            f"{setup.capacity()[Tier.DEVICE]:,} bytes. Remove one of the two."
        )
    refused = ""
    if may_fuse:
        try:
            return fuse(setup, request), FUSED if is_open else ""
        except (NotImplementedError, *CANNOT) as error:
            if mode == "fused" or request.homes is not None:
                raise
            # A state that does not fit the device needs no explanation in the plan.
            if not isinstance(error, InfeasibleError):
                refused = f"Not fused, because {_why_not(setup, error)}."
    if is_open:
        made, why = _offload_or_stream(setup, request, refused)
        return made, f"{refused} {why}".strip()
    return _last(setup, request, refused), refused


def _last(setup: Setup, request: StepRequest, refused: str) -> AbstractPrepared:
    """The streamed step, where nothing else is left to try.

    Args:
        refused: why the others were not made, for errors; empty if none was tried.
    """
    try:
        return stream(setup, request)
    except CANNOT as error:
        if not refused:
            raise
        if isinstance(error, InfeasibleError):
            raise error.because([refused]) from None
        why_not = _why_not(setup, error)
        raise NotImplementedError(
            f"No form of this step can be compiled. {refused} Not streamed, "
            f"because {why_not}. Try another version of jax or another microbatch "
            "size. With execution: streamed the compiler's message is shown whole."
        ) from error


def _offload_or_stream(
    setup: Setup, request: StepRequest, refused: str
) -> tuple[AbstractPrepared, str]:
    """The offloaded or the streamed step, whichever is predicted faster, and why.

    Args:
        refused: why the step is not fused, for errors; may be empty.
    """
    offloaded, machine = None, (setup.rule, setup.group.count, setup.topology)
    why_not = why_not_offloaded(setup.config, *machine)
    if why_not is None:
        try:
            _check_host_holds_state(setup, request.layouts)
            offloaded = offload(setup, request)
        except (NotImplementedError, ValueError, *CANNOT) as error:
            why_not = _why_not(setup, error)
    if offloaded is None:
        refused = f"{refused} Not offloaded, because {why_not}.".strip()
        streamed = _last(setup, request, refused)
        return streamed, f"Streamed; not offloaded, because {why_not}."
    try:
        streamed = stream(setup, request)
    except CANNOT as error:
        why_not = _why_not(setup, error)
        return offloaded, f"Offloaded; not streamed, because {why_not}."
    is_faster, why = faster(offloaded.plan, streamed.plan)
    return (offloaded if is_faster else streamed), why


def _check_host_holds_state(setup: Setup, layouts: Layouts) -> None:
    """Raise InfeasibleError if the budget of the host is less than the state.

    Compiling, which would find it too, takes minutes for a large model.
    """
    needed = sum(entry.share.nbytes for entry in layouts.arrays.values())
    capacity = setup.capacity()
    if needed > capacity[Tier.HOST]:
        short = Shortage(capacity[Tier.HOST], needed, "the state")
        raise InfeasibleError({Tier.HOST: short}, capacity)


def _why_not(setup: Setup, error: Exception) -> str:
    """Why a step was not made, as the end of a sentence."""
    if isinstance(error, jax.errors.JaxRuntimeError):
        try:
            error = setup.refused(error)
        except ValueError as unknown:  # It ran out of memory, in unknown words.
            error = unknown
    return in_short(error)


def why_not_offloaded(
    config: Config, rule: AxisRule, num_processes: int, topology: Topology | None
) -> str | None:
    """Why config, mesh or machine forbid an offloaded step; None if they do not."""
    hosts = 1 if topology is None else topology.num_hosts
    count, found = max(num_processes, hosts), not_offloadable(rule)
    if count > 1:
        # Each process would check and choose by itself, and they might differ.
        return f"with {count} processes it must be asked for (execution: offloaded)"
    if found:
        return f"it does not work yet with {' and '.join(found)}"
    tiers = {
        "offload_param": config.param_tier,
        "offload_optimizer": config.optimizer_tier,
    }
    for key, tier in tiers.items():
        if tier not in (None, Tier.HOST):
            return f"it keeps everything on the host, and {key} asks for {tier}"
    if config.quantizes_weights:
        return "it cannot gather parameters as integers (zero_quantized_weights)"
    if config.quantizes_gradients:
        return "it cannot exchange parts of gradients (zero_quantized_gradients)"
    if config.forward_backward:
        return "it adds no gradients to sums (forward_backward)"
    if config.pinned == "off":
        return "all its memory is pinned, and memory.pinned is off"
    return None


def in_short(error: Exception) -> str:
    """Why a step was not made, as the end of a sentence."""
    if isinstance(error, InfeasibleError):
        return " and ".join(
            f"{short.what} needs {short.needed_bytes:,} bytes of the {tier}, whose "
            f"budget is {short.capacity_bytes:,}"
            for tier, short in error.shortages.items()
        )
    if isinstance(error, jax.errors.JaxRuntimeError):
        line = str(error).partition("\n")[0]
        return f"its compiler fails with {line[:SAID_CHARACTERS]!r}"
    return str(error).rstrip(".")


def faster(offloaded: Plan, streamed: Plan) -> tuple[bool, str]:
    """`(whether to offload, why)`, by the predicted seconds of a step."""
    ours, others = offloaded.timeline.seconds, streamed.timeline.seconds
    is_faster = ours <= others
    name = "Offloaded" if is_faster else "Streamed"
    return is_faster, (
        f"{name}, because an offloaded step is predicted to take {ours:.3g} s, and a "
        f"streamed one {others:.3g} s."
    )
