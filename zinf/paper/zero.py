"""Bytes of model state on a device by stage (Rajbhandari et al., "ZeRO", fig. 1).

Mixed precision Adam, per parameter: 2 bytes of parameter, 2 of gradient, 12 of
optimizer state (master parameter and two moments in 32 bits). Stage 1 shards the last
over the devices, stage 2 the gradient too, stage 3 all. https://arxiv.org/abs/1910.02054
"""

from typing import Literal

Stage = Literal[0, 1, 2, 3]
PARAM_BYTES, GRAD_BYTES, OPTIMIZER_BYTES = 2, 2, 12


def model_state_bytes(num_params: int, stage: Stage, *, num_devices: int) -> float:
    """Bytes on each device of parameters, gradients and optimizer state."""
    sharded_from = ((PARAM_BYTES, 3), (GRAD_BYTES, 2), (OPTIMIZER_BYTES, 1))
    return sum(
        num_params * nbytes / (num_devices if stage >= first else 1)
        for nbytes, first in sharded_from
    )


def sent_params(stage: Stage) -> int:
    """What a device sends in a step, in bytes of all parameters (section 7).

    Gradients are reduce-scattered and parameters gathered once; in stage 0 both are one
    all-reduce of gradients. Stage 3 gathers parameters for the forward and again for
    the backward. A ring sends (n - 1) / n of that.
    """
    return 3 if stage == 3 else 2
