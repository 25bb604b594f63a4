"""The DeepSpeed side of bench_finetune_deepspeed.py: a `transformers` model in torch.

It runs in an interpreter that has torch, transformers and deepspeed, and does not
import zinf:

    python scripts/bench/deepspeed_finetune.py deepspeed-nvme '{"model": ..., ...}'

It takes one step per line of stdin, and prints time and loss as JSON. The model is read
from its folder by `from_pretrained`, under DeepSpeed in `zero.Init`, as `transformers`
does by itself if it knows of DeepSpeed's settings. What had to be mended in DeepSpeed
is in deepspeed_gpt.py.
"""

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import deepspeed
import numpy as np
import torch
import transformers
from deepspeed_gpt import (
    AIO,
    BETAS,
    EPSILON,
    LEARNING_RATE,
    WEIGHT_DECAY,
    adam_step,
    answer,
    mend_dtype,
)
from transformers.integrations import HfDeepSpeedConfig

Settings = dict[str, Any]
Step = Callable[[torch.Tensor], torch.Tensor]


def opened(settings: Settings) -> torch.nn.Module:
    """The model in float32, to be trained."""
    return transformers.AutoModelForCausalLM.from_pretrained(
        settings["model"], dtype=torch.float32
    ).train()


def torch_step(settings: Settings) -> Step:
    model = opened(settings)

    def loss_of(tokens: torch.Tensor) -> torch.Tensor:
        return model(input_ids=tokens, labels=tokens, use_cache=False).loss

    return adam_step(model, loss_of)


def deepspeed_step(settings: Settings, *, reads_ahead: bool) -> Step:
    mend_dtype()
    # Its kernel for all-reduces in shared memory takes minutes to build, and one
    # process has none.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    config = deepspeed_config(settings, reads_ahead=reads_ahead)
    deepspeed.init_distributed(dist_backend="gloo")
    # While this object lives, `from_pretrained` makes the model in `zero.Init`.
    known = HfDeepSpeedConfig(config)
    model = opened(settings)
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config
    )
    del known

    def step(tokens: torch.Tensor) -> torch.Tensor:
        loss = engine(input_ids=tokens, labels=tokens, use_cache=False).loss
        engine.backward(loss)
        engine.step()
        return loss

    return step


def deepspeed_config(settings: Settings, *, reads_ahead: bool) -> Settings:
    """Parameters and optimizer on NVMe; what each key is for is in deepspeed_gpt.py."""
    place = {"device": "nvme", "nvme_path": settings["folder"], "pin_memory": True}
    # A buffer must hold the largest parameter, which is the embedding.
    parameters = {"buffer_count": 5, "buffer_size": settings["largest"] + 2**16}
    state = {"buffer_count": 8 if reads_ahead else 4, "pipeline_read": reads_ahead}
    adam = {"lr": LEARNING_RATE, "betas": BETAS, "eps": EPSILON}
    return {
        "train_batch_size": settings["samples"],
        "train_micro_batch_size_per_gpu": settings["samples"],
        "optimizer": {
            "type": "AdamW",
            "params": adam | {"weight_decay": WEIGHT_DECAY},
        },
        "gradient_clipping": 0.0,
        "steps_per_print": 10**9,
        "zero_optimization": {
            "stage": 3,
            "offload_param": place | parameters | {"max_in_cpu": 0},
            "offload_optimizer": place | state | {"fast_init": True},
            # About the size of a layer.
            "sub_group_size": settings["layer"],
            "stage3_prefetch_bucket_size": 0,
            "stage3_max_live_parameters": 10**6,
            "stage3_max_reuse_distance": 10**6,
        },
        "aio": AIO,
    }


def serve(name: str, settings: Settings) -> None:
    torch.set_num_threads(settings["threads"])
    began = time.perf_counter()
    if name == "torch":
        step = torch_step(settings)
    else:
        step = deepspeed_step(settings, reads_ahead=not name.endswith("-serial"))
    versions = {
        module.__name__: module.__version__
        for module in (torch, transformers, deepspeed)
    }
    answer({"init_seconds": time.perf_counter() - began, "versions": versions})
    tokens = torch.from_numpy(np.load(settings["batch"]).astype(np.int64))
    for _ in sys.stdin:
        began, spent = time.perf_counter(), time.process_time()
        loss = step(tokens).item()
        seconds = time.perf_counter() - began
        processor = time.process_time() - spent
        answer({"seconds": seconds, "processor": processor, "loss": loss})


if __name__ == "__main__":
    serve(sys.argv[1], json.loads(sys.argv[2]))
