"""What of a config decides the numbers of a run, so that a resumed run keeps it."""

from typing import Any

from zinf.core.config.config import Config
from zinf.core.config.scheduler import DecayParams, WarmupParams
from zinf.core.config.section import dotted

# Sections whose keys all decide. Not here: where arrays rest, how the program is cut,
# how many devices there are, and what is saved and printed.
SECTIONS = (
    "optimizer",
    "scheduler",
    "gradient_clipping",
    "bf16",
    "bfloat16",
    "fp16",
    "data_types",
    "weight_quantization",
    "curriculum_learning",
    "data_efficiency",
    "loss_average",
    "frozen",
    "adapter",
    "distillation",
    "grpo",
    "ppo",
    "model",
    "data",
)
# Where data is and where it is kept: its content is compared.
WITHOUT = (
    "grpo.rewards",
    "grpo.reward_timeout",
    "ppo.rewards",
    "ppo.reward_timeout",
    "grpo.environment",
    "grpo.environment_timeout",
    "data.paths",
    "data.glob",
    "data.cache",
    "data.evaluation_paths",
)
WITHIN = (
    "zero_optimization.zero_quantized_weights",
    "zero_optimization.zero_quantized_gradients",
    "zero_optimization.zeropp_loco_param.err_beta",
    "zero_optimization.zeropp_loco_param.reset_T",
    "run.seed",
)


def deciding(config: Config) -> dict[str, Any]:
    """The dotted keys that decide the numbers of a run, where they are not defaults.

    `train_batch_size` and `data.sequence_length` are the values in use. `run.steps` is
    there only if the learning rate ends with the run.
    """
    given = dotted(config.model_dump(mode="json", exclude_defaults=True))
    found = {
        key: value
        for key, value in given.items()
        if key in WITHIN or key.partition(".")[0] in SECTIONS and key not in WITHOUT
    }
    found["train_batch_size"] = config.batch_size
    found["data.sequence_length"] = config.sequence_length
    params = None if config.scheduler is None else config.scheduler.params
    ends = isinstance(params, DecayParams) and params.total_num_steps is None
    if ends or isinstance(params, WarmupParams) and params.warmup_ratio is not None:
        found["run.steps"] = config.run.steps
    return found
