"""Settings as DeepSpeed's users write them, each row from files that are public.

A row has the settings that tell a file apart, not the whole file. It loads as it is, or
is refused by the names of exactly the keys in `refused`, and loads without them where
the config says `ignore_unsupported`.
"""

from dataclasses import dataclass, field
from typing import Any

import pytest

from zinf.config import Config, ConfigError, notices, report
from zinf.program import Tier

AUTO_BATCH = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
}
AUTO_FP16 = {
    "enabled": "auto",
    "loss_scale": 0,
    "loss_scale_window": 1000,
    "initial_scale_power": 16,
    "hysteresis": 2,
    "min_loss_scale": 1,
}
AUTO_PRECISION = {"fp16": AUTO_FP16, "bf16": {"enabled": "auto"}}
AUTO_ADAM = {
    "type": "AdamW",
    "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto"),
}
WARMUP = ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps")
AUTO_WARMUP = {"type": "WarmupLR", "params": dict.fromkeys(WARMUP, "auto")}
AUTO_DECAY = {
    "type": "WarmupDecayLR",
    "params": dict.fromkeys((*WARMUP, "total_num_steps"), "auto"),
}
TO_HOST = {"device": "cpu", "pin_memory": True}
STAGE_2 = {
    "stage": 2,
    "allgather_partitions": True,
    "allgather_bucket_size": 2e8,
    "overlap_comm": True,
    "reduce_scatter": True,
    "reduce_bucket_size": 2e8,
    "contiguous_gradients": True,
}
STAGE_3 = {
    "stage": 3,
    "overlap_comm": True,
    "contiguous_gradients": True,
    "sub_group_size": 1e9,
    "reduce_bucket_size": "auto",
    "stage3_prefetch_bucket_size": "auto",
    "stage3_param_persistence_threshold": "auto",
    "stage3_max_live_parameters": 1e9,
    "stage3_max_reuse_distance": 1e9,
    "stage3_gather_16bit_weights_on_model_save": True,
}
TRAINER = {**AUTO_BATCH, **AUTO_PRECISION, "optimizer": AUTO_ADAM}


@dataclass(frozen=True)
class File:
    """Attributes:
    found: a public file that has these settings.
    refused: the keys that it is refused for.
    """

    found: str
    raw: dict[str, Any]
    refused: tuple[str, ...] = ()
    num_devices: int = 1
    expected: dict[str, Any] = field(default_factory=dict)


def bert(kind: str, **params: Any) -> dict[str, Any]:
    """The settings that DeepSpeedExamples' BERT files share."""
    return {
        "train_batch_size": 4096,
        "train_micro_batch_size_per_gpu": 16,
        "prescale_gradients": False,
        "optimizer": {"type": kind, "params": {"lr": 4e-4, **params}},
        "gradient_clipping": 1.0,
        "fp16": {"enabled": True, "loss_scale": 0},
    }


TRANSFORMERS = "transformers/tests/deepspeed"
ACCELERATE = "accelerate/examples/deepspeed_config_templates"
AXOLOTL = "axolotl/deepspeed_configs"
EXAMPLES = "DeepSpeedExamples"
BERT = f"{EXAMPLES}/training/bing_bert"
NO_BIAS = {"bias_correction": False}
ON_WIRE = {"cuda_aware": False, "comm_backend_name": "nccl"}
BIAS_KEY = "optimizer.params.bias_correction"

FILES = (
    File(
        f"{TRANSFORMERS}/ds_config_zero2.json",
        {
            **TRAINER,
            "scheduler": AUTO_WARMUP,
            "zero_optimization": {**STAGE_2, "offload_optimizer": TO_HOST},
        },
        expected={"clip_norm": 1.0, "optimizer_tier": Tier.HOST, "param_tier": None},
    ),
    File(
        f"{TRANSFORMERS}/ds_config_zero3.json",
        {
            **TRAINER,
            "scheduler": AUTO_WARMUP,
            "zero_optimization": {
                **STAGE_3,
                "offload_optimizer": TO_HOST,
                "offload_param": TO_HOST,
            },
            "steps_per_print": 2000,
            "wall_clock_breakdown": False,
        },
        expected={"param_tier": Tier.HOST, "compute_dtype": "float32"},
    ),
    File(
        f"{TRANSFORMERS}/ds_config_zero3_bf16.json, with the older name of bf16",
        {
            **AUTO_BATCH,
            "bfloat16": {"enabled": "auto"},
            "optimizer": AUTO_ADAM,
            "scheduler": AUTO_WARMUP,
            "zero_optimization": {
                "stage": 3,
                "stage3_gather_fp16_weights_on_model_save": True,
            },
        },
    ),
    File(
        f"{TRANSFORMERS}/ds_config_zero3.json, as it was with numbers",
        {
            "fp16": {**AUTO_FP16, "enabled": True},
            "zero_optimization": {
                "stage": 3,
                "sub_group_size": 1e14,
                "reduce_bucket_size": 0,
                "stage3_prefetch_bucket_size": 0,
                "stage3_param_persistence_threshold": 0,
            },
            "optimizer": {
                "type": "AdamW",
                "params": {"lr": 3e-5, "betas": [0.8, 0.999], "weight_decay": 3e-7},
            },
            "scheduler": {
                "type": "WarmupLR",
                "params": {
                    "warmup_min_lr": 0,
                    "warmup_max_lr": 3e-5,
                    "warmup_num_steps": 500,
                },
            },
        },
        expected={"persistence_bytes": 0, "compute_dtype": "float16"},
    ),
    File(
        "transformers/docs/source/en/deepspeed.md, with aio inside zero_optimization",
        {
            **TRAINER,
            "scheduler": AUTO_WARMUP,
            "zero_optimization": {
                **STAGE_3,
                "offload_optimizer": {
                    "device": "nvme",
                    "nvme_path": "/local_nvme",
                    "pin_memory": True,
                    "buffer_count": 4,
                    "fast_init": False,
                },
                "offload_param": {
                    "device": "nvme",
                    "nvme_path": "/local_nvme",
                    "buffer_size": 1e8,
                    "max_in_cpu": 1e9,
                },
                "aio": {
                    "block_size": 262144,
                    "queue_depth": 32,
                    "thread_count": 1,
                    "single_submit": False,
                    "overlap_events": True,
                },
            },
        },
        expected={"param_tier": Tier.NVME, "optimizer_tier": Tier.NVME},
    ),
    File(
        "transformers/docs, NVIDIA Apex left to the trainer",
        {**AUTO_BATCH, "amp": {"enabled": "auto", "opt_level": "auto"}},
    ),
    File(
        f"{ACCELERATE}/zero_stage2_offload_config.json",
        {
            "fp16": {**AUTO_FP16, "enabled": True},
            "optimizer": {
                "type": "AdamW",
                "params": {
                    "lr": "auto",
                    "weight_decay": "auto",
                    "torch_adam": True,
                    "adam_w_mode": True,
                },
            },
            "scheduler": AUTO_DECAY,
            "zero_optimization": {**STAGE_2, "offload_optimizer": TO_HOST},
            "gradient_accumulation_steps": 1,
            "gradient_clipping": "auto",
        },
    ),
    File(
        f"{ACCELERATE}/zero_stage3_config.json",
        {
            "optimizer": AUTO_ADAM,
            "scheduler": AUTO_DECAY,
            "zero_optimization": {
                **STAGE_3,
                "stage3_gather_16bit_weights_on_model_save": "auto",
            },
        },
        expected={"stage": 3},
    ),
    File(
        "accelerate/tests/deepspeed/ds_config_zero3_model_only.json",
        {**AUTO_PRECISION, "zero_optimization": STAGE_3, "gradient_clipping": "auto"},
    ),
    File(
        "accelerate/examples/alst_ulysses_sequence_parallelism/sp-alst.ds-config.json",
        {
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": 3},
            "seq_parallel_communication_data_type": "bf16",
        },
        expected={"compute_dtype": "bfloat16"},
    ),
    File(
        f"{AXOLOTL}/zero1_torch_compile.json",
        {
            **AUTO_BATCH,
            "zero_optimization": {"stage": 1, "overlap_comm": True},
            "fp16": {**AUTO_FP16, "auto_cast": False, "initial_scale_power": 32},
            "compile": {"disable": False, "backend": "inductor"},
        },
    ),
    File(
        f"{AXOLOTL}/zero3_bf16_cpuoffload_all.json, with names without stage3_",
        {
            **AUTO_BATCH,
            "zero_force_ds_cpu_optimizer": False,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": TO_HOST,
                "offload_param": TO_HOST,
                "sub_group_size": 0,
                "max_live_parameters": 0,
                "max_reuse_distance": 0,
                "gather_16bit_weights_on_model_save": True,
            },
            "bf16": {"enabled": True},
        },
    ),
    File(
        f"{EXAMPLES}/inference/sglang/ds_offload_nvme_gds.json",
        {
            "zero_optimization": {
                "stage": 3,
                "stage3_max_live_parameters": "auto",
                "offload_param": {
                    "device": "nvme",
                    "nvme_path": "/local_nvme/sglang",
                    "buffer_size": "auto",
                    "buffer_count": 3,
                },
            },
            "aio": {"block_size": 8388608, "intra_op_parallelism": 8, "use_gds": True},
            "train_batch_size": 1,
        },
    ),
    File(
        f"{EXAMPLES}/training/DeepSpeed-ZenFlow/finetuning/zf_config.json",
        {
            "train_batch_size": 8,
            "zero_optimization": {
                "stage": 2,
                "offload_optimizer": TO_HOST,
                "zenflow": {"topk_ratio": 0.1, "update_interval": 4},
            },
        },
        refused=("zero_optimization.zenflow",),
    ),
    File(
        f"{EXAMPLES}/benchmarks/autosp/configs/autosp_config.json",
        {
            "compile": {"deepcompile": True, "passes": ["autosp"]},
            "sequence_parallel_size": 2,
        },
        refused=("sequence_parallel_size",),
    ),
    File(
        f"{EXAMPLES}/training/imagenet/config/ds_fp16_z1_config.json",
        {
            "train_batch_size": 256,
            "zero_optimization": {"stage": 1},
            "fp16": {"enabled": True, "auto_cast": True},
            "gradient_clipping": 0,
            "cuda_visible_devices": 0,
        },
        refused=("fp16.auto_cast",),
    ),
    File(
        f"{EXAMPLES}/training/MoQ/test.json",
        {
            "fp16": {"enabled": True, "initial_scale_power": 16},
            "quantize_training": {"enabled": True, "quantize_groups": 8},
        },
        refused=("quantize_training",),
    ),
    File(
        "DeepSpeed/tests/model/BingBertSquad/deepspeed_bsz24_fp16_eigenvalue...json",
        {"eigenvalue": {"enabled": True, "model_name": "bert", "layer_num": 24}},
        refused=("eigenvalue",),
    ),
    File(
        f"{EXAMPLES}/training/BingBertSquad/deepspeed_bsz24_config.json",
        bert("Adam", weight_decay=0.0, **NO_BIAS),
        refused=(BIAS_KEY,),
        num_devices=8,
        expected={"batch_size": 4096, "num_microbatches": 32},
    ),
    File(
        f"{BERT}/01_adam/.../deepspeed_bsz4k_01adam_config_seq128_mpi_ethernet.json",
        bert(
            "ZeroOneAdam",
            **NO_BIAS,
            var_freeze_step=12500,
            local_step_scaler=32678,
            **ON_WIRE,
        ),
        refused=("optimizer.type",),
    ),
    File(
        f"{BERT}/1-bit_lamb/nccl/deepspeed_bsz64k_onebitlamb_config_seq128_nccl.json",
        bert(
            "OneBitLamb",
            max_coeff=0.3,
            freeze_step=1000,
            coeff_beta=0.9,
            factor_max=4.0,
            **ON_WIRE,
        ),
        refused=("optimizer.type",),
    ),
    File(
        f"{EXAMPLES}/training/BingBertSquad/1-bit_adam/.../config.json, its spelling",
        bert("OnebitAdam", freeze_step=400, **ON_WIRE),
        refused=("optimizer.type",),
    ),
    File(
        f"{BERT}/deepspeed_bsz64k_lamb_config_seq128.json",
        {
            **bert("Lamb", **NO_BIAS, max_coeff=0.3, min_coeff=0.01),
            "sparse_attention": {"mode": "fixed", "block": 16},
        },
        refused=(BIAS_KEY, "sparse_attention"),
    ),
    File(
        f"{BERT}/deepspeed_bsz4k_progressive_layer_drop_config_seq128.json",
        {
            **bert("Adam"),
            "prescale_gradients": True,
            "gradient_predivide_factor": 8,
            "progressive_layer_drop": {"enabled": True, "theta": 0.5, "gamma": 0.001},
        },
        refused=("progressive_layer_drop",),
    ),
    File(
        "DeepSpeed/docs/_tutorials/bert-pretraining.md",
        bert("Lamb", max_grad_norm=1.0),
        refused=("optimizer.params.max_grad_norm",),
    ),
    File(
        f"{EXAMPLES}/training/data_efficiency/.../ds_config_gpt_base_random_ltd.json",
        {
            "data_efficiency": {
                "enabled": True,
                "data_routing": {
                    "enabled": True,
                    "random_ltd": {
                        "enabled": True,
                        "total_layer_num": 12,
                        "random_ltd_layer_num": 10,
                        "random_ltd_layer_id": [1, 2, 3, 4, 5, 6, 7, 8, 9, 10],
                        "model_mask_name": "attention_mask",
                        "model_type": "decoder",
                        "hidden_state_order": "batch_seq_dim",
                        "random_ltd_schedule": {
                            "min_value": 128,
                            "max_value": 256,
                            "schedule_type": "fixed_linear",
                            "schedule_config": {
                                "require_steps": 200,
                                "seq_per_step": 16,
                            },
                        },
                    },
                },
            }
        },
    ),
    File(
        "DeepSpeed/docs/_tutorials/curriculum-learning.md",
        {
            "curriculum_learning": {
                "enabled": True,
                "curriculum_type": "seqlen",
                "min_difficulty": 8,
                "max_difficulty": 256,
                "schedule_type": "fixed_linear",
                "schedule_config": {
                    "total_curriculum_step": 15000,
                    "difficulty_step": 8,
                },
            }
        },
    ),
    File(
        f"{EXAMPLES}/compression/bert/config/ds_config_W1A8_Qgroup64_fp32.json",
        {
            "compression_training": {
                "weight_quantization": {"shared_parameters": {"enabled": True}}
            }
        },
        refused=("compression_training",),
    ),
    File(
        f"{EXAMPLES}/training/autotuning/hf/dsconfigs/ds_config_fp16_tune.json",
        {
            "train_micro_batch_size_per_gpu": "auto",
            "autotuning": {"enabled": True, "overwrite": False, "fast": True},
        },
        refused=("autotuning",),
    ),
    File(
        f"{EXAMPLES}/training/tensor_parallel/hf_integration/configs/ds_config.json",
        {
            **TRAINER,
            "scheduler": AUTO_DECAY,
            "zero_optimization": {
                "stage": 2,
                "gather_16bit_weights_on_model_save": True,
            },
            "tensor_parallel": {"autotp_size": 4},
        },
    ),
    File(
        f"{EXAMPLES}/training/expert_parallel/configs/ds_autoep_zero1_qwen3_5_moe.json",
        {
            "zero_optimization": {"stage": 1},
            "expert_parallel": {"enabled": True, "autoep_size": 8},
            "scheduler": {
                "type": "WarmupCosineLR",
                "params": {"total_num_steps": 1000, "warmup_type": "linear"},
            },
        },
    ),
    File(
        f"{EXAMPLES}/training/expert_parallel/configs/ds_zero3_leaf_qwen3_5.json",
        {
            "zero_optimization": {
                "stage": 3,
                "stage3_param_persistence_threshold": 1e5,
                "leaf_module": {"classes": ["a.b.Block"]},
            },
        },
        expected={"persistence_bytes": 400_000},
    ),
    File(
        f"{EXAMPLES}/training/bf16_master_weight/configs/bf16_full.json",
        {
            "bf16": {
                "enabled": True,
                "bf16_master_weights_and_grads": True,
                "bf16_optimizer_states": True,
            },
            "torch_autocast": {"enabled": True, "dtype": "torch.bfloat16"},
        },
        refused=(
            "bf16.bf16_master_weights_and_grads",
            "bf16.bf16_optimizer_states",
            "torch_autocast",
        ),
    ),
    File(
        "DeepSpeed/docs/_tutorials/zeropp.md",
        {
            "zero_optimization": {
                "stage": 3,
                "zero_quantized_weights": True,
                "zero_quantized_gradients": True,
                "zero_hpz_partition_size": 4,
            }
        },
        refused=("zero_optimization.zero_quantized_gradients",),
        num_devices=4,
    ),
    File(
        f"{EXAMPLES}/claude_tutorials/model_configs/llama/llama_70b_multi_node.json",
        {
            "train_batch_size": 256,
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 8,
            "zero_optimization": {"stage": 3},
            "optimizer": {"type": "OneBitAdam", "params": {"lr": 1e-5, **ON_WIRE}},
            "communication_data_type": "fp16",
        },
        refused=("optimizer.type",),
        num_devices=32,
    ),
    File(
        f"{EXAMPLES}/applications/DeepSpeed-Chat/dschat/utils/ds_utils.py, with LoRA",
        {
            "train_batch_size": 32,
            "train_micro_batch_size_per_gpu": 4,
            "zero_optimization": {
                "stage": 3,
                "overlap_comm": True,
                "offload_param": {"device": "none"},
                "offload_optimizer": {"device": "none"},
                "stage3_param_persistence_threshold": 1e4,
                "stage3_max_live_parameters": 3e7,
                "memory_efficient_linear": False,
                "zero_quantized_nontrainable_weights": True,
            },
            "bfloat16": {"enabled": True},
            "hybrid_engine": {"enabled": True, "max_out_tokens": 512},
            "tensorboard": {"enabled": False, "output_path": "/ds_tensorboard_logs/"},
        },
        refused=(
            "zero_optimization.zero_quantized_nontrainable_weights",
            "hybrid_engine",
        ),
        num_devices=8,
        expected={"param_tier": Tier.DEVICE, "compute_dtype": "bfloat16"},
    ),
    File(
        "DeepSpeed/docs/_pages/config-json.md, sums of gradients in bf16",
        {
            "bf16": {"enabled": True},
            "data_types": {"grad_accum_dtype": "bf16"},
        },
        refused=("data_types.grad_accum_dtype",),
    ),
    File(
        "DeepSpeed before 0.5: keys that it has dropped",
        {
            "fp32_allreduce": True,
            "zero_optimization": {
                "stage": 3,
                "cpu_offload": True,
                "cpu_offload_params": True,
                "cpu_offload_use_pin_memory": True,
                "allgather_size": 500000000,
                "find_unused_parameters": False,
            },
        },
        expected={"param_tier": Tier.HOST, "optimizer_tier": Tier.HOST},
    ),
)

every = pytest.mark.parametrize("file", FILES, ids=[file.found for file in FILES])


def load(file: File, **named: Any) -> Config:
    return Config.load(file.raw, world_size=file.num_devices, **named)


@every
def test_a_file_loads_or_is_refused_by_the_names_of_its_keys(file: File):
    assert report(file.raw, world_size=file.num_devices).is_valid == (not file.refused)
    if file.refused:
        with pytest.raises(ConfigError) as error:
            load(file)
        problems = error.value.problems
        assert {".".join(problem.path) for problem in problems} == set(file.refused)
        assert all(problem.is_unsupported for problem in problems)
        assert "ignore_unsupported: true" in str(error.value)


@every
def test_without_what_is_not_supported_every_file_loads_and_says_so(file: File):
    config = load(file, ignore_unsupported=True)
    for name, value in file.expected.items():
        assert getattr(config, name) == value
    said = notices(config)
    for key in file.refused:
        assert any(line.startswith(f"{key}: ") for line in said), key
    if not file.refused:
        assert not any("left out" in line for line in said)


@pytest.mark.parametrize(
    ("asked", "other"),
    [
        ("OneBitAdam", "Adam"),
        ("ZeroOneAdam", "Adam"),
        ("OneBitLamb", "Lamb"),
        ("MuAdam", "Adam"),
        ("MuAdamW", "AdamW"),
        ("MuSGD", "SGD"),
    ],
)
def test_a_missing_optimizer_has_a_stand_in_only_where_that_is_asked_for(asked, other):
    raw = {"optimizer": {"type": asked, "params": {"lr": 0.5}}}
    with pytest.raises(ConfigError, match="ignore_unsupported: true"):
        Config.load(raw)
    config = Config.load(raw, ["ignore_unsupported=true"])
    assert config.optimizer.type == other
    assert config.optimizer.params.lr == 0.5
    (line,) = notices(config)
    assert f"{asked} is not supported yet; {other} trains in its place" in line


@pytest.mark.parametrize(
    "raw",
    [
        {"gradient_cliping": 1.0},
        {"zero_optimization": {"stage": 7}},
        {"train_batch_size": 6, "gradient_accumulation_steps": 4},
        {"offload_param": {"device": "cpu"}},
    ],
    ids=["mistyped", "wrong value", "impossible", "misplaced"],
)
def test_what_is_wrong_is_never_ignored(raw):
    with pytest.raises(ConfigError) as error:
        Config.load(raw, ignore_unsupported=True)
    assert "ignore_unsupported: true" not in str(error.value)


def test_a_key_that_is_like_none_can_be_left_out():
    raw = {"xyzzy_preserve": True, "run": {"steps": 3}}
    with pytest.raises(ConfigError, match="ignore_unsupported: true"):
        Config.load(raw)
    config = Config.load(raw, ignore_unsupported=True)
    assert config.run.steps == 3
    (line,) = notices(config)
    assert line.startswith("xyzzy_preserve: left out. unknown key")


def test_what_was_left_out_is_still_said_of_a_config_that_is_loaded_again():
    config = Config.load({"amp": {"enabled": True}}, ignore_unsupported=True)
    again = Config.load(config, ["run.steps=2"], world_size=4)
    assert notices(again) == notices(config) != ()
