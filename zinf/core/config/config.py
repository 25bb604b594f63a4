"""The whole config, and the properties of it that the engine reads."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, PrivateAttr

from zinf.core.config.adapter import Adapter
from zinf.core.config.arguments import TOTAL_STEPS, Key, chosen_values, fill
from zinf.core.config.batch import BatchSizes, batch_sizes, batch_violations
from zinf.core.config.deepspeed import ActivationCheckpointing, DeepSpeedKeys
from zinf.core.config.distillation import Distillation
from zinf.core.config.dynamic_batching import DynamicBatching
from zinf.core.config.efficiency import (
    RESHAPE,
    dropping_violations,
    length_violations,
)
from zinf.core.config.grouping import grouping
from zinf.core.config.load import override, raw_config
from zinf.core.config.messages import ConfigError, Notice, Problem, without_effect
from zinf.core.config.pacing import Pacing, buckets
from zinf.core.config.precision import BF16, LossScaling, precision_violations
from zinf.core.config.rules import (
    batching_violations,
    counting_violations,
    distillation_violations,
    execution_violations,
    function_violations,
    huggingface_violations,
    memory_violations,
    mesh_violations,
    model_violations,
    objective_violations,
    training_violations,
)
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
from zinf.core.config.section import Violation
from zinf.core.config.size import Threshold
from zinf.core.config.stand_in import with_stand_in
from zinf.core.config.status import Auto
from zinf.core.config.validate import overlaps, validate
from zinf.core.program import Tier

FP32_BYTES = 4
PERSISTENCE_BYTES = 32 * 1024
PERSISTENT_ELEMENTS = "stage3_param_persistence_threshold"


class Config(DeepSpeedKeys):
    """A complete, checked config: DeepSpeed's keys and zinf's own.

    Make one with `Config.load`. An empty config leaves everything automatic.
    """

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
    _chosen: dict[Key, Any] = PrivateAttr(default_factory=dict)
    _not_done: tuple[Notice, ...] = PrivateAttr(default=())
    _is_told: bool = PrivateAttr(default=False)
    _origin: "Origin" = PrivateAttr(default_factory=lambda: Origin())

    @classmethod
    def load(
        cls,
        source: "Mapping[str, Any] | str | Path | Config | None" = None,
        overrides: Sequence[str] = (),
        *,
        world_size: int | None = None,
        arguments: Mapping[str, Any] | None = None,
        ignore_unsupported: bool | None = None,
    ) -> "Config":
        """The config in `source`, with `overrides` ("a.b=value") on top.

        Args:
            source: a mapping, the path of a YAML or JSON file, a config, or None for
                an empty one.
            overrides: values are read as YAML; a later one wins.
            world_size: data-parallel devices, for batch-size arithmetic; by default
                those that a given config was loaded for, or that `mesh` asks for, or 1
                if the mesh takes all devices. `on_devices` counts those.
            arguments: what fills in keys that are "auto", by the names of
                `transformers.TrainingArguments` (`learning_rate`, `max_grad_norm`,
                `max_steps`, ...), as its `to_dict` gives them. Those that are not given
                have that class's defaults, and `chosen` lists them.
            ignore_unsupported: replaces the key of that name.

        Raises:
            ConfigError: a ValueError that names every unknown key, wrong value and
                impossible combination, with its full path and what is allowed there.
            FileNotFoundError: `source` names no file.
            ValueError: the file or an override cannot be read.
        """
        if isinstance(source, Config):
            world_size = source._world_size if world_size is None else world_size
            if not overrides and world_size == source._world_size:
                return source
        raw = override(raw_config(source), overrides)
        if ignore_unsupported is not None:
            raw["ignore_unsupported"] = ignore_unsupported
        if world_size is None:
            world_size = grouping(raw).num_data_parallel or 1
        found = check_raw(raw, world_size=world_size, arguments=arguments)
        if found.config is None:
            name = str(source) if isinstance(source, str | Path) else "config"
            raise ConfigError(name, found.problems)
        if isinstance(source, Config):
            found.config._take_over(source, overrides)
        elif isinstance(source, str | Path):
            folder = Path(source).expanduser().absolute().parent
            found.config._origin = Origin(folder)
        return found.config

    def _take_over(self, source: "Config", overrides: Sequence[str]) -> None:
        """Copies from the config that this one was made from what no key holds."""
        keys = (text.partition("=")[0].strip() for text in overrides)
        changed = [tuple(key.split(".")) for key in keys]
        for key, value in source._chosen.items():
            if not overlaps(key, changed):
                self._chosen.setdefault(key, value)
        kept = [n for n in source._not_done if not overlaps(n.path, changed)]
        self._not_done = tuple(dict.fromkeys([*kept, *self._not_done]))
        self._origin = source._origin

    def told(self) -> "Config":
        """A copy whose notices `zinf.initialize` does not log, as they were printed."""
        told = self.model_copy()
        told._is_told = True
        return told

    def folders_of_modules(self) -> tuple[Path, ...]:
        """Where the module of `model.function` is looked for, in this order.

        The folder of the file that this config was read from, and the current folder.
        """
        folders = [self._origin.folder, Path.cwd()]
        return tuple(dict.fromkeys(folder for folder in folders if folder is not None))

    def without_training(self) -> "Config":
        """A copy for running a model: all is frozen, and no step is taken.

        Budgets, folders, tiers of parameters and dtypes stay. Left out is what changes
        the parameters first: an adapter, and weights in few bits.
        """
        nothing = dict.fromkeys(
            (
                "adapter",
                "weight_quantization",
                "gradient_clipping",
                "train_batch_size",
                "train_micro_batch_size_per_gpu",
                "gradient_accumulation_steps",
            )
        )
        changed = {
            "frozen": ("*",),
            "execution": "streamed",
            "activation_checkpointing": ActivationCheckpointing(),
        }
        return self.model_copy(update=nothing | changed)

    @property
    def is_told(self) -> bool:
        """Whether a user has been shown the notices."""
        return self._is_told

    @property
    def chosen(self) -> dict[Key, Any]:
        """Keys that were "auto" and that no argument gave, with their values."""
        return dict(self._chosen)

    @property
    def not_done(self) -> tuple[Notice, ...]:
        """Keys that ask for what zinf does not do: left out, or without effect."""
        return self._not_done

    def model_post_init(self, context: Any) -> None:
        if isinstance(context, Mapping):
            self._world_size = context.get("world_size", 1)

    def violations(self) -> Iterator[Violation]:
        yield from batch_violations(*self._given_sizes, world_size=self._world_size)
        yield from precision_violations(self._bf16, self.fp16)
        yield from memory_violations(self.zero_optimization, self.memory)
        yield from mesh_violations(
            self.zero_optimization,
            self.mesh,
            self.expert_parallel,
            self.tensor_parallel,
            self.sequence_parallel_size,
        )
        yield from execution_violations(
            self.execution,
            self.quantizes_weights,
            self._tiers,
            self.segment,
            self.memory,
        )
        yield from training_violations(self.optimizer, self.scheduler, self.run)
        yield from model_violations(self.model, self.data)
        yield from length_violations(
            self.curriculum_learning, self.data_efficiency, self.sequence_length
        )
        yield from dropping_violations(
            self.data_efficiency, self.model, self.sequence_length
        )
        yield from batching_violations(
            self.data_efficiency,
            self.curriculum_learning,
            self.model,
            self.data,
            self.may_skip,
        )
        yield from function_violations(
            self.model, self.adapter, self.distillation, self.data_efficiency
        )
        yield from huggingface_violations(
            self.model, self.curriculum_learning, self.data_efficiency, self.data
        )
        yield from objective_violations(self.data)
        yield from counting_violations(self.scheduler, self.model, self.data_efficiency)
        yield from distillation_violations(
            self.distillation,
            self.model,
            self.adapter,
            self.curriculum_learning,
            self.data_efficiency,
        )
        if self.bfloat16 is not None and "bf16" in self.model_fields_set:
            yield (
                ("bfloat16",),
                "is the old name of bf16, which is given too; remove it.",
            )
        if None not in (self.persistence_threshold, self._persistent_elements):
            text = "means the same as persistence_threshold, which is given too"
            path = ("zero_optimization", PERSISTENT_ELEMENTS)
            yield path, f"{text}; remove one of them."

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
        if self._persistent_elements is not None:
            return self._persistent_elements * FP32_BYTES
        if self.persistence_threshold is not None:
            return self.persistence_threshold
        return PERSISTENCE_BYTES

    @property
    def persistence_key(self) -> str:
        """The key that sets `persistence_bytes`."""
        if self._persistent_elements is not None:
            return f"zero_optimization.{PERSISTENT_ELEMENTS}"
        return "persistence_threshold"

    @property
    def sequence_length(self) -> int:
        """Tokens that a sample of `zinf train` predicts.

        A published model that was made for fewer has fewer if the config says nothing.
        """
        if self.data.sequence_length is not None:
            return self.data.sequence_length
        if self.model is not None and self.model.huggingface is not None:
            return PUBLISHED_SEQUENCE_LENGTH
        longest = None if self.model is None else self.model.max_length
        return min(SEQUENCE_LENGTH, longest or SEQUENCE_LENGTH)

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
    def _given_sizes(self) -> tuple[int | None, int | None, int | None]:
        return (
            self.train_batch_size,
            self.train_micro_batch_size_per_gpu,
            self.gradient_accumulation_steps,
        )

    @property
    def _sizes(self) -> BatchSizes:
        return batch_sizes(*self._given_sizes, world_size=self._world_size)

    @property
    def _persistent_elements(self) -> int | None:
        return self.zero_optimization.persistent_elements

    @property
    def _tiers(self) -> dict[tuple[str, ...], Tier | None]:
        return {
            ("zero_optimization", "offload_param"): self.param_tier,
            ("zero_optimization", "offload_optimizer"): self.optimizer_tier,
            ("activation_checkpointing", "cpu_checkpointing"): self.activation_tier,
        }


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a config was read from. Configs are equal wherever that is.

    Attributes:
        folder: of its file; None: it was no file.
    """

    folder: Path | None = field(default=None, compare=False)


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


@dataclass(frozen=True, slots=True)
class CheckedConfig:
    """A config, or everything that is wrong with one."""

    config: Config | None
    problems: tuple[Problem, ...]


def check_raw(
    raw: Mapping[str, Any],
    *,
    world_size: int = 1,
    arguments: Mapping[str, Any] | None = None,
) -> CheckedConfig:
    """Makes a config of keys and values.

    Fills in "auto", leaves out unsupported keys if `ignore_unsupported` is true, and
    checks the rest.
    """
    filled = fill(raw, arguments)
    ignores = raw.get("ignore_unsupported") is True
    asked, stand_ins = with_stand_in(filled.raw)
    checked = validate(
        Config,
        asked if ignores else filled.raw,
        context={"world_size": world_size},
        ignores_unsupported=ignores,
    )
    config = checked.config
    if config is None:
        replaceable = [notice.path for notice in stand_ins]
        problems = [
            replace(p, is_unsupported=True) if p.path in replaceable else p
            for p in checked.problems
        ]
        return CheckedConfig(None, tuple(problems))
    config._chosen = {
        key: value
        for key, value in chosen_values(config, raw)
        if key not in filled.given
    }
    if TOTAL_STEPS in filled.open and "steps" not in config.run.model_fields_set:
        config._chosen[TOTAL_STEPS] = config.run.steps
    left_out = [Notice(p.path, f"left out. {p.text}") for p in checked.left_out]
    unsupported = (*stand_ins, *left_out) if ignores else ()
    config._not_done = (*unsupported, *without_effect(filled.raw, Config))
    return CheckedConfig(config, ())
