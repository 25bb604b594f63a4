"""Parses the text of a compiled program into computations and instructions.

XLA prints a compiled program (`jax.stages.Compiled.as_text`) with instructions in the
order in which they are issued. Only the parts that this package needs are parsed.
"""

import re
from dataclasses import dataclass
from functools import cached_property

from zinf.core.topology.compiled.shape import Leaf, leaves

COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*)$")
OPCODE = re.compile(r"\s*([\w\-]+)(?=\()")
REFERENCE = re.compile(r"%([\w.\-]+)")
INDEX_COMMENT = re.compile(r"/\*index=\d+\*/")
CALLED = re.compile(
    r"\b(?:calls|to_apply|body|condition|true_computation|false_computation)"
    r"=%?([\w.\-]+)|\b(?:branch_computations|called_computations)=\{([^}]*)\}"
)


@dataclass(frozen=True)
class Instruction:
    """One line: `%name = shape opcode(arguments), attributes`."""

    name: str
    shape: str
    opcode: str
    arguments: str
    attributes: str
    is_root: bool

    @cached_property
    def operands(self) -> tuple[str, ...]:
        """Names of the instructions that this one reads, in the same computation."""
        return tuple(REFERENCE.findall(self.arguments))

    @cached_property
    def leaves(self) -> tuple[Leaf, ...]:
        """The arrays of its result."""
        return leaves(self.shape)

    @cached_property
    def called(self) -> tuple[str, ...]:
        """Names of the computations that it runs."""
        names: list[str] = []
        for one, several in CALLED.findall(self.attributes):
            names += [one] if one else REFERENCE.findall(several)
        return tuple(names)

    def attribute(self, pattern: str) -> str | None:
        """The first group of a pattern in the attributes; None if it does not match."""
        found = re.search(pattern, self.attributes)
        return found.group(1) if found else None


@dataclass(frozen=True)
class Computation:
    """Instructions in the order in which they are issued."""

    name: str
    instructions: tuple[Instruction, ...]

    @cached_property
    def by_name(self) -> dict[str, Instruction]:
        return {one.name: one for one in self.instructions}

    @cached_property
    def position(self) -> dict[str, int]:
        return {one.name: at for at, one in enumerate(self.instructions)}

    @cached_property
    def users(self) -> dict[str, tuple[Instruction, ...]]:
        """The instructions that read the result of each instruction, in order."""
        found: dict[str, tuple[Instruction, ...]] = {}
        for one in self.instructions:
            for operand in one.operands:
                found[operand] = (*found.get(operand, ()), one)
        return found

    @cached_property
    def root(self) -> Instruction:
        return next(one for one in self.instructions if one.is_root)

    def operand_leaves(self, one: Instruction) -> tuple[Leaf, ...]:
        """The arrays that an instruction reads."""
        return tuple(
            leaf for name in one.operands for leaf in self.by_name[name].leaves
        )


@dataclass(frozen=True)
class Module:
    """A compiled program; every one of its devices runs the same instructions."""

    computations: dict[str, Computation]
    entry: str
    num_devices: int


def parse(text: str) -> Module:
    """The module that XLA printed as `text`.

    Raises:
        ValueError: the text has no entry computation, so it is not a module of XLA.
    """
    computations: dict[str, Computation] = {}
    entry = None
    name, inside = "", []
    for line in text.splitlines():
        if header := COMPUTATION.match(line):
            name, inside = header.group(2), []
            entry = name if header.group(1) else entry
        elif line.startswith("}") and inside:
            computations[name] = Computation(name, tuple(inside))
        elif found := INSTRUCTION.match(line):
            inside.append(_instruction(found))
    if entry is None:
        raise ValueError(
            "The text has no ENTRY computation, so it is not a compiled program. Pass "
            "what jax.jit(f).lower(...).compile().as_text() returns."
        )
    return Module(computations, entry, _num_devices(text))


def _instruction(found: re.Match[str]) -> Instruction:
    rest = INDEX_COMMENT.sub("", found.group(3))
    end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.index(" ")
    shape, rest = rest[:end], rest[end:]
    opcode = OPCODE.match(rest)
    assert opcode is not None, f"no operation in {found.group(0)!r}"
    start = opcode.end()
    end = _closing(rest, start)
    return Instruction(
        name=found.group(2),
        shape=shape,
        opcode=opcode.group(1),
        arguments=rest[start + 1 : end],
        attributes=rest[end + 1 :],
        is_root=found.group(1) is not None,
    )


def _closing(text: str, start: int) -> int:
    """The position where the bracket that opens at `start` closes.

    Constants may contain brackets too; those of XLA's arrays come in pairs.
    """
    depth = 0
    for at in range(start, len(text)):
        if text[at] == "(":
            depth += 1
        elif text[at] == ")":
            depth -= 1
            if depth == 0:
                return at
    raise ValueError(f"A bracket does not close in {text[start : start + 80]!r}.")


def _num_devices(text: str) -> int:
    header = text[: text.find("\n")]
    counts = re.findall(r"\b(?:replica_count|num_partitions)=(\d+)", header)
    product = 1
    for count in counts:
        product *= int(count)
    return product
