"""Combinations of sections that contradict each other."""

from collections.abc import Iterator

from zinf.core.config.adapter import Adapter
from zinf.core.config.deepspeed import ExpertParallel, TensorParallel
from zinf.core.config.distillation import Distillation
from zinf.core.config.efficiency import CurriculumLearning, DataEfficiency
from zinf.core.config.optimizer import AdamParams, Optimizer
from zinf.core.config.pacing import Pacing
from zinf.core.config.scheduler import (
    DecayParams,
    OneCycleParams,
    Scheduler,
    WarmupParams,
)
from zinf.core.config.schema import (
    BYTE_VALUES,
    STDLIB,
    Data,
    Memory,
    MeshAxes,
    Model,
    Run,
    Segment,
)
from zinf.core.config.section import Violation
from zinf.core.config.zero import ZeroOptimization
from zinf.core.program import Tier


def memory_violations(zero: ZeroOptimization, memory: Memory) -> Iterator[Violation]:
    """An NVMe tier without a folder, or with two; memory that is pinned and is not."""
    offload = {
        "offload_param": (zero.offload_param, zero.param_tier),
        "offload_optimizer": (zero.offload_optimizer, zero.optimizer_tier),
    }
    for key, (section, tier) in offload.items():
        path = ("zero_optimization", key, "nvme_path")
        folder = section.nvme_path if section else None
        if tier not in (None, Tier.NVME):
            continue  # The folder has no effect, which is a notice.
        if tier is Tier.NVME and folder is None and not memory.nvme:
            yield path, "device is nvme: give a folder here, or in memory.nvme."
        if folder is not None and memory.nvme and folder not in memory.nvme:
            folders = ", ".join(map(str, memory.nvme))
            text = f"{folder} is not among memory.nvme ({folders}). Remove one of them."
            yield path, text
    if memory.nvme_capacity and not (memory.nvme or zero.nvme_paths):
        text = "has no effect without an NVMe tier. Give its folders in memory.nvme."
        yield ("memory", "nvme_capacity"), text
    pins = zero.pins_memory
    is_given = "pinned" in memory.model_fields_set and memory.pinned != "auto"
    if is_given and pins is not None and pins == (memory.pinned == "off"):
        text = f"is {memory.pinned}, but pin_memory in zero_optimization is"
        yield ("memory", "pinned"), f"{text} {str(pins).lower()}. Remove one of them."


def mesh_violations(
    zero: ZeroOptimization,
    mesh: MeshAxes,
    experts: ExpertParallel,
    tensor: TensorParallel,
    num_seq: int,
) -> Iterator[Violation]:
    """Groups of devices that are given twice."""
    given = {
        ("zero_optimization", "zero_hpz_partition_size"): zero.zero_hpz_partition_size,
        ("zero_optimization", "mics_shard_size"): zero.mics_shard_size,
    }
    asked = [path for path, size in given.items() if size > 1]
    if len(asked) > 1:
        yield (
            asked[1],
            "groups devices, and so does zero_hpz_partition_size; keep one.",
        )
    if experts.size > 1 and mesh.expert not in (1, experts.size):
        text = f"{experts.size} is not mesh.expert, {mesh.expert}. Remove one of them."
        yield ("expert_parallel", "autoep_size"), text
    if tensor.autotp_size > 1 and mesh.tensor not in (1, tensor.autotp_size):
        text = f"{tensor.autotp_size} is not mesh.tensor, {mesh.tensor}."
        yield ("tensor_parallel", "autotp_size"), f"{text} Remove one of them."
    if num_seq > 1 and mesh.seq not in (1, num_seq):
        text = f"{num_seq} is not mesh.seq, {mesh.seq}. Remove one of them."
        yield ("sequence_parallel_size",), text
    sizes = mesh.replica, mesh.seq, mesh.expert, mesh.tensor
    if asked and (max(sizes) > 1 or mesh.fsdp is not None):
        text = "groups devices, and so does the mesh section. Remove one of them."
        yield asked[0], text


def execution_violations(
    execution: str,
    quantizes_weights: bool,
    tiers: dict[tuple[str, ...], Tier | None],
    segment: Segment,
    memory: Memory,
) -> Iterator[Violation]:
    """A fused step with a tier to stream to; a segment larger than the device."""
    if execution in ("fused", "offloaded") and quantizes_weights:
        text = f"{execution} steps cannot gather parameters as integers, which"
        where = "zero_optimization.zero_quantized_weights asks for"
        yield ("execution",), f"{text} {where}. Use auto or streamed."
    for path, tier in tiers.items():
        if execution == "offloaded" and tier not in (None, Tier.HOST):
            text = "offloaded keeps everything in pinned host memory, but"
            where = f"{'.'.join(path)} asks for the {tier} tier"
            yield ("execution",), f"{text} {where}. Use streamed, or device: cpu."
        if execution == "fused" and tier in Tier.DEVICE.slower:
            text = "fused keeps everything on the device, but"
            where = f"{'.'.join(path)} asks for the {tier} tier"
            yield ("execution",), f"{text} {where}. Use auto or streamed."
    if segment.max_bytes and memory.device and segment.max_bytes > memory.device:
        text = f"{segment.max_bytes:,} bytes are more than memory.device, which is"
        yield ("segment", "max_bytes"), f"{text} {memory.device:,} bytes."


def training_violations(
    optimizer: Optimizer | None, scheduler: Scheduler | None, run: Run
) -> Iterator[Violation]:
    """A schedule of unknown length or against the optimizer; choices without losses."""
    for key in ("keep_best", "patience"):
        if getattr(run, key) and run.evaluate_every is None:
            text = "goes by evaluations, and there are none: set run.evaluate_every."
            yield ("run", key), text
    if run.weights == "ema" and (optimizer is None or optimizer.ema is None):
        text = "ema is an average that no update keeps: set optimizer.ema, as 0.999."
        yield ("run", "weights"), text
    params = scheduler.params if scheduler else None
    if (
        isinstance(params, DecayParams)
        and params.total_num_steps is None
        # If it was "auto", it is run.steps.
        and "total_num_steps" not in params.model_fields_set
        and "steps" not in run.model_fields_set
    ):
        path = ("scheduler", "params", "total_num_steps")
        yield path, "is unknown: give it, or run.steps."
    if (
        isinstance(params, WarmupParams)
        and params.warmup_ratio is not None
        and "warmup_num_steps" in params.model_fields_set
    ):
        path = ("scheduler", "params", "warmup_ratio")
        yield path, "gives the steps of the warm-up, and so does warmup_num_steps."
    if (
        isinstance(params, OneCycleParams)
        and params.cycle_momentum
        and optimizer is not None
        and optimizer.type in ("Lamb", "Lion", "Adafactor", "GaLore")
    ):
        path = ("scheduler", "params", "cycle_momentum")
        text = f"moving the betas of {optimizer.type} is not supported yet"
        yield path, f"{text}. Set it to false, or use Adam or AdamW."

    if (
        isinstance(params, OneCycleParams)
        and params.cycle_momentum
        and optimizer is not None
        and isinstance(optimizer.params, AdamParams)
        and optimizer.params.moments != "float32"
    ):
        path = ("optimizer", "params", "moments")
        text = f"{optimizer.params.moments} moments with betas that move"
        yield path, f"{text} are not supported yet. Set cycle_momentum to false."


def huggingface_violations(
    model: Model | None,
    legacy: CurriculumLearning | None,
    efficiency: DataEfficiency | None,
    data: Data,
) -> Iterator[Violation]:
    """Curricula that the samples of a model of transformers cannot follow."""
    if model is None or model.huggingface is None:
        return
    asked: dict[tuple[str, ...], bool] = {}
    shortest: list[tuple[tuple[str, ...], Pacing]] = []
    if legacy is not None and legacy.enabled:
        asked[("curriculum_learning",)] = True
        shortest.append((("curriculum_learning", "min_difficulty"), legacy))
    if efficiency is not None:
        section = ("data_efficiency", "data_sampling", "curriculum_learning")
        lengths = efficiency.lengths
        asked[section] = lengths is not None or bool(efficiency.metrics)
        routing = ("data_efficiency", "data_routing", "random_ltd")
        asked[routing] = efficiency.random_ltd is not None
        if lengths is not None:
            name, pacing = lengths
            path = (*section, "curriculum_metrics", name, "min_difficulty")
            shortest.append((path, pacing))
    if not data.traits.predicts_next:
        text = f"is for data.objective sft, not {data.objective}"
        for path, is_asked in asked.items():
            if is_asked:
                yield path, f"{text}. Remove one of them."
    for path, pacing in shortest:
        if pacing.is_complete and pacing.levels()[0] == 1:
            yield path, "begins with sequences of 1 token, which predict none."


def batching_violations(
    efficiency: DataEfficiency | None,
    legacy: CurriculumLearning | None,
    model: Model | None,
    data: Data,
    may_skip: bool,
) -> Iterator[Violation]:
    """Batches by tokens where all samples are as long, or where others need rows."""
    batching = efficiency.dynamic_batching if efficiency is not None else None
    if efficiency is None or batching is None:
        return
    path = ("data_efficiency", "data_sampling", "dynamic_batching")
    if model is None:
        text = "is for model.huggingface. With a loop of your own use"
        yield path, f"{text} zinf.data.TokenBatches, and remove this."
    elif model.huggingface is None:
        text = "all samples have data.sequence_length tokens, so all batches would have"
        yield path, f"{text} as many rows. Remove it, and set train_batch_size."
    if data.packing:
        yield path, "rows of data.packing are all as long. Remove one of them."
    if not data.traits.predicts_next:
        yield (
            path,
            f"has no effect on pairs (data.objective {data.objective}); remove it.",
        )
    if efficiency.random_ltd is not None:
        text = "with data_routing.random_ltd is not supported yet; remove one of them."
        yield path, text
    if efficiency.lengths is not None or efficiency.metrics:
        text = "orders samples by length, and so does curriculum_learning; keep one."
        yield path, text
    if legacy is not None and legacy.enabled:
        yield path, "has lengths of its own; remove it, or curriculum_learning."
    if may_skip and batching.lr_scaling_method != "none":
        text = "steps that an overflow skips would move the rates to other batches"
        yield (
            (*path, "lr_scaling_method"),
            f"{text}. Use bf16 without skip_nonfinite, or none.",
        )


def objective_violations(data: Data) -> Iterator[Violation]:
    """Settings of the data that are of other objectives."""
    objective = f"(data.objective {data.objective})"
    if data.packing and not data.traits.predicts_next:
        text = f"puts samples of sft into rows; others stay apart {objective}"
        yield ("data", "packing"), f"{text}. Set it to false."
    if data.labels is not None and not data.traits.has_classes:
        text = f"names the classes of classification, and has no effect {objective}"
        yield ("data", "labels"), f"{text}. Remove it, or set the objective."


def counting_violations(
    scheduler: Scheduler | None,
    model: Model | None,
    efficiency: DataEfficiency | None,
) -> Iterator[Violation]:
    """Tokens of layers that cannot be counted, as the layers are not known."""
    dropping = efficiency.random_ltd if efficiency is not None else None
    if scheduler is None or scheduler.count != "layer_tokens" or dropping is None:
        return
    is_known = model is not None and model.num_layers is not None
    if not is_known and dropping.total_layer_num is None:
        text = "layer_tokens needs the number of layers of the model. Set"
        path = "data_efficiency.data_routing.random_ltd.total_layer_num"
        yield ("scheduler", "count"), f"{text} {path}."


def function_violations(
    model: Model | None,
    adapter: Adapter | None,
    distillation: Distillation | None,
    efficiency: DataEfficiency | None,
) -> Iterator[Violation]:
    """Settings that change a model, beside a function that makes it."""
    if model is None or model.function is None:
        return
    drops = efficiency is not None and efficiency.random_ltd is not None
    others = {
        ("adapter",): (adapter is not None, "zinf.adapt.lora"),
        ("distillation",): (distillation is not None, "zinf.data.Taught"),
        ("data_efficiency", "data_routing"): (drops, "zinf.random_ltd"),
    }
    for path, (is_used, instead) in others.items():
        if is_used:
            text = "is for zinf's own models, and model.function makes this one"
            yield path, f"{text}. Remove it, and use {instead} in Python."


def distillation_violations(
    distillation: Distillation | None,
    model: Model | None,
    adapter: Adapter | None,
    legacy: CurriculumLearning | None,
    efficiency: DataEfficiency | None,
) -> Iterator[Violation]:
    """A teacher beside what it cannot be with yet."""
    if distillation is None:
        return
    grows = efficiency is not None and (efficiency.lengths or efficiency.random_ltd)
    others = {
        "model.huggingface": model is not None and model.huggingface is not None,
        "adapter": adapter is not None,
        "curriculum_learning": legacy is not None and legacy.enabled,
        "data_efficiency": grows,
    }
    for name in (name for name, is_used in others.items() if is_used):
        text = f"is not supported with {name} yet. Remove one of them."
        yield ("distillation",), text


def model_violations(model: Model | None, data: Data) -> Iterator[Violation]:
    """Data that the model cannot take."""
    if model is None or model.huggingface is not None:
        return
    length, longest = data.sequence_length, model.max_length
    if length is not None and longest is not None and length > longest:
        text = f"{data.sequence_length} tokens are more than model.max_length"
        text = f"{text}, which is {model.max_length}"
        yield ("data", "sequence_length"), f"{text}. Lower it, or raise max_length."
    # Token arrays are checked batch by batch, when they are read.
    paths = () if data.paths == STDLIB else data.paths
    may_be_tokens = any(
        path.suffix.lower() in (".npy", ".bin") or path.is_dir() for path in paths
    )
    if model.vocab_size < BYTE_VALUES and not may_be_tokens:
        text = f"text is read as bytes, which have {BYTE_VALUES} values, not"
        yield ("model", "vocab_size"), f"{text} {model.vocab_size}."
