"""DeepSpeed's top-level keys, under their own names (DeepSpeed 0.19.6).

Those that zinf does not read are in `unread`.
"""

from math import inf
from typing import Annotated

from pydantic import BeforeValidator, Field

from zinf.core.config.efficiency import CurriculumLearning, DataEfficiency
from zinf.core.config.optimizer import Optimizer
from zinf.core.config.precision import BF16, FP16, DataTypes
from zinf.core.config.quantization import WeightQuantization
from zinf.core.config.scalar import Count, Flag, NonNegative, Text, Whole
from zinf.core.config.scheduler import Scheduler
from zinf.core.config.section import Section
from zinf.core.config.status import Auto
from zinf.core.config.unread import TABLE
from zinf.core.config.zero import AIO, ZeroOptimization

Finite = Annotated[
    Count | None, BeforeValidator(lambda n: None if n in (inf, "inf") else n)
]


class ActivationCheckpointing(Section):
    """What the backward pass needs of the forward pass."""

    UNREAD = TABLE["activation_checkpointing"]

    cpu_checkpointing: Auto[Flag] = False
    """Keep the inputs of segments in host memory until the backward pass."""


class Pipeline(Section):
    """DeepSpeed's pipeline engine. Every device of zinf runs every segment."""

    UNREAD = TABLE["pipeline"]


class ExpertParallel(Section):
    """DeepSpeed's AutoEP. zinf finds the experts of any model in its traced program."""

    UNREAD = TABLE["expert_parallel"]

    enabled: Flag = False
    """Divide the experts of each layer among devices."""

    autoep_size: Count = 1
    """Devices that divide experts; the same as mesh.expert."""

    expert_tensor_parallel_size: Count | None = None
    """Devices that divide the weights of each expert, by columns and then by rows:
    mesh.tensor, or 1. Absent or 1: they have experts whole, and divide their tokens.
    DeepSpeed's enable_expert_tensor_parallelism."""

    @property
    def size(self) -> int:
        """The devices that divide experts; 1 if it is off."""
        return self.autoep_size if self.enabled else 1


class TensorParallel(Section):
    """DeepSpeed's AutoTP. zinf finds which weights to cut in the traced program."""

    UNREAD = TABLE["tensor_parallel"]

    autotp_size: Whole = 1
    """Devices that divide the weights of a layer; the same as mesh.tensor. 0 or 1: it
    is off."""


class TensorBoard(Section):
    """Metrics as TensorBoard events."""

    enabled: Flag = False
    """Write events; the same as run.tensorboard."""

    output_path: str = ""
    """Folder of all jobs; run.output when empty."""

    job_name: Text = "DeepSpeedJobName"
    """Folder of this job below it."""


class CsvMonitor(Section):
    """Metrics as CSV files, one for each."""

    enabled: Flag = False
    """Write a row step,value of each metric after each step, in a file of its name."""

    output_path: str = ""
    """Folder of all jobs; run.output when empty."""

    job_name: Text = "DeepSpeedJobName"
    """Folder of this job below it."""


class DeepSpeedKeys(Section):
    """The keys that a `ds_config.json` may hold."""

    UNREAD = TABLE["top level"]

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
    """Dtypes of other arrays than compute copies and masters."""

    activation_checkpointing: ActivationCheckpointing = Field(
        default_factory=ActivationCheckpointing
    )
    """What backward needs of the forward pass."""

    steps_per_print: Auto[Finite] = None
    """Steps between printed metrics, unless run.log_every is given. Infinity, which
    accelerate writes, counts as absent."""

    tensorboard: TensorBoard = Field(default_factory=TensorBoard)
    """Metrics as TensorBoard events."""

    sequence_parallel_size: Count = 1
    """Devices that divide the positions of the same examples; the same as mesh.seq."""

    pipeline: Pipeline | None = None
    """Pipeline parallelism."""

    tensor_parallel: TensorParallel = Field(default_factory=TensorParallel)
    """DeepSpeed's AutoTP: tensor parallelism for any model."""

    expert_parallel: ExpertParallel = Field(default_factory=ExpertParallel)
    """DeepSpeed's AutoEP: expert parallelism for models of transformers."""

    weight_quantization: WeightQuantization | None = None
    """Weights in 8 or 4 bits, to run a model and not to train it."""

    curriculum_learning: CurriculumLearning | None = None
    """Sequences that get longer while training, in `zinf train`."""

    data_efficiency: DataEfficiency | None = None
    """Curricula, in `zinf train`."""

    csv_monitor: CsvMonitor = Field(default_factory=CsvMonitor)
    """Metrics as CSV files."""
