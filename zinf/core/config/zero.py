"""DeepSpeed's `zero_optimization`: the ZeRO stage, and what rests on which tier.

Buffers, buckets and hooks exist in DeepSpeed because nothing there knows the program
ahead. The plan does, so the keys for them are in `unread`.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from zinf.core.config.scalar import Count, Flag, Folder, Fraction, Integer, Whole
from zinf.core.config.section import Section, Violation
from zinf.core.config.status import Auto
from zinf.core.config.unread import TABLE
from zinf.core.program import Tier

OffloadDevice = Literal["none", "cpu", "nvme"]


class AIO(Section):
    """DeepSpeed's asynchronous I/O."""

    UNREAD = TABLE["aio"]


class OffloadParam(Section):
    """Where parameters rest between uses."""

    UNREAD = TABLE["zero_optimization.offload_param"]

    device: Auto[OffloadDevice | None] = None
    """Tier of parameters: none (device), cpu (host), nvme; absent: by budget."""

    nvme_path: Auto[Folder | None] = None
    """Folder of the NVMe tier."""

    pin_memory: Auto[Flag | None] = None
    """true: memory.pinned: auto; false in all sections: memory.pinned: off."""


class OffloadOptimizer(Section):
    """Where optimizer state and fp32 masters rest between uses."""

    UNREAD = TABLE["zero_optimization.offload_optimizer"]

    device: Auto[OffloadDevice | None] = None
    """Tier of optimizer state: none (device), cpu (host), nvme; absent: by budget."""

    nvme_path: Auto[Folder | None] = None
    """Folder of the NVMe tier."""

    pin_memory: Auto[Flag | None] = None
    """true: memory.pinned: auto; false in all sections: memory.pinned: off."""


class LoCo(Section):
    """Error feedback of the exchange of gradients (LoCo)."""

    err_beta: Auto[Fraction] = 0.8
    """Decay of what exchanges lost, which is added to what is sent next."""

    reset_T: Auto[Count] = 1024
    """Steps after which it is set to zero."""


class ZeroOptimization(Section):
    """ZeRO stage and offload."""

    UNREAD = TABLE["zero_optimization"]

    stage: Auto[Annotated[Whole, Field(le=3)]] = 0
    """ZeRO stage; sharded: 0 nothing, 1 optimizer state, 2 gradients, 3 parameters."""

    offload_param: OffloadParam | None = None
    """Where parameters rest; absent: the fastest tier with room."""

    offload_optimizer: OffloadOptimizer | None = None
    """Where optimizer state rests; absent: the fastest tier with room."""

    stage3_param_persistence_threshold: Auto[Whole | None] = None
    """Elements; smaller fp32 arrays (4 bytes each) never go to NVMe."""

    zero_hpz_partition_size: Auto[Whole] = 1
    """Devices in each group that holds all parameters (ZeRO++ hpZ). Other state is
    divided among all devices. 1: no groups."""

    mics_shard_size: Auto[Annotated[Integer, Field(ge=-1)]] = -1
    """Devices in each group that holds all state (MiCS); -1: no groups."""

    zero_quantized_weights: Auto[Flag] = False
    """Gather parameters as 8-bit integers (ZeRO++ qwZ), at stage 3. A weight is rounded
    by at most 1/254 of the largest of up to 256 beside it. With zero_hpz_partition_size
    and bf16 or fp16, updated weights go to other groups so too, with the same bits."""

    zero_quantized_gradients: Auto[Flag] = False
    """Exchange gradients as 4-bit integers (ZeRO++ qgZ), at stages 2 and 3. A part of a
    sum is rounded by at most 1/14 of the largest of up to 256 beside it."""

    zeropp_loco_param: LoCo | None = None
    """Error feedback of zero_quantized_gradients; absent: none. It keeps two bytes for
    each number and device, and again for each node, among the optimizer state."""

    aio: AIO | None = None
    """The same as aio. Hugging Face documents it here; DeepSpeed does not read it."""

    param_persistence_threshold: Auto[Whole | None] = None
    """Another name of stage3_param_persistence_threshold."""

    cpu_offload: Flag | None = None
    """Old name: true means offload_optimizer.device: cpu."""

    cpu_offload_param: Flag | None = None
    """Old name: true means offload_param.device: cpu."""

    cpu_offload_params: Flag | None = None
    """Older name of cpu_offload_param, which DeepSpeed dropped."""

    cpu_offload_use_pin_memory: Flag | None = None
    """Old name of pin_memory."""

    @model_validator(mode="before")
    @classmethod
    def _stage_of_flag(cls, data: Any) -> Any:
        # Before stages had numbers, `"zero_optimization": true` was stage 1.
        return {"stage": int(data)} if isinstance(data, bool) else data

    @property
    def reset_errors_every(self) -> int | None:
        """Steps after which errors of exchanges are forgotten; None: there are none."""
        feedback = self.zeropp_loco_param
        return None if feedback is None else feedback.reset_T

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
        """The folders of both offload sections, without duplicates.

        The folder of a section that asks for another tier is left out.
        """
        sections = (self.offload_param, self.offload_optimizer)
        asking = [s for s in sections if s and s.device in (None, "nvme")]
        paths = (section.nvme_path for section in asking)
        return tuple(dict.fromkeys(path for path in paths if path))

    @property
    def pins_memory(self) -> bool | None:
        """Whether any section asks for pinned memory; None: none says."""
        sections = filter(None, (self.offload_param, self.offload_optimizer))
        said = [self.cpu_offload_use_pin_memory, *(s.pin_memory for s in sections)]
        given = [one for one in said if one is not None]
        return any(given) if given else None

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
        if self.zero_quantized_weights is True and self.stage != 3:
            yield (
                ("zero_quantized_weights",),
                f"sends parameters as 8-bit integers where they are gathered, and at "
                f"stage {self.stage} every device holds all parameters. Set stage to "
                "3, or leave it false.",
            )
        if self.zero_quantized_gradients is True and self.stage < 2:
            yield (
                ("zero_quantized_gradients",),
                "sends parts of gradients to the devices that keep their rows, and at "
                f"stage {self.stage} every device has all of every gradient. Set stage "
                "to 2 or 3, or leave it false.",
            )
        if self.zeropp_loco_param is not None and not self.zero_quantized_gradients:
            yield (
                ("zeropp_loco_param",),
                "feeds back what zero_quantized_gradients loses. Set that to true, or "
                "remove it.",
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
        return next(t for t in Tier if t.row.device == section.device)
    return Tier.HOST if is_cpu else None
