"""The task of a config with zinf's own GPT: its model, loss and data."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from zinf import models
from zinf.adapt import Adapted, MergedTensors, adapt, load_adapter, save_adapter
from zinf.cli.endings import say_nothing
from zinf.core.config import Config, Model
from zinf.core.config.schema import BESIDE_HUGGINGFACE
from zinf.core.engine.engine import Engine
from zinf.core.engine.initialize import initialize, make_planner
from zinf.core.engine.named import MASTER
from zinf.core.interchange import export_safetensors
from zinf.core.interchange.tensors import AbstractTensors
from zinf.core.optim.transforms.factory import build_optimizer
from zinf.core.problem.weighted import Weighted
from zinf.core.sharding import batch_share
from zinf.core.step.planner import Planner
from zinf.core.topology import Topology
from zinf.core.trainer import Hook
from zinf.data import TEACHER_LOGITS, describe, text_dataset
from zinf.data.configured import batch_size, difficulties, paced
from zinf.data.text import Split, read_tokens, tokens_hash
from zinf.distributed import AbstractGroup, Alone
from zinf.inference import ROWS, Decoder
from zinf.models import GPTConfig

ALONE = Alone()
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class GptTask:
    """Model, loss and data of a config; windows of texts are its samples.

    Methods are those of `zinf.hf.Task`; those with no work here do nothing.
    """

    config: Config

    @property
    def shape(self) -> GPTConfig:
        return gpt_config(self.config)

    @property
    def length(self) -> int:
        return self.config.sequence_length

    @property
    def num_parameters(self) -> int | None:
        return models.num_parameters(self.shape)

    @property
    def is_entropy(self) -> bool:
        # Experts add a term for their balance.
        return self.config.data.traits.predicts_next and not any(
            self.shape.experts_of_blocks
        )

    def arguments(self, num_shares: int = 1) -> Arguments:
        config, shape = self.config, self.shape
        loss, init, named = self._given(num_shares)
        distillation = config.distillation
        if distillation is not None:
            named["batch"] |= {TEACHER_LOGITS: self.teacher_logits(named["batch"])}
        has_experts = any(shape.experts_of_blocks)
        if config.adapter is None and (has_experts or distillation is not None):
            # How experts are used, and how far the teacher is, for the metrics.
            init, loss = models.init_and_loss(
                shape,
                seed=config.run.seed,
                has_aux=True,
                coefficient=1.0 if distillation is None else distillation.coefficient,
                temperature=1.0 if distillation is None else distillation.temperature,
            )
            named["has_aux"] = True
        optimizer, told = build_optimizer(config), config.told()
        if config.adapter is None:
            return (loss, init, optimizer, told), named
        adapted = self._adapted(loss, init, named)
        named["eval_loss_fn"] = adapted.eval_loss_fn
        return (adapted.loss_fn, adapted.params, optimizer, adapted.config(told)), named

    def batch_spec(self, num_shares: int = 1) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes of one of so many parts of a batch."""
        shape = batch_size(self.config) // num_shares, self.length + 1
        return {"tokens": jax.ShapeDtypeStruct(shape, np.int32)}

    def teacher_logits(self, batch: Mapping[str, Any]) -> jax.ShapeDtypeStruct:
        """Shape and dtype of the logits that a teacher adds to a batch."""
        rows, length = batch["tokens"].shape
        shape = rows, length - 1, self.shape.vocab_size
        return jax.ShapeDtypeStruct(shape, np.float32)

    def _given(self, num_shares: int = 1) -> tuple[Callable, Callable, dict[str, Any]]:
        """The loss, the function that makes the parameters, and other arguments."""
        config, shape = self.config, self.shape
        init, loss = models.init_and_loss(shape, seed=config.run.seed)
        dropout = 0.0 if config.adapter is None else config.adapter.lora_dropout
        draws = shape.dropout or dropout
        sums = models.held_out_sums(shape)
        named = {
            "rng": jax.random.key(config.run.seed) if draws else None,
            "batch": self.batch_spec(num_shares),
            "eval_loss_fn": lambda params, batch: Weighted(*sums(params, batch)),
        }
        return loss, init, named

    def _adapted(
        self, loss: Callable, init: Callable, named: dict[str, Any]
    ) -> Adapted:
        assert self.config.adapter is not None
        found = adapt(loss, init, self.config.adapter, **named)
        begin_from = self.config.adapter.begin_from
        return found if begin_from is None else load_adapter(found, begin_from)

    def engine(self, mesh: Mesh, group: AbstractGroup = ALONE) -> Engine:
        arguments, named = self.arguments(batch_share(mesh)[1])
        return initialize(*arguments, **named, mesh=mesh, group=group)

    def running(self, length: int) -> "RunningGpt":
        shape = replace(self.shape, dropout=0.0)
        return RunningGpt(shape, self.config, min(length, shape.max_length))

    def dataset(
        self,
        split: Split,
        group: AbstractGroup = ALONE,
        *,
        process: tuple[int, int] = (0, 1),
        say: Callable[[str], None] = lambda text: None,
    ) -> grain.IterDataset:
        config, data, (names, files) = self.config, self.config.data, self._files()
        if group.count > 1:
            group.agree({"data of the files": tokens_hash(read_tokens(names, **files))})
        efficiency, is_training = config.data_efficiency, split == "train"
        num_epochs = None if efficiency is None else efficiency.num_epochs
        metrics, seed = difficulties(config) if is_training else None, data.seed
        if efficiency is not None and metrics is not None:
            seed = efficiency.seed
        samples = text_dataset(
            names,
            **files,
            sequence_length=self.length,
            batch_size=batch_size(config),
            seed=seed,
            num_epochs=num_epochs if is_training else 1,
            fills=not is_training and self._knows_weights,
            split=split,
            validation_fraction=data.validation_fraction,
            vocab_size=_model(config).vocab_size,
            process=process,
            num_microbatches=config.num_microbatches,
            metrics=metrics,
            # Both splits are of the same files, which training names.
            say=say if is_training else say_nothing,
        )
        return paced(config, samples) if is_training else samples

    @property
    def _knows_weights(self) -> bool:
        """Whether the loss ignores rows of weight 0, which fill the last batch."""
        return True

    describe = staticmethod(describe)

    def digests(self) -> dict[str, str]:
        names, files = self._files()
        return {"data.content": read_tokens(names, **files).digest()}

    def _files(self) -> tuple[list[str], dict[str, Any]]:
        """The files, and how their tokens are read, for `read_tokens`."""
        data = self.config.data
        # Absolute, because `find_files` takes the name "stdlib" for the standard
        # library, even if the user means a folder of that name.
        paths = data.paths
        is_name = isinstance(paths, str)
        names: list[str] = [paths] if is_name else [str(p.absolute()) for p in paths]
        return names, {
            "glob": data.glob,
            "field": data.field,
            "bin_dtype": data.bin_dtype,
            "cache": data.cache or self.config.run.output / "data",
        }

    def rate_scale(self) -> optax.Schedule | None:
        return None

    def check_files(self) -> None: ...

    def check_exports(self) -> None:
        run = self.config.run
        keys = "export", "export_adapter", "export_best", "push_to_hub"
        asked = [key for key in keys if getattr(run, key)]
        if asked:
            raise ValueError(
                f"run.{asked[0]} writes models of model.huggingface only. Remove it, "
                "and use zinf checkpoint export for this model."
            )

    def check_verified(self) -> None: ...

    def read_constants(self) -> None: ...

    def before_training(self, engine: Any, say: Callable[[str], None]) -> None: ...

    def measures(
        self, engine: Any, batches: Any, *, weights: str = MASTER
    ) -> tuple[()]:
        return ()

    def drawn(
        self, data: grain.IterDataset, engine: Engine, *, evaluated: str | None = None
    ) -> tuple[grain.IterDataset, Sequence[Hook]]:
        return data, ()

    def export(
        self, source: Any, say: Callable[[str], None], *, step: int | None = None
    ) -> None: ...

    def write_adapter(self, tensors: AbstractTensors, output: Path) -> None:
        save_adapter(self._adapted(*self._given()), tensors, output)

    def write_merged(
        self,
        tensors: AbstractTensors,
        output: Path,
        names: Mapping[str, str] | None,
        **written: Any,
    ) -> None:
        merged = MergedTensors(self._adapted(*self._given()), tensors)
        export_safetensors(merged, output, names=names, **written)


@dataclass(frozen=True)
class RunningGpt:
    """A GPT that runs and is not trained; as `zinf.hf.engine.Running`."""

    shape: GPTConfig
    config: Config
    length: int

    @property
    def num_parameters(self) -> int:
        return models.num_parameters(self.shape)

    @property
    def execution(self) -> str:
        return self.config.execution

    @property
    def batch(self) -> dict[str, jax.ShapeDtypeStruct]:
        return {"tokens": jax.ShapeDtypeStruct((ROWS, self.length + 1), np.int32)}

    @cached_property
    def _adapted(self) -> Adapted | None:
        """The model with its weights in few bits, if the config asks for that."""
        kept = self.config.weight_quantization
        if kept is None:
            return None
        init, loss = models.init_and_loss(self.shape, seed=self.config.run.seed)
        return adapt(loss, init, quantization=kept, batch=self.batch)

    def planner(self, *, mesh: Mesh, topology: Topology | None) -> Planner:
        init, loss = models.init_and_loss(self.shape, seed=self.config.run.seed)
        if self._adapted is not None:
            loss, init = self._adapted.loss_fn, self._adapted.params
        rest = optax.identity(), self.config.without_training().told()
        return make_planner(loss, init, *rest, mesh=mesh, topology=topology)

    def decoder(self, planner: Planner) -> Decoder:
        dtype = jnp.dtype(self.config.compute_dtype)
        apply, init_cache = models.decoding(self.shape, dtype)
        if self._adapted is not None:
            apply = self._adapted.applied(apply)
        return Decoder(apply, init_cache, self.shape.max_length)


def _model(config: Config) -> Model:
    """The model section of a config.

    Raises:
        ValueError: there is none.
    """
    if config.model is None or config.model.model_fields_set == {"attention"}:
        raise ValueError(
            "The config has no model section, which zinf train and zinf plan need. "
            "Add one, such as model: {num_layers: 8, num_heads: 5, embed_dim: 320}, "
            "or one of your own: model: {function: module:make}."
        )
    return config.model


def gpt_config(config: Config) -> GPTConfig:
    """The shape of zinf's model that a config asks for.

    Raises:
        ValueError: the config has no model section.
        NotImplementedError: a function of the user makes the model.
    """
    model = _model(config)
    if model.function is not None:
        raise NotImplementedError(
            "This is for zinf's own model and those of transformers, whose parts it "
            f"knows, and model.function {model.function} makes this one. Use the "
            "engine of zinf.initialize in Python."
        )
    kept = config.kept_tokens
    layers = () if kept is None else kept.layers
    given = model.model_dump(exclude={"name", "function", *BESIDE_HUGGINGFACE})
    given["max_length"] = model.max_length or config.sequence_length
    return GPTConfig(**given, random_ltd_layers=layers)
