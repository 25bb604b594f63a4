"""Compares a training run on zinf with the same run in plain jax and optax."""

from zinf.core.verification.compare import Check as Check
from zinf.core.verification.compare import check_arrays as check_arrays
from zinf.core.verification.compare import check_losses as check_losses
from zinf.core.verification.plain import Microbatches as Microbatches
from zinf.core.verification.plain import PlainRun as PlainRun
from zinf.core.verification.plain import PlainTraining as PlainTraining
from zinf.core.verification.result import LeafChecks as LeafChecks
from zinf.core.verification.result import Verification as Verification
