"""The shape of a GPT, checked when it is made."""

import dataclasses
import math
from typing import Literal, get_args

Norm = Literal["layernorm", "rmsnorm"]
Activation = Literal["gelu", "swiglu"]
Position = Literal["learned", "rope"]

CHOICES = {
    "norm": get_args(Norm),
    "activation": get_args(Activation),
    "position": get_args(Position),
}
POSITIVE = (
    "num_layers",
    "num_heads",
    "kv_heads",
    "embed_dim",
    "hidden_dim",
    "vocab_size",
    "max_length",
    "expert_splits",
)
SWIGLU_MULTIPLE = 256  # Llama rounds 8/3 * embed_dim up to a multiple of this


@dataclasses.dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """The shape of a model. The defaults are GPT-2's, with bytes as tokens.

    Args:
        num_layers: Number of blocks.
        num_heads: Number of query heads; divides `embed_dim` evenly.
        num_kv_heads: Number of key and value heads (grouped-query attention,
            https://arxiv.org/abs/2305.13245). `None`: as many as query heads.
        embed_dim: Width of the residual stream.
        mlp_dim: Hidden width of the MLP. `None`: 4 * embed_dim for gelu; for swiglu
            8/3 * embed_dim, rounded up to a multiple of 256.
        vocab_size: Number of different tokens; 256 for bytes.
        max_length: Longest sequence, in tokens.
        norm: Normalisation before attention, before the MLP and at the end.
        activation: "swiglu" (https://arxiv.org/abs/2002.05202) adds a gate kernel.
        position: A learned table of `max_length` rows, or rotary embeddings.
        tied_embeddings: Use the token embedding as the output embedding too.
        use_bias: Biases in linear layers and layer norms.
        dropout: Rate after the embedding, the attention and the MLP. Attention
            probabilities are never dropped: fused attention kernels cannot do it.
        scan_layers: Stack the parameters of all blocks along a leading dim L and run
            the blocks in one `lax.scan`.
        remat: Recompute each block from its inputs in the backward pass
            (https://arxiv.org/abs/1604.06174). For fused steps only: in streamed steps
            zinf decides which segments recompute.
        communication_aware_remat: With `remat`, save what devices have sent each other,
            so that the backward pass sends nothing twice (`zinf.moe.keeps_exchanged`):
            what all-to-alls bring, and the sums over devices along `tensor`. A block
            keeps two activations for it, and tokens at experts twice.
        num_experts: Experts in place of each block's MLP (`zinf.moe.MoE`); 0: a dense
            MLP. A sequence has one number for each block: a pyramid, as PR-MoE's
            (https://arxiv.org/abs/2201.05596).
        experts_per_token: The likeliest so many experts take a token.
        capacity_factor: An expert takes up to this times `experts_per_token` times the
            tokens of a routing group over the number of experts. `None`: every token
            that chose it.
        routing_group_size: Consecutive tokens of a microbatch that are a routing group.
            `None`: all of them. On a mesh with experts divided, groups that lie within
            a device let tokens travel by all-to-all (`zinf.moe.exchange`).
        residual_experts: Each token also passes a dense MLP (PR-MoE).
        aux_loss_coefficient: What the mean load-balancing loss of the layers with
            experts is multiplied with, before it is added to the loss; 0.01 in GShard
            and Switch Transformers.
        expert_splits: Experts of a layer are computed in so many pieces, each of which
            zinf fetches by itself.
        random_ltd_layers: Numbers of the blocks that run on some tokens only, if a
            batch says on which (random-LTD, https://arxiv.org/abs/2211.11586).

    Raises:
        ValueError: A field is out of range, or fields contradict each other.
    """

    num_layers: int
    num_heads: int
    num_kv_heads: int | None = None
    embed_dim: int
    mlp_dim: int | None = None
    vocab_size: int = 256
    max_length: int
    norm: Norm = "layernorm"
    activation: Activation = "gelu"
    position: Position = "learned"
    tied_embeddings: bool = True
    use_bias: bool = True
    dropout: float = 0.0
    scan_layers: bool = False
    remat: bool = False
    communication_aware_remat: bool = False
    num_experts: int | tuple[int, ...] = 0
    experts_per_token: int = 1
    capacity_factor: float | None = None
    routing_group_size: int | None = None
    residual_experts: bool = False
    aux_loss_coefficient: float = 0.01
    expert_splits: int = 1
    random_ltd_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices:
                raise ValueError(
                    f"{name} is {getattr(self, name)!r}; it must be one of "
                    f"{', '.join(choices)}."
                )
        for name in POSITIVE:
            if getattr(self, name) < 1:
                raise ValueError(
                    f"{name} is {getattr(self, name)}; it must be at least 1."
                )
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"dropout is {self.dropout}; it must be in [0, 1).")
        if self.communication_aware_remat and not self.remat:
            raise ValueError(
                "communication_aware_remat says what remat saves, and remat is off. "
                "Set remat too, or leave it out."
            )
        self._check_heads()
        self._check_experts()
        self._check_dropping()

    def _check_heads(self) -> None:
        if self.embed_dim % self.num_heads:
            raise ValueError(
                f"embed_dim {self.embed_dim} is not a multiple of num_heads "
                f"{self.num_heads}. Change one of them."
            )
        if self.num_heads % self.kv_heads:
            raise ValueError(
                f"num_heads {self.num_heads} is not a multiple of num_kv_heads "
                f"{self.kv_heads}, so that query heads cannot share them evenly."
            )
        if self.position == "rope" and self.head_dim % 2:
            raise ValueError(
                f"Rotary embeddings rotate pairs, but a head has {self.head_dim} "
                f"entries (embed_dim / num_heads). Make it even."
            )

    def _check_experts(self) -> None:
        counts = self.experts_of_blocks
        if len(counts) != self.num_layers:
            raise ValueError(
                f"num_experts has {len(counts)} numbers, but there are "
                f"{self.num_layers} layers. Give one for each, or one number for all."
            )
        if min(counts) < 0:
            raise ValueError(f"num_experts is {min(counts)}; it must be at least 0.")
        with_experts = [count for count in counts if count]
        if not with_experts:
            return
        if not 1 <= self.experts_per_token <= min(with_experts):
            raise ValueError(
                f"experts_per_token is {self.experts_per_token}; it must be at "
                f"least 1, and at most the fewest experts, {min(with_experts)}."
            )
        if self.capacity_factor is not None and not self.capacity_factor > 0:
            raise ValueError(
                f"capacity_factor is {self.capacity_factor}; it must be above zero, or "
                "every token would be dropped. None drops no token."
            )
        if self.routing_group_size is not None and self.routing_group_size < 1:
            raise ValueError(
                f"routing_group_size is {self.routing_group_size}; it must be at least "
                "1. None makes all tokens one group."
            )
        if any(count % self.expert_splits for count in with_experts):
            raise ValueError(
                f"expert_splits is {self.expert_splits}; it must divide the numbers of "
                f"experts evenly: {with_experts}."
            )
        if self.scan_layers:
            raise ValueError(
                "scan_layers stacks equal blocks, and is not supported with "
                "num_experts. Set scan_layers to false; equal layers share one "
                "executable in zinf without it."
            )

    @property
    def experts_of_blocks(self) -> tuple[int, ...]:
        """The number of experts in each block; 0 for a dense MLP."""
        if isinstance(self.num_experts, int):
            return (self.num_experts,) * self.num_layers
        return tuple(self.num_experts)

    def _check_dropping(self) -> None:
        layers = self.random_ltd_layers
        for layer in layers:
            if not 0 <= layer < self.num_layers:
                raise ValueError(
                    f"random_ltd_layers has {layer}, but the layers are 0 to "
                    f"{self.num_layers - 1}."
                )
        if list(layers) != sorted({*layers}):
            raise ValueError(
                f"random_ltd_layers is {list(layers)}; it must be ascending, each once."
            )
        if layers and self.scan_layers:
            raise ValueError(
                "random_ltd_layers names single layers, and scan_layers makes all of "
                "them one. Turn scan_layers off."
            )

    @property
    def head_dim(self) -> int:
        return self.embed_dim // self.num_heads

    @property
    def kv_heads(self) -> int:
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def hidden_dim(self) -> int:
        if self.mlp_dim is not None:
            return self.mlp_dim
        if self.activation == "gelu":
            return 4 * self.embed_dim
        return math.ceil(8 * self.embed_dim / 3 / SWIGLU_MULTIPLE) * SWIGLU_MULTIPLE
