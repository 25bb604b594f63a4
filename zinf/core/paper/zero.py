"""Bytes of model state on a device by stage (Rajbhandari et al., "ZeRO", fig. 1).

Adam in mixed precision needs, per parameter, 2 bytes for the parameter, 2 for the
gradient and 12 for optimizer state (master parameter and two moments in 32 bits).
Stage 1 shards optimizer state over the devices, stage 2 gradients too, stage 3
parameters too. https://arxiv.org/abs/1910.02054
"""

from typing import Literal

Stage = Literal[0, 1, 2, 3]
PARAM_BYTES, GRAD_BYTES, OPTIMIZER_BYTES = 2, 2, 12


def model_state_bytes(num_params: int, stage: Stage, *, num_devices: int) -> float:
    """Bytes of parameters, gradients and optimizer state on each device."""
    sharded_from = ((PARAM_BYTES, 3), (GRAD_BYTES, 2), (OPTIMIZER_BYTES, 1))
    return sum(
        num_params * nbytes / (num_devices if stage >= first else 1)
        for nbytes, first in sharded_from
    )


def sent_params(stage: Stage) -> int:
    """Bytes that a device sends in a step over the bytes of all parameters (section 7).

    Gradients are reduce-scattered and parameters are gathered once; in stage 0 both are
    one all-reduce of gradients. Stage 3 gathers parameters for the forward pass and
    again for the backward pass. A ring of n devices sends (n - 1) / n of this.
    """
    return 3 if stage == 3 else 2
