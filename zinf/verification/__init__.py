"""Compares a training run on zinf with the same run in plain jax and optax."""

from zinf.verification.compare import Check as Check
from zinf.verification.compare import check_arrays as check_arrays
from zinf.verification.compare import check_losses as check_losses
from zinf.verification.plain import Microbatches as Microbatches
from zinf.verification.plain import Noise as Noise
from zinf.verification.plain import PlainRun as PlainRun
from zinf.verification.plain import PlainTraining as PlainTraining
from zinf.verification.result import LeafChecks as LeafChecks
from zinf.verification.result import Verification as Verification
