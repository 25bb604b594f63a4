"""The loss of a policy that learns from advantages: GRPO and its kin, RLOO, PPO."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from zinf.core.problem.cross_entropy import cross_entropy
from zinf.core.problem.weighted import Weighted
from zinf.core.rl.metrics import mean_over
from zinf.core.rl.tokens import LOSS_TYPES

Batch = Mapping[str, jax.Array]
Metrics = dict[str, Weighted | jax.Array]

# What one importance ratio covers.
LEVELS = (
    "token",
    "sequence",  # geometric mean over tokens: GSPO, https://arxiv.org/abs/2507.18071
    "sequence_token",  # that mean, with the gradient of the token: GSPO-token
    "sequence_product",  # the product over tokens: RLOO
)
# The range of logarithms of ratios in VESPO, https://arxiv.org/abs/2602.10693.
VESPO_SMALLEST, VESPO_LARGEST = math.log(1e-8), 20.0


@dataclass(frozen=True)
class PolicyLoss:
    """The clipped loss of a policy, with TRL's names and defaults of its settings.

    Attributes:
        loss_type: one of `LOSS_TYPES`. cispo, sapo and vespo are losses of their own;
            others differ in the weights of tokens alone, see `token_weights`.
        importance_sampling_level: one of `LEVELS`.
        epsilon: a ratio below 1 - epsilon is clipped.
        epsilon_high: a ratio above 1 + epsilon_high is clipped; None: epsilon. In cispo
            it is the largest ratio itself.
        delta: the largest ratio where advantages are negative (two-sided clipping,
            https://arxiv.org/abs/2505.07291); None: no limit.
        beta: weight of the KL divergence from the reference.
        use_bias_correction_kl: multiply the divergence by the importance ratio.
        sapo_temperature_pos, sapo_temperature_neg: of sapo's sigmoid, where advantages
            are positive, and elsewhere.
        vespo_k_pos, vespo_lambda_pos, vespo_k_neg, vespo_lambda_neg: power and decay of
            vespo's weight of a sequence, by the sign of its advantage.
    """

    loss_type: str = "dapo"
    importance_sampling_level: str = "token"
    epsilon: float = 0.2
    epsilon_high: float | None = None
    delta: float | None = None
    beta: float = 0.0
    use_bias_correction_kl: bool = False
    sapo_temperature_pos: float = 1.0
    sapo_temperature_neg: float = 1.05
    vespo_k_pos: float = 2.0
    vespo_lambda_pos: float = 3.0
    vespo_k_neg: float = 3.0
    vespo_lambda_neg: float = 2.0

    def __post_init__(self) -> None:
        choices = {"loss_type": tuple(LOSS_TYPES), "importance_sampling_level": LEVELS}
        for name, known in choices.items():
            if getattr(self, name) not in known:
                raise ValueError(
                    f"{name} is {getattr(self, name)!r}; it is one of "
                    f"{', '.join(known)}."
                )
        limits = (self.epsilon, self.high, self.beta)
        if not all(math.isfinite(x) and x >= 0 for x in limits):
            raise ValueError(
                f"epsilon is {self.epsilon}, epsilon_high {self.epsilon_high} and beta "
                f"{self.beta}; none may be negative or infinite."
            )
        temperatures = (self.sapo_temperature_pos, self.sapo_temperature_neg)
        if not all(math.isfinite(x) and x > 0 for x in temperatures):
            raise ValueError(
                f"The temperatures of sapo are {temperatures}; they have to be over 0."
            )
        if self.loss_type == "vespo" and self.importance_sampling_level != "token":
            raise ValueError(
                "loss_type vespo has ratios of sequences of its own. Leave out "
                f"importance_sampling_level, which is {self.importance_sampling_level}."
            )
        if self.delta is not None and not self.delta > 1 + self.high:
            raise ValueError(
                f"delta is {self.delta}; it has to be over 1 + epsilon_high, which is "
                f"{1 + self.high:g}, or nothing between them is clipped once."
            )

    @property
    def high(self) -> float:
        return self.epsilon if self.epsilon_high is None else self.epsilon_high

    def __call__(
        self, logps: jax.Array, batch: Batch, *, entropies: jax.Array | None = None
    ) -> tuple[Weighted, Metrics]:
        """The loss of a microbatch and its metrics.

        Args:
            logps: log-probabilities of the tokens by the model that is trained, float32
                (rows, tokens); of logits that were divided by the temperature.
            batch: float32 (rows, tokens), placed as `logps`:

                * `weights`: see `token_weights`; tokens with 0 are no part of the loss;
                * `advantages`: that of a completion at each of its tokens;
                * `old_logps`: by the model that sampled; absent: `logps`, if the batch
                  is used for one step alone;
                * `ref_logps`: by the reference; read if beta is not 0;
                * `policy_weights`: factors of the policy's term, see `corrections.py`;
                  absent: 1;
                * `importance_ratios`: of tokens, see `importance_correction`; read by
                  vespo alone, whose weights have them; absent: 1;

                `segment_ids`, int32 (rows, tokens): numbers of samples, where a row has
                several; read by levels of sequences; absent: a row is a sample;
                and `denominators`, float32 (rows,), see `token_weights`.
            entropies: for the metrics, (rows, tokens).

        Returns:
            The loss, whose weight depends on the batch alone, and metrics under TRL's
            names as sums: see `metric_values`. Those of ratios count sequences if
            ratios are of sequences, and tokens otherwise.
        """
        mask = (batch["weights"] != 0).astype(jnp.float32)
        old = batch.get("old_logps")
        old = jax.lax.stop_gradient(logps) if old is None else old
        differences = jnp.where(mask != 0, logps - old, 0.0)
        ratios = jnp.exp(self._log_ratios(logps, differences, mask, batch))
        losses, metrics = self._policy_losses(logps, ratios, differences, mask, batch)
        if "policy_weights" in batch:
            losses = losses * batch["policy_weights"]
        if self.beta:
            divergence = k3(logps, batch["ref_logps"], mask)
            if self.use_bias_correction_kl:
                divergence = divergence * ratios
            losses = losses + self.beta * divergence
            metrics["kl"] = mean_over(divergence, mask)
        if entropies is not None:
            metrics["entropy"] = mean_over(entropies, mask)
        metrics = jax.lax.stop_gradient(metrics)
        # Where the mask is 0 a loss may be anything that is not finite.
        losses = jnp.where(mask != 0, losses, 0.0)
        total = jnp.sum(batch["weights"] * losses)
        return Weighted(total, jnp.sum(batch["denominators"])), metrics

    def _log_ratios(
        self, logps: jax.Array, differences: jax.Array, mask: jax.Array, batch: Batch
    ) -> jax.Array:
        """Logarithms of importance ratios, (rows, tokens)."""
        level = self.importance_sampling_level
        if level == "token":
            return differences
        sums = over_sequences(differences, batch)
        if level == "sequence_product":
            return sums
        means = sums / lengths(mask, batch)
        if level == "sequence":
            return means
        return jax.lax.stop_gradient(means) + logps - jax.lax.stop_gradient(logps)

    def _policy_losses(
        self,
        logps: jax.Array,
        ratios: jax.Array,
        differences: jax.Array,
        mask: jax.Array,
        batch: Batch,
    ) -> tuple[jax.Array, Metrics]:
        """The policy's term of each token, and metrics of ratios that are clipped."""
        advantages = batch["advantages"]
        if self.loss_type == "cispo":
            capped = jax.lax.stop_gradient(jnp.minimum(ratios, self.high))
            is_capped = (ratios > self.high) & (advantages > 0)
            share = mean_over(is_capped, self._metric_weights(mask, batch))
            return -capped * advantages * logps, {"cispo_clip_ratio": share}
        if self.loss_type == "sapo":
            temperatures = jnp.where(
                advantages > 0, self.sapo_temperature_pos, self.sapo_temperature_neg
            )
            gates = jax.nn.sigmoid(temperatures * (ratios - 1)) * 4 / temperatures
            return -gates * advantages, {}
        if self.loss_type == "vespo":
            weights = jax.lax.stop_gradient(self._vespo(differences, mask, batch))
            mean = mean_over(weights, mask / lengths(mask, batch))
            return -weights * advantages * logps, {"vespo/phi_seq_mean": mean}
        clipped = jnp.clip(ratios, 1 - self.epsilon, 1 + self.high)
        if self.delta is not None:
            ratios = jnp.minimum(ratios, self.delta)
        losses = -jnp.minimum(ratios * advantages, clipped * advantages)
        return losses, self._clipped(ratios, mask, batch)

    def _clipped(self, ratios: jax.Array, mask: jax.Array, batch: Batch) -> Metrics:
        """Shares of ratios that are clipped."""
        advantages = batch["advantages"]
        weights = self._metric_weights(mask, batch)
        is_low = (ratios < 1 - self.epsilon) & (advantages < 0)
        is_high = (ratios > 1 + self.high) & (advantages > 0)
        low, high = (
            over_sequences(x * mask, batch) / lengths(mask, batch)
            for x in (is_low, is_high)
        )
        return {
            "clip_ratio/low_mean": mean_over(is_low, weights),
            "clip_ratio/low_min": jnp.min(jnp.where(mask != 0, low, jnp.inf)),
            "clip_ratio/high_mean": mean_over(is_high, weights),
            "clip_ratio/high_max": jnp.max(jnp.where(mask != 0, high, -jnp.inf)),
            "clip_ratio/region_mean": mean_over(is_low | is_high, weights),
        }

    def _metric_weights(self, mask: jax.Array, batch: Batch) -> jax.Array:
        """1 for each token, or for each sequence if ratios are of sequences."""
        is_of_tokens = self.importance_sampling_level in ("token", "sequence_token")
        return mask if is_of_tokens else mask / lengths(mask, batch)

    def _vespo(
        self, differences: jax.Array, mask: jax.Array, batch: Batch
    ) -> jax.Array:
        """e^l w^k e^(-l w) of the ratio w of a sequence, 1 where w is 1."""
        log_ratios = jnp.clip(differences, -VESPO_LARGEST, VESPO_LARGEST)
        if "importance_ratios" in batch:
            corrections = jnp.log(batch["importance_ratios"])
            corrections = jnp.clip(corrections, VESPO_SMALLEST, VESPO_LARGEST)
            log_ratios = log_ratios + jnp.where(mask != 0, corrections, 0.0)
        sums = over_sequences(log_ratios, batch)
        sums = jnp.clip(sums, VESPO_SMALLEST, VESPO_LARGEST)
        is_positive = batch["advantages"] >= 0
        power = jnp.where(is_positive, self.vespo_k_pos, self.vespo_k_neg)
        decay = jnp.where(is_positive, self.vespo_lambda_pos, self.vespo_lambda_neg)
        return jnp.exp(decay + power * sums - decay * jnp.exp(sums))


def k3(logps: jax.Array, ref_logps: jax.Array, mask: jax.Array) -> jax.Array:
    """An estimate of the KL divergence from the reference, never negative.

    e^d - d - 1 with d = ref_logps - logps, http://joschu.net/blog/kl-approx.html.
    """
    difference = jnp.where(mask != 0, ref_logps - logps, 0.0)
    return jnp.expm1(difference) - difference


def over_sequences(values: jax.Array, batch: Batch) -> jax.Array:
    """Sums over the tokens of a sample, at each of its tokens, (rows, tokens)."""
    if "segment_ids" not in batch:
        return jnp.broadcast_to(jnp.sum(values, axis=1, keepdims=True), values.shape)

    def row(values: jax.Array, segments: jax.Array) -> jax.Array:
        # A row of T tokens has at most T samples, numbered from 0 or 1.
        count = values.shape[0] + 1
        return jax.ops.segment_sum(values, segments, num_segments=count)[segments]

    return jax.vmap(row)(values, batch["segment_ids"])


def lengths(mask: jax.Array, batch: Batch) -> jax.Array:
    """Tokens of a sample, at each of its tokens; at least 1, (rows, tokens)."""
    return jnp.maximum(over_sequences(mask, batch), 1.0)


def token_scores(
    logits: jax.Array, tokens: jax.Array, *, temperature: float = 1.0
) -> tuple[jax.Array, jax.Array]:
    """Log-probabilities of tokens and entropies of what they are drawn from, float32.

    Args:
        logits: (..., words); divided by the temperature, so that the probabilities are
            those that tokens are sampled by.
        tokens: integers (...).
        temperature: over 0.
    """
    logits = logits.astype(jnp.float32) / temperature
    log_probabilities = jax.nn.log_softmax(logits)
    entropies = -jnp.sum(jnp.exp(log_probabilities) * log_probabilities, axis=-1)
    return -cross_entropy(logits, tokens), entropies
