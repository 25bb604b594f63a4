"""Records what DeepSpeed's gating functions return, as a fixture for tests.

    python scripts/reports/record_gating.py DEEPSPEED_SOURCE [OUT]

Needs torch and the source of DeepSpeed (0.19.6 was recorded), but not its installation:
only `deepspeed/moe/sharded_moe.py` is executed, with the modules that it imports
replaced by empty ones. OUT is `tests/unit/moe/gating.npz` unless given.

Random numbers that DeepSpeed draws are recorded too, so that the comparison does not
depend on a generator. Dense [tokens, experts, capacity] weights are recorded as their
sum over the capacity: the gate of each token for each expert, zero where dropped.
"""

import importlib.util
import sys
import types
from pathlib import Path

import numpy as np
import torch

TOKENS, EXPERTS = 96, 8
FACTORS = {"ample": 4.0, "tight": 0.5}
MIN_CAPACITY = 4
DEFAULT_OUT = Path(__file__).parents[2] / "tests/unit/moe/gating.npz"


class _Absent(types.ModuleType):
    """Any name in it is another such module; called, it gives 1."""

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Absent(name)

    def __call__(self, *_, **__) -> int:
        return 1


def load(source: Path) -> types.ModuleType:
    for name in (
        "deepspeed",
        "deepspeed.accelerator",
        "deepspeed.comm",
        "deepspeed.moe",
        "deepspeed.moe.mappings",
        "deepspeed.utils",
        "deepspeed.utils.bwc",
        "deepspeed.utils.timer",
        "deepspeed.utils.torch",
        "tutel",
    ):
        sys.modules[name] = _Absent(name)
    sys.modules["deepspeed.utils.torch"].jit_script_compat = lambda function: function
    path = source / "deepspeed" / "moe" / "sharded_moe.py"
    spec = importlib.util.spec_from_file_location("deepspeed.moe.sharded_moe", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    # Without these groups DeepSpeed neither pads a capacity nor asks other processes.
    module.groups.mpu = None
    return module


def main() -> None:
    deepspeed = load(Path(sys.argv[1]))
    out = Path(sys.argv[2]) if len(sys.argv) > 2 else DEFAULT_OUT
    torch.manual_seed(0)
    logits = torch.randn(TOKENS, EXPERTS) * 2
    gumbel = torch.distributions.Gumbel(0.0, 1.0).sample(logits.shape)
    uniform = torch.rand(TOKENS, EXPERTS)
    jitter = torch.empty(TOKENS, EXPERTS).uniform_(0.99, 1.01)
    deepspeed.gumbel_rsample = lambda shape, device: gumbel
    draws = {"logits": logits, "gumbel": gumbel, "uniform": uniform, "jitter": jitter}
    record = {name: draw.numpy() for name, draw in draws.items()}

    def keep(name: str, result: tuple) -> None:
        aux_loss, combine, _, counts = result
        record[f"{name}/aux_loss"] = np.float32(aux_loss)
        record[f"{name}/gates"] = combine.sum(-1).numpy()
        record[f"{name}/counts"] = counts.numpy()

    uniforms = deepspeed.exp_selection_uniform_map
    uniforms[logits.device] = lambda shape: uniform
    jitters = deepspeed.uniform_map
    jitters[logits.device] = lambda shape: jitter
    record["jittered"] = deepspeed.multiplicative_jitter(
        logits.clone(), device=logits.device
    ).numpy()
    for label, factor in FACTORS.items():
        for noise in (None, "RSample"):
            for rts in (False, True):
                keep(
                    f"top1/{label}/{noise}/{rts}",
                    deepspeed.top1gating(
                        logits.clone(), factor, MIN_CAPACITY, None, noise, True, rts
                    ),
                )
        for sampling in (False, True):
            keep(
                f"top2/{label}/{sampling}",
                deepspeed.top2gating(
                    logits.clone(),
                    factor,
                    MIN_CAPACITY,
                    top2_2nd_expert_sampling=sampling,
                ),
            )
        for k in (1, 2, 4):
            for policy in ("probs", "position"):
                keep(
                    f"topk/{label}/{k}/{policy}",
                    deepspeed.topkgating(
                        logits.clone(), k, factor, MIN_CAPACITY, drop_policy=policy
                    ),
                )
    for k, name in ((1, "top1/all"), (2, "top2/all"), (4, "topk/all/4")):
        gating = {1: deepspeed.top1gating, 2: deepspeed.top2gating}.get(k)
        arguments = {"drop_tokens": False}
        if k == 1:
            arguments["use_rts"] = False
        if k == 2:
            arguments["top2_2nd_expert_sampling"] = False
        if gating is None:
            found = deepspeed.topkgating(logits.clone(), k, 1.0, 4, **arguments)
        else:
            found = gating(logits.clone(), 1.0, MIN_CAPACITY, **arguments)
        keep(name, found)
    np.savez_compressed(out, **record)
    print(f"{len(record)} arrays in {out}")


if __name__ == "__main__":
    main()
