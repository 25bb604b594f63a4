"""The keys of a config, and the properties of it that the engine reads."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, PrivateAttr

from zinf.core.config.adapter import Adapter
from zinf.core.config.batch import BatchSizes, batch_sizes
from zinf.core.config.completions import Completions
from zinf.core.config.deepspeed import DeepSpeedKeys
from zinf.core.config.distillation import Distillation
from zinf.core.config.dynamic_batching import DynamicBatching
from zinf.core.config.efficiency import RESHAPE
from zinf.core.config.grpo import Grpo
from zinf.core.config.optimizer import CompressedParams
from zinf.core.config.pacing import Pacing, buckets
from zinf.core.config.ppo import Ppo
from zinf.core.config.precision import BF16, LossScaling
from zinf.core.config.scalar import Flag, Folder, Text, Whole
from zinf.core.config.schema import (
    PUBLISHED_SEQUENCE_LENGTH,
    SEQUENCE_LENGTH,
    Data,
    Memory,
    MeshAxes,
    Model,
    Run,
    Segment,
)
from zinf.core.config.size import Threshold
from zinf.core.config.status import Auto
from zinf.core.program import Tier

FP32_BYTES = 4
PERSISTENCE_BYTES = 32 * 1024
PERSISTENT_ELEMENTS = "stage3_param_persistence_threshold"


class Settings(DeepSpeedKeys):
    """DeepSpeed's keys and zinf's own, and what they come to."""

    memory: Memory = Field(default_factory=Memory)
    """Byte budgets per tier."""

    segment: Segment = Field(default_factory=Segment)
    """How the program is cut."""

    mesh: MeshAxes = Field(default_factory=MeshAxes)
    """Which devices train, and how they are grouped."""

    execution: Literal["auto", "fused", "offloaded", "streamed"] = "auto"
    """One fused step on the device; one program whose state rests in pinned host memory
    (offloaded); or segments streamed between tiers. auto: fused if it fits; otherwise
    streamed, or on an accelerator offloaded if that is predicted to be faster."""

    forward_backward: Flag = False
    """Keep a float32 sum of the gradients of each trained leaf, to which
    engine.forward_backward adds and from which engine.optim_step updates. A step is one
    of each."""

    skip_nonfinite: Whole = 0
    """Most steps in a row that change nothing because their loss or gradients are not
    finite; the next one is an error. 0: the first is. Updates wait for the norm of all
    gradients, as with gradient_clipping."""

    loss_average: Literal["weights", "microbatches"] = "weights"
    """The mean loss of a step. weights: of all its tokens (or what a loss function
    weighs) alike. microbatches: of the means of its microbatches, as zinf had it
    before, and transformers before 4.46."""

    frozen: tuple[Text, ...] = ()
    """Glob patterns of parameter key paths (such as embed/*) that are not trained."""

    adapter: Adapter | None = None
    """Train low-rank adapters of frozen weights; null: the weights themselves."""

    distillation: Distillation | None = None
    """Train on the predictions of a teacher too; null: on the data alone."""

    grpo: Grpo = Field(default_factory=Grpo)
    """With data.objective grpo: how completions are drawn, rewarded and learnt from."""

    ppo: Ppo = Field(default_factory=Ppo)
    """With data.objective ppo: the same, and how the critic learns."""

    rates: Literal["measured", "fixed"] | Folder | None = None
    """Rates to plan by: a file that `zinf bench step` wrote; measured: a streamed run
    of one process measures its own before the first step; fixed: the same on every
    machine, but for the drive's where `zinf bench io` has measured it. Null: measured
    in `zinf train` and `zinf finetune`, fixed in Python."""

    compile_cache: Literal["auto", False] | Folder = "auto"
    """Where compiled programs are kept from run to run, with the plans and the measured
    rates of steps. auto: in the user's cache folder, at most 4 GiB; false: nowhere; a
    folder. A folder that jax was told (`jax_compilation_cache_dir`) stays, and then
    plans and rates are not kept."""

    persistence_threshold: Auto[Threshold | None] = None
    """Bytes; smaller arrays never go to NVMe; 32KiB when absent, 0: all may go."""

    model: Model | None = None
    """The model of `zinf train`; in Python a loss function is given instead."""

    data: Data = Field(default_factory=Data)
    """The data of `zinf train`."""

    run: Run = Field(default_factory=Run)
    """The training loop."""

    ignore_unsupported: Flag = False
    """Leave out keys that are not supported, with a line each, instead of refusing
    them."""

    _world_size: int = PrivateAttr(default=1)

    @property
    def stage(self) -> int:
        """The ZeRO stage: which state is sharded over the devices."""
        return self.zero_optimization.stage

    @property
    def gathers_in_group(self) -> bool:
        """Whether each group of devices holds all parameters (ZeRO++ hpZ)."""
        return self.zero_optimization.zero_hpz_partition_size > 1

    @property
    def quantizes_weights(self) -> bool:
        """Whether parameters are gathered as 8-bit integers (ZeRO++ qwZ)."""
        return self.zero_optimization.zero_quantized_weights is True

    @property
    def quantizes_gradients(self) -> bool:
        """Whether gradients are exchanged as 4-bit integers (ZeRO++ qgZ)."""
        return self.zero_optimization.zero_quantized_gradients is True

    @property
    def compressed(self) -> CompressedParams | None:
        """The optimizer's parameters, if it sends signs in place of gradients."""
        params = None if self.optimizer is None else self.optimizer.params
        return params if isinstance(params, CompressedParams) else None

    @property
    def param_tier(self) -> Tier | None:
        """Tier that parameters rest on; None: placed by budget."""
        return self.zero_optimization.param_tier

    @property
    def optimizer_tier(self) -> Tier | None:
        """Tier that masters and optimizer state rest on; None: placed by budget."""
        return self.zero_optimization.optimizer_tier

    @property
    def activation_tier(self) -> Tier | None:
        """Tier of segment inputs until backward needs them; None: placed by budget."""
        is_offloaded = self.activation_checkpointing.cpu_checkpointing
        return Tier.HOST if is_offloaded else None

    @property
    def completions(self) -> Completions:
        """How completions are drawn, where the objective has them drawn."""
        return self.ppo if self.data.objective == "ppo" else self.grpo

    @property
    def syncs_reference(self) -> bool:
        """Whether the reference moves: the optimizer then keeps it."""
        return self.data.objective == "grpo" and self.grpo.sync_ref_model

    @property
    def device_bytes(self) -> int | None:
        """Budget of the device tier; None: automatic."""
        return self.memory.device

    @property
    def host_bytes(self) -> int | None:
        """Budget of the host tier; None: automatic."""
        return self.memory.host

    @property
    def nvme_bytes(self) -> int | None:
        """Budget of the NVMe tier; None: automatic."""
        return self.memory.nvme_capacity

    @property
    def expert_bytes(self) -> int | None:
        """Bytes of the device for experts that are read on demand; None: automatic."""
        asked = self.memory.experts
        return 0 if asked == "off" else asked

    @property
    def nvme_paths(self) -> tuple[Path, ...]:
        """Folders of the NVMe tier; empty: there is none."""
        return self.memory.nvme or self.zero_optimization.nvme_paths

    @property
    def nvme_options(self) -> dict[str, Any]:
        """How the NVMe tier is opened, by the names of `core.memory.open_stores`."""
        return {
            "nvme_paths": self.nvme_paths,
            "stall_seconds": self.memory.stall_seconds,
            "checksums": self.memory.checksums,
        }

    @property
    def pinned(self) -> str:
        """Memory of the host tier of streamed steps: a kind of pages, auto or off."""
        is_given = "pinned" in self.memory.model_fields_set
        is_off = self.zero_optimization.pins_memory is False
        return "off" if is_off and not is_given else self.memory.pinned

    @property
    def compute_dtype(self) -> str:
        """Dtype of the compute copies: float32, bfloat16 or float16."""
        if self._bf16.enabled:
            return "bfloat16"
        return "float16" if self.fp16.enabled else "float32"

    @property
    def attention(self) -> str:
        """How attention is computed; see `model.attention`."""
        return "auto" if self.model is None else self.model.attention

    @property
    def loss_scaling(self) -> LossScaling | None:
        """How the loss is scaled; None unless fp16 is on."""
        return self.fp16.loss_scaling

    @property
    def may_skip(self) -> bool:
        """Whether a step whose gradients are not finite may be left out."""
        return self.fp16.enabled or self.skip_nonfinite > 0

    @property
    def clip_norm(self) -> float | None:
        """Largest global gradient norm; None: no clipping."""
        return self.gradient_clipping or None

    @property
    def num_microbatches(self) -> int:
        """Microbatches per step."""
        return self._sizes.num_microbatches

    @property
    def microbatch_size(self) -> int | None:
        """Samples per microbatch and device; None: the first batch decides."""
        return self._sizes.microbatch

    @property
    def batch_size(self) -> int | None:
        """Samples per step on `world_size` devices; None: the first batch decides."""
        return self._sizes.batch

    @property
    def world_size(self) -> int:
        """Data-parallel devices that sizes of batches are computed for."""
        return self._world_size

    @property
    def segment_max_bytes(self) -> int | None:
        """Most bytes of parameters in one segment; None: automatic."""
        return self.segment.max_bytes

    @property
    def keeps_residuals(self) -> bool:
        """Whether segments may keep residuals instead of computing them again."""
        return self.segment.remat == "auto"

    @property
    def persistence_bytes(self) -> int:
        """Arrays of fewer bytes never go to NVMe."""
        elements = self.zero_optimization.persistent_elements
        if elements is not None:
            return elements * FP32_BYTES
        if self.persistence_threshold is not None:
            return self.persistence_threshold
        return PERSISTENCE_BYTES

    @property
    def persistence_key(self) -> str:
        """The key that sets `persistence_bytes`."""
        if self.zero_optimization.persistent_elements is not None:
            return f"zero_optimization.{PERSISTENT_ELEMENTS}"
        return "persistence_threshold"

    @property
    def sequence_length(self) -> int:
        """Tokens that a sample of `zinf train` predicts.

        A published model that was made for fewer has fewer if the config says nothing.
        zinf's own model is made for as many if `model.max_length` does not say.
        """
        if self.data.sequence_length is not None:
            return self.data.sequence_length
        if self.model is not None and self.model.huggingface is not None:
            return PUBLISHED_SEQUENCE_LENGTH
        longest = None if self.model is None else self.model.max_length
        return longest or SEQUENCE_LENGTH

    @property
    def lengths(self) -> "Lengths | None":
        """The lengths of sequences while training; None: all have sequence_length."""
        legacy, efficiency = self.curriculum_learning, self.data_efficiency
        path: tuple[str, ...]
        if legacy is not None and legacy.enabled:
            path, pacing, reshapes = ("curriculum_learning",), legacy, False
        elif efficiency is not None and efficiency.lengths is not None:
            name, pacing = efficiency.lengths
            path = ("data_efficiency", "data_sampling", "curriculum_learning")
            path, reshapes = (*path, "curriculum_metrics", name), name == RESHAPE
        else:
            return None
        kept = buckets(pacing.levels(), self.data.max_buckets)
        return Lengths(path, pacing, kept, reshapes)

    @property
    def kept_tokens(self) -> "KeptTokens | None":
        """The tokens that some layers keep; None: all layers keep all."""
        efficiency = self.data_efficiency
        dropping = efficiency.random_ltd if efficiency is not None else None
        if efficiency is None or dropping is None:
            return None
        pacing = dropping.random_ltd_schedule.pacing
        kept = buckets(pacing.levels(first_count=0), self.data.max_buckets)
        layers = dropping.random_ltd_layer_id or ()
        return KeptTokens(pacing, kept, layers, efficiency.seed)

    @property
    def num_layers(self) -> int | None:
        """Layers of the model, of which random-LTD shortens some, if they are known."""
        if self.model is not None and self.model.num_layers is not None:
            return self.model.num_layers
        efficiency = self.data_efficiency
        dropping = efficiency.random_ltd if efficiency is not None else None
        return None if dropping is None else dropping.total_layer_num

    @property
    def dynamic_batching(self) -> DynamicBatching | None:
        """The batches by tokens; None: all have train_batch_size samples."""
        efficiency = self.data_efficiency
        return None if efficiency is None else efficiency.dynamic_batching

    @property
    def cuts_rows(self) -> bool:
        """Whether steps may have several rows per sample of a batch."""
        return self.lengths is not None and self.lengths.reshapes

    @property
    def log_every(self) -> int:
        """Steps between printed metrics."""
        if self.steps_per_print and "log_every" not in self.run.model_fields_set:
            return self.steps_per_print
        return self.run.log_every

    @property
    def tensorboard_folder(self) -> Path | None:
        """Where TensorBoard events go; None: they are not written."""
        if self.tensorboard.enabled and self.tensorboard.output_path:
            return Path(self.tensorboard.output_path) / self.tensorboard.job_name
        is_on = self.tensorboard.enabled or self.run.tensorboard
        return self.run.output / "tensorboard" if is_on else None

    @property
    def csv_folder(self) -> Path | None:
        """Where metrics go as CSV files; None: they are not written."""
        if not self.csv_monitor.enabled:
            return None
        folder = self.csv_monitor.output_path
        return Path(folder or self.run.output / "csv") / self.csv_monitor.job_name

    @property
    def _bf16(self) -> BF16:
        return self.bf16 if self.bfloat16 is None else self.bfloat16

    @property
    def _sizes(self) -> BatchSizes:
        return batch_sizes(
            self.train_batch_size,
            self.train_micro_batch_size_per_gpu,
            self.gradient_accumulation_steps,
            world_size=self._world_size,
        )


@dataclass(frozen=True, slots=True)
class Lengths:
    """How long the sequences of each step are.

    Attributes:
        path: the section that says so.
        pacing: the length in tokens.
        buckets: the lengths that are used; others are rounded down to these.
        reshapes: whether a sample is cut into several, instead of truncated.
    """

    path: tuple[str, ...]
    pacing: Pacing
    buckets: tuple[int, ...]
    reshapes: bool


@dataclass(frozen=True, slots=True)
class KeptTokens:
    """How many tokens of a sequence some layers keep.

    Attributes:
        pacing: the number of kept tokens; its steps count from 0.
        buckets: the numbers that are used; others are rounded down to these.
        layers: the layers that drop tokens.
        seed: of the choice of tokens.
    """

    pacing: Pacing
    buckets: tuple[int, ...]
    layers: tuple[int, ...]
    seed: int
