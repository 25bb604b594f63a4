"""DeepSpeed's configs as they are found in the wild."""

import pytest

from zinf.config import Config, ConfigError, report
from zinf.program import Tier

TOP_LEVEL = """
train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps optimizer
scheduler communication_data_type prescale_gradients gradient_predivide_factor
sparse_gradients fp16 bf16 amp gradient_clipping zero_optimization
zero_allow_untested_optimizer zero_force_ds_cpu_optimizer steps_per_print
wall_clock_breakdown dump_state flops_profiler activation_checkpointing sparse_attention
data_efficiency curriculum_learning tensorboard wandb csv_monitor comet elasticity
comms_logger compression_training checkpoint data_types aio autotuning hybrid_engine
pipeline graph_harvesting eigenvalue progressive_layer_drop nebula timers
weight_quantization quantize_training compile tensor_parallel expert_parallel
torch_autocast managed_gradient_accumulation gradient_allreduce_op disable_allgather
vocabulary_size dataloader_drop_last memory_breakdown log_level
use_data_before_expert_parallelism sequence_parallel_size
seq_parallel_communication_data_type datastates_ckpt trackio
""".split()

# As in the documentation of Hugging Face Transformers.
HUGGING_FACE = {
    "fp16": {
        "enabled": "auto",
        "loss_scale": 0,
        "loss_scale_window": 1000,
        "initial_scale_power": 16,
        "hysteresis": 2,
        "min_loss_scale": 1,
    },
    "bf16": {"enabled": "auto"},
    "optimizer": {
        "type": "AdamW",
        "params": {
            "lr": "auto",
            "betas": "auto",
            "eps": "auto",
            "weight_decay": "auto",
        },
    },
    "scheduler": {
        "type": "WarmupLR",
        "params": {
            "warmup_min_lr": "auto",
            "warmup_max_lr": "auto",
            "warmup_num_steps": "auto",
        },
    },
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "cpu", "pin_memory": True},
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 1e9,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "steps_per_print": 2000,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "wall_clock_breakdown": False,
}

# As written by Hugging Face Accelerate, and with monitors and switches left off.
SWITCHED_OFF = {
    "train_micro_batch_size_per_gpu": 2,
    "zero_optimization": {
        "stage": 2,
        "allgather_partitions": True,
        "allgather_bucket_size": 2e8,
        "reduce_scatter": True,
        "reduce_bucket_size": 5e8,
        "round_robin_gradients": True,
        "offload_optimizer": {"device": "none"},
    },
    "amp": {"enabled": "auto", "opt_level": "auto"},
    "wandb": {"enabled": False, "project": "x"},
    "csv_monitor": {"enabled": False},
    "autotuning": {"enabled": False, "fast": True},
    "elasticity": {"enabled": False, "micro_batch_sizes": [2, 4]},
    "hybrid_engine": {"enabled": False, "max_out_tokens": 512},
    "flops_profiler": {"enabled": False, "profile_step": 1},
    "comms_logger": {"enabled": True, "prof_ops": ["all_gather"]},
    "data_efficiency": {"enabled": False, "data_sampling": {"enabled": False}},
    "progressive_layer_drop": {"enabled": False, "theta": 0.5},
    "compression_training": {
        "weight_quantization": {
            "shared_parameters": {"enabled": False, "quantizer_kernel": False},
            "different_groups": {"wq1": {"params": {"start_bits": 8}}},
        }
    },
    "tensor_parallel": {"autotp_size": 1},
    "pipeline": {"stages": "auto", "partition": "best", "seed_layers": False},
    "sparse_attention": None,
    "sequence_parallel_size": 1,
    "gradient_allreduce_op": "mean",
    "sparse_gradients": False,
}


@pytest.mark.parametrize("key", TOP_LEVEL)
def test_every_top_level_key_of_deepspeed_is_known(key):
    assert key in Config.known_keys()


def test_a_hugging_face_config_loads_with_auto_as_its_trainer_has_it():
    config = Config.load(HUGGING_FACE)
    assert config.compute_dtype == "float32"
    assert config.clip_norm == 1.0
    assert config.batch_size is None
    assert config.num_microbatches == 1
    assert config.optimizer.params.lr == 5e-5
    assert config.optimizer.params.betas == (0.9, 0.999)
    assert config.scheduler.params.warmup_max_lr is None
    assert config.persistence_bytes == 32 * 1024
    assert (config.param_tier, config.optimizer_tier) == (Tier.HOST, Tier.HOST)
    assert report(HUGGING_FACE).is_valid


def test_sections_that_are_off_are_accepted():
    assert Config.load(SWITCHED_OFF).optimizer_tier is Tier.DEVICE
    assert report(SWITCHED_OFF).is_valid


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("sparse_attention", {"mode": "fixed"}),
        ("pipeline", {"stages": 4}),
        ("sequence_parallel_size", 2),
        ("amp", {"enabled": True, "opt_level": "O1"}),
        ("torch_autocast", {"enabled": True, "dtype": "bfloat16"}),
        ("wandb", {"enabled": True}),
        ("csv_monitor", {"enabled": True}),
        ("autotuning", {"enabled": True}),
        ("elasticity", {"enabled": True}),
        ("progressive_layer_drop", {"enabled": True, "theta": 0.5}),
        ("hybrid_engine", {"enabled": True}),
        ("nebula", {"enabled": True}),
        ("eigenvalue", {"enabled": True}),
        ("quantize_training", {"enabled": True}),
        (
            "compression_training",
            {"layer_reduction": {"enabled": True, "keep_number_layer": 4}},
        ),
        ("gradient_allreduce_op", "sum"),
        ("managed_gradient_accumulation", False),
    ],
)
def test_what_zinf_cannot_do_is_refused_by_name(key, value):
    with pytest.raises(ConfigError, match=f"{key}.*: not supported yet"):
        Config.load({key: value})


@pytest.mark.parametrize("kind", ["OneBitAdam", "onebitlamb", "ZeroOneAdam", "MuAdam"])
def test_optimizers_of_deepspeed_that_are_missing_say_so(kind):
    with pytest.raises(ConfigError, match="optimizer.type.*not supported yet"):
        Config.load({"optimizer": {"type": kind}})


def test_max_grad_norm_of_the_optimizer_points_to_gradient_clipping():
    raw = {"optimizer": {"type": "Lamb", "params": {"max_grad_norm": 1.0}}}
    with pytest.raises(ConfigError, match="gradient_clipping"):
        Config.load(raw)
    Config.load(raw, ["optimizer.params.max_grad_norm=0"])


def test_torch_adam_has_another_default_decay_so_it_must_be_given():
    raw = {"optimizer": {"type": "AdamW", "params": {"torch_adam": True}}}
    with pytest.raises(ConfigError, match="optimizer.params.weight_decay: is 0.01"):
        Config.load(raw)
    Config.load(raw, ["optimizer.params.weight_decay=0"])


@pytest.mark.parametrize("kind", ["Adam", "adam", "ADAM"])
def test_types_are_read_in_any_case(kind):
    assert Config.load({"optimizer": {"type": kind}}).optimizer.type == "Adam"


def test_a_type_is_required():
    with pytest.raises(ConfigError, match="optimizer.type: is required"):
        Config.load({"optimizer": {"params": {"lr": 1.0}}})
