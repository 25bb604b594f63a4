"""Whether a class of models computes in zinf what it computes in torch.

zinf replaces what `transformers` calls for attention, experts and embeddings, and
torchax replaces torch, so a class that nobody has compared may compute something else.
A tiny model of the same class is compared when the class is first used with these
versions; the verdict is remembered in the user's cache folder.
"""

import hashlib
import logging
import warnings
from copy import deepcopy
from dataclasses import asdict, dataclass
from importlib.metadata import version
from inspect import signature
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers

from zinf.core.process.user_cache import own_digest, recall, remember, user_cache
from zinf.core.sharding.mesh import first_cpu
from zinf.hf.model import Model
from zinf.hf.module import build, output_name
from zinf.hf.tiny import LENGTH, VOCAB, tiny
from zinf.hf.weights import to_numpy

logger = logging.getLogger(__name__)
AGREES, DIFFERS, REFUSED, NOT_TINY, NOT_COMPARED = (
    "agrees",
    "differs",
    "is refused",
    "cannot be made tiny",
    "not compared",
)
# Float32 sums of two layers in another order differ by 1e-6 of the largest entry. What
# is computed otherwise differs by 1e-2 and more.
MAX_LOGITS, MAX_GRADIENTS = 1e-4, 1e-3
# A router whose scores nearly tie may choose otherwise in another order of sums. That
# does not happen for each of these seeds.
SEEDS = (0, 1, 2)
ROWS = 2
# Half of the time is the compiler's otherwise.
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
MAX_PARAMETERS = 20_000_000
# Initial weights give scores near 0, of which the softmax hides most. Matrices are
# scaled so, and vectors, which are mostly all 0 or all 1, are moved.
SCALE, MOVE = 4.0, 0.2


@dataclass(frozen=True)
class Verdict:
    """The result of comparing a class of models with torch.

    Attributes:
        kind: the class of the model.
        state: AGREES, DIFFERS, REFUSED (zinf cannot compute it), NOT_TINY or
            NOT_COMPARED.
        versions: of what computes it.
        logits, gradients: the largest difference, as a share of the largest entry; that
            of gradients is of the leaf that differs most.
        leaf: the name of that leaf.
        reason: why nothing was compared.
    """

    kind: str
    state: str
    versions: str
    logits: float = 0.0
    gradients: float = 0.0
    leaf: str = ""
    reason: str = ""

    @property
    def agrees(self) -> bool:
        return self.state == AGREES

    def __str__(self) -> str:
        if self.reason:
            return f"{self.kind}: {self.state} ({self.reason}); {self.versions}"
        return (
            f"{self.kind} {self.state}: logits are {self.logits:.1e} off those of "
            f"torch, gradients {self.gradients:.1e} ({self.leaf}); {self.versions}"
        )


def check_class(model: Model) -> None:
    """Compare the class of a model with torch, unless that was done before.

    Raises:
        NotImplementedError: the class computes something else in zinf, or cannot be
            computed.
    """
    verdict = verdict_of(model)
    if verdict.state == REFUSED:
        raise NotImplementedError(
            f"{model.name} cannot be computed: zinf has no way to run its class "
            f"{verdict.kind} ({verdict.reason}), with {verdict.versions}. Use a model "
            "of another architecture."
        )
    if verdict.state == DIFFERS:
        raise NotImplementedError(
            f"{model.name} would be computed wrongly. A tiny model of its class "
            f"{verdict.kind} with random weights was compared with torch: logits are "
            f"{verdict.logits:.1%} of the largest one off, gradients "
            f"{verdict.gradients:.1%} ({verdict.leaf}), with {verdict.versions}. Use a "
            "model of another architecture, or a version of zinf that knows this one."
        )
    if verdict.state in (NOT_TINY, NOT_COMPARED):
        logger.warning("Nobody has compared this model with torch: %s", verdict)


def verdict_of(model: Model, *, anew: bool = False) -> Verdict:
    """The verdict on the class of a model, with the features of its configuration.

    Args:
        anew: compare even if the verdict is remembered.
    """
    config, auto_class, kind = model.config, model.auto_class, type(model.module)
    is_pair = getattr(model.module.config, "is_encoder_decoder", False)
    if model.module.main_input_name != "input_ids" or is_pair:
        reason = "it is not called with tokens alone"
        return Verdict(kind.__name__, NOT_COMPARED, versions(), reason=reason)
    first_cpu()  # Without one the engine cannot be either; that is no verdict.
    try:
        small = tiny(config)
    except Exception as error:  # Each class refuses sizes in its own way.
        return _left(kind.__name__, NOT_TINY, error)
    place = _place(small, auto_class)
    found = None if anew else recall(place)
    if found is not None:
        return Verdict(**found)
    logger.info("Comparing %s with torch, once for these versions.", kind.__name__)
    verdict = compare(small, auto_class)
    remember(place, asdict(verdict))
    return verdict


def compare(config: transformers.PretrainedConfig, auto_class: str) -> Verdict:
    """The verdict on a tiny configuration; the most alike of several random models."""
    found = None
    for seed in SEEDS:
        verdict = _compared(config, auto_class, seed)
        if verdict.state != DIFFERS:
            return verdict
        if found is None or verdict.logits < found.logits:
            found = verdict
    assert found is not None
    return found


def versions() -> str:
    """The versions of the libraries that a verdict holds for."""
    names = ("transformers", "torch", "torchax", "jax", "zinf")
    return ", ".join(f"{name} {version(name)}" for name in names)


def _compared(
    config: transformers.PretrainedConfig, auto_class: str, seed: int
) -> Verdict:
    name = type(config).__name__
    ids = np.random.default_rng(seed).integers(3, VOCAB, (ROWS, LENGTH), np.int32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            module = _torch_model(config, auto_class, seed)
            name = type(module).__name__
            results = _torch_results(module, auto_class, ids, seed)
            wanted, pull, wanted_gradients = results
        except Exception as error:  # Each class refuses sizes in its own way.
            return _left(name, NOT_TINY, error)
        try:
            logits, gradients = _own_results(config, auto_class, module, ids, pull)
        except Exception as error:
            # Tokens are all that a causal model is called with, so the model itself
            # would raise it too. Others may need more than tokens.
            is_causal = auto_class == Model.auto_class
            return _left(name, REFUSED if is_causal else NOT_COMPARED, error)
    off = _off(logits, wanted, np.abs(wanted).max())
    largest = max(np.abs(g).max() for g in wanted_gradients.values())
    by_leaf = {
        path: _off(gradients[path], g, max(np.abs(g).max(), 1e-3 * largest))
        for path, g in wanted_gradients.items()
    }
    leaf = max(by_leaf, key=lambda path: by_leaf[path])
    is_same = off <= MAX_LOGITS and by_leaf[leaf] <= MAX_GRADIENTS
    state = AGREES if is_same else DIFFERS
    return Verdict(name, state, versions(), off, by_leaf[leaf], leaf)


def _off(found: Any, wanted: np.ndarray, scale: float) -> float:
    difference = float(np.abs(np.asarray(found, np.float32) - wanted).max())
    # A number that is not finite on one side only makes the difference infinite.
    share = difference / max(float(scale), 1e-30)
    return share if np.isfinite(share) else float("inf")


def _torch_model(
    config: transformers.PretrainedConfig, auto_class: str, seed: int
) -> transformers.PreTrainedModel:
    """The model of torch, in evaluation, with random weights.

    Raises:
        ValueError: it is not tiny.
    """
    count = sum(
        p.numel()
        for p in build(deepcopy(config), torch.float32, auto_class).parameters()
    )
    if count > MAX_PARAMETERS:
        raise ValueError(f"it has {count:,} parameters still")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        kind = getattr(transformers, auto_class)
        module = kind.from_config(
            deepcopy(config), dtype=torch.float32, attn_implementation="eager"
        )
        with torch.no_grad():
            for parameter in module.parameters():
                noise = MOVE * torch.randn_like(parameter)
                if parameter.ndim > 1:
                    parameter.mul_(SCALE)
                else:
                    parameter.add_(noise * _step(parameter))
    return module.eval()


def _step(vector: torch.Tensor) -> float:
    """The size of the numbers of a vector, at most 1; 1 if all are 0."""
    return min(1.0, float(vector.abs().mean()) or 1.0)


def _torch_results(
    module: transformers.PreTrainedModel, auto_class: str, ids: np.ndarray, seed: int
) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
    """torch's logits or states, random cotangents, and gradients by parameter.

    Parameters that torch does not train have no gradient here.
    """
    outputs = module(torch.tensor(ids).long(), **_options(module))
    logits = getattr(outputs, output_name(auto_class))
    if not bool(torch.isfinite(logits).all()):
        raise ValueError("the logits of torch are not finite")
    pull = np.random.default_rng(seed).standard_normal(logits.shape, np.float32)
    (logits * torch.tensor(pull)).sum().backward()
    gradients = {
        name: np.zeros(p.shape, np.float32) if p.grad is None else to_numpy(p.grad)
        for name, p in module.named_parameters()
        if p.requires_grad
    }
    return logits.detach().numpy(), pull, gradients


def _options(module: torch.nn.Module) -> dict[str, Any]:
    takes_cache = "use_cache" in signature(module.forward).parameters
    return {"use_cache": False} if takes_cache else {}


def _own_results(
    config: transformers.PretrainedConfig,
    auto_class: str,
    module: transformers.PreTrainedModel,
    ids: np.ndarray,
    pull: np.ndarray,
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    model = Model("a tiny model", Path(), deepcopy(config))
    model.auto_class = auto_class
    kept = module.state_dict().keys()
    model._stored_buffers = {
        name: to_numpy(b) for name, b in module.named_buffers() if name in kept
    }
    params = {name: to_numpy(p.detach()) for name, p in module.named_parameters()}

    def pulled(params: Any, ids: Any) -> tuple[jax.Array, jax.Array]:
        given = {"input_ids": ids}
        logits = model._run(params, given, _options(module), key=(), train=False)
        return jnp.sum(logits * pull), logits

    on_cpu = jax.default_device(first_cpu())
    with on_cpu, jax.default_matmul_precision("highest"):
        pulls = jax.value_and_grad(pulled, has_aux=True)
        compiled = jax.jit(pulls, compiler_options=QUICK)
        (_, logits), gradients = compiled(params, ids)
        return jax.device_get((logits, gradients))


def _left(kind: str, state: str, error: Exception) -> Verdict:
    text = " ".join(str(error).split())
    reason = f"{type(error).__name__}: {text:.200}"
    return Verdict(kind, state, versions(), reason=reason)


def _place(config: transformers.PretrainedConfig, auto_class: str) -> Path:
    """The file of a verdict, by what is compared and what computes it."""
    digest = hashlib.sha256()
    for part in (
        type(config).__name__,
        auto_class,
        versions(),
        config.to_json_string(),
        own_digest(),
    ):
        digest.update(part.encode() + b"\0")
    return user_cache() / "compared" / f"{digest.hexdigest()[:32]}.json"
