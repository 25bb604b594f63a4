"""DeepSpeed's keys that zinf does not read: a table of keys and sentences.

A key in the table is known, and no section keeps its value. Keys are those of DeepSpeed
0.19.6, under all their names, and old ones that are still in use.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from zinf.core.config.status import AUTO_WORD, Status


@dataclass(frozen=True, slots=True)
class Unread:
    """A row for one key.

    Attributes:
        status: why the value is not read. Unsupported: a value that asks is refused.
        sentence: what zinf does, or what to do instead.
        usual: values that ask for nothing, as null and "auto" do.
    """

    status: Status
    sentence: str
    usual: tuple[Any, ...]

    def asks(self, value: object) -> bool:
        """Whether `value` asks for something other than what zinf does.

        A mapping with flags such as "enabled" at any depth asks only if one of them is
        on.
        """
        if isinstance(value, Mapping):
            switches = list(_switches(value))
            return any(switches) if switches else bool(value)
        if value is None or value in (*self.usual, AUTO_WORD):
            return False
        return any(self.usual) or bool(value)

    def is_missed(self, value: object) -> bool:
        """Whether a user should be told that this value has no effect."""
        return self.status is Status.NO_EFFECT and self.asks(value)

    def is_refused(self, value: object) -> bool:
        """Whether no config may have this value."""
        return self.status is Status.UNSUPPORTED and self.asks(value)


def _switches(mapping: Mapping[str, Any]) -> Iterator[bool]:
    for key, value in mapping.items():
        if key == "enabled":
            yield bool(value) and value != AUTO_WORD
        elif key == "autotp_size":
            yield value not in (0, 1)
        elif isinstance(value, Mapping):
            yield from _switches(value)


# A line "[section] status" begins a group of rows "keys: sentence". A key may have
# usual values (key=1); that of others is false. Indented lines continue a row.
ROWS = """
[top level] automatic here
wall_clock_breakdown: Step times are always in the metrics.
memory_breakdown: Bytes held per tier are always in the metrics.
checkpoint: zinf has one format of checkpoints, which loads on any number of devices.
datastates_ckpt: A run of one process saves in the background where the host has room.
dataloader_drop_last: `zinf train` drops an incomplete last batch.
prescale_gradients: Gradients are divided before they are exchanged, because the loss
  function averages over the microbatch of all devices.

[top level] without meaning under XLA
gradient_predivide_factor: The loss function averages over all devices, which divides.
compile: XLA compiles forward and backward passes.
timers: zinf has none of DeepSpeed's timers to synchronise.
log_level: zinf logs through Python's logging.
seq_parallel_communication_data_type seq_parallel_comm_data_type: Devices that divide a
  sequence (mesh.seq) exchange values in the dtype that the model computes in.
disable_allgather: GSPMD chooses between broadcasts and gathers.
zero_allow_untested_optimizer: Any separable optax transform works.
zero_force_ds_cpu_optimizer: zinf has its own updates in host memory.
graph_harvesting: XLA launches whole programs.
vocabulary_size: DeepSpeed only checks its alignment; see model.vocab_size.
use_data_before_expert_parallelism: Devices that divide experts are neighbours.

[top level] no effect here
comms_logger: Collectives are inside XLA programs; `jax.profiler` shows them.
flops_profiler: zinf counts no flops by module; `zinf train --trace` times every pass.
cuda_visible_devices: DeepSpeed does not read it either; set CUDA_VISIBLE_DEVICES in the
  environment.
dump_state: `zinf config check` prints what every key comes to.
communication_data_type: Gradients are exchanged in the dtype that backward makes them
  in.
fp32_allreduce: DeepSpeed dropped this old name of communication_data_type: fp32.
  Gradients are exchanged in the dtype that backward makes them in.
sparse_gradients: Gradients of embeddings are exchanged dense; the sum is the same.

[top level] unsupported
elasticity: Batch sizes chosen by the number of devices; give batch sizes instead.
autotuning: Trial runs for the best settings; `zinf plan` predicts them without running.
managed_gradient_accumulation=true: False lets the user decide when to step;
  `engine.step` is one optimizer step.
gradient_allreduce_op="mean": Sum gradients over devices and microbatches; leave it
  mean, scale the loss.
amp: NVIDIA Apex; use bf16 or fp16.
torch_autocast: Casts for each operation; use bf16 or fp16.
sparse_attention: Sparse attention kernels; attention is up to the model. Remove it.
progressive_layer_drop: Progressive layer dropping; remove it.
eigenvalue: Eigenvalues of the Hessian, for quantisation; remove it.
quantize_training: Mixture-of-Quantization (MoQ); remove it.
compression_training: Compression while training; remove it.
hybrid_engine: Generation inside training; remove it.
nebula: Checkpoints by Azure Nebula; zinf writes its own, to run.output.
wandb: Metrics to Weights & Biases; set run.metrics for JSON lines instead.
comet: Metrics to Comet; set run.metrics for JSON lines instead.
trackio: Metrics to Trackio; set run.metrics for JSON lines instead.

[expert_parallel] automatic here
preset_model moe_layer_pattern expert_pattern router_pattern expert_w1 expert_w2
  expert_w3 num_experts_attr top_k_attr has_shared_experts shared_experts_pattern
  shared_experts_gate_pattern expert_activation: Experts are found in the traced
  program.
validate_folding_routing: The mesh decides no route.

[expert_parallel] without meaning under XLA
use_grouped_mm disable_triton_grouped_mm combine_impl row_weighting_impl gate_up_impl:
  Experts are computed in blocks of rows (zinf.moe.experts).
comm_backend comm_num_sm comm_qp_margin comm_max_tokens_per_rank async_split_plan: XLA
  exchanges tokens.

[expert_parallel] no effect here
route_norm route_scale score_apply score_func top_k num_expert_groups num_limited_groups
  routed_scaling_factor load_balance_coeff: The router is the model's own.

[tensor_parallel] automatic here
preset_model partition_config injection_policy_tuple: Which weights are cut is found in
  the traced program.
dtype: bf16 and fp16 say the dtype.
keep_module_on_host: Leaves are read and placed one at a time.
tp_overlap_comm: XLA decides what runs beside collectives.

[tensor_parallel] no effect here
tensor_parallel tp: DeepSpeed's training reads autotp_size alone.
vocab_parallel_lm_head vocab_parallel_ce_backend: The vocabulary is not cut along
  mesh.tensor.
replace_with_kernel_inject kernel_inject: Kernels are the model's own.

[zero_optimization] automatic here
sub_group_size: zinf cuts updates into leaves and blocks of them.
stage3_prefetch_bucket_size prefetch_bucket_size: The plan fetches as early as budgets
  allow.
stage3_max_live_parameters max_live_parameters: memory.device bounds all device bytes.
stage3_max_reuse_distance max_reuse_distance: The plan knows the next use of each array.
stage3_model_persistence_threshold model_persistence_threshold: The budgets bound what
  stays on each tier.
stage3_partition_stream_chunk_size: Leaves are initialised one at a time.
stage3_gather_16bit_weights_on_model_save stage3_gather_fp16_weights_on_model_save
  gather_16bit_weights_on_model_save: Checkpoints hold whole arrays.
elastic_checkpoint: Checkpoints do not depend on the number of devices.
pipeline_loading_checkpoint: Checkpoints are read in pieces, never as a whole.
overlap_comm: XLA decides what runs beside collectives.
save_muon_momentum_buffer_in_memory: Every state of the optimizer rests where
  offload_optimizer says, or by budget.
enable_sanity_checks: A plan that moves bytes is always checked before it runs.

[zero_optimization] without meaning under XLA
reduce_scatter allgather_partitions stage3_use_all_reduce_for_fetch_params
  use_all_reduce_for_fetch_params: GSPMD chooses the collectives.
mics_hierarchical_params_gather: XLA chooses how collectives are routed.
reduce_bucket_size allgather_bucket_size allgather_size use_multi_rank_bucket_allreduce:
  XLA combines collectives itself.
contiguous_gradients: XLA plans the memory of each program, which does not fragment.
round_robin_gradients: Each process copies its own share of the gradients to its host.
legacy_stage1: zinf has one implementation of stage 1.
grad_hooks leaf_module: A traced program has no hooks.
override_module_apply: A traced program has no modules.
stage3_module_granularity_threshold module_granularity_threshold: Segments are cut from
  the traced program, not by module.
stage3_allgather_sequential allgather_sequential: The plan bounds what is live.
memory_efficient_linear: Segments take their weights as arguments in both passes.
log_trace_cache_warnings: The order of a traced program does not change.
find_unused_parameters: The gradient of an unused parameter is zero in JAX.

[zero_optimization] no effect here
load_from_fp32_weights=true: Masters are always restored from fp32.
ignore_unused_parameters=true: The gradient of an unused parameter is zero in JAX.

[zero_optimization] unsupported
zenflow: ZenFlow applies gradients late, which changes the numerics; remove it.
zero_quantized_nontrainable_weights: Frozen weights as integers on the wire; leave it
  false. To keep those below adapters in few bits set adapter.quantize_base.

[zero_optimization.offload_param] automatic here
buffer_count buffer_size: The plan decides what waits in host memory.
max_in_cpu: memory.host bounds all host bytes.

[zero_optimization.offload_optimizer] automatic here
buffer_count: The plan decides what waits in host memory.
pipeline_read pipeline_write: Transfers overlap updates as far as budgets allow.
fast_init: State is made leaf by leaf on the host, and written to its tier.
super_offload: The plan decides when each update runs, and no number depends on it.

[zero_optimization.offload_optimizer] without meaning under XLA
convert_grad_on_cpu: An update casts gradients where it runs.
cpuadam_cores_perc: Updates in host memory may use all cores.

[zero_optimization.offload_optimizer] no effect here
ratio=true: All state is offloaded; leave out device to offload only what has no room.

[aio] automatic here
intra_op_parallelism thread_count: A drive has 8 threads, or as many as `zinf bench io`
  measured to be best.
block_size: A request has up to 16 MiB, or what `zinf bench io` measured to be best.
queue_depth: Each thread of a drive has one request in flight at a time.

[aio] without meaning under XLA
single_submit overlap_events: zinf does not use libaio.

[aio] no effect here
use_gds: Bytes pass through host memory.

[bf16] automatic here
check_grad_overflow check_overflow: A loss or gradient norm that is not finite always
  stops the run with an error.

[bf16] without meaning under XLA
immediate_grad_update: Gradients are values in JAX, not buffers.

[bf16] unsupported
bf16_master_weights_and_grads: Masters and gradients in bf16 would change the numerics;
  masters are fp32.
bf16_optimizer_states: Optimizer state in bf16; set optimizer.params.moments to
  bfloat16 instead.

[fp16] without meaning under XLA
fused_mode: zinf has none of DeepSpeed's wrappers for fp16.

[fp16] unsupported
auto_cast: Casting the batch to fp16 is up to the loss function.
fp16_master_weights_and_grads: Masters and gradients in fp16 would change the numerics;
  masters are fp32.

[data_types] unsupported
grad_accum_dtype="fp32","float32": Gradients of microbatches are summed in fp32; 16 bits
  would lose small ones.
param_dtype="fp32","float32": Parameters are kept in fp32, whatever the compute
  precision.
buffer_dtype: Leaves that are not parameters keep their dtype.

[activation_checkpointing] automatic here
partition_activations: mesh.seq divides activations by position.

[activation_checkpointing] without meaning under XLA
contiguous_memory_optimization number_checkpoints: XLA plans the memory of each program,
  which does not fragment.
synchronize_checkpoint_boundary: XLA orders what a program computes.
profile: `zinf train --trace` times every pass.

[pipeline] without meaning under XLA
partition pipe_partitioned grad_partitioned: zinf has no pipeline stages yet.
seed_layers: Random keys are explicit in JAX.
activation_checkpoint_interval: Segments are cut from the traced program.

[pipeline] unsupported
stages=1: Pipeline parallelism; leave it out.

[data_efficiency.data_sampling] no effect here
num_workers pin_memory: Samples are read in the calling thread.

[data_efficiency.data_sampling.curriculum_learning] automatic here
data_cluster_path: Samples are drawn from the index itself; no clusters are written.

[data_efficiency.data_sampling.dynamic_batching] automatic here
metrics_path: Lengths are those of the tokenized samples.
verbose: The shapes of batches are printed when training begins.

[data_efficiency.data_routing.random_ltd] automatic here
model_mask_name: Kept tokens stay in order, so causal attention needs no mask.
hidden_state_order: zinf's model has rows before tokens.

[data_efficiency.data_routing.random_ltd] unsupported
layer_token_lr_schedule: DeepSpeed has no code for it; set scheduler.count to
  layer_tokens instead.

[optimizer] without meaning under XLA
legacy_fusion: zinf has none of DeepSpeed's wrappers of optimizers.

[optimizer.params] without meaning under XLA
fused foreach capturable: zinf chooses the code of every update.

[optimizer.params] unsupported
max_grad_norm: Clipping belongs to the engine: set the top-level gradient_clipping
  instead.
maximize: Gradient ascent; negate the loss instead.
amsgrad: The AMSGrad variant; DeepSpeed's own kernels refuse it too.

[optimizer.params of Adam, AdamW, GaLore and Lamb] without meaning under XLA
set_grad_none: Gradients are values in JAX, not buffers.

[optimizer.params of Adam, AdamW, GaLore and Lamb] unsupported
bias_correction=true: Moments without bias correction; leave it true.

[optimizer.params of Adam and AdamW] unsupported
fp32_optimizer_states=true: Moments in the compute dtype; set moments to bfloat16
  instead.

[optimizer.params of OneBitAdam] without meaning under XLA
cuda_aware comm_backend_name: XLA sends the signs.
bias_correction: DeepSpeed's OneBitAdam, OneBitLamb and ZeroOneAdam never use it.

[optimizer.params of OneBitAdam] unsupported
eps_inside_sqrt=false: It adds eps to the root, as DeepSpeed's does.

[optimizer.params of SGD] unsupported
dampening: Dampened momentum; leave it 0.

[optimizer.params of Lion] without meaning under XLA
set_grad_none: Gradients are values in JAX, not buffers.

[optimizer.params of Adagrad] unsupported
lr_decay: Learning rate decay of the optimizer; use a scheduler instead.

[optimizer.params of Muon] without meaning under XLA
ns_method: Both methods compute the same orthogonal matrix.
torch_adam: zinf chooses the code of every update.

[optimizer.params of Muon] unsupported
per_head_muon: One orthogonal matrix per attention head; leave it false.

[scheduler.params] unsupported
last_batch_iteration=-1: Steps already done; a resumed run continues its schedule by
  itself.
"""


def _table() -> dict[str, dict[str, Unread]]:
    table: dict[str, dict[str, Unread]] = {}
    section, status = "", Status.USED
    for line in ROWS.replace("\n  ", " ").split("\n"):
        if line.startswith("["):
            section, _, words = line.removeprefix("[").partition("] ")
            status = Status(words)
        elif line:
            keys, _, sentence = line.partition(": ")
            for word in keys.split():
                key, _, usual = word.partition("=")
                values = tuple(json.loads(f"[{usual or 'false'}]"))
                table.setdefault(section, {})[key] = Unread(status, sentence, values)
    return table


TABLE = _table()
