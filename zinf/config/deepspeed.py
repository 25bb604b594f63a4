"""DeepSpeed's top-level keys, under their own names (DeepSpeed 0.19.6)."""

from typing import Literal

from pydantic import Field

from zinf.config.opaque import AnyKeys, Opaque
from zinf.config.optimizer import Optimizer
from zinf.config.precision import BF16, FP16, DataTypes
from zinf.config.scalar import Count, Flag, NonNegative, Number, Text, Whole
from zinf.config.scheduler import Scheduler
from zinf.config.section import Section
from zinf.config.status import Auto, Automatic, Moot, NoEffect, Unsupported
from zinf.config.zero import AIO, ZeroOptimization

CommDtype = Literal["none", "fp32", "fp16", "bf16"]


class ActivationCheckpointing(Section):
    """What backward needs of the forward pass. Segments are always rematerialised."""

    cpu_checkpointing: Auto[Flag] = False
    """Keep the inputs of segments in host memory until backward."""

    partition_activations: Automatic[Flag] = None
    """Divide the inputs of segments among tensor-parallel devices; there are none."""

    contiguous_memory_optimization: Moot[Flag] = None
    """Buffers against fragmentation; XLA's buffers are static."""

    number_checkpoints: Moot[Whole] = None
    """How many such buffers."""

    synchronize_checkpoint_boundary: Moot[Flag] = None
    """Device synchronisation for debugging."""

    profile: Moot[Flag] = None
    """Timers around each checkpoint; every step's times are in its metrics."""


class Pipeline(Section):
    """DeepSpeed's pipeline engine. Segments stream through one device instead."""

    stages: Unsupported[Count] = 1
    """Devices that each hold a part of the layers; leave it out."""

    partition: Moot[str] = None
    """How layers are divided over stages."""

    seed_layers: Moot[Flag] = None
    """A random seed per layer; JAX keys are explicit."""

    activation_checkpoint_interval: Moot[Whole] = None
    """Layers per checkpoint; segments are cut by size."""

    pipe_partitioned: Moot[Flag] = None
    """Shard what stages exchange."""

    grad_partitioned: Moot[Flag] = None
    """Shard the gradients that stages exchange."""


class TensorBoard(Section):
    """Metrics as TensorBoard events."""

    enabled: Flag = False
    """Write events; as run.tensorboard."""

    output_path: str = ""
    """Folder of all jobs; run.output when empty."""

    job_name: Text = "DeepSpeedJobName"
    """Folder of this job below it."""


class DeepSpeedKeys(Section):
    """The keys that a `ds_config.json` may hold."""

    train_batch_size: Auto[Count | None] = None
    """Samples per optimizer step."""

    train_micro_batch_size_per_gpu: Auto[Count | None] = None
    """Samples per device in one forward and backward pass."""

    gradient_accumulation_steps: Auto[Count | None] = None
    """Microbatches per optimizer step."""

    optimizer: Optimizer | None = None
    """The optimizer of `zinf train`; in Python an optax transform is given instead."""

    scheduler: Scheduler | None = None
    """The learning rate of `zinf train` as a function of the step."""

    gradient_clipping: Auto[NonNegative | None] = None
    """Largest global gradient norm; absent or 0: no clipping. The gradients are divided
    by their norm + 1e-6, as in torch (`optax.clip_by_global_norm` adds nothing)."""

    zero_optimization: ZeroOptimization = Field(default_factory=ZeroOptimization)
    """ZeRO stage and offload."""

    aio: AIO = Field(default_factory=AIO)
    """Asynchronous I/O of the NVMe tier."""

    bf16: BF16 = Field(default_factory=BF16)
    """bfloat16 compute."""

    bfloat16: BF16 | None = None
    """Old name of bf16."""

    fp16: FP16 = Field(default_factory=FP16)
    """float16 compute with loss scaling."""

    data_types: DataTypes = Field(default_factory=DataTypes)
    """Dtypes of what is neither a compute copy nor a master."""

    activation_checkpointing: ActivationCheckpointing = Field(
        default_factory=ActivationCheckpointing
    )
    """What backward needs of the forward pass."""

    steps_per_print: Auto[Count | None] = None
    """Steps between printed metrics, unless run.log_every is given."""

    tensorboard: TensorBoard = Field(default_factory=TensorBoard)
    """Metrics as TensorBoard events."""

    wall_clock_breakdown: Automatic[Flag] = None
    """Step times are always in the metrics."""

    memory_breakdown: Automatic[Flag] = None
    """Bytes held per tier are always in the metrics."""

    checkpoint: Automatic[Opaque] = None
    """How checkpoints are written; here streamed, one array at a time."""

    datastates_ckpt: Automatic[AnyKeys] = None
    """Checkpoints by DataStates; zinf writes them in the background by itself."""

    dataloader_drop_last: Automatic[Flag] = None
    """Every batch has the same size; an incomplete last one is dropped."""

    elasticity: Unsupported[Opaque | None] = None
    """Batch sizes that follow the number of devices; give batch sizes instead."""

    autotuning: Unsupported[Opaque | None] = None
    """Trial runs for the best settings; `zinf plan` predicts them without running."""

    comms_logger: NoEffect[Opaque | None] = None
    """Collectives are inside XLA programs; `jax.profiler` shows them."""

    flops_profiler: NoEffect[Opaque | None] = None
    """There are no modules to count flops of; `zinf train --trace` times every pass."""

    compile: Moot[Opaque] = None
    """DeepCompile; every segment is compiled by XLA and placed by the plan."""

    timers: Moot[Opaque] = None
    """Synchronisation of DeepSpeed's timers."""

    log_level: Moot[str] = None
    """Level of DeepSpeed's logger; zinf's is that of Python's logging."""

    cuda_visible_devices: NoEffect[str | int | None] = None
    """No DeepSpeed reads it from a config; set CUDA_VISIBLE_DEVICES outside."""

    dump_state: NoEffect[Flag] = False
    """`zinf config check` prints what every key comes to."""

    communication_data_type: NoEffect[CommDtype | None] = None
    """Gradients are exchanged in the dtype that backward makes them in."""

    fp32_allreduce: NoEffect[Flag] = False
    """Old name of communication_data_type: fp32, which DeepSpeed dropped. Gradients are
    exchanged in the dtype that backward makes them in."""

    seq_parallel_communication_data_type: Moot[CommDtype] = None
    """Dtype of exchanges among the devices of a sequence; a sequence is on one."""

    seq_parallel_comm_data_type: Moot[CommDtype] = None
    """The name DeepSpeed's code reads for seq_parallel_communication_data_type."""

    prescale_gradients: Automatic[Flag] = None
    """Divide gradients before they are exchanged; the loss is a mean, so they are."""

    gradient_predivide_factor: Moot[Number] = None
    """Part of that division; the loss is a mean over all devices."""

    sparse_gradients: NoEffect[Flag] = False
    """Gradients of embeddings are exchanged dense, as all others, with the same sum."""

    disable_allgather: Moot[Flag] = None
    """Broadcast instead of gather; GSPMD chooses."""

    zero_allow_untested_optimizer: Moot[Flag] = None
    """Optimizers DeepSpeed has not tested; any separable optax transform works."""

    zero_force_ds_cpu_optimizer: Moot[Flag] = None
    """Insist on DeepSpeed's CPU Adam; XLA compiles the update."""

    graph_harvesting: Moot[Flag] = None
    """CUDA graphs; XLA launches whole programs."""

    vocabulary_size: Moot[Count] = None
    """Only checked for alignment by DeepSpeed; see model.vocab_size."""

    use_data_before_expert_parallelism: Moot[Flag] = None
    """Order of expert and data ranks; there are no expert ranks."""

    managed_gradient_accumulation: Unsupported[Flag] = True
    """The user decides when to step; here `engine.step` is one optimizer step."""

    gradient_allreduce_op: Unsupported[Literal["mean", "sum"]] = "mean"
    """Sum gradients over devices and microbatches; leave it mean, scale the loss."""

    sequence_parallel_size: Unsupported[Count] = 1
    """Devices per sequence; leave it 1."""

    amp: Unsupported[AnyKeys | None] = None
    """NVIDIA Apex; use bf16 or fp16."""

    torch_autocast: Unsupported[Opaque | None] = None
    """Per-operation casts; use bf16 or fp16."""

    pipeline: Pipeline | None = None
    """Pipeline parallelism."""

    tensor_parallel: Unsupported[AnyKeys | None] = None
    """Tensor parallelism; remove it."""

    expert_parallel: Unsupported[Opaque | None] = None
    """Expert parallelism; remove it."""

    sparse_attention: Unsupported[AnyKeys | None] = None
    """Sparse attention kernels; attention is up to the model. Remove it."""

    progressive_layer_drop: Unsupported[Opaque | None] = None
    """Progressive layer dropping; remove it."""

    eigenvalue: Unsupported[Opaque | None] = None
    """Eigenvalues of the loss, for quantisation; remove it."""

    quantize_training: Unsupported[AnyKeys | None] = None
    """Mixture of quantisation; remove it."""

    compression_training: Unsupported[Opaque | None] = None
    """Compression while training; remove it."""

    weight_quantization: Unsupported[AnyKeys | None] = None
    """Quantised weights for inference; remove it."""

    curriculum_learning: Unsupported[Opaque | None] = None
    """Sequence lengths that grow; remove it."""

    data_efficiency: Unsupported[Opaque | None] = None
    """Curriculum and random token dropping; remove it."""

    hybrid_engine: Unsupported[Opaque | None] = None
    """Generation inside training; remove it."""

    nebula: Unsupported[Opaque | None] = None
    """Checkpoints by Azure Nebula; zinf writes its own, to run.output."""

    csv_monitor: Unsupported[Opaque | None] = None
    """Metrics as CSV; set run.metrics for JSON lines instead."""

    wandb: Unsupported[Opaque | None] = None
    """Metrics to Weights & Biases; set run.metrics for JSON lines instead."""

    comet: Unsupported[Opaque | None] = None
    """Metrics to Comet; set run.metrics for JSON lines instead."""

    trackio: Unsupported[Opaque | None] = None
    """Metrics to Trackio; set run.metrics for JSON lines instead."""
