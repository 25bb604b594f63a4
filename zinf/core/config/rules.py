"""Combinations of sections that contradict each other, one rule each."""

from collections.abc import Callable, Iterator

from zinf.core.config.batch import batch_violations
from zinf.core.config.efficiency import RandomLTD
from zinf.core.config.optimizer import AdamParams
from zinf.core.config.pacing import Pacing
from zinf.core.config.scheduler import DecayParams, OneCycleParams, WarmupParams
from zinf.core.config.schema import BYTE_VALUES, STDLIB, WITH_IMAGES
from zinf.core.config.section import Violation
from zinf.core.config.settings import PERSISTENT_ELEMENTS, Settings
from zinf.core.objectives import KEYS_OF_SOME, OBJECTIVES, OF_OWN_MODELS
from zinf.core.program import Tier

SAMPLING = ("data_efficiency", "data_sampling")
CURRICULUM = (*SAMPLING, "curriculum_learning")
RANDOM_LTD = ("data_efficiency", "data_routing", "random_ltd")


def _batch(config: Settings) -> Iterator[Violation]:
    """Sizes whose product is not the batch size."""
    yield from batch_violations(
        config.train_batch_size,
        config.train_micro_batch_size_per_gpu,
        config.gradient_accumulation_steps,
        world_size=config.world_size,
    )


def _precision(config: Settings) -> Iterator[Violation]:
    """Both 16-bit precisions at once."""
    if config.compute_dtype == "bfloat16" and config.fp16.enabled:
        text = "bf16.enabled and fp16.enabled are both true: turn one of them off."
        yield ("fp16", "enabled"), text


def _memory(config: Settings) -> Iterator[Violation]:
    """An NVMe tier without a folder, or with two; memory that is pinned and is not."""
    zero, memory = config.zero_optimization, config.memory
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
    if memory.nvme_capacity and not config.nvme_paths:
        text = "has no effect without an NVMe tier. Give its folders in memory.nvme."
        yield ("memory", "nvme_capacity"), text
    pins = zero.pins_memory
    is_given = "pinned" in memory.model_fields_set and memory.pinned != "auto"
    if is_given and pins is not None and pins == (memory.pinned == "off"):
        text = f"is {memory.pinned}, but pin_memory in zero_optimization is"
        yield ("memory", "pinned"), f"{text} {str(pins).lower()}. Remove one of them."


def _mesh(config: Settings) -> Iterator[Violation]:
    """Groups of devices that are given twice."""
    zero, mesh = config.zero_optimization, config.mesh
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
    synonyms = {
        "expert": (("expert_parallel", "autoep_size"), config.expert_parallel.size),
        "tensor": (
            ("tensor_parallel", "autotp_size"),
            config.tensor_parallel.autotp_size,
        ),
        "seq": (("sequence_parallel_size",), config.sequence_parallel_size),
    }
    for axis, (path, size) in synonyms.items():
        along = getattr(mesh, axis)
        if size > 1 and along not in (1, size):
            text = f"{size} is not mesh.{axis}, {along}. Remove one of them."
            yield path, text
    sizes = mesh.replica, mesh.seq, mesh.expert, mesh.tensor
    if asked and (max(sizes) > 1 or mesh.fsdp is not None):
        text = "groups devices, and so does the mesh section. Remove one of them."
        yield asked[0], text


def _compressed(config: Settings) -> Iterator[Violation]:
    """What optimizers that send signs cannot be with."""
    params = config.compressed
    if params is None:
        return
    assert config.optimizer is not None
    path = ("optimizer", "params", params.WARM_UP)
    warm_up = getattr(params, params.WARM_UP)
    kind = config.optimizer.type
    asked = kind, warm_up, params.LARGEST_STAGE
    yield from compressed_violations(config, *asked, ("optimizer", "type"), path)
    if kind == "ZeroOneAdam" and config.optimizer.ema is not None:
        text = "ZeroOneAdam keeps no average of weights, which differ on devices after"
        yield ("optimizer", "ema"), f"{text} var_freeze_step. Remove one of them."


def compressed_violations(
    config: Settings,
    name: str,
    warm_up: int,
    largest_stage: int,
    kind: tuple[str, ...] = (),
    warm_up_path: tuple[str, ...] = (),
) -> Iterator[Violation]:
    """What an optimizer that sends signs cannot be with, as in DeepSpeed or not yet.

    Args:
        name: of the optimizer.
        warm_up: updates before it sends any signs.
        largest_stage: of ZeRO, that it can be with.
        kind, warm_up_path: the keys of both, if the config has them.
    """
    if config.stage > largest_stage:
        text = f"{name} sends signs of whole leaves, and zero_optimization.stage is"
        less = "0" if largest_stage == 0 else f"at most {largest_stage}"
        text = f"{text} {config.stage}. Set it to {less}, or use another optimizer."
        yield kind, text
    if config.clip_norm is not None:
        text = f"{name} does not clip: after its warm-up DeepSpeed clips the gradient"
        yield kind, f"{text} of each device by its own norm. Remove gradient_clipping."
    if config.may_skip:
        text = f"{name} keeps what signs lost, also of steps that fp16 or"
        yield kind, f"{text} skip_nonfinite may skip or scale anew. Use bf16 alone."
    tiers = {config.param_tier, config.optimizer_tier}
    if config.execution not in ("auto", "fused") or not tiers <= {None, Tier.DEVICE}:
        text = f"{name} runs in fused steps, with everything on the device"
        yield kind, f"{text}. Use execution: fused, without offloading."
    is_given = "steps" in config.run.model_fields_set
    if is_given and config.run.steps and warm_up >= config.run.steps:
        text = f"is {warm_up:,}, and the run ends at step {config.run.steps:,}, before"
        yield warm_up_path, f"{text} any signs. Lower it, or use another optimizer."


def _execution(config: Settings) -> Iterator[Violation]:
    """A fused step with a tier to stream to; a segment larger than the device."""
    execution, segment, memory = config.execution, config.segment, config.memory
    if execution == "offloaded" and config.quantizes_weights:
        text = "offloaded steps cannot gather parameters as integers, which"
        where = "zero_optimization.zero_quantized_weights asks for"
        yield ("execution",), f"{text} {where}. Use another one."
    if execution == "offloaded" and config.quantizes_gradients:
        text = "offloaded steps cannot exchange parts of gradients, which"
        where = "zero_optimization.zero_quantized_gradients asks for"
        yield ("execution",), f"{text} {where}. Use another one."
    if config.zero_optimization.zeropp_loco_param is not None and config.may_skip:
        text = "keeps what was lost of gradients, also of those that fp16 or"
        path = "zero_optimization", "zeropp_loco_param"
        yield path, f"{text} skip_nonfinite may skip or scale anew. Remove one of them."
    tiers = {
        "zero_optimization.offload_param": config.param_tier,
        "zero_optimization.offload_optimizer": config.optimizer_tier,
        "activation_checkpointing.cpu_checkpointing": config.activation_tier,
    }
    for key, tier in tiers.items():
        where = f"{key} asks for the {tier} tier"
        if execution == "offloaded" and tier not in (None, Tier.HOST):
            text = "offloaded keeps everything in pinned host memory, but"
            yield ("execution",), f"{text} {where}. Use streamed, or device: cpu."
        if execution == "fused" and tier in Tier.DEVICE.slower:
            text = "fused keeps everything on the device, but"
            yield ("execution",), f"{text} {where}. Use auto or streamed."
    if segment.max_bytes and memory.device and segment.max_bytes > memory.device:
        text = f"{segment.max_bytes:,} bytes are more than memory.device, which is"
        yield ("segment", "max_bytes"), f"{text} {memory.device:,} bytes."


def _summing(config: Settings) -> Iterator[Violation]:
    """What no gradients can be summed with over several passes."""
    if not config.forward_backward:
        return
    found = {
        "execution: offloaded": config.execution == "offloaded",
        "an optimizer that sends signs": config.compressed is not None,
        "zero_quantized_gradients": config.quantizes_gradients,
        "fp16 or skip_nonfinite": config.may_skip,
    }
    for name in (name for name, is_set in found.items() if is_set):
        text = "sums gradients of several passes, which does not work yet with"
        yield ("forward_backward",), f"{text} {name}. Leave one of them out."


def _training(config: Settings) -> Iterator[Violation]:
    """A schedule of unknown length or against the optimizer; choices without losses."""
    optimizer, run = config.optimizer, config.run
    for key in ("keep_best", "patience"):
        if getattr(run, key) and run.evaluate_every is None:
            text = "goes by evaluations, and there are none: set run.evaluate_every."
            yield ("run", key), text
    if run.export_best and not run.keep_best:
        text = "exports the checkpoint that is kept as the best: set run.keep_best."
        yield ("run", "export_best"), text
    if run.weights == "ema" and (optimizer is None or optimizer.ema is None):
        text = "ema is an average that no update keeps: set optimizer.ema, as 0.999."
        yield ("run", "weights"), text
    params = config.scheduler.params if config.scheduler else None
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
    if not isinstance(params, OneCycleParams) or not params.cycle_momentum:
        return
    if optimizer is None:
        return
    if optimizer.type in ("Lamb", "Lion", "Adafactor", "GaLore"):
        path = ("scheduler", "params", "cycle_momentum")
        text = f"moving the betas of {optimizer.type} is not supported yet"
        yield path, f"{text}. Set it to false, or use Adam or AdamW."
    if isinstance(optimizer.params, AdamParams):
        if optimizer.params.moments != "float32":
            text = f"{optimizer.params.moments} moments with betas that move"
            text = f"{text} are not supported yet. Set cycle_momentum to false."
            yield ("optimizer", "params", "moments"), text


def _model(config: Settings) -> Iterator[Violation]:
    """Data that the model cannot take."""
    model, data = config.model, config.data
    if model is None or model.huggingface is not None:
        return
    length, longest = data.sequence_length, model.max_length
    if length is not None and longest is not None and length > longest:
        text = f"{length} tokens are more than model.max_length, which is {longest}"
        yield ("data", "sequence_length"), f"{text}. Lower it, or raise max_length."
    # Token arrays are checked batch by batch, when they are read.
    paths = () if data.paths == STDLIB else data.paths
    may_be_tokens = any(
        path.suffix.lower() in (".npy", ".bin") or path.is_dir() for path in paths
    )
    if model.vocab_size < BYTE_VALUES and not may_be_tokens:
        text = f"text is read as bytes, which have {BYTE_VALUES} values, not"
        yield ("model", "vocab_size"), f"{text} {model.vocab_size}."


def _lengths(config: Settings) -> Iterator[Violation]:
    """Two curricula of lengths, and lengths that no sample has."""
    pacings = {p: pacing for p, pacing in _curricula(config) if pacing.is_complete}
    if len(pacings) > 1:
        first, second = pacings
        yield first, f"shortens sequences, and so does {'.'.join(second)}."
    for path, pacing in pacings.items():
        longest, shortest = pacing.levels()[-1], pacing.levels()[0]
        if longest > config.sequence_length:
            text = f"{longest} tokens are more than data.sequence_length, which is"
            yield (*path, "max_difficulty"), f"{text} {config.sequence_length}."
        if shortest < 1:
            text = f"begins with sequences of {shortest} tokens: it is rounded down to"
            yield (*path, "min_difficulty"), f"{text} a multiple of difficulty_step."


def _curricula(config: Settings) -> Iterator[tuple[tuple[str, ...], Pacing]]:
    """The schedules of lengths that are used, with the paths of their sections."""
    legacy, efficiency = config.curriculum_learning, config.data_efficiency
    if legacy is not None and legacy.enabled:
        yield ("curriculum_learning",), legacy
    if efficiency is not None and efficiency.lengths is not None:
        name, pacing = efficiency.lengths
        yield (*CURRICULUM, "curriculum_metrics", name), pacing


def _random_ltd(config: Settings) -> RandomLTD | None:
    """The dropping of tokens, if it is used."""
    return None if config.data_efficiency is None else config.data_efficiency.random_ltd


def _dropping(config: Settings) -> Iterator[Violation]:
    """Layers that the model does not have, and more tokens than a sequence has."""
    dropping, model = _random_ltd(config), config.model
    if dropping is None:
        return
    highest = dropping.random_ltd_schedule.max_value
    if highest is not None and highest > config.sequence_length:
        text = f"{highest} kept tokens are more than data.sequence_length, which is"
        path = (*RANDOM_LTD, "random_ltd_schedule", "max_value")
        yield path, f"{text} {config.sequence_length}."
    if model is None or model.num_layers is None:
        return
    num_layers, total = model.num_layers, dropping.total_layer_num
    if total not in (None, num_layers):
        text = f"is {total}, and model.num_layers is {num_layers}."
        yield (*RANDOM_LTD, "total_layer_num"), text
    outside = [n for n in dropping.random_ltd_layer_id or () if n >= num_layers]
    if outside:
        text = f"has {outside[0]}, but the layers are 0 to {num_layers - 1}."
        yield (*RANDOM_LTD, "random_ltd_layer_id"), text
    if model.scan_layers:
        text = "names single layers, and model.scan_layers makes all of them one"
        path = (*RANDOM_LTD, "random_ltd_layer_id")
        yield path, f"{text}. Set scan_layers to false."


def _batching(config: Settings) -> Iterator[Violation]:
    """Batches by tokens where all samples are as long, or where others need rows."""
    batching, efficiency = config.dynamic_batching, config.data_efficiency
    model, data, legacy = config.model, config.data, config.curriculum_learning
    if efficiency is None or batching is None:
        return
    path = (*SAMPLING, "dynamic_batching")
    if model is None:
        text = "is for model.huggingface. With a loop of your own use"
        yield path, f"{text} zinf.data.TokenBatches, and remove this."
    elif model.huggingface is None:
        text = "all samples have data.sequence_length tokens, so all batches would have"
        yield path, f"{text} as many rows. Remove it, and set train_batch_size."
    if data.packing:
        yield path, "rows of data.packing are all as long. Remove one of them."
    if not data.traits.predicts_next:
        text = f"has no effect on pairs (data.objective {data.objective}); remove it."
        yield path, text
    if efficiency.random_ltd is not None:
        text = "with data_routing.random_ltd is not supported yet; remove one of them."
        yield path, text
    if efficiency.lengths is not None or efficiency.metrics:
        text = "orders samples by length, and so does curriculum_learning; keep one."
        yield path, text
    if legacy is not None and legacy.enabled:
        yield path, "has lengths of its own; remove it, or curriculum_learning."
    if config.may_skip and batching.lr_scaling_method != "none":
        text = "steps that an overflow skips would move the rates to other batches"
        path = (*path, "lr_scaling_method")
        yield path, f"{text}. Use bf16 without skip_nonfinite, or none."


def _function(config: Settings) -> Iterator[Violation]:
    """Settings that change a model, beside a function that makes it."""
    if config.model is None or config.model.function is None:
        return
    others = {
        ("adapter",): (config.adapter, "zinf.adapt.lora"),
        ("distillation",): (config.distillation, "zinf.data.Taught"),
        ("data_efficiency", "data_routing"): (_random_ltd(config), "zinf.random_ltd"),
    }
    for path, (section, instead) in others.items():
        if section is not None:
            text = "is for zinf's own models, and model.function makes this one"
            yield path, f"{text}. Remove it, and use {instead} in Python."


def _huggingface(config: Settings) -> Iterator[Violation]:
    """Curricula that the samples of a model of transformers cannot follow."""
    if config.model is None or config.model.huggingface is None:
        return
    legacy, efficiency = config.curriculum_learning, config.data_efficiency
    orders = efficiency is not None and (efficiency.lengths or efficiency.metrics)
    uses = {
        ("curriculum_learning",): legacy is not None and legacy.enabled,
        CURRICULUM: bool(orders),
        RANDOM_LTD: _random_ltd(config) is not None,
    }
    if not config.data.traits.predicts_next:
        text = f"is for data.objective sft, not {config.data.objective}"
        for path in (path for path, is_used in uses.items() if is_used):
            yield path, f"{text}. Remove one of them."
    for path, pacing in _curricula(config):
        if pacing.is_complete and pacing.levels()[0] == 1:
            text = "begins with sequences of 1 token, which predict none."
            yield (*path, "min_difficulty"), text


def _objective(config: Settings) -> Iterator[Violation]:
    """Keys of the data that are of other objectives, or of other models."""
    data, model = config.data, config.model
    is_own = model is not None and model.huggingface is None
    read = OF_OWN_MODELS if is_own else data.traits.reads
    if model is None:
        read |= OF_OWN_MODELS
    if is_own and data.objective != "sft":
        yield ("data", "objective"), f"{data.objective} is for model.huggingface."
    for key in sorted(KEYS_OF_SOME - read):
        if data.asks(key):
            yield ("data", key), _unread(key, data.objective, is_own=is_own)


def _unread(key: str, objective: str, *, is_own: bool) -> str:
    """Why a key of the data has no effect, and what to do."""
    readers = [name for name, traits in OBJECTIVES.items() if key in traits.reads]
    if is_own or not readers:
        what = "model.huggingface" if is_own else "other models than model.huggingface"
        return f"is for {what}, and has no effect here. Remove it."
    text = f"has no effect with data.objective {objective}: it is for"
    return f"{text} {', '.join(readers)}. Remove it, or set the objective."


def _images(config: Settings) -> Iterator[Violation]:
    """Settings that lines with images do not go with, or that are for them alone."""
    data, path = config.data, ("data", "images")
    for key in [] if data.traits.takes_images else WITH_IMAGES:
        if getattr(config.model, key, False):
            text = f"has no effect: data.objective {data.objective} takes no images"
            yield ("model", key), f"{text}. Remove it."
    if data.images is None:
        return
    if config.model is None:
        yield path, "is for model.huggingface. Remove it."
    legacy, efficiency = config.curriculum_learning, config.data_efficiency
    others = {
        "data.packing": data.packing,
        "data.too_long truncate": data.treatment_of_long == "truncate",
        "curriculum_learning": legacy is not None and legacy.enabled,
        "data_efficiency": efficiency is not None,
    }
    for name in (name for name, is_used in others.items() if is_used):
        yield path, f"is not supported with {name}. Remove one of them."
    if config.model is None or not config.model.multimodal_attention:
        return
    if data.objective == "reward":
        path = ("model", "multimodal_attention")
        yield path, "is not supported with data.objective reward. Remove one of them."


def _drawing(config: Settings) -> Iterator[Violation]:
    """How completions are drawn where none are, and evaluations of what is drawn."""
    objective = config.data.objective
    for name in ("grpo", "ppo"):
        if name in config.model_fields_set and name != objective:
            text = f"has no effect (data.objective {objective})"
            yield (name,), f"{text}. Remove it, or set the objective to {name}."
    if not config.data.traits.is_drawn:
        return
    if config.data.treatment_of_long == "truncate":
        text = "truncate cuts samples, and prompts are not cut. Set it to drop, which"
        yield ("data", "too_long"), f"{text} leaves out prompts without room."
    if config.syncs_reference and config.adapter is not None:
        text = "moves the reference, which with adapters is their frozen base. Leave it"
        yield ("grpo", "sync_ref_model"), f"{text} out, or train all weights."
    if config.run.evaluate_every is not None:
        text = f"is not supported with data.objective {objective} yet: rewards of"
        text = f"{text} training are in the metrics. Set it to null."
        yield ("run", "evaluate_every"), text


def _counting(config: Settings) -> Iterator[Violation]:
    """Tokens of layers that cannot be counted, as the layers are not known."""
    counts = config.scheduler is not None and config.scheduler.count == "layer_tokens"
    if counts and _random_ltd(config) is not None and config.num_layers is None:
        text = "layer_tokens needs the number of layers of the model. Set"
        path = ".".join((*RANDOM_LTD, "total_layer_num"))
        yield ("scheduler", "count"), f"{text} {path}."


def _distillation(config: Settings) -> Iterator[Violation]:
    """Settings that distillation does not support yet."""
    if config.distillation is None:
        return
    model, legacy = config.model, config.curriculum_learning
    efficiency = config.data_efficiency
    changes = efficiency is not None and (efficiency.lengths or efficiency.random_ltd)
    is_published = model is not None and model.huggingface is not None
    objective = config.data.objective
    others = {
        "adapter": config.adapter is not None and not is_published,
        "curriculum_learning": legacy is not None and legacy.enabled,
        "data_efficiency": bool(changes),
        f"data.objective {objective}": not config.data.traits.predicts_next,
        "images": is_published and config.data.images is not None,
        "distillation.step": is_published and config.distillation.step is not None,
    }
    for name in (name for name, is_used in others.items() if is_used):
        text = f"is not supported with {name} yet. Remove one of them."
        yield ("distillation",), text


def _names(config: Settings) -> Iterator[Violation]:
    """Keys that are given under two names."""
    if config.bfloat16 is not None and "bf16" in config.model_fields_set:
        text = "is the old name of bf16, which is given too; remove it."
        yield ("bfloat16",), text
    elements = config.zero_optimization.persistent_elements
    if None not in (config.persistence_threshold, elements):
        text = "means the same as persistence_threshold, which is given too"
        path = ("zero_optimization", PERSISTENT_ELEMENTS)
        yield path, f"{text}; remove one of them."


RULES: tuple[Callable[[Settings], Iterator[Violation]], ...] = (
    _batch,
    _precision,
    _memory,
    _mesh,
    _execution,
    _compressed,
    _summing,
    _training,
    _model,
    _lengths,
    _dropping,
    _batching,
    _function,
    _huggingface,
    _objective,
    _images,
    _drawing,
    _counting,
    _distillation,
    _names,
)
