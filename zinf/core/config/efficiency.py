"""DeepSpeed's keys of data efficiency: curricula of lengths and of samples."""

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from zinf.core.config.dynamic_batching import DynamicBatching
from zinf.core.config.pacing import Pacing, PacingConfig, pacing_violations
from zinf.core.config.scalar import Count, Flag, Folder, Seed, Whole
from zinf.core.config.section import Section, Violation
from zinf.core.config.unread import TABLE

TRUNCATE, RESHAPE = "seqlen_truncate", "seqlen_reshape"
LENGTHS = ("seqlen", TRUNCATE, RESHAPE)
SINGLE = "single_cluster"


class CurriculumLearning(Pacing):
    """Sequences that get longer while training (https://arxiv.org/abs/2108.06084)."""

    enabled: Flag = False
    """Whether sequences are shortened, by truncation."""

    curriculum_type: Literal["seqlen"] | None = None
    """What grows: the length of sequences, in tokens."""

    def violations(self) -> Iterator[Violation]:
        if self.enabled:
            yield from pacing_violations(self)


class Metric(Pacing):
    """How one difficulty grows, and which samples have it."""

    index_to_sample_path: Folder | None = None
    """Path without suffix of the samples by difficulty, as `zinf data analyze` or
    DeepSpeed's analyzer wrote them."""

    index_to_metric_path: Folder | None = None
    """Path without suffix of the difficulties of those."""

    difficulty_type: Literal["value", "percentile"] = "value"
    """What min_difficulty and max_difficulty are: values, or percentiles of samples."""

    clustering_type: Literal["schedule_based", "single_cluster"] | None = None
    """schedule_based: samples above the difficulty wait. single_cluster: none waits;
    sequences are shortened instead."""

    @property
    def draws(self) -> bool:
        """Whether samples above the difficulty wait."""
        return self.clustering_type != SINGLE

    def sample_violations(self) -> Iterator[Violation]:
        """What is missing for a difficulty of samples."""
        if not self.draws:
            return
        missing = "is missing: name what zinf data analyze wrote, without a suffix."
        if self.index_to_sample_path is None:
            yield ("index_to_sample_path",), missing
        if self.index_to_metric_path is None and self.difficulty_type == "value":
            yield ("index_to_metric_path",), missing
        if self.counts_tokens:
            text = "samples are drawn by the step. Give steps in place of tokens."
            yield ("schedule_config",), text


class Metrics(Section):
    """A section per metric, by its name."""

    @classmethod
    def section_at(cls, key: str, siblings: object) -> type[Section] | None:
        del key, siblings
        return Metric


class SamplingCurriculum(Section):
    """Curricula by metrics of samples (https://arxiv.org/abs/2212.03597)."""

    UNREAD = TABLE["data_efficiency.data_sampling.curriculum_learning"]

    enabled: Flag = False
    """Whether metrics restrict or shorten samples."""

    curriculum_metrics: dict[str, Metric] = Field(default_factory=dict)
    """A section per metric. seqlen_truncate and seqlen_reshape are lengths; all others
    are difficulties of samples."""

    @classmethod
    def section_at(cls, key: str, siblings: object) -> type[Section] | None:
        del siblings
        return Metrics if key == "curriculum_metrics" else None

    def violations(self) -> Iterator[Violation]:
        if not self.enabled:
            return
        if not self.curriculum_metrics:
            yield ("curriculum_metrics",), "is missing: name a metric."
        names = [name for name in self.curriculum_metrics if name in LENGTHS]
        for name in names[1:]:
            path = ("curriculum_metrics", name)
            yield path, f"shortens sequences, and so does {names[0]}. Keep one."
        for name, metric in self.curriculum_metrics.items():
            at = ("curriculum_metrics", name)
            yield from ((at + key, text) for key, text in pacing_violations(metric))
            if name not in LENGTHS:
                yield from (
                    (at + key, text) for key, text in metric.sample_violations()
                )
            elif metric.clustering_type == "schedule_based":
                text = f"a length has no clusters of samples. Set it to {SINGLE}."
                yield (*at, "clustering_type"), text


class DataSampling(Section):
    """Which samples a step trains on, and how long they are."""

    UNREAD = TABLE["data_efficiency.data_sampling"]

    enabled: Flag = False
    """Whether anything below is used."""

    num_epochs: Count | None = None
    """Passes over the data; endless when absent."""

    curriculum_learning: SamplingCurriculum = Field(default_factory=SamplingCurriculum)
    """Curricula."""

    dynamic_batching: DynamicBatching = Field(default_factory=DynamicBatching)
    """Batches of about as many tokens each."""


class KeptConfig(Section):
    """The parameters of the schedule of kept tokens."""

    require_steps: Count | None = None
    """Steps until max_value is reached."""

    seq_per_step: Count | None = None
    """Kept tokens are multiples of this; max_value is one always."""


class KeptSchedule(Section):
    """How many tokens layers keep. It grows linearly with the step."""

    min_value: Count | None = None
    """Kept tokens at the beginning."""

    max_value: Count | None = None
    """Kept tokens at the end; those of a whole sequence drop none."""

    schedule_type: Literal["fixed_linear"] | None = None
    """How it grows."""

    schedule_config: KeptConfig = Field(default_factory=KeptConfig)
    """The parameters of the schedule."""

    @property
    def pacing(self) -> Pacing:
        """The schedule, of which DeepSpeed counts the steps from 0."""
        return Pacing(
            min_difficulty=self.min_value,
            max_difficulty=self.max_value,
            schedule_type=self.schedule_type,
            schedule_config=PacingConfig(
                total_curriculum_step=self.schedule_config.require_steps,
                difficulty_step=self.schedule_config.seq_per_step,
            ),
        )

    def missing(self) -> Iterator[Violation]:
        """What is missing or contradicts itself in a schedule that is to be used."""
        for key in ("min_value", "max_value", "schedule_type"):
            if getattr(self, key) is None:
                yield (key,), "is missing."
        for key in ("require_steps", "seq_per_step"):
            if getattr(self.schedule_config, key) is None:
                yield ("schedule_config", key), "is missing."
        low, high = self.min_value, self.max_value
        if low is not None and high is not None and low > high:
            yield ("min_value",), f"{low} is above max_value, which is {high}."
        if low is not None and low < (self.schedule_config.seq_per_step or 1):
            text = f"{low} is rounded down to 0 kept tokens"
            yield ("min_value",), f"{text}. Make it a multiple of seq_per_step."


class RandomLTD(Section):
    """Layers that run on some tokens of a sequence (https://arxiv.org/abs/2211.11586).

    DeepSpeed wraps modules of a model. `zinf train` has the layers of its own model do
    it, and those of `model.huggingface`; other models call `zinf.random_ltd`.
    """

    UNREAD = TABLE["data_efficiency.data_routing.random_ltd"]

    enabled: Flag = False
    """Whether layers drop tokens while training."""

    total_layer_num: Count | None = None
    """Layers of the model; model.num_layers when absent."""

    random_ltd_layer_num: Count | None = None
    """How many layers drop tokens; the length of random_ltd_layer_id when absent."""

    random_ltd_layer_id: tuple[Whole, ...] | None = None
    """Which layers drop tokens, from 0."""

    model_type: Literal["decoder"] | None = None
    """Kept tokens stay in order, so that attention stays causal."""

    random_ltd_schedule: KeptSchedule = Field(default_factory=KeptSchedule)
    """How many tokens they keep."""

    def violations(self) -> Iterator[Violation]:
        if not self.enabled:
            return
        for key, text in self.random_ltd_schedule.missing():
            yield ("random_ltd_schedule", *key), text
        layers, path = self.random_ltd_layer_id, ("random_ltd_layer_id",)
        if not layers:
            yield path, "is missing: list the layers that drop tokens."
            return
        if list(layers) != sorted({*layers}):
            yield path, "must be ascending, each layer once."
        if self.random_ltd_layer_num not in (None, len(layers)):
            text = f"has {len(layers)} layers, and random_ltd_layer_num is"
            yield path, f"{text} {self.random_ltd_layer_num}."


class DataRouting(Section):
    """Which tokens which layers see."""

    enabled: Flag = False
    """Whether anything below is used."""

    random_ltd: RandomLTD = Field(default_factory=RandomLTD)
    """Random layerwise token dropping."""


class DataEfficiency(Section):
    """The same loss from fewer tokens."""

    enabled: Flag = False
    """Whether anything below is used."""

    seed: Seed = 1234
    """Seed of what is drawn."""

    data_sampling: DataSampling = Field(default_factory=DataSampling)
    """Curricula."""

    data_routing: DataRouting = Field(default_factory=DataRouting)
    """Random layerwise token dropping."""

    @property
    def random_ltd(self) -> RandomLTD | None:
        """The dropping of tokens, if it is used."""
        routing = self.data_routing
        is_on = self.enabled and routing.enabled and routing.random_ltd.enabled
        return routing.random_ltd if is_on else None

    @property
    def dynamic_batching(self) -> DynamicBatching | None:
        """The batches by tokens, if they are used."""
        sampling = self.data_sampling
        is_on = self.enabled and sampling.enabled and sampling.dynamic_batching.enabled
        return sampling.dynamic_batching if is_on else None

    @property
    def num_epochs(self) -> int | None:
        """Passes over the data; None for endless ones."""
        sampling = self.data_sampling
        return sampling.num_epochs if self.enabled and sampling.enabled else None

    @property
    def lengths(self) -> tuple[str, Metric] | None:
        """The metric of lengths and its name, if one is used."""
        sampling = self.data_sampling
        curriculum = sampling.curriculum_learning
        if not (self.enabled and sampling.enabled and curriculum.enabled):
            return None
        found = curriculum.curriculum_metrics.items()
        return next(((n, m) for n, m in found if n in LENGTHS), None)

    @property
    def metrics(self) -> dict[str, Metric]:
        """The difficulties by which samples are drawn."""
        sampling = self.data_sampling
        curriculum = sampling.curriculum_learning
        if not (self.enabled and sampling.enabled and curriculum.enabled):
            return {}
        found = curriculum.curriculum_metrics.items()
        return {n: m for n, m in found if n not in LENGTHS and m.draws}
