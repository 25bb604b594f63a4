"""Records what TRL's `KTOTrainer` computes, as a fixture for tests.

    python scripts/reports/record_kto.py [OUT]

Needs torch and TRL (1.16.0 was recorded). OUT is `tests/unit/hf/kto.npz` unless given.
The loss is TRL's own `_compute_loss`, with the log-probabilities of models replaced by
given ones, in float64 from numbers that float32 has, and recorded in float32.
"""

import sys
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from record_rl import ROWS, TOKENS, drawn, exact, whole, write
from trl.trainer.kto_trainer import KTOTrainer

DEFAULT_OUT = Path(__file__).parents[2] / "tests/unit/hf/kto.npz"
ACCELERATOR = SimpleNamespace(gather_for_metrics=whole, device="cpu")
# Weights of desirable and other answers, beta, and the sign of the divergence.
CASES = {
    "plain": (1.0, 1.0, 0.1, 1),
    "weighed": (1.5, 0.5, 0.3, 1),
    "clamped": (1.0, 1.33, 0.2, -1),
}


def loss_of(logps, data, *, desirable, undesirable, beta, sign):
    """The loss, z, and the gradient of the log-probabilities of answers."""
    logps = logps.clone().requires_grad_()
    divergences = sign * data["divergences"]
    trainer = SimpleNamespace(
        accelerator=ACCELERATOR,
        model=SimpleNamespace(training=True),
        calculate_KL=True,
        aux_loss_enabled=False,
        precompute_ref_logps=True,
        loss_type="kto",
        beta=beta,
        desirable_weight=desirable,
        undesirable_weight=undesirable,
        _total_train_tokens=0,
        _tp_size=1,
        _metrics={"train": defaultdict(list)},
        _compute_kl_logps=lambda *_: data["ref_kl_logps"] + divergences,
    )
    tokens = torch.zeros(ROWS, TOKENS + 1, dtype=torch.long)
    inputs = {
        "input_ids": tokens,
        "attention_mask": tokens + 1,
        "completion_mask": tokens + 1,
        "label": data["label"],
        "ref_logps": data["ref_logps"],
        "ref_KL_logps": data["ref_kl_logps"],
    }
    shape = ROWS, TOKENS
    spread = logps[:, None].expand(shape) / TOKENS
    outputs = SimpleNamespace(
        log_probs=spread, entropy=torch.zeros(shape), mean_logits=torch.zeros(shape)
    )
    loss = KTOTrainer._compute_loss(trainer, lambda **_: outputs, inputs, False)
    loss.backward()
    return loss.item(), trainer._metrics["train"]["kl"][0], logps.grad


def main() -> None:
    torch.set_default_dtype(torch.float64)
    generator = torch.Generator().manual_seed(0)
    logps, gains, reference, divergences = drawn(generator, 4, ROWS)
    logps = exact(4 * logps - 20)
    data = {
        "logps": logps,
        "ref_logps": exact(logps - 5 * gains),
        "ref_kl_logps": exact(4 * reference - 20),
        "divergences": exact(divergences + 1),
        "label": torch.tensor([True, False, True, True, False, True, False, False]),
    }
    record = dict(data)
    for name, (desirable, undesirable, beta, sign) in CASES.items():
        weights = {"desirable": desirable, "undesirable": undesirable}
        loss, kl, grad = loss_of(logps, data, **weights, beta=beta, sign=sign)
        record |= {f"{name}/loss": loss, f"{name}/kl": kl, f"{name}/grad": grad}
        record[f"{name}/settings"] = np.array(CASES[name])
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else DEFAULT_OUT
    write(out, record)
    print(f"{len(record)} arrays of {len(CASES)} losses in {out}")


if __name__ == "__main__":
    main()
