"""Finds the tensor of a file that belongs to each leaf of a model."""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch

from zinf.core.interchange.rounding import is_exact, is_float
from zinf.core.program import ArraySpec

Names = Mapping[str, str] | Callable[[str], str] | None
"""Names of tensors: a mapping by key path, or a function of a key path.

A leaf has its usual name if the mapping lacks it, or if there is no mapping (None).
"""

MAX_SHOWN = 8


def dotted(path: str) -> str:
    """The usual name in safetensors files: "blocks/0/kernel" is "blocks.0.kernel"."""
    return path.replace("/", ".")


def named(
    paths: Collection[str], names: Names, usual: Callable[[str], str] = dotted
) -> dict[str, str]:
    """The name of every leaf's tensor.

    Raises:
        ValueError: `names` has a key that is not a leaf, or two leaves have one name.
    """
    if callable(names):
        return _distinct({path: names(path) for path in paths})
    given = names or {}
    unknown = [path for path in given if path not in paths]
    if unknown:
        raise ValueError(
            f"names has {listed(unknown)}, and there is no such leaf. The leaves are "
            f"{listed(paths)}."
        )
    return _distinct({path: given.get(path, usual(path)) for path in paths})


@dataclass(frozen=True)
class Terms:
    """The differences between a file and a model that an import accepts.

    Attributes:
        keep: patterns of key paths. A matching leaf without a tensor in the file keeps
            its value.
        ignore: patterns of tensor names. A matching tensor without a leaf is skipped.
        may_round: whether values may be rounded to the dtype that a leaf is kept in.
        remedy: what an error says to do about other differences.
    """

    keep: Collection[str] = ()
    ignore: Collection[str] = ()
    may_round: bool = False
    remedy: str = (
        "Name tensors with names=, leaves to leave as they are with keep=, tensors to "
        "leave out with ignore=, and allow rounding with may_round=True."
    )


def match(
    leaves: Mapping[str, ArraySpec],
    tensors: Mapping[str, ArraySpec],
    name_of: Mapping[str, str],
    terms: Terms,
) -> dict[str, str]:
    """The name of the tensor of every leaf that has one, after all were compared.

    Raises:
        ValueError: a leaf has no tensor, a tensor has no leaf, or their shapes or
            dtypes differ. The message names the first few of each kind.
    """
    found = {path: name for path, name in name_of.items() if name in tensors}
    used = set(found.values())
    missing = [
        f"{path!r} (as {name!r})"
        for path, name in name_of.items()
        if path not in found and not _matches(path, terms.keep)
    ]
    unexpected = [
        repr(name)
        for name in tensors
        if name not in used and not _matches(name, terms.ignore)
    ]
    problems = []
    if missing:
        problems.append(f"no tensor for {len(missing)} leaves: {listed(missing)}")
    if unexpected:
        problems.append(f"{len(unexpected)} tensors of no leaf: {listed(unexpected)}")
    for path, name in found.items():
        problem = _difference(leaves[path], tensors[name], terms)
        if problem:
            problems.append(f"{path!r} is {problem} ({name!r})")
    if problems:
        left = len(problems) - MAX_SHOWN
        more = [f"and {left} more"] * (left > 0)
        lines = "\n  ".join([*problems[:MAX_SHOWN], *more])
        raise ValueError(
            f"These tensors are not those of this model:\n  {lines}\n{terms.remedy} "
            "Nothing was overwritten."
        )
    return found


def listed(items: Iterable[str]) -> str:
    """The first few items, and the number of all if there are more."""
    items = list(items)
    more = [f"... ({len(items)} in all)"] * (len(items) > MAX_SHOWN)
    return ", ".join([*items[:MAX_SHOWN], *more])


def _difference(leaf: ArraySpec, tensor: ArraySpec, terms: Terms) -> str | None:
    if leaf.shape != tensor.shape:
        return f"{list(leaf.shape)} here and {list(tensor.shape)} there"
    if is_exact(tensor.dtype, leaf.dtype):
        return None
    if terms.may_round and is_float(tensor.dtype) and is_float(leaf.dtype):
        return None
    return f"{leaf.dtype} here and {tensor.dtype} there, which does not fit in it"


def _distinct(names: dict[str, str]) -> dict[str, str]:
    paths: dict[str, str] = {}
    for path, name in names.items():
        other = paths.setdefault(name, path)
        if other != path:
            raise ValueError(
                f"The leaves {other!r} and {path!r} would both be the tensor {name!r}. "
                "Give one of them another name."
            )
    return names


def _matches(name: str, patterns: Collection[str]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)
