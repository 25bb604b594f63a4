"""DeepSpeed's `zero_optimization`: the ZeRO stage, and what rests on which tier.

Every key of DeepSpeed 0.19.6 is here under its own name. Buffers, buckets and hooks
exist there because nothing knows the program ahead; the plan does, so those are
automatic or have no meaning.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from zinf.config.opaque import Opaque
from zinf.config.scalar import Count, Flag, Folder, Integer, NonNegative, Number, Whole
from zinf.config.section import Section, Violation
from zinf.config.status import Auto, Automatic, Moot, NoEffect, Unsupported
from zinf.program import Tier

OffloadDevice = Literal["none", "cpu", "nvme"]
TIERS = {"none": Tier.DEVICE, "cpu": Tier.HOST, "nvme": Tier.NVME}


class AIO(Section):
    """DeepSpeed's asynchronous I/O."""

    intra_op_parallelism: Automatic[Count] = None
    """Threads per request; the NVMe store sizes its own thread pool."""

    block_size: Automatic[Count] = None
    """Bytes per request; the NVMe store sizes its own requests."""

    queue_depth: Automatic[Count] = None
    """Requests in flight; the NVMe store keeps its own queue full."""

    thread_count: Automatic[Count] = None
    """Documented by DeepSpeed but never read; intra_op_parallelism is meant."""

    single_submit: Moot[Flag] = None
    """One system call per request of libaio, which is not used."""

    overlap_events: Moot[Flag] = None
    """Whether submission and completion overlap; they always do."""

    use_gds: NoEffect[Flag] = False
    """GPUDirect Storage; bytes pass through host memory instead."""


class OffloadParam(Section):
    """Where parameters rest between uses."""

    device: Auto[OffloadDevice | None] = None
    """Tier of parameters: none (device), cpu (host), nvme; absent: by budget."""

    nvme_path: Auto[Folder | None] = None
    """Folder of the NVMe tier."""

    pin_memory: NoEffect[Flag] = True
    """On accelerators host memory is always pinned, in one pool of the exact size; on
    CPUs there is nothing to pin."""

    buffer_count: Automatic[Whole] = None
    """Number of swap buffers; pools follow from the plan."""

    buffer_size: Automatic[Whole] = None
    """Elements per swap buffer; pools follow from the plan."""

    max_in_cpu: Automatic[Whole] = None
    """Elements kept in host memory; `memory.host` bounds all host bytes instead."""


class OffloadOptimizer(Section):
    """Where optimizer state and fp32 masters rest between uses."""

    device: Auto[OffloadDevice | None] = None
    """Tier of optimizer state: none (device), cpu (host), nvme; absent: by budget."""

    nvme_path: Auto[Folder | None] = None
    """Folder of the NVMe tier."""

    pin_memory: NoEffect[Flag] = True
    """On accelerators host memory is always pinned, in one pool of the exact size; on
    CPUs there is nothing to pin."""

    buffer_count: Automatic[Whole] = None
    """Number of swap buffers; pools follow from the plan."""

    pipeline_read: Automatic[Flag] = None
    """Reads always overlap the update."""

    pipeline_write: Automatic[Flag] = None
    """Writes always overlap the update."""

    fast_init: Automatic[Flag] = None
    """State is always initialised one array at a time, straight on its tier."""

    ratio: NoEffect[Annotated[Number, Field(ge=0, le=1)]] = 1.0
    """Share of state offloaded. All is; leave out `device` to offload only what has no
    room."""

    super_offload: Automatic[Flag] = None
    """The update always overlaps backward or the next forward, exactly."""

    convert_grad_on_cpu: Moot[Flag] = None
    """Where PyTorch casts gradients; here the cast is part of the compiled segment."""

    cpuadam_cores_perc: Moot[NonNegative] = None
    """Share of cores for DeepSpeed's CPU Adam; XLA has its own threads."""


class ZeroOptimization(Section):
    """ZeRO stage and offload."""

    stage: Auto[Annotated[Whole, Field(le=3)]] = 0
    """ZeRO stage; sharded: 0 nothing, 1 optimizer state, 2 gradients, 3 parameters."""

    offload_param: OffloadParam | None = None
    """Where parameters rest; absent: the fastest tier with room."""

    offload_optimizer: OffloadOptimizer | None = None
    """Where optimizer state rests; absent: the fastest tier with room."""

    stage3_param_persistence_threshold: Auto[Whole | None] = None
    """Elements; smaller fp32 arrays (4 bytes each) never go to NVMe."""

    sub_group_size: Automatic[Whole] = None
    """Elements per optimizer tile; state is updated leaf by leaf."""

    stage3_prefetch_bucket_size: Automatic[Whole] = None
    """Elements fetched ahead; the plan fetches as early as budgets allow."""

    stage3_max_live_parameters: Automatic[Whole] = None
    """Elements gathered at once; `memory.device` bounds all device bytes instead."""

    stage3_max_reuse_distance: Automatic[Whole] = None
    """Elements before a parameter is dropped; the plan knows every reuse exactly."""

    stage3_model_persistence_threshold: Automatic[Whole] = None
    """Elements that may stay resident; the budgets bound that."""

    stage3_partition_stream_chunk_size: Automatic[Whole] = None
    """Elements per piece at initialisation, which always streams."""

    stage3_gather_16bit_weights_on_model_save: Automatic[Flag] = None
    """Checkpoints hold whole arrays; nothing has to be consolidated."""

    stage3_gather_fp16_weights_on_model_save: Automatic[Flag] = None
    """Old name of stage3_gather_16bit_weights_on_model_save."""

    load_from_fp32_weights: NoEffect[Flag] = True
    """Masters are always restored from fp32."""

    elastic_checkpoint: Automatic[Flag] = None
    """Checkpoints do not depend on the number of devices."""

    pipeline_loading_checkpoint: Automatic[Flag] = None
    """Checkpoints are always read one array at a time."""

    overlap_comm: Automatic[Flag] = None
    """XLA's scheduler overlaps collectives with compute."""

    save_muon_momentum_buffer_in_memory: Automatic[Flag] = None
    """Every state of the optimizer is placed by budget."""

    enable_sanity_checks: Automatic[Flag] = None
    """Plans are always checked before they run."""

    reduce_scatter: Moot[Flag] = None
    """Which collective adds gradients; GSPMD chooses."""

    reduce_bucket_size: Moot[Whole] = None
    """Elements per gradient bucket; XLA combines collectives itself."""

    allgather_bucket_size: Moot[Whole] = None
    """Elements per gather bucket; XLA combines collectives itself."""

    allgather_partitions: Moot[Flag] = None
    """Gather or broadcast of updated parameters; GSPMD chooses."""

    use_multi_rank_bucket_allreduce: Moot[Flag] = None
    """Buckets over several ranks; XLA combines collectives itself."""

    contiguous_gradients: Moot[Flag] = None
    """A flat gradient buffer against fragmentation; XLA's buffers are static."""

    round_robin_gradients: Moot[Flag] = None
    """Interleaved gradient copies among ranks; each shard moves by itself."""

    ignore_unused_parameters: NoEffect[Flag] = True
    """False refuses parameters without a gradient; in JAX their gradient is zero."""

    legacy_stage1: Moot[Flag] = None
    """An older implementation of stage 1."""

    grad_hooks: Moot[Flag] = None
    """Backward hooks; a traced program has none."""

    stage3_module_granularity_threshold: Moot[Whole] = None
    """Modules fetched as a unit; segments are cut from the traced program."""

    stage3_use_all_reduce_for_fetch_params: Moot[Flag] = None
    """Gathering by all-reduce; GSPMD chooses."""

    stage3_allgather_sequential: Moot[Flag] = None
    """Gathering one parameter at a time; the plan bounds what is live."""

    leaf_module: Moot[Opaque] = None
    """Modules whose hooks would hang; a traced program has no hooks."""

    memory_efficient_linear: Moot[Flag] = None
    """A linear layer that saves no weight; backward always fetches weights again."""

    override_module_apply: Moot[Flag] = None
    """A patched `Module.apply`; there are no modules."""

    log_trace_cache_warnings: Moot[Flag] = None
    """Warnings on a changed trace; the program is traced once and cannot change."""

    zero_hpz_partition_size: Auto[Whole] = 1
    """Devices of a group that holds all parameters, while other state is divided among
    all devices (ZeRO++ hpZ); 1: there are no such groups."""

    mics_shard_size: Auto[Annotated[Integer, Field(ge=-1)]] = -1
    """Devices of a group that holds all state (MiCS); -1: there are no such groups."""

    mics_hierarchical_params_gather: Moot[Flag] = None
    """Gathers inside and between nodes; XLA chooses how collectives are routed."""

    zenflow: Unsupported[Opaque | None] = None
    """ZenFlow applies gradients late, which changes the numerics; remove it."""

    zero_quantized_weights: Unsupported[Flag] = False
    """Quantised gathers would change the numerics; leave it false."""

    zero_quantized_nontrainable_weights: Unsupported[Flag] = False
    """Quantised frozen weights would change the numerics; leave it false."""

    zero_quantized_gradients: Unsupported[Flag] = False
    """Quantised gradient reduction would change the numerics; leave it false."""

    zeropp_loco_param: Unsupported[Opaque | None] = None
    """Error feedback for quantised gradients, which are not supported; remove it."""

    aio: AIO | None = None
    """Where Hugging Face's documentation has it, and DeepSpeed reads none; as aio."""

    param_persistence_threshold: Auto[Whole | None] = None
    """Another name of stage3_param_persistence_threshold."""

    model_persistence_threshold: Automatic[Whole] = None
    """Another name of stage3_model_persistence_threshold."""

    prefetch_bucket_size: Automatic[Whole] = None
    """Another name of stage3_prefetch_bucket_size."""

    max_live_parameters: Automatic[Whole] = None
    """Another name of stage3_max_live_parameters."""

    max_reuse_distance: Automatic[Whole] = None
    """Another name of stage3_max_reuse_distance."""

    gather_16bit_weights_on_model_save: Automatic[Flag] = None
    """Another name of stage3_gather_16bit_weights_on_model_save."""

    module_granularity_threshold: Moot[Whole] = None
    """Another name of stage3_module_granularity_threshold."""

    use_all_reduce_for_fetch_params: Moot[Flag] = None
    """Another name of stage3_use_all_reduce_for_fetch_params."""

    allgather_sequential: Moot[Flag] = None
    """Another name of stage3_allgather_sequential."""

    allgather_size: Moot[Whole] = None
    """Old name of allgather_bucket_size, which DeepSpeed dropped."""

    find_unused_parameters: Moot[Flag] = None
    """The opposite of ignore_unused_parameters, which DeepSpeed dropped."""

    cpu_offload: Flag | None = None
    """Old name: true means offload_optimizer.device: cpu."""

    cpu_offload_param: Flag | None = None
    """Old name: true means offload_param.device: cpu."""

    cpu_offload_params: Flag | None = None
    """Older name of cpu_offload_param, which DeepSpeed dropped."""

    cpu_offload_use_pin_memory: NoEffect[Flag] = True
    """Old name of pin_memory: on accelerators host memory is always pinned."""

    @model_validator(mode="before")
    @classmethod
    def _stage_of_flag(cls, data: Any) -> Any:
        # Before stages had numbers, `"zero_optimization": true` was stage 1.
        return {"stage": int(data)} if isinstance(data, bool) else data

    @property
    def param_tier(self) -> Tier | None:
        """Tier asked for parameters; None: placed by budget."""
        is_cpu = self.cpu_offload_param or self.cpu_offload_params
        return _tier(self.offload_param, is_cpu)

    @property
    def optimizer_tier(self) -> Tier | None:
        """Tier asked for optimizer state and masters; None: placed by budget."""
        return _tier(self.offload_optimizer, self.cpu_offload)

    @property
    def nvme_paths(self) -> tuple[Path, ...]:
        """The folders of both offload sections, each once.

        Not those of a section that asks for another tier: nothing is to rest there.
        """
        sections = (self.offload_param, self.offload_optimizer)
        asking = [s for s in sections if s and s.device in (None, "nvme")]
        paths = (section.nvme_path for section in asking)
        return tuple(dict.fromkeys(path for path in paths if path))

    @property
    def persistent_elements(self) -> int | None:
        """`stage3_param_persistence_threshold`, under either name."""
        if self.param_persistence_threshold is not None:
            return self.param_persistence_threshold
        return self.stage3_param_persistence_threshold

    def violations(self) -> Iterator[Violation]:
        for old, new in (
            ("cpu_offload", "offload_optimizer"),
            ("cpu_offload_param", "offload_param"),
            ("cpu_offload_params", "offload_param"),
        ):
            if getattr(self, old) is not None and getattr(self, new) is not None:
                yield (
                    (old,),
                    f"is the old name of {new}, which is given too; remove it.",
                )
        given = (
            self.param_persistence_threshold,
            self.stage3_param_persistence_threshold,
        )
        if None not in given:
            yield (
                ("param_persistence_threshold",),
                "is another name of stage3_param_persistence_threshold, which is given "
                "too; remove it.",
            )


def _tier(
    section: OffloadParam | OffloadOptimizer | None, is_cpu: bool | None
) -> Tier | None:
    if section is not None and section.device is not None:
        return TIERS[section.device]
    return Tier.HOST if is_cpu else None
