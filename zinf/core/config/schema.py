"""zinf's own sections: memory budgets, segments, and what `zinf train` trains."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import BeforeValidator, Field

from zinf.core.config.nearest import did_you_mean
from zinf.core.config.scalar import (
    Count,
    Flag,
    Folder,
    Fraction,
    Int32,
    NonNegative,
    Positive,
    Seconds,
    Seed,
    Text,
    Whole,
)
from zinf.core.config.section import Section, Violation
from zinf.core.config.size import Size
from zinf.core.config.status import Auto
from zinf.core.objectives import OBJECTIVES, Traits

# Far more than published models have. A layer is traced by itself, and XLA ends the
# process if an array has 2**63 bytes.
Layers = Annotated[Count, Field(le=4096)]
Width = Annotated[Count, Field(le=2**20)]
Experts = Annotated[Whole, Field(le=4096)]
STDLIB = "stdlib"
# Keys of a model that its data is checked by.
WITH_IMAGES = ("freeze_vision_tower", "multimodal_attention")
BESIDE_HUGGINGFACE = frozenset({"huggingface", "attention", *WITH_IMAGES})
BESIDE_FUNCTION = frozenset({"function", "vocab_size", "max_length", "attention"})
SEQUENCE_LENGTH = 256
PUBLISHED_SEQUENCE_LENGTH = 1024  # of a model that huggingface names
BYTE_VALUES = 256
if TYPE_CHECKING:
    ObjectiveName = str
else:
    ObjectiveName = Literal[tuple(OBJECTIVES)]


def _one_or_many(value: object) -> object:
    if isinstance(value, list | tuple) and not value:
        raise ValueError("must have at least 1 folder")
    return (value,) if isinstance(value, str | Path) else value


def _off(value: object) -> object:
    # YAML reads a bare off as false.
    return "off" if value is False else value


class Memory(Section):
    """Byte budgets, one per tier. They are hard: nothing ever holds more."""

    device: Auto[Size | None] = None
    """Bytes of each device's memory, such as 120GiB. Absent or auto: 0.9 of what an
    accelerator reports; all CPU devices together have 0.35 of the host's memory."""

    host: Auto[Size | None] = None
    """Bytes of host memory that one process may hold. Absent or auto: 0.7 of the
    machine's memory, or of its container's limit if that is lower. CPU devices use the
    same memory: with them it is 0.35, or what memory.device leaves of 0.7. Processes of
    a run on one machine share it equally."""

    nvme: Annotated[tuple[Folder, ...] | None, BeforeValidator(_one_or_many)] = None
    """Folders of the NVMe tier, best one per drive."""

    nvme_capacity: Auto[Size | None] = None
    """Bytes on all those folders together; absent or auto: 0.95 of what they have
    free."""

    experts: Annotated[Auto[Size | Literal["off"] | None], BeforeValidator(_off)] = None
    """Bytes of the device for experts that tokens chose, in programs that do not change
    them: text is generated or scored, or adapters are trained. Absent or auto: what all
    else leaves there; in training, half of what arrays at rest leave, if that is
    predicted to be faster. off: all experts of a layer are read for each pass."""

    stall_seconds: Seconds = 120.0
    """How long a drive may take to answer a request before the step fails."""

    checksums: Literal["sampled", "full", "off"] = "sampled"
    """Which part of the bytes on the NVMe tier has checksums that reads verify.
    sampled: a sixteenth, another one at each write, for 1 to 3% of throughput. full:
    all, for 4 to 14% on two cores. off: none."""

    pinned: Annotated[
        Literal["auto", "arrays", "registered", "off"], BeforeValidator(_off)
    ] = "auto"
    """Whether streamed steps keep arrays of the host tier in pinned memory, which an
    accelerator copies without a core's help. arrays: memory of jax's kind pinned_host.
    registered: NumPy's memory, pinned in place by CUDA. auto: the fastest in a
    measurement of seconds, and off on the CPU. An offloaded step is always pinned."""

    def violations(self) -> Iterator[Violation]:
        folders = self.nvme or ()
        twice = {str(folder) for folder in folders if folders.count(folder) > 1}
        if twice:
            yield ("nvme",), f"names a folder twice: {', '.join(sorted(twice))}."


class Segment(Section):
    """How the program is cut."""

    max_bytes: Auto[Size | None] = None
    """Bytes of parameters in one segment; absent or auto: chosen by the plan."""

    remat: Literal["auto", "always"] = "auto"
    """auto: segments keep residuals where there is room and the step is faster.
    always: they never do, so no bit of a result depends on how much room there is."""


class MeshAxes(Section):
    """Which devices train, and how they are grouped."""

    replica: Count = 1
    """Groups of devices that each hold all state."""

    fsdp: Count | None = None
    """Devices of a group, among which state is divided. Absent: all devices; one
    process on the CPU takes only its first, as the others are virtual."""

    seq: Count = 1
    """Devices that divide the positions of the same examples (sequence parallelism).
    They divide state too: a group has fsdp times seq times expert times tensor
    devices."""

    expert: Count = 1
    """Devices that divide the experts of each layer (expert parallelism); outside of
    experts they are data-parallel. DeepSpeed's ep_size."""

    tensor: Count = 1
    """Devices that divide the weights of each layer, by columns and then by rows, as in
    Megatron (tensor parallelism). Which weights is found in the traced program."""


class Model(Section):
    """The model that `zinf train` trains."""

    huggingface: Text | None = None
    """Folder of a model of transformers, or its name on the Hugging Face hub, to train
    from its weights; null: a new model of the sizes below. Needs zinf[hf]."""

    function: Text | None = None
    """module:function of your own, which returns (loss_fn, params) as zinf.initialize
    takes them, or a dict of its arguments; it may take the config. The module is in the
    folder of the config file, the current folder, or installed. Null: the model below.
    """

    freeze_vision_tower: Flag = False
    """With huggingface and data.images: the part that makes features of images stays as
    it is, and gets no adapters."""

    multimodal_attention: Flag = False
    """With huggingface and data.images: tokens of images see themselves alone, and text
    sees images by a softmax of its own (DeepSpeed-VisualChat). The exported config.json
    says so; only zinf reads that."""

    name: Literal["gpt"] = "gpt"
    """A decoder-only Transformer."""

    num_layers: Layers | None = None
    """Number of blocks; required with name."""

    num_heads: Width | None = None
    """Attention heads per block; required with name."""

    num_kv_heads: Width | None = None
    """Key and value heads; num_heads when null."""

    embed_dim: Width | None = None
    """Width of the residual stream; required with name."""

    mlp_dim: Width | None = None
    """Hidden width of the MLP; null: 4 embed_dim for gelu, about 8/3 for swiglu."""

    vocab_size: Int32 = BYTE_VALUES
    """Number of token values; bytes have 256."""

    max_length: Int32 | None = None
    """Longest sequence in tokens; data.sequence_length when null."""

    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    """Normalisation."""

    activation: Literal["gelu", "swiglu"] = "gelu"
    """Nonlinearity of the MLP."""

    position: Literal["learned", "rope"] = "learned"
    """Position embedding."""

    tied_embeddings: Flag = True
    """One matrix for token embedding and output."""

    use_bias: Flag = True
    """Biases in linear layers and norms."""

    dropout: Fraction = 0.0
    """Share of activations dropped while training."""

    scan_layers: Flag = False
    """Stack the parameters of all blocks and run them in a `lax.scan`."""

    remat: Flag = False
    """Recompute blocks in the backward pass even if the step is not streamed."""

    attention: Literal["auto", "cudnn", "pallas", "blocks", "xla"] = "auto"
    """How attention is computed: xla holds all scores; the others hold none (cuDNN,
    jax's Pallas kernels, or blocks of plain jnp, which run everywhere). auto: xla where
    scores are small, else the first kernel that computes the attention here and passes
    a trial, else blocks. The plan says which."""

    communication_aware_remat: Flag = False
    """With remat, save what devices have sent each other, so that the backward pass
    repeats no all-to-all of experts and no sum along mesh.tensor."""

    num_experts: Experts | tuple[Experts, ...] = 0
    """Experts in place of each block's MLP; 0: a dense MLP. A list has one number for
    each block."""

    experts_per_token: Width = 1
    """How many experts take a token."""

    capacity_factor: Positive | None = None
    """An expert takes up to this times experts_per_token times the tokens of a routing
    group over the number of experts; null: every token that chose it."""

    routing_group_size: Int32 | None = None
    """Tokens of a routing group, in which capacity is counted; null: all tokens of a
    microbatch. Groups within a device let tokens travel by all-to-all."""

    residual_experts: Flag = False
    """Each token also passes a dense MLP, as in PR-MoE."""

    aux_loss_coefficient: NonNegative = 0.01
    """Weight of the load-balancing loss of experts."""

    expert_splits: Width = 1
    """Pieces in which a layer's experts are fetched and computed."""

    def violations(self) -> Iterator[Violation]:
        if self.huggingface is not None:
            for key in sorted(self.model_fields_set - BESIDE_HUGGINGFACE):
                yield (key,), "has no effect: huggingface names the model. Remove it."
            return
        if self.function is not None:
            yield from self._violations_of_function(self.function)
            return
        if self.model_fields_set == {"attention"}:
            return  # The model is made in Python.
        for key in WITH_IMAGES:
            if getattr(self, key):
                yield (key,), "is for model.huggingface. Remove it."
        for key in ("num_layers", "num_heads", "embed_dim"):
            if getattr(self, key) is None:
                yield (key,), "is required here, but missing."
        if self.num_layers is None or self.num_heads is None or self.embed_dim is None:
            return
        heads, kv_heads = self.num_heads, self.num_kv_heads or self.num_heads
        if self.embed_dim % heads:
            text = f"{self.embed_dim} is not a multiple of num_heads, {heads}."
            yield ("embed_dim",), text
        elif self.position == "rope" and self.embed_dim // heads % 2:
            head_dim = self.embed_dim // heads
            yield ("embed_dim",), f"/ num_heads is {head_dim}; rope needs it even."
        if heads % kv_heads:
            yield ("num_kv_heads",), f"{kv_heads} does not divide num_heads, {heads}."
        if self.communication_aware_remat and not self.remat:
            text = "says what remat saves, and remat is off. Set model.remat too."
            yield ("communication_aware_remat",), text
        yield from self._violations_of_experts(self.num_layers)

    def _violations_of_function(self, function: str) -> Iterator[Violation]:
        module, _, name = function.partition(":")
        if not name.isidentifier() or not all(map(str.isidentifier, module.split("."))):
            # A problem of the section: without this key, others would be missing.
            text = f"function {function!r} is none: write it as module:function."
            yield (), text
        for key in sorted(self.model_fields_set - BESIDE_FUNCTION):
            yield (key,), "has no effect: function makes the model. Remove it."

    def _violations_of_experts(self, num_layers: int) -> Iterator[Violation]:
        given = self.num_experts
        counts = given if isinstance(given, tuple) else (given,) * num_layers
        if len(counts) != num_layers:
            text = f"has {len(counts)} numbers, but num_layers is {num_layers}."
            yield ("num_experts",), text
        with_experts = [count for count in counts if count]
        if not with_experts:
            return
        fewest = min(with_experts)
        if self.experts_per_token > fewest:
            text = f"{self.experts_per_token} is more than there are experts, {fewest}."
            yield ("experts_per_token",), text
        if any(count % self.expert_splits for count in with_experts):
            text = f"{self.expert_splits} does not divide num_experts, {given}."
            yield ("expert_splits",), text
        if self.scan_layers:
            text = "is not supported with num_experts. Set it to false; equal layers"
            yield ("scan_layers",), f"{text} share one executable without it."


def _paths(value: object) -> object:
    if value == STDLIB:
        return value
    allowed = f"must be a list of files and folders, or {STDLIB!r}"
    if isinstance(value, str):
        hint = did_you_mean(value, [STDLIB])
        if hint:
            raise ValueError(f"{allowed}.{hint} Write ./{value} for a folder.")
        value = [value] if value else []
    if not isinstance(value, list | tuple) or not value:
        raise ValueError(allowed)
    if not all(isinstance(path, str | Path) and str(path) for path in value):
        raise ValueError(f"{allowed}; one of its entries is no path")
    return tuple(Path(path).expanduser() for path in value)


class Data(Section):
    """The files that `zinf train` trains on: text, as bytes, or tokens."""

    name: Literal["text"] = "text"
    """Files of text, JSON lines, parquet or tokens (.npy, .bin)."""

    paths: Annotated[Literal["stdlib"] | tuple[Path, ...], BeforeValidator(_paths)] = (
        "stdlib"
    )
    """Files and folders; stdlib: the source of Python's standard library."""

    glob: Text | None = None
    """Pattern of the names of files to read in folders, at any depth; null: all."""

    field: Text = "text"
    """Name of the text in JSON lines and parquet."""

    too_long: Literal["error", "truncate", "drop"] | None = None
    """With model.huggingface: what happens to samples longer than sequence_length.
    error (or null): the run is refused, and the first of them named. truncate: they are
    cut, and left out if no trained token remains. drop: they are left out."""

    truncate: Flag = False
    """Old name: true means too_long: truncate."""

    completion_only: Flag = True
    """With model.huggingface: train on completions and on what an assistant says, and
    not on prompts."""

    assistant_only: Flag = False
    """With model.huggingface: train on all that an assistant says, and refuse a chat
    template without generation tags, which mark it; false: without tags, train on the
    last answer."""

    objective: ObjectiveName = "sft"
    """With model.huggingface"""

    labels: tuple[Text, ...] | None = None
    """With classification: names of the classes, in the order of the model's outputs;
    null: those of the model's config.json."""

    images: Annotated[int, Field(ge=0)] | None = None
    """With model.huggingface and objectives of answers: lines may have images, and this
    is the most tiles or patches of a sample (`zinf finetune` takes it from the files);
    null: text alone."""

    beta: Positive = 0.1
    """With dpo, ipo and kto: how strongly the model is kept near the one that training
    begins with. With simpo: what the difference of mean log-probabilities is multiplied
    by. With orpo: the weight of preferences beside the entropy of chosen answers."""

    simpo_gamma: NonNegative = 0.5
    """With simpo: the margin by which chosen answers are to be likelier, after beta."""

    desirable_weight: NonNegative = 1.0
    """With kto: weight of the losses of answers whose label is true."""

    undesirable_weight: NonNegative = 1.0
    """With kto: weight of the losses of the others."""

    center_rewards_coefficient: NonNegative = 0.0
    """With reward: weight of the square of the sum of a pair's scores, which keeps them
    near 0, such as 0.01."""

    packing: Flag = False
    """With model.huggingface: put several samples into a row of sequence_length tokens.
    No token sees another sample."""

    evaluation_paths: Annotated[tuple[Path, ...], BeforeValidator(_paths)] | None = None
    """With model.huggingface: files for evaluation; null: validation_fraction of the
    data."""

    bin_dtype: Literal["uint8", "uint16", "uint32", "int32", "int64"] = "uint16"
    """Dtype of the tokens in .bin files; nanoGPT writes uint16."""

    cache: Folder | None = None
    """Folder for the text of JSON lines and parquet; null: run.output/data."""

    sequence_length: Count | None = None
    """Tokens per sample; null: model.max_length, or 256 without it. With
    model.huggingface: 1,024, or what the model was made for if that is less."""

    max_buckets: Count = 8
    """Most lengths that a schedule of lengths, or dynamic_batching, trains with. Each
    has its own plan."""

    validation_fraction: Fraction = 0.05
    """Share of the data that is used for evaluation only."""

    seed: Seed = 0
    """Seed of the order of samples."""

    @classmethod
    def description_of(cls, key: str) -> str:
        text = super().description_of(key)
        if key != "objective":
            return text
        return f"{text}: {'; '.join(f'{n}: {t.goal}' for n, t in OBJECTIVES.items())}."

    @property
    def traits(self) -> Traits:
        """Those of the objective."""
        return OBJECTIVES[self.objective]

    @property
    def treatment_of_long(self) -> Literal["error", "truncate", "drop"]:
        """What happens to samples that are too long, under either name."""
        return self.too_long or ("truncate" if self.truncate else "error")

    def violations(self) -> Iterator[Violation]:
        if self.truncate and self.too_long is not None:
            yield (
                ("truncate",),
                "is the old name of too_long, which is given too; remove it.",
            )


class Run(Section):
    """The training loop of `zinf train` and `zinf.Trainer`."""

    steps: Int32 = 1000
    """Optimizer steps."""

    seed: Seed = 0
    """Seed of initialisation and dropout."""

    output: Folder = Path("runs/default")
    """Folder of logs, and of checkpoints unless `checkpoints` names another place."""

    export: Folder | None = None
    """Folder for the tuned model, in the form that transformers loads and the dtype of
    its files, with model.huggingface; null: none is written."""

    export_adapter: Folder | None = None
    """Folder for the trained adapters, in the form that PEFT loads, with
    model.huggingface and an adapter section; null: none is written."""

    export_best: Flag = False
    """Export the checkpoint of the best evaluation (keep_best), not that of the end."""

    push_to_hub: Flag = False
    """Upload `export`, or `export_adapter` without it, to the Hugging Face hub."""

    hub_model_id: Text | None = None
    """Repository of the upload, OWNER/NAME or NAME; null: the name of the folder."""

    hub_private_repo: Flag = False
    """Whether a repository that the upload makes is private."""

    checkpoint_every: Count | None = None
    """Steps between checkpoints; null: only at the end."""

    checkpoints: Text | None = None
    """Where checkpoints go: a folder, or s3://BUCKET/PREFIX, gs://BUCKET/PREFIX or
    file:///FOLDER; null: `checkpoints` in `output`."""

    keep_checkpoints: Count = 3
    """Checkpoints kept, the newest ones."""

    evaluate_every: Count | None = None
    """Steps between evaluations; null: never."""

    evaluate_batches: Count | None = None
    """The most batches of an evaluation; null: all held-out data."""

    weights: Literal["master", "ema"] = "master"
    """Weights that evaluations compute with, and that run.export writes. master: as
    trained; ema: their average (optimizer.ema)."""

    keep_best: Flag = False
    """Save when an evaluation is the best so far, and keep that checkpoint too."""

    patience: Count | None = None
    """End the run after so many evaluations in a row that are no better than the best;
    null: never."""

    log_every: Count = 10
    """Steps between printed metrics."""

    resume: Flag = False
    """Continue from the newest checkpoint, if there is one."""

    metrics: Folder | None = None
    """File of metrics, one JSON object per line and step; null: metrics.jsonl in
    `output`."""

    tensorboard: Flag = False
    """Write TensorBoard events to `output`."""
