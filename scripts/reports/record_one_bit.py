"""Records parameters that DeepSpeed's compressed optimizers train, for tests.

    python scripts/reports/record_one_bit.py DEEPSPEED_SOURCE [OUT]

Needs torch and DeepSpeed's source (edaa7221 was recorded), of which four files are
executed: the three classes of `runtime/fp16/onebit` and `runtime/comm/compressed.py`,
whose `compressed_allreduce` they call. Two threads are two ranks; they exchange tensors
through lists in place of torch.distributed, and NumPy packs bits. OUT is
`tests/equivalence/one_bit.npz` unless given.

The gradient of rank r in step t is p - targets(t, r), so it depends on the rank's own
parameters. The first call of `step` only makes buffers. OneBitLamb sends all leaves in
one buffer with one scale, and zinf each leaf with its own: it is recorded with an
optimizer for each leaf, and without the leaf that needs padding, since it takes the
padding of its buffer for a momentum. Of ZeroOneAdam, the parameters without the steps
since the last exchange are recorded. Beside them are the parameters of each optimizer
as JSON.
"""

import importlib.util
import json
import sys
import threading
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch

RANKS, UPDATES, RECORDED = 2, 200, (40, 80, 120, 160, 200)
SHAPES = {"even": (8, 16), "odd": (15, 9), "wide": (4, 36)}
COMMON = {"betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0.01}
CASES: dict[str, dict[str, Any]] = {
    "OneBitAdam": {"freeze_step": 60},
    "OneBitLamb": {"freeze_step": 60, "max_coeff": 5.0, "factor_max": 2.0},
    "ZeroOneAdam": {
        "var_freeze_step": 90,
        "var_update_scaler": 4,
        "local_step_scaler": 30,
        "local_step_clipper": 4,
    },
}
DEFAULT_OUT = Path(__file__).parents[2] / "tests/equivalence/one_bit.npz"


def initial() -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    return {k: random.standard_normal(s, np.float32) for k, s in SHAPES.items()}


def targets(update: int) -> dict[str, np.ndarray]:
    """(ranks, *shape) of each leaf."""
    random = np.random.default_rng(1 + update)
    return {
        k: random.standard_normal((RANKS, *s), np.float32) for k, s in SHAPES.items()
    }


def rate(update: int) -> float:
    """DeepSpeed's WarmupLR, linear to 0.01 in 20 steps; the first two have 0."""
    return 0.01 * min(1.0, max(0, update - 1) / 20)


class Ranks:
    """What `deepspeed.comm` is to the classes."""

    def __init__(self) -> None:
        self.own = threading.local()
        self.barrier = threading.Barrier(RANKS)
        self.sent: list[Any] = [None] * RANKS

    def gathered(self, content: Any) -> list[Any]:
        """What all ranks give."""
        self.sent[self.own.rank] = content.clone()
        self.barrier.wait()
        found = [x.clone() for x in self.sent]
        self.barrier.wait()
        return found

    def all_gather(self, outputs: list[Any], own: Any, group: Any = None) -> None:
        for output, content in zip(outputs, self.gathered(own), strict=True):
            output.copy_(content.reshape(output.shape))

    def all_to_all_single(self, output: Any, own: Any, group: Any = None) -> None:
        output.copy_(torch.stack([x[self.own.rank] for x in self.gathered(own)]))

    def module(self) -> ModuleType:
        module = ModuleType("deepspeed.comm")
        module.is_initialized = lambda: True
        module.new_group = lambda ranks: None
        module.get_rank = lambda group=None: self.own.rank
        module.get_world_size = lambda group=None: RANKS
        module.all_gather = self.all_gather
        module.all_to_all_single = self.all_to_all_single
        return module


class Packer:
    """What `PackbitsBuilder().load()` is."""

    def packbits(self, content: Any, size: int, rank: int) -> Any:
        return torch.from_numpy(np.packbits(content.numpy() >= 0))

    def unpackbits(self, content: Any, size: int, rank: int) -> Any:
        return torch.from_numpy(np.unpackbits(content.numpy())).float() * 2 - 1


def modules(source: Path, ranks: Ranks) -> dict[str, Any]:
    """The classes by name; their imports are stand-ins of the same names."""
    device = SimpleNamespace(
        empty_cache=lambda: None, current_device_name=lambda: "cpu"
    )
    stand_ins = {
        "accelerator": {"get_accelerator": lambda: device},
        "utils.torch": {"required_torch_version": lambda **_: True},
        "ops.op_builder": {"PackbitsBuilder": lambda: SimpleNamespace(load=Packer)},
        "runtime.comm.utils": {"check_and_handle_empty_buffer": lambda *_: None},
        "runtime.utils": {"filter_empty_parameters": list},
    }
    for name in ("", "ops", "runtime", "runtime.comm", "utils", *stand_ins):
        module = ModuleType(f"deepspeed.{name}".rstrip("."))
        vars(module).update(stand_ins.get(name, {}))
        sys.modules[module.__name__] = module
    sys.modules["deepspeed"].comm = sys.modules["deepspeed.comm"] = ranks.module()
    found = {}
    for name, file in {
        "": "runtime/comm/compressed",
        "OneBitAdam": "runtime/fp16/onebit/adam",
        "OneBitLamb": "runtime/fp16/onebit/lamb",
        "ZeroOneAdam": "runtime/fp16/onebit/zoadam",
    }.items():
        full = "deepspeed." + file.replace("/", ".")
        spec = importlib.util.spec_from_file_location(
            full, source / f"deepspeed/{file}.py"
        )
        sys.modules[full] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        found[name] = getattr(module, name.replace("OneBit", "Onebit"), None)
    return found


def train(kind: str, made: Any, ranks: Ranks, rank: int, found: dict[str, Any]) -> None:
    """Trains as one rank; rank 0 adds what is recorded to `found`."""
    ranks.own.rank = rank
    params = {k: torch.nn.Parameter(torch.tensor(x)) for k, x in initial().items()}
    if kind == "OneBitLamb":
        del params["odd"]
    groups = [[p] for p in params.values()]
    if kind != "OneBitLamb":
        groups = [list(params.values())]
    engines = [
        SimpleNamespace(mpu=None, local_rank=0, enable_backward_allreduce=True)
        for _ in groups
    ]
    freeze = dict(CASES[kind])
    if "freeze_step" in freeze:
        freeze["freeze_step"] += 1  # It counts the first call too.
    rest = {**COMMON, **freeze, "comm_backend_name": "compressed"}
    optimizers = [
        made(group, deepspeed=engine, **rest)
        for group, engine in zip(groups, engines, strict=True)
    ]
    for update in range(-1, UPDATES):
        drawn = targets(max(update, 0))
        for p, name in zip(params.values(), params, strict=True):
            p.grad = p.data - torch.tensor(drawn[name][rank])
            if engines[0].enable_backward_allreduce:
                p.grad = torch.stack(ranks.gathered(p.grad)).mean(0)
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = rate(update)
            optimizer.step()
        if rank == 0 and update + 1 in RECORDED:
            for name, p in params.items():
                (state,) = [o.state[p] for o in optimizers if p in o.state]
                steps = state.get("momentum_accumulator", torch.zeros(()))
                key = f"{kind}/{update + 1}/{name}"
                found[key] = (p.data - steps).numpy().copy()


def main() -> None:
    source = Path(sys.argv[1])
    out = Path(sys.argv[2]) if len(sys.argv) > 2 else DEFAULT_OUT
    ranks, found = Ranks(), {}
    found |= {kind: json.dumps(COMMON | CASES[kind]) for kind in CASES}
    classes = modules(source, ranks)
    for kind in CASES:
        threads = [
            threading.Thread(target=train, args=(kind, classes[kind], ranks, r, found))
            for r in range(RANKS)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    np.savez_compressed(out, **found)
    print(f"{len(found)} arrays in {out}")


if __name__ == "__main__":
    main()
