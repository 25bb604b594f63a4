"""Direct preference optimization: answers that were chosen against rejected ones.

DPO (https://arxiv.org/abs/2305.18290, equation 7) compares the log-probabilities of the
trained model with those of a reference, which is the model as training begins. The
reference never changes, so its log-probabilities are computed once, and kept in a file.
"""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import jax
import numpy as np

from zinf.core.config import Config
from zinf.core.problem.weighted import Weighted
from zinf.core.text.complaint import naming
from zinf.data.array_file import read_array
from zinf.data.configured import batch_size
from zinf.data.share import own_rows
from zinf.hf.dataset import Samples
from zinf.hf.engine import ModelEngine
from zinf.hf.folder import weights_digest
from zinf.hf.model import Batch, Model, Params
from zinf.hf.objectives.objective import Objective, Say, Spec
from zinf.hf.pairs import (
    SIDES,
    Pairs,
    PairTokenizing,
    log_probabilities,
    over_pairs,
    pairs_spec,
)

# Log-probabilities of equal weights that two machines compute in 16 bits differ by
# less: terms are off by 2**-8 of a logit, either way. More costs a pass, and no error.
ROUNDING = {"rtol": 2.0**-10, "atol": 2.0**-5}


@dataclass(frozen=True)
class Preference:
    """The loss of DPO for a model.

    Attributes:
        beta: how strongly the model is kept near the reference; 0.1 is usual.
    """

    model: Model
    beta: float = 0.1

    def loss(
        self, params: Params, batch: Batch, *key: jax.Array, train: bool = True
    ) -> Weighted:
        """-log sigmoid(beta * (gain of chosen - gain of rejected)), summed over pairs.

        The weight is the number of pairs with a label. A gain is the log-probability of
        an answer less that of the reference.

        Args:
            batch: `input_ids` and `labels` (pairs, 2, tokens), chosen first, and
                `reference` (pairs, 2), what `log_probabilities` gave for the reference.
        """
        found = self.log_probabilities(params, batch, *key, train=train)
        gains = found - batch["reference"]
        losses = jax.nn.softplus(self.beta * (gains[:, 1] - gains[:, 0]))
        return over_pairs(losses, batch)

    def log_probabilities(
        self, params: Params, batch: Batch, *key: jax.Array, train: bool = False
    ) -> jax.Array:
        """The log-probability of each answer, float32 (pairs, 2)."""
        return log_probabilities(self.model, params, batch, *key, train=train)


class Referenced(Pairs):
    """Pairs with the log-probabilities of the reference.

    Args:
        samples: chosen and rejected in turn.
        reference: the file of the log-probabilities of all samples of the folder; it
            is written before the first pair is read.
    """

    def __init__(self, samples: Samples, reference: Path) -> None:
        super().__init__(samples)
        self._path = reference
        self._reference: np.ndarray | None = None

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """`input_ids` and `labels`, int32 (2, length); `reference`, float32 (2,)."""
        if self._reference is None:
            self._reference = read_array(self._path)
        number = self.samples.first // len(SIDES) + index
        return super().__getitem__(index) | {"reference": self._reference[number]}


def _write(path: Path, passes: Iterator[np.ndarray], num_pairs: int) -> None:
    """Write the log-probabilities of all pairs to a file."""
    found = np.concatenate(list(passes))[:num_pairs]
    partial = path.with_suffix(f".{os.getpid()}.partial")
    with naming(partial), partial.open("wb") as file:
        np.save(file, found)
    partial.replace(path)


def _is_of(path: Path, passes: Iterator[np.ndarray], num_pairs: int) -> bool:
    """Whether the model of `passes` gave a file of `_write`, by the first pass.

    That is so if the log-probabilities of the first pairs are equal within rounding: on
    another machine sums of the same terms may differ.
    """
    kept = read_array(path)
    if kept.shape != (num_pairs, len(SIDES)):
        return False
    found = next(passes)[: len(kept)]
    return np.allclose(found, kept[: len(found)], **ROUNDING)


def _passes(engine: ModelEngine, pairs: Pairs, size: int) -> Iterator[np.ndarray]:
    """Log-probabilities of `size` pairs after another; the last pass may repeat.

    The engine has taken no step: the reference is its model as it is now. The passes
    run forward alone, with weights streamed from where they rest. All of several
    processes make them, each with its part of the pairs.
    """
    assert engine.num_steps == 0, "the reference is the model before the first step"
    function = engine.applied(Preference(engine.model).log_probabilities)
    for start in range(0, len(pairs), size):
        # The last pass has the shape of the others: it repeats the last pair.
        numbers = np.minimum(np.arange(start, start + size), len(pairs) - 1)
        numbers = own_rows(numbers, engine.planner.batch_share)
        rows = [pairs[int(number)] for number in numbers]
        batch = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
        yield engine.apply(function, batch)


def reference_file(folder: Path, model: Model, config: Config) -> Path:
    """Where the log-probabilities of the pairs in a folder are, for a model.

    It goes by the content of the weights and settings of the model; see
    `sampled_digest`.
    """
    adapter = config.adapter
    begin_from = None if adapter is None else adapter.begin_from
    encoding = None if adapter is None else adapter.quantize_base
    places = [model.folder, *([] if begin_from is None else [begin_from])]
    weights = [weights_digest(place) for place in places]
    state = [weights, encoding, config.compute_dtype]
    digest = sha256(json.dumps(state).encode()).hexdigest()[:16]
    return folder / f"reference-{digest}.npy"


def _before_training(
    engine: ModelEngine, config: Config, files: Sequence[Samples], say: Say
) -> None:
    """Compute the reference for all pairs of the files.

    That is not done if an earlier run computed it from equal weights. What that run
    wrote is compared with a pass of this model, and written anew unless they agree.
    Each of several processes has a file, which may be the same one: all write it if one
    lacks it.
    """
    group = engine.planner.group
    for samples in files:
        path = reference_file(samples.folder, engine.model, config)
        pairs = Pairs(samples)
        given = engine, pairs, batch_size(config)
        if not group.any("a reference is absent", not path.exists()):
            differs = not _is_of(path, _passes(*given), len(pairs))
            if not group.any("a reference is of another model", differs):
                continue
            say(f"data: {path} is of another model than this one")
        say(f"data: log-probabilities of {len(pairs):,} pairs, once, to {path}")
        _write(path, _passes(*given), len(pairs))


def _loss(model: Model, config: Config) -> Callable:
    return Preference(model, config.data.beta).loss


def _spec(config: Config, rows: int, length: int) -> Spec:
    reference = jax.ShapeDtypeStruct((rows, len(SIDES)), np.float32)
    return pairs_spec(rows, length) | {"reference": reference}


def _rows(samples: Samples, model: Model, config: Config) -> Referenced:
    return Referenced(samples, reference_file(samples.folder, model, config))


OBJECTIVE = Objective(
    loss=_loss,
    batch_spec=_spec,
    rows=_rows,
    tokenizing=PairTokenizing,
    before_training=_before_training,
)
