"""DeepSpeed's keys of batches by tokens."""

from collections.abc import Iterator
from typing import Literal

from zinf.core.config.scalar import Count, Flag
from zinf.core.config.section import Section, Violation
from zinf.core.config.unread import TABLE


class DynamicBatching(Section):
    """Batches of as many rows as have room for their tokens.

    For samples of several lengths, which `model.huggingface` trains on. Samples of
    similar length share a batch, in `data.max_buckets` lengths.
    """

    UNREAD = TABLE["data_efficiency.data_sampling.dynamic_batching"]

    enabled: Flag = False
    """Whether batches are made so; train_batch_size is then what the learning rate is
    meant for."""

    max_tokens: Count | None = None
    """Most tokens of a microbatch of all devices, with padding."""

    min_batch_size: Count = 1
    """The rows of a microbatch are a multiple of it, such as the number of devices."""

    max_batch_size: Count | None = None
    """Most rows of a microbatch."""

    sequence_picking_order: Literal["dataloader", "random", "seqlen"] = "dataloader"
    """dataloader: shuffled by data.seed; random: by data_efficiency.seed, both anew in
    each epoch. seqlen: the shortest first."""

    lr_scaling_method: Literal["linear", "sqrt", "none"] = "linear"
    """How the learning rate grows with the rows of a step over train_batch_size."""

    def violations(self) -> Iterator[Violation]:
        if not self.enabled:
            return
        low, high = self.min_batch_size, self.max_batch_size
        if self.max_tokens is None:
            yield ("max_tokens",), "is missing: say how many tokens a microbatch has."
        elif low > self.max_tokens:
            text = f"{low} rows are more than max_tokens, which is {self.max_tokens}."
            yield ("min_batch_size",), text
        if high is not None and low > high:
            yield (
                ("min_batch_size",),
                f"{low} is above max_batch_size, which is {high}.",
            )
