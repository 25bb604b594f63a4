"""Batches: their shape, and how a step cuts them into microbatches."""

from collections import Counter
from collections.abc import Collection, Generator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zinf.core.config import Config
from zinf.core.plan import InfeasibleError
from zinf.core.segment import named_leaves


def batch_spec(
    batch: Any,
    num_microbatches: int,
    num_shares: int = 1,
    *,
    setting: str = "gradient_accumulation_steps",
) -> Any:
    """The shapes and dtypes of one microbatch of all processes together, as a pytree.

    A leaf with a leading dim is cut along it; every microbatch gets scalars whole.

    Args:
        batch: the part of one process; all `num_shares` parts have the same shapes.
        setting: what errors call `num_microbatches`.

    Raises:
        ValueError: a leaf is no array of numbers, or its leading dim cannot be divided
            into `num_microbatches`, or is not the one of the other leaves although the
            batch is divided.
    """
    if num_microbatches < 1:
        raise ValueError(f"{setting} must be at least 1; found {num_microbatches}.")
    for path, leaf in named_leaves(batch).items():
        _check_kind(path, leaf)
        _check_divides(path, leaf, num_microbatches, setting)
        if np.shape(leaf)[:1] == (0,):
            raise ValueError(
                f"batch leaf {path!r} has shape {list(np.shape(leaf))}: the batch is "
                "empty. Leave such batches out."
            )

    if num_microbatches > 1 or num_shares > 1:
        _check_same_rows(batch, f"{setting} = {num_microbatches}, {num_shares} parts")

    def cut(leaf: Any) -> jax.ShapeDtypeStruct:
        shape = tuple(np.shape(leaf))
        if shape:
            shape = (num_shares * (shape[0] // num_microbatches), *shape[1:])
        return jax.ShapeDtypeStruct(shape, jnp.result_type(leaf))

    return jax.tree.map(cut, batch)


def check_values(batch: Any) -> None:
    """Raise if a leaf of the batch is only a shape, or jax would change its integers.

    Raises:
        ValueError: a leaf has no values, or has an integer of 64 bits that the 32 bits
            do not hold to which jax casts it.
    """
    for path, leaf in named_leaves(batch).items():
        if isinstance(leaf, jax.ShapeDtypeStruct):
            raise ValueError(
                f"batch leaf {path!r} is a jax.ShapeDtypeStruct, which has no values. "
                "Shapes are enough for zinf.initialize(batch=) alone."
            )
        if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "iu" and leaf.size:
            limits = np.iinfo(jax.dtypes.canonicalize_dtype(leaf.dtype))
            if limits.bits == 8 * leaf.itemsize:
                continue
            for value in (leaf.min(), leaf.max()):
                if not limits.min <= value <= limits.max:
                    raise ValueError(
                        f"batch leaf {path!r} has the {leaf.dtype} {value}, which jax "
                        f"would cast to {limits.dtype} as another number. Mend the "
                        "data, or set jax_enable_x64."
                    )


@contextmanager
def with_shapes_before(
    batch: Any, earlier: Collection[tuple]
) -> Generator[None, None, None]:
    """Adds to an error of the `with` block how `batch` differs from the one before.

    Args:
        earlier: the signatures of the batches before; without any there is no note.
    """
    try:
        yield
    except Exception as error:
        if earlier and not isinstance(error, InfeasibleError):
            error.add_note(_difference(batch, list(earlier)[-1]))
        raise


def _difference(batch: Any, before: tuple) -> str:
    structure, kinds = before
    if jax.tree.structure(batch) != structure:
        return (
            f"This batch has the structure {jax.tree.structure(batch)}; the one before "
            f"had {structure}."
        )
    pairs = zip(named_leaves(batch).items(), kinds, signature(batch)[1], strict=True)
    changes = [
        f"{path!r} is {new[1]}{list(new[0])}, before it was {old[1]}{list(old[0])}"
        for (path, _), old, new in pairs
        if old != new
    ]
    return f"This batch has another shape than the one before: {'; '.join(changes)}."


def check_rows(batch: Any, config: Config, num_shares: int = 1) -> None:
    """Raise if the config sets a batch size and `batch` has another one.

    With `dynamic_batching` batches have any number of rows.

    Args:
        batch: the part of one process; all `num_shares` parts have the same shapes.

    Raises:
        ValueError: a leaf has more or fewer samples than the config says.
    """
    if config.batch_size is None or config.dynamic_batching is not None:
        return
    wanted = config.batch_size // num_shares
    for path, leaf in named_leaves(batch).items():
        shape = np.shape(leaf)
        is_cut = config.cuts_rows and shape and shape[0] % wanted == 0
        if shape and shape[0] != wanted and not is_cut:
            part = f" in {num_shares} parts" if num_shares > 1 else ""
            raise ValueError(
                f"batch leaf {path!r} has shape {list(shape)}, {shape[0]} samples, but "
                f"the config asks for {config.batch_size} a step{part}: "
                f"{config.num_microbatches} microbatches of {config.microbatch_size} "
                "samples per device. Change the batch, or train_batch_size and "
                "train_micro_batch_size_per_gpu, or leave both out."
            )


def _check_kind(path: str, leaf: Any) -> None:
    if isinstance(leaf, (bool, int, float)):
        return
    if isinstance(leaf, jax.Array) and leaf.is_deleted():
        raise ValueError(
            f"batch leaf {path!r} was deleted, as jax.jit does with arguments that are "
            "donated to it. Give the engine a copy made before, or do not donate it."
        )
    found = f"a {type(leaf).__name__}"
    if isinstance(leaf, (jax.ShapeDtypeStruct, jax.Array, np.ndarray, np.generic)):
        # jax counts ml_dtypes such as bfloat16 as numbers; numpy does not.
        if any(jnp.issubdtype(leaf.dtype, kind) for kind in (np.number, np.bool_)):
            return
        found = f"of {leaf.dtype}"
    raise ValueError(
        f"batch leaf {path!r} is {found}, not an array of numbers. Convert it, or "
        "leave it out of the batch."
    )


def _check_divides(path: str, leaf: Any, num_microbatches: int, setting: str) -> None:
    shape = np.shape(leaf)
    if shape and shape[0] % num_microbatches:
        raise ValueError(
            f"batch leaf {path!r} has shape {list(shape)}, whose leading dim "
            f"{shape[0]} is not a multiple of {setting} = {num_microbatches}."
        )


def _check_same_rows(batch: Any, how: str) -> None:
    """Raise if leaves have different leading dims: one of them is no set of samples."""
    shapes = {path: np.shape(leaf) for path, leaf in named_leaves(batch).items()}
    counts = Counter(shape[0] for shape in shapes.values() if shape)
    if len(counts) < 2:
        return
    # Most leaves have the samples; of as many, the larger leading dim does.
    rows = max(counts, key=lambda n: (counts[n], n))
    others = [f"{p!r} {list(s)}" for p, s in shapes.items() if s and s[0] != rows]
    raise ValueError(
        f"The batch has {rows} samples, and is divided along the leading dim of every "
        f"leaf ({how}). But these leaves have other leading dims: {', '.join(others)}. "
        "Let loss_fn close over what is the same for all samples (class weights, for "
        f"example), or give each sample its own: [{rows}, ...]."
    )


def by_microbatch(batch: Any, spec: Any, num_microbatches: int) -> Any:
    """This process's part of a batch, with a leading microbatch dim, as NumPy arrays.

    The arrays have the dtypes of `spec` and memory of their own. The shapes of `spec`
    are those of all parts together.
    """

    def cut(wanted: jax.ShapeDtypeStruct, leaf: Any) -> np.ndarray:
        array = np.asarray(leaf)
        if array.ndim:
            rows = array.shape[0] // num_microbatches
            array = array.reshape(num_microbatches, rows, *array.shape[1:])
        own = np.empty((num_microbatches, *array.shape[1:]), wanted.dtype)
        own[...] = array
        return own

    return jax.tree.map(cut, spec, batch)


def count_tokens(spec: Any, num_microbatches: int) -> int:
    """Entries of the largest integer leaf of a batch.

    Leaves of more than two dims count only if there are no others, as they may be
    positions of tokens. A batch without integer leaves counts its examples.
    """
    leaves = [s for s in jax.tree.leaves(spec) if s.shape]
    integers = [s for s in _integers(spec) if s.shape]
    flat = [s.size for s in integers if len(s.shape) <= 2]
    integers = flat or [s.size for s in integers]
    examples = [s.shape[0] for s in leaves]
    return num_microbatches * max(integers or examples or [1])


def has_tokens(spec: Any) -> bool:
    """Whether a batch has integers in rows; one of each sample is a label."""
    return any(len(s.shape) > 1 for s in _integers(spec))


def _integers(spec: Any) -> list[Any]:
    return [s for s in jax.tree.leaves(spec) if jnp.issubdtype(s.dtype, jnp.integer)]


def signature(batch: Any) -> tuple:
    """Structure, shapes and dtypes of a batch; a plan is for one signature.

    Raises:
        ValueError: a leaf is no array.
    """
    for path, leaf in named_leaves(batch).items():
        _check_kind(path, leaf)
    leaves, structure = jax.tree.flatten(batch)
    return structure, tuple((np.shape(x), str(jnp.result_type(x))) for x in leaves)
