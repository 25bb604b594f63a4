"""Builds plans for arrays at given homes, and the plan of one fused executable."""

from collections.abc import Mapping, Sequence

from zinf.core.plan.catalog import Catalog, StepOptions, UpdateUnit
from zinf.core.plan.check import check
from zinf.core.plan.cost import Rates
from zinf.core.plan.infeasible import InfeasibleError, Shortage
from zinf.core.plan.instruction import FusedStep, Instruction, OffloadedStep
from zinf.core.plan.passage import (
    checked,
    forward_passage,
    proven,
    step_passage,
    streamed,
)
from zinf.core.plan.plan import Plan
from zinf.core.program import ArrayId, Link, Tier, open_tiers


def build(
    catalog: Catalog,
    units: Sequence[UpdateUnit],
    capacity_bytes: Mapping[Tier, int],
    options: StepOptions,
) -> Plan:
    """The plan of one training step with arrays at the homes of the catalog.

    Args:
        units: the optimizer's updates, in the order in which they run.

    Raises:
        InfeasibleError: the step does not fit; the error names budgets that suffice.
    """
    passage = step_passage(catalog, units, options)
    try:
        plan = streamed(passage, catalog, capacity_bytes)
    except InfeasibleError as error:
        raise proven(error, passage, catalog) from None
    return checked(plan, passage, catalog)


def build_forward(
    catalog: Catalog, capacity_bytes: Mapping[Tier, int], num_microbatches: int
) -> Plan:
    """The plan of a forward pass with the arrays at the homes of a catalog.

    Raises:
        InfeasibleError: the pass does not fit, even with activations on the slowest
            tier.
    """
    tiers = open_tiers(capacity_bytes)
    for tier in tiers:
        options = StepOptions(num_microbatches, False, tier, Tier.HOST)
        try:
            passage = forward_passage(catalog, options)
            plan = streamed(passage, catalog, capacity_bytes)
        except InfeasibleError:
            if tier == tiers[-1]:
                raise
        else:
            return checked(plan, passage, catalog)
    raise AssertionError("no tier")


def fused_plan(
    homes: Mapping[ArrayId, Tier],
    home_bytes: int,
    workspace_bytes: int,
    capacity_bytes: Mapping[Tier, int],
    flops: int,
    rates: Rates,
) -> Plan:
    """The plan of one instruction: the whole step, with every array on the device.

    Raises:
        InfeasibleError: state and workspace exceed the device budget.
    """
    capacity = capacity_bytes[Tier.DEVICE]
    needed = home_bytes + workspace_bytes
    if needed > capacity:
        short = Shortage(capacity, needed, "the fused step")
        raise InfeasibleError({Tier.DEVICE: short}, capacity_bytes)
    workspace = ((Tier.DEVICE, workspace_bytes),)
    instruction = Instruction(
        FusedStep(), Link.DEVICE, (), workspace=workspace, flops=flops
    )
    zeros = dict.fromkeys(Tier, 0)
    at_rest, most = ({**zeros, Tier.DEVICE: n} for n in (home_bytes, needed))
    rest = dict(homes), at_rest, most, dict(capacity_bytes), rates
    plan = Plan((instruction,), *rest)
    check(plan)
    return plan


def offloaded_plan(
    homes: Mapping[ArrayId, Tier],
    step: OffloadedStep,
    home_bytes: int,
    peak_bytes: Mapping[Tier, int],
    capacity_bytes: Mapping[Tier, int],
    flops: int,
    rates: Rates,
) -> Plan:
    """The plan of one instruction: the whole step, with every array on the host.

    Args:
        home_bytes: bytes at rest on the host.
        peak_bytes: what device and host hold while the step runs.

    Raises:
        InfeasibleError: a budget is exceeded.
    """
    needed = {tier: peak_bytes.get(tier, 0) for tier in Tier}
    lacking = {
        tier: Shortage(capacity_bytes[tier], needed[tier], "the offloaded step")
        for tier in (Tier.DEVICE, Tier.HOST)
        if needed[tier] > capacity_bytes[tier]
    }
    if lacking:
        raise InfeasibleError(lacking, capacity_bytes)
    workspace = (
        (Tier.DEVICE, needed[Tier.DEVICE]),
        (Tier.HOST, needed[Tier.HOST] - home_bytes),
    )
    instruction = Instruction(step, Link.DEVICE, (), workspace=workspace, flops=flops)
    at_rest = {**dict.fromkeys(Tier, 0), Tier.HOST: home_bytes}
    rest = dict(homes), at_rest, needed, dict(capacity_bytes), rates
    plan = Plan((instruction,), *rest)
    check(plan)
    return plan
