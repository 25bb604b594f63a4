"""Section of gpu_check.py: gradients of an offloaded step beside those without offload.

It runs before anything is timed: XLA has had wrong gradients from slices of arrays in
host memory (openxla/xla#46231, mended by #46308; open: #47362, #47380, #34565). If a
gradient or a loss differs, the section fails, and says not to use
`execution: offloaded`.
"""

from typing import Any

from gpu_rows import Rows, Setting, imported

NUM_STEPS = 2


def run(setting: Setting, rows: Rows) -> None:
    """Compares steps of a small GPT with plain jax."""
    setting.device()
    np, optax = imported("numpy"), imported("optax")
    models, zinf = imported("zinf.models"), imported("zinf")
    wrong = []
    # A dry run only shows that it runs: each comparison takes a minute of two cores.
    forms = (True,) if setting.is_dry else (False, True)
    for scan_layers in forms:
        shape = models.GPTConfig(
            num_layers=5,
            num_heads=2,
            embed_dim=32 if setting.is_dry else 256,
            vocab_size=256,
            max_length=16 if setting.is_dry else 128,
            scan_layers=scan_layers,
        )
        init, loss = models.init_and_loss(shape, seed=0)
        random = np.random.default_rng(0)
        tokens = random.integers(0, 256, (4, shape.max_length + 1), np.int32)
        for name, config in _configs(setting.is_dry).items():
            found: Any = zinf.verify(
                loss,
                init,
                optax.adamw(1e-3),
                config,
                batch={"tokens": tokens},
                num_steps=NUM_STEPS,
            )
            of = {"step": name, "stacked": scan_layers}
            rows.add("agrees with plain jax", found.agrees, **of)
            if not found.agrees:
                wrong.append(f"{of}: {found.verdict}")
    if wrong:
        raise AssertionError(
            "Do not use execution: offloaded on this machine: its numbers are not "
            f"those of plain jax. {' '.join(wrong)}"
        )


def _configs(is_dry: bool) -> dict[str, dict[str, Any]]:
    offloaded = {"execution": "offloaded"}
    values = {"activation_checkpointing": {"cpu_checkpointing": True}}
    if is_dry:
        return {"offloaded with activations": offloaded | values}
    return {
        "without offload": {"execution": "fused"},
        "offloaded": offloaded,
        "offloaded with activations": offloaded | values,
    }
