"""`zinf.hf.initialize`: an engine whose weights come from the files of a model."""

import logging
from typing import Any

import jax
import optax
from jax.sharding import Mesh

from zinf.distributed import AbstractGroup
from zinf.engine import Engine
from zinf.hf.model import Model
from zinf.initialize import ConfigSource, make_planner
from zinf.interchange.names import Terms, listed
from zinf.interchange.place import fill

logger = logging.getLogger(__name__)


class ModelEngine(Engine):
    """An engine that trains a `transformers` model; made by `initialize`."""

    _model: Model

    @property
    def model(self) -> Model:
        """The model, without its weights."""
        return self._model

    def initialize_state(self) -> None:
        """Write the weights of the model's files to their tiers, in parts."""
        model = self._model
        files, weights = model.open_weights()
        with files:
            if weights.unused:
                logger.warning(
                    f"{model.name}: {len(weights.unused)} tensors of the files are "
                    "not read, as the model has no place for them: "
                    f"{listed(weights.unused)}"
                )
            buffers = [name for name, _ in model.module.named_buffers()]
            names = {name: name for name in model.specs}
            terms = Terms(ignore=buffers, may_round=True)
            fill(self.planner, self._residents, weights, names, terms)


def initialize(
    model: Model,
    tx: optax.GradientTransformation,
    config: ConfigSource = None,
    *,
    rng: jax.Array | None = None,
    batch: Any = None,
    mesh: Mesh | None = None,
    group: AbstractGroup | None = None,
) -> ModelEngine:
    """Prepare training of a model; see `zinf.initialize`.

    The weights are read when the first batch is known: in parts, each to its tier, so
    the model need not fit in memory. They are rounded to the dtype that they are kept
    in, if that is narrower than the files'.

    Args:
        rng: for dropout. If the model has any and this is absent, it is key 0.
        batch: `input_ids` and maybe `labels`, `attention_mask`, `position_ids`, each
            (samples, tokens); see `Model.loss`.

    Raises:
        ValueError: as for `zinf.initialize`; or a file lacks a tensor, or has one of
            another shape.
        FileNotFoundError, NotImplementedError: the files are absent, or of a kind that
            zinf does not read.
    """
    if group is not None and group.count > 1:
        raise NotImplementedError(
            "The weights of a model are read by one process. Use one process with all "
            "devices of the machine."
        )
    if rng is None and model.is_random:
        rng = jax.random.key(0)
    # Buffers that the files have are constants of the loss, which is traced first.
    model.read_buffers()
    planner = make_planner(
        model.loss, model.zeros, tx, config, rng=rng, mesh=mesh, group=group
    )
    engine = ModelEngine(planner, rng)
    engine._model = model
    if batch is not None:
        engine.prepare(batch)
    return engine
