"""The GPT of bench_vs_deepspeed.py in torch: in memory, or under DeepSpeed ZeRO-3.

It runs in an interpreter that has torch and deepspeed, and does not import zinf:

    python scripts/bench/deepspeed_gpt.py deepspeed-nvme '{"model": {...}, ...}'

It takes one step per line of stdin and prints time and loss as JSON. Its arithmetic and
weights equal those of `zinf.models.GPT`: pre-norm, tanh GELU, learned positions, tied
embeddings, biases everywhere. Only here query, key and value are one matmul.

DeepSpeed 0.19.8 asks for float16 if parameters of a float32 model are on NVMe: in
`zero.Init`, `dtype or torch.float16 if ... else ...` means `(dtype or torch.float16) if
... else ...`, which ignores the dtype if the accelerator has no float16, like the CPU.
`mend_dtype` fixes this; the rest of DeepSpeed is unchanged.
"""

import contextlib
import json
import sys
import time
import zlib
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

try:
    import deepspeed
    from deepspeed.runtime.zero.partition_parameters import Init
except ModuleNotFoundError:  # The contender "torch" does not need it.
    deepspeed = None

LEARNING_RATE, BETAS, EPSILON, WEIGHT_DECAY = 3e-4, (0.9, 0.95), 1e-8, 0.1
SPREAD = 0.02 * 12**0.5  # Width of uniform weights with GPT-2's standard deviation.
PIECE = 2**20
# Settings of DeepNVMe. Blocks of 4 MiB were faster here than of 1 MiB; with blocks of
# 8 MiB most parameters would be too small to be offloaded.
AIO = {"block_size": 2**22, "queue_depth": 32, "intra_op_parallelism": 2}
AIO |= {"single_submit": False, "overlap_events": True}
Settings = dict[str, Any]


def weights(name: str, *shape: int) -> torch.Tensor:
    """Weights that depend only on name and position, equal to bench_vs_deepspeed.py's.

    Each is a hash of its position (the finalizer of MurmurHash3). They are made in
    pieces, as memory may have room for only one copy of the model.
    """
    values = np.empty(shape, np.float32)
    flat = values.reshape(-1)
    for start in range(0, flat.size, PIECE):
        stop = min(start + PIECE, flat.size)
        x = np.arange(start, stop, dtype=np.uint32) + np.uint32(
            zlib.crc32(name.encode())
        )
        x = (x ^ (x >> 16)) * np.uint32(0x85EBCA6B)
        x = (x ^ (x >> 13)) * np.uint32(0xC2B2AE35)
        x ^= x >> 16
        uniform = (x >> 8).astype(np.float32) * np.float32(2**-24)
        flat[start:stop] = (uniform - np.float32(0.5)) * np.float32(SPREAD)
    return torch.from_numpy(values)


class Linear(torch.nn.Module):
    """One matmul for all named kernels, which zinf's model keeps separate.

    The kernels there are (in, out); here they are (out, in), the fastest for torch.
    """

    def __init__(self, names: list[str], in_dim: int, out_dim: int) -> None:
        super().__init__()
        kernels = [weights(name, in_dim, out_dim).T for name in names]
        self.weight = torch.nn.Parameter(torch.cat(kernels).contiguous())
        self.bias = torch.nn.Parameter(torch.zeros(out_dim * len(names)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)


class Block(torch.nn.Module):
    def __init__(self, number: int, dim: int, heads: int) -> None:
        super().__init__()
        start, self.heads = f"blocks/{number}/", heads
        mixed = [f"{start}attention/{x}/kernel" for x in ("query", "key", "value")]
        self.attention_norm = torch.nn.LayerNorm(dim, eps=1e-5)
        self.mixed = Linear(mixed, dim, dim)
        self.out = Linear([f"{start}attention/out/kernel"], dim, dim)
        self.mlp_norm = torch.nn.LayerNorm(dim, eps=1e-5)
        self.up = Linear([f"{start}mlp/up/kernel"], dim, 4 * dim)
        self.down = Linear([f"{start}mlp/down/kernel"], 4 * dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, dim = x.shape
        mixed = self.mixed(self.attention_norm(x)).view(
            batch, length, 3, self.heads, -1
        )
        query, key, value = mixed.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, dim))
        up = self.up(self.mlp_norm(x))
        return x + self.down(F.gelu(up, approximate="tanh"))


class GPT(torch.nn.Module):
    def __init__(self, model: Settings, *, remat: bool) -> None:
        super().__init__()
        dim, self.remat = model["embed_dim"], remat
        tokens = weights("token_embedding", model["vocab_size"], dim)
        self.tokens = torch.nn.Parameter(tokens)
        positions = weights("position_embedding", model["max_length"], dim)
        self.positions = torch.nn.Parameter(positions)
        self.blocks = torch.nn.ModuleList(
            Block(number, dim, model["num_heads"])
            for number in range(model["num_layers"])
        )
        self.norm = torch.nn.LayerNorm(dim, eps=1e-5)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The loss of (B, T + 1) tokens."""
        read, predicted = tokens[:, :-1], tokens[:, 1:]
        x = F.embedding(read, self.tokens) + self.positions[: read.shape[1]]
        for block in self.blocks:
            run = partial(checkpoint, block, use_reentrant=False)
            x = (run if self.remat else block)(x)
        logits = F.linear(self.norm(x), self.tokens)
        return F.cross_entropy(logits.flatten(0, 1), predicted.flatten())


def torch_step(name: str, settings: Settings) -> Callable[[torch.Tensor], torch.Tensor]:
    model = GPT(settings["model"], remat=name.endswith("-remat"))
    return adam_step(model, model)


def adam_step(
    model: torch.nn.Module, loss_of: Callable[[torch.Tensor], torch.Tensor]
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Steps of torch's fused AdamW on a model; each returns the loss of its tokens."""
    adam = torch.optim.AdamW(
        model.parameters(),
        lr=LEARNING_RATE,
        betas=BETAS,
        eps=EPSILON,
        weight_decay=WEIGHT_DECAY,
        fused=True,
    )

    def step(tokens: torch.Tensor) -> torch.Tensor:
        loss = loss_of(tokens)
        loss.backward()
        adam.step()
        adam.zero_grad(set_to_none=True)
        return loss

    return step


def deepspeed_step(
    name: str, settings: Settings
) -> Callable[[torch.Tensor], torch.Tensor]:
    mend_dtype()
    config = deepspeed_config(name, settings)
    deepspeed.init_distributed(dist_backend="gloo")
    # Without Init the whole model is in memory before any of it is offloaded.
    construction: Any = contextlib.nullcontext()
    if "nvme" in name:
        construction = Init(config_dict_or_path=config, dtype=torch.float32)
    with construction:
        model = GPT(settings["model"], remat=name.endswith("-remat"))
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config
    )

    def step(tokens: torch.Tensor) -> torch.Tensor:
        loss = engine(tokens)
        engine.backward(loss)
        engine.step()
        return loss

    return step


def deepspeed_config(name: str, settings: Settings) -> Settings:
    """float32, no clipping (DeepSpeed's default is 1), and DeepSpeed's AdamW in C++."""
    adam = {"lr": LEARNING_RATE, "betas": BETAS, "eps": EPSILON}
    cpu = {"device": "cpu", "pin_memory": True}
    zero = {"offload_param": cpu, "offload_optimizer": cpu}
    if "nvme" in name:
        zero = nvme_config(settings, reads_ahead=not name.endswith("-serial"))
    return {
        "train_batch_size": settings["sequences"],
        "train_micro_batch_size_per_gpu": settings["sequences"],
        "optimizer": {
            "type": "AdamW",
            "params": adam | {"weight_decay": WEIGHT_DECAY},
        },
        "gradient_clipping": 0.0,
        "steps_per_print": 10**9,
        "zero_optimization": {"stage": 3} | zero,
        "aio": AIO,
    }


def nvme_config(settings: Settings, *, reads_ahead: bool) -> Settings:
    """The fastest of the settings tried on two cores.

    Deferred writes (pipeline_write, with 12 buffers) took more memory and were no
    faster. With four parallel requests (intra_op_parallelism), or with remat, the
    losses differed from those of torch and of DeepSpeed in host memory.
    """
    dim, rows = settings["model"]["embed_dim"], settings["model"]["vocab_size"]
    place = {"device": "nvme", "nvme_path": settings["folder"], "pin_memory": True}
    # A buffer must hold the largest parameter. A block needs five buffers.
    parameters = {"buffer_count": 5, "buffer_size": rows * dim + 2**16}
    # Four buffers for a parameter, its gradient and two moments; four more to prefetch.
    state = {"buffer_count": 8 if reads_ahead else 4, "pipeline_read": reads_ahead}
    return {
        "offload_param": place | parameters | {"max_in_cpu": 0},
        "offload_optimizer": place | state | {"fast_init": True},
        # About the size of a block. With the default, one update covers everything and
        # needs huge buffers.
        "sub_group_size": 12 * dim**2,
        # Avoids DeepSpeed's error "Not enough buffers 0 for swapping 1".
        "stage3_prefetch_bucket_size": 0,
        "stage3_max_live_parameters": 10**6,
        "stage3_max_reuse_distance": 10**6,
    }


def mend_dtype() -> None:
    def set_dtype(self: Any, config: Any, dtype: Any) -> None:
        self.dtype = torch.float32

    Init._set_dtype = set_dtype


def serve(name: str, settings: Settings) -> None:
    torch.set_num_threads(settings["threads"])
    began = time.perf_counter()
    make = torch_step if name.startswith("torch") else deepspeed_step
    step = make(name, settings)
    answer({"init_seconds": time.perf_counter() - began, "torch": torch.__version__})
    tokens = torch.from_numpy(np.load(settings["batch"]).astype(np.int64))
    for _ in sys.stdin:
        began = time.perf_counter()
        loss = step(tokens).item()
        answer({"seconds": time.perf_counter() - began, "loss": loss})


def answer(found: Settings) -> None:
    print(json.dumps({"answer": found}), flush=True)


if __name__ == "__main__":
    serve(sys.argv[1], json.loads(sys.argv[2]))
