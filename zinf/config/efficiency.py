"""DeepSpeed's keys of data efficiency: curricula of lengths and of samples."""

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from zinf.config.ignored import TABLE
from zinf.config.opaque import AnyKeys
from zinf.config.pacing import Pacing, pacing_violations
from zinf.config.scalar import Count, Flag, Folder, Whole
from zinf.config.section import Section, Violation
from zinf.config.status import Unsupported

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


class Metrics(Section):
    """A section per metric, by its name."""

    @classmethod
    def section_at(cls, key: str, siblings: object) -> type[Section] | None:
        del key, siblings
        return Metric


class SamplingCurriculum(Section):
    """Curricula by metrics of samples (https://arxiv.org/abs/2212.03597)."""

    IGNORED = TABLE["data_efficiency.data_sampling.curriculum_learning"]

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
                yield at, "not supported yet; only seqlen_truncate and seqlen_reshape."
            elif metric.clustering_type == "schedule_based":
                text = f"a length has no clusters of samples. Set it to {SINGLE}."
                yield (*at, "clustering_type"), text


class DataSampling(Section):
    """Which samples a step trains on, and how long they are."""

    IGNORED = TABLE["data_efficiency.data_sampling"]

    enabled: Flag = False
    """Whether anything below is used."""

    num_epochs: Count | None = None
    """Passes over the data; endless when absent."""

    curriculum_learning: SamplingCurriculum = Field(default_factory=SamplingCurriculum)
    """Curricula."""

    dynamic_batching: Unsupported[AnyKeys | None] = None
    """Batches of about the same number of tokens; remove it."""


class DataEfficiency(Section):
    """The same loss from fewer tokens."""

    enabled: Flag = False
    """Whether anything below is used."""

    seed: Whole = 1234
    """Seed of what is drawn."""

    data_sampling: DataSampling = Field(default_factory=DataSampling)
    """Curricula."""

    data_routing: Unsupported[AnyKeys | None] = None
    """Random layerwise token dropping; remove it."""

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


def length_violations(
    legacy: CurriculumLearning | None,
    efficiency: DataEfficiency | None,
    sequence_length: int,
) -> Iterator[Violation]:
    """Two curricula of lengths, and lengths that no sample has."""
    found: list[tuple[tuple[str, ...], Pacing]] = []
    if legacy is not None and legacy.enabled and legacy.is_complete:
        found.append((("curriculum_learning",), legacy))
    named = efficiency.lengths if efficiency is not None else None
    if named is not None and named[1].is_complete:
        section = ("data_efficiency", "data_sampling", "curriculum_learning")
        found.append(((*section, "curriculum_metrics", named[0]), named[1]))
    if len(found) > 1:
        yield found[0][0], f"shortens sequences, and so does {'.'.join(found[1][0])}."
    for path, pacing in found:
        longest, shortest = pacing.levels()[-1], pacing.levels()[0]
        if longest > sequence_length:
            text = f"{longest} tokens are more than data.sequence_length, which is"
            yield (*path, "max_difficulty"), f"{text} {sequence_length}."
        if shortest < 1:
            text = f"begins with sequences of {shortest} tokens: it is rounded down to"
            yield (*path, "min_difficulty"), f"{text} a multiple of difficulty_step."
