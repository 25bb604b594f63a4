"""Sections of gpu_check.py: losses and gradients of each execution beside plain JAX.

They run before anything is timed. XLA has had wrong gradients from slices of arrays in
host memory (openxla/xla#46231, mended by #46308; open: #47362, #47380, #34565). If a
gradient or a loss differs, the section fails, and says what not to use.
"""

from collections.abc import Callable, Mapping
from typing import Any

from gpu_rows import Rows, Setting, imported

NUM_STEPS = 2
NVME, HOST = {"device": "nvme"}, {"device": "cpu"}
BF16 = {"bf16": {"enabled": True}}
VALUES = {"activation_checkpointing": {"cpu_checkpointing": True}}


def run(setting: Setting, rows: Rows) -> None:
    """Compares the forms of `case` with plain JAX: all steps, or offloaded ones."""
    setting.device()
    is_dry, is_offloaded = setting.is_dry, setting.case == "offloaded"
    forms = offloaded(is_dry) if is_offloaded else executions(setting.folder, is_dry)
    # Offloaded steps read slices of stacked layers, where the wrong gradients were.
    # A dry run only shows that it runs: each comparison takes seconds to a minute.
    stacked = (True,) if is_dry else (False, True)
    wrong: list[str] = []
    for scan_layers in stacked if is_offloaded else (False,):
        check = _comparison(is_dry, scan_layers)
        for name, config in forms.items():
            of = {"step": name, "stacked": scan_layers}

            def compare(config: Any = config, of: Any = of, check: Any = check) -> None:
                found = check(config)
                rows.add("agrees with plain JAX", found.agrees, **of)
                if not found.agrees:
                    wrong.append(f"{of}: {found.verdict}")

            error = rows.attempt("agrees with plain JAX", compare, **of)
            if error is not None:
                wrong.append(f"{of}: {type(error).__name__}")
    if wrong:
        raise AssertionError(
            "Do not use these on this machine: they fail, or their numbers are not "
            f"those of plain JAX. {' '.join(wrong)}"
        )


def _comparison(is_dry: bool, scan_layers: bool) -> Callable[[Mapping], Any]:
    """`zinf.verify` of a small GPT, as a function of the config."""
    np, optax = imported("numpy"), imported("optax")
    models, zinf = imported("zinf.models"), imported("zinf")
    # Not the lazy package alone, whose import succeeds even if a module is missing.
    imported("zinf.core.verification.verify")
    shape = models.GPTConfig(
        num_layers=5 if scan_layers and not is_dry else 2,
        num_heads=2,
        embed_dim=32 if is_dry else 256,
        vocab_size=256,
        max_length=16 if is_dry else 128,
        scan_layers=scan_layers,
    )
    init, loss = models.init_and_loss(shape, seed=0)
    random = np.random.default_rng(0)
    tokens = random.integers(0, 256, (4, shape.max_length + 1), np.int32)
    return lambda config: zinf.verify(
        loss,
        init,
        optax.adamw(1e-3),
        config,
        batch={"tokens": tokens},
        num_steps=NUM_STEPS,
    )


def executions(folder: str, is_dry: bool) -> dict[str, dict[str, Any]]:
    """Configs by name: each way in which a step runs, and where state rests."""
    host = {"zero_optimization": {"offload_param": HOST, "offload_optimizer": HOST}}
    nvme = {
        "zero_optimization": {"offload_param": NVME, "offload_optimizer": NVME},
        "memory": {"nvme": [folder], "nvme_capacity": "1GiB"},
        "persistence_threshold": 1,
    }
    streamed = {"execution": "streamed"}
    found = {
        "fused": {"execution": "fused"},
        "streamed from NVMe": streamed | nvme,
    }
    if is_dry:
        return found
    cut = {"gradient_accumulation_steps": 2, "gradient_clipping": 0.1}
    return found | {
        "streamed on the device": streamed,
        "streamed from the host": streamed | host,
        "fused, bf16": found["fused"] | BF16,
        "streamed from the host, bf16": streamed | host | BF16,
        "streamed from NVMe, 2 microbatches": streamed | nvme | cut,
    }


def offloaded(is_dry: bool) -> dict[str, dict[str, Any]]:
    """Configs by name: one program whose state rests in pinned host memory."""
    execution = {"execution": "offloaded"}
    if is_dry:
        return {"offloaded with activations": execution | VALUES}
    return {
        "without offload": {"execution": "fused"},
        "offloaded": execution,
        "offloaded with activations": execution | VALUES,
    }
