"""zinf as a model of EleutherAI's `lm-eval`; needs the extra `lm-eval`."""

from typing import TYPE_CHECKING

from zinf.core.process.lazy import make_lazy

if TYPE_CHECKING:
    from zinf.lm_eval.model import StreamedLM as StreamedLM

make_lazy(__name__, extra="lm-eval")
