"""What the sections of a config on data efficiency ask of the training data."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import grain

from zinf.core.config import Config
from zinf.core.config.pace import Pace
from zinf.data.analyze import check_about
from zinf.data.curriculum import DifficultyIndex, Metric
from zinf.data.paced import TOKENS, Dropping, Paced


def batch_size(config: Config) -> int:
    if config.batch_size is None:
        raise ValueError(
            "The config does not say how many samples a step has. Set train_batch_size "
            "or train_micro_batch_size_per_gpu."
        )
    return config.batch_size


def difficulties(
    config: Config,
) -> Callable[[int, Mapping[str, Any]], Sequence[Metric]] | None:
    """A function that reads the metrics of samples, given their number and `about`.

    None if all samples may be drawn in each step.
    """
    efficiency = config.data_efficiency
    if efficiency is None or not efficiency.metrics:
        return None

    def read(num_samples: int, about: Mapping[str, Any]) -> list[Metric]:
        found = []
        for name, metric in efficiency.metrics.items():
            samples, values = metric.index_to_sample_path, metric.index_to_metric_path
            assert samples is not None and metric.max_difficulty is not None
            index = DifficultyIndex.read(
                samples,
                values if metric.difficulty_type == "value" else None,
                num_samples=num_samples,
            )
            check_about(samples.parent, about)
            kind, highest = metric.difficulty_type, metric.max_difficulty
            found.append(Metric(name, metric, index, kind, highest))
        return found

    return read


def paced(
    config: Config,
    samples: grain.IterDataset,
    *,
    leaf: str = TOKENS,
    extra: int = 1,
    check: Callable[[Mapping[str, Any]], None] | None = None,
) -> grain.IterDataset:
    """The batches of training; first steps have fewer tokens if the config says so.

    Args:
        leaf, extra, check: as for `Paced`.
    """
    lengths, kept, most = config.lengths, config.kept_tokens, config.data.max_buckets
    if lengths is None and kept is None:
        return samples
    dropping = None
    if kept is not None:
        pace = Pace.of(kept.pacing, most, first=0)
        dropping = Dropping(pace, len(kept.layers), kept.seed)
    return Paced(
        samples,
        length=None if lengths is None else Pace.of(lengths.pacing, most),
        reshapes=lengths is not None and lengths.reshapes,
        dropping=dropping,
        leaf=leaf,
        extra=extra,
        check=check,
    )
