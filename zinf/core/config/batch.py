"""Batch-size arithmetic: batch = microbatch x accumulation x data-parallel devices."""

from collections.abc import Iterator
from dataclasses import dataclass

from zinf.core.config.section import Violation

BATCH = "train_batch_size"
MICROBATCH = "train_micro_batch_size_per_gpu"
ACCUMULATION = "gradient_accumulation_steps"


@dataclass(frozen=True, slots=True)
class BatchSizes:
    """Samples per step, samples per microbatch and device, microbatches per step."""

    batch: int | None
    microbatch: int | None
    num_microbatches: int


def batch_sizes(
    batch: int | None,
    microbatch: int | None,
    accumulation: int | None,
    *,
    world_size: int = 1,
) -> BatchSizes:
    """The three sizes, where any two of them imply the third, as in DeepSpeed.

    The batch or the microbatch alone means no accumulation. With neither, the first
    batch decides. Divisions round down, and `batch_violations` reports remainders.
    """
    if batch is not None and microbatch is not None and accumulation is None:
        accumulation = batch // (microbatch * world_size)
    accumulation = 1 if accumulation is None else accumulation
    if microbatch is None and batch is not None:
        microbatch = batch // (accumulation * world_size)
    if batch is None and microbatch is not None:
        batch = microbatch * accumulation * world_size
    return BatchSizes(batch, microbatch, accumulation)


def batch_violations(
    batch: int | None,
    microbatch: int | None,
    accumulation: int | None,
    *,
    world_size: int = 1,
) -> Iterator[Violation]:
    """Sizes whose product is not the batch size."""
    sizes = batch_sizes(batch, microbatch, accumulation, world_size=world_size)
    if sizes.batch is None or sizes.microbatch is None:
        return
    product = sizes.microbatch * sizes.num_microbatches * world_size
    if product == sizes.batch:
        return
    given = {BATCH: batch, MICROBATCH: microbatch, ACCUMULATION: accumulation}
    asked = ", ".join(f"{key} {size}" for key, size in given.items() if size)
    text = (
        f"{asked} on {world_size} device(s): {sizes.microbatch} x "
        f"{sizes.num_microbatches} x {world_size} = {product}, not {sizes.batch}."
    )
    if None in given.values():
        text += f" Make {BATCH} a multiple of the others."
    else:
        text += " Leave one of the three out."
    per_device = product // world_size
    if None not in given.values() and sizes.batch % per_device == 0:
        text += f" (It would be right on {sizes.batch // per_device} devices.)"
    yield (BATCH,), text
