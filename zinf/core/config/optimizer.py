"""The `optimizer` section: DeepSpeed's optimizer types with their own parameters."""

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import SerializeAsAny

from zinf.core.config.scalar import Count, Flag, Fraction, NonNegative, Whole
from zinf.core.config.section import Section, Violation
from zinf.core.config.status import AUTO, Auto, Status
from zinf.core.config.typed import TypedSection
from zinf.core.config.unread import TABLE


class OptimizerParams(Section):
    """What all optimizers take."""

    UNREAD = TABLE["optimizer.params"]

    lr: Auto[NonNegative] = 1e-3
    """Learning rate; a scheduler may set it instead."""

    weight_decay: Auto[NonNegative] = 0.0
    """Weight decay per step and learning rate; an L2 penalty where not decoupled."""


class BetaParams(OptimizerParams):
    """What Adam and its relatives take."""

    UNREAD = (
        OptimizerParams.UNREAD
        | TABLE["optimizer.params of Adam, AdamW, GaLore and Lamb"]
    )

    betas: Auto[tuple[Fraction, Fraction]] = (0.9, 0.999)
    """Decay rates per step of the first and the second moment."""

    eps: Auto[NonNegative] = 1e-8
    """Added to the root of the second moment."""


class AdamParams(BetaParams):
    """Adam and AdamW."""

    UNREAD = BetaParams.UNREAD | TABLE["optimizer.params of Adam and AdamW"]

    adam_w_mode: Auto[Flag] = True
    """Decoupled weight decay, https://arxiv.org/abs/1711.05101; false: L2 penalty."""

    moments: Literal["float32", "bfloat16", "8bit"] = "float32"
    """How the two moments are kept. bfloat16: rounded at random, 4 bytes a parameter
    instead of 8. 8bit: blocks of 256 with a scale, https://arxiv.org/abs/2110.02861, 2
    bytes a parameter; leaves are then updated whole."""

    torch_adam: Annotated[Flag | None, Status.MOOT, AUTO] = None
    """Which kernel of Adam runs; zinf compiles every update."""

    def violations(self) -> Iterator[Violation]:
        if self.torch_adam and "weight_decay" not in self.model_fields_set:
            text = "is 0.01 by default in torch's AdamW and 0 in DeepSpeed's"
            yield ("weight_decay",), f"{text}. With torch_adam, give it."


class CompressedParams(OptimizerParams):
    """What optimizers take that send signs in place of gradients after a warm-up."""

    UNREAD = OptimizerParams.UNREAD | TABLE["optimizer.params of OneBitAdam"]
    # The key of the number of updates before any signs are sent.
    WARM_UP: ClassVar[str]
    LARGEST_STAGE: ClassVar[int] = 1

    betas: Auto[tuple[Fraction, Fraction]] = (0.9, 0.999)
    """Decay rates per step of the first and the second moment."""

    eps: Auto[NonNegative] = 1e-8
    """Added to the root of the second moment."""


class OneBitAdamParams(CompressedParams):
    """1-bit Adam: Adam without bias correction, and then by signs of momenta."""

    WARM_UP = "freeze_step"

    freeze_step: Auto[Count] = 100_000
    """Updates after which the second moment stays, and devices average the signs of
    their momenta. Too early, training diverges."""


class OneBitLambParams(CompressedParams):
    """1-bit LAMB: LAMB without bias correction, and then by signs of momenta."""

    WARM_UP = "freeze_step"

    freeze_step: Auto[Count] = 100_000
    """Updates after which the second moment stays, and devices average the signs of
    their momenta."""

    max_coeff: Auto[NonNegative] = 10.0
    """Largest trust ratio of the warm-up."""

    min_coeff: Auto[NonNegative] = 0.01
    """Smallest trust ratio of the warm-up."""

    coeff_beta: Auto[Fraction] = 0.9
    """Share of the average of the trust ratio that each update of the warm-up keeps.
    The average counts after freeze_step, which should be above 1 / (1 - coeff_beta)."""

    factor_max: Auto[NonNegative] = 4.0
    """Largest factor of that average after the warm-up."""

    factor_min: Auto[NonNegative] = 0.5
    """Smallest factor of that average after the warm-up."""

    factor_threshold: Auto[NonNegative] = 0.1
    """Largest change of the factor in one update, as a share of it."""

    def violations(self) -> Iterator[Violation]:
        for low, high in (("min_coeff", "max_coeff"), ("factor_min", "factor_max")):
            if getattr(self, low) > getattr(self, high):
                text = f"is {getattr(self, low):g}, above {high}"
                yield (low,), f"{text}, {getattr(self, high):g}. Lower it."


class ZeroOneAdamParams(CompressedParams):
    """0/1 Adam: Adam without bias correction, whose gradients and steps go by signs."""

    WARM_UP = "var_update_scaler"
    LARGEST_STAGE = 0

    var_freeze_step: Auto[Count] = 100_000
    """Updates after which the second moment stays, and devices take local steps."""

    var_update_scaler: Auto[Count] = 16
    """Updates of the second moment after which the interval between them doubles. In
    other steps gradients go by their signs."""

    local_step_scaler: Auto[Count] = 32_678
    """Local steps after which the interval between exchanges doubles."""

    local_step_clipper: Auto[Count] = 16
    """Longest interval between exchanges of local steps."""


class SGDParams(OptimizerParams):
    """SGD as in torch: momentum is a sum of gradients, weight decay an L2 penalty."""

    UNREAD = OptimizerParams.UNREAD | TABLE["optimizer.params of SGD"]

    momentum: Auto[Fraction] = 0.0
    """Decay rate per step of the momentum."""

    nesterov: Auto[Flag] = False
    """Nesterov momentum."""


class LionParams(OptimizerParams):
    """Lion (https://arxiv.org/abs/2302.06675), weight decay decoupled."""

    UNREAD = OptimizerParams.UNREAD | TABLE["optimizer.params of Lion"]

    betas: Auto[tuple[Fraction, Fraction]] = (0.9, 0.99)
    """Rates per step that mix the update and decay the momentum."""


class AdagradParams(OptimizerParams):
    """Adagrad as in torch: weight decay is an L2 penalty."""

    UNREAD = OptimizerParams.UNREAD | TABLE["optimizer.params of Adagrad"]

    lr: Auto[NonNegative] = 1e-2
    """Learning rate; a scheduler may set it instead."""

    eps: Auto[NonNegative] = 1e-10
    """Added to the root of the sum of squares."""

    initial_accumulator_value: Auto[NonNegative] = 0.0
    """First value of the sum of squares."""


class LambParams(BetaParams):
    """LAMB (https://arxiv.org/abs/1904.00962)."""

    max_coeff: Auto[NonNegative] = 10.0
    """Largest trust ratio."""

    min_coeff: Auto[NonNegative] = 0.01
    """Smallest trust ratio."""

    eps_inside_sqrt: Auto[Flag] = False
    """Whether eps is added before the root is taken."""


class MuonParams(OptimizerParams):
    """Muon (https://kellerjordan.github.io/posts/muon) for matrices, else Adam."""

    UNREAD = OptimizerParams.UNREAD | TABLE["optimizer.params of Muon"]

    momentum: Auto[Fraction] = 0.95
    """Decay rate per step of the momentum of matrices."""

    muon_lr: Auto[NonNegative | None] = None
    """Learning rate of matrices; lr when absent."""

    adam_lr: Auto[NonNegative | None] = None
    """Learning rate of everything else; lr when absent."""

    betas: Auto[tuple[Fraction, Fraction]] = (0.9, 0.999)
    """Decay rates per step of the moments of everything else."""

    eps: Auto[NonNegative] = 1e-8
    """Added to the root of the second moment of everything else."""

    ns_steps: Auto[Count] = 5
    """Newton-Schulz iterations per update."""

    adam_w_mode: Auto[Flag] = True
    """Decoupled weight decay for everything else; false: L2 penalty."""


class AdafactorParams(OptimizerParams):
    """Adafactor (https://arxiv.org/abs/1804.04235), as in optax."""

    min_dim_size_to_factor: Auto[Count] = 128
    """A matrix whose two largest dims are at least this keeps sums of rows and columns
    in place of the second moment."""

    decay_rate: Auto[Fraction] = 0.8
    """Exponent of the decay of the second moment."""

    clipping_threshold: Auto[NonNegative | None] = 1.0
    """Largest root mean square of a leaf's update; null: any."""

    momentum: Auto[Fraction | None] = None
    """Decay rate per step of the momentum; null: none is kept."""

    multiply_by_parameter_scale: Auto[Flag] = True
    """Multiply the learning rate by the root mean square of the leaf."""


class GaLoreParams(BetaParams):
    """GaLore (https://arxiv.org/abs/2403.03507): Adam of projected matrices."""

    rank: Auto[Count] = 128
    """Rank of the space that the gradient of a matrix is projected to."""

    update_proj_gap: Auto[Count] = 200
    """Steps after which the space is chosen anew, by an SVD of the gradient."""

    scale: Auto[NonNegative] = 1.0
    """Factor of the updates of projected matrices."""


class Optimizer(TypedSection):
    """The optimizer, with the meaning its parameters have in torch and DeepSpeed."""

    UNREAD = TABLE["optimizer"]

    KNOWN = {
        "Adam": AdamParams,
        "AdamW": AdamParams,
        "SGD": SGDParams,
        "Lion": LionParams,
        "Adagrad": AdagradParams,
        "Adafactor": AdafactorParams,
        "GaLore": GaLoreParams,
        "Lamb": LambParams,
        "Muon": MuonParams,
        "OneBitAdam": OneBitAdamParams,
        "OneBitLamb": OneBitLambParams,
        "ZeroOneAdam": ZeroOneAdamParams,
    }
    ANY = OptimizerParams
    NOT_YET = ("MuAdam", "MuAdamW", "MuSGD")

    params: SerializeAsAny[OptimizerParams]
    """The parameters of that type."""

    ema: Fraction | None = None
    """Share of an average of the weights that each update keeps, such as 0.999; null:
    no average. It is `zinf.with_ema`, for `zinf evaluate --weights ema` and exports."""

    ema_update_after: Whole = 0
    """Updates after which averaging begins; until then the average is the weights."""
