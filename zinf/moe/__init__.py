"""Mixture of experts: any expert function, DeepSpeed's routers, layers for Flax."""

from typing import TYPE_CHECKING

from zinf.core.process.lazy import make_lazy

if TYPE_CHECKING:
    from zinf.moe.exchange import exchanged as exchanged
    from zinf.moe.exchange import keeps_exchanged as keeps_exchanged
    from zinf.moe.experts import experts as experts
    from zinf.moe.gating import Capacity as Capacity
    from zinf.moe.gating import Routing as Routing
    from zinf.moe.gating import balanced_bias as balanced_bias
    from zinf.moe.gating import expert_choice as expert_choice
    from zinf.moe.gating import sigmoid_top_k as sigmoid_top_k
    from zinf.moe.gating import top1 as top1
    from zinf.moe.gating import top2 as top2
    from zinf.moe.gating import top_k as top_k
    from zinf.moe.gating import z_loss as z_loss
    from zinf.moe.layer import Mixed as Mixed
    from zinf.moe.layer import MoE as MoE
    from zinf.moe.layer import RouterBias as RouterBias
    from zinf.moe.routing import Router as Router

# Lazy, because layers need Flax.
make_lazy(__name__)
