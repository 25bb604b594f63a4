"""From rewards, by a critic's values: PPO."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax

from zinf.core.config import Config
from zinf.core.rl import ActorCriticLoss
from zinf.core.rollouts.functions import place_of_model
from zinf.core.rollouts.ppo import NAMES, PpoRollouts
from zinf.data.configured import batch_size
from zinf.hf.actor_critic import ActorCritic
from zinf.hf.critic import Critic, load_critic
from zinf.hf.engine import ModelEngine
from zinf.hf.model import Batch, Params, load
from zinf.hf.objectives.from_rewards import drawing_objective, drawn_by, scored


@dataclass(frozen=True)
class PpoLoss:
    """The loss of a policy and its critic.

    Attributes:
        formula: from log-probabilities and values.
        temperature: that of drawing; logits are divided by it.
    """

    model: ActorCritic
    formula: ActorCriticLoss
    temperature: float = 1.0

    def loss(self, params: Params, batch: Batch) -> Any:
        """`(loss, metrics)`, see `ActorCriticLoss`.

        Args:
            batch: of `PpoRollouts`: `input_ids` and `labels` (rows, tokens), and what
                `ActorCriticLoss` reads.
        """
        logps = self.model.token_log_probabilities(
            params, scored(self.model, batch), temperature=self.temperature
        )
        return self.formula(logps, self.model.values(params, batch), batch)


@dataclass(frozen=True)
class _Values:
    """The critic's values, as a function of parameters and a batch."""

    model: ActorCritic

    def __call__(self, params: Params, batch: Batch) -> jax.Array:
        return self.model.values(params, batch)


def critic_of(config: Config) -> str:
    """The folder or name of the model that the critic begins from."""
    assert config.model is not None and config.model.huggingface is not None
    folders, asked = config.folders_of_modules(), config.ppo.critic
    if asked is not None:
        return place_of_model(asked, folders) or asked
    places = [place_of_model(name, folders) for name in config.ppo.rewards]
    judges = [place for place in places if place is not None]
    return judges[0] if len(judges) == 1 else config.model.huggingface


@cache
def _joined(policy: str, critic: str, seed: int) -> ActorCritic:
    model = load(policy)
    model.check_whole()
    return ActorCritic(model, Critic(load_critic(critic, seed=seed)))


def _model(config: Config) -> ActorCritic:
    assert config.model is not None and config.model.huggingface is not None
    adapter = config.adapter
    if adapter is not None and adapter.begin_from is not None:
        raise NotImplementedError(
            f"adapter.begin_from is {adapter.begin_from}, and with data.objective ppo "
            "the critic has adapters too, which that folder does not have. Leave it "
            "out, or merge the adapter and begin from the merged model."
        )
    return _joined(config.model.huggingface, critic_of(config), config.run.seed)


def _loss(model: Any, config: Config) -> Callable:
    settings = config.ppo
    formula = ActorCriticLoss(
        settings.cliprange, settings.vf_coef, settings.cliprange_value
    )
    return PpoLoss(model, formula, settings.temperature).loss


def _by(rollouts: PpoRollouts, engine: ModelEngine, config: Config) -> PpoRollouts:
    """Rollouts that an engine draws and its critic values; see `drawn_by`."""
    model: Any = engine.model  # As `_model` makes it.
    function = engine.applied(_Values(model))

    def values(batch: Mapping[str, Any]) -> Any:
        read = {"input_ids": batch["input_ids"]}
        count = config.num_microbatches
        return engine.apply(function, read, num_microbatches=count)

    return drawn_by(rollouts.valued_by(values), engine, config)


OBJECTIVE = drawing_objective(
    PpoRollouts,
    loss=_loss,
    names=lambda config: NAMES,
    drawn=lambda config: batch_size(config) * config.ppo.num_mini_batches,
    model=_model,
    by=_by,
    asked=lambda model: {"the critic": _Values(model)},
)
