"""The shape of the tree: imports point one way, at top level, and start nothing."""

import ast
import importlib
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from graphlib import CycleError, TopologicalSorter
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "zinf/README.md").read_text()
# Lowest first. A module may import from its own package and from lower layers.
LAYERS = (
    ("core", "core.text"),
    ("core.process", "core.objectives"),
    (
        "core.program",
        "core.jaxpr",
        "core.config",
        "core.topology",
        "distributed",
    ),
    ("core.problem",),
    ("core.sharding",),
    ("core.plan", "core.memory", "moe"),
    ("tiling", "data", "models", "core.rl"),
    ("core.segment",),
    ("core.optim",),
    ("core.machine",),
    ("core.step",),
    ("checkpoint", "observe"),
    ("inference",),
    ("core.engine",),
    (
        *("core.interchange", "adapt", "core.verification"),
        *("core.trainer", "core.rollouts"),
    ),
    ("nnx", "linen", "hf", "ray"),
    ("cli", "lm_eval"),
    ("__main__",),
)
# Packages whose modules import what an extra brings, and what that is.
EXTRAS = {"zinf.hf": "torchax", "zinf.lm_eval": "lm_eval", "zinf.ray": "ray"}
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
# Features know nothing of each other; elsewhere siblings may, without a cycle.
STRANGERS = LEVEL["tiling"]
COMPAT = "zinf.core.jaxpr.compat"
# Modules that may choose what to import, by the version of jax or by the system.
CHOOSING = (COMPAT, "zinf.core.memory.nvme.system")
# A completion in a pipe is the text as it is.
PRINTS_ITSELF = ("zinf.cli.generate",)
WITHOUT_ARRAYS = ("zinf.core.program", "zinf.core.plan")
# Modules that may import inside functions, and what: imports so heavy that most users
# of the module should not wait for them. tests/test_startup.py holds what this buys.
LATE: dict[str, tuple[str, ...]] = {
    "zinf.cli.entry": ("zinf.cli.app",),
    "zinf.cli.app": (
        "tqdm",
        "zinf.cli",
        "zinf.core.config",
        "zinf.core.memory",
        "zinf.observe",
    ),
    "zinf.cli.checkpoint": (
        "zinf.adapt",
        "zinf.checkpoint",
        "zinf.cli",
        "zinf.core.config",
        "zinf.distributed",
        "zinf.core.engine.initialize",
        "zinf.core.interchange",
        "zinf.core.machine",
    ),
    "zinf.cli.data": ("zinf.cli", "zinf.data", "zinf.core.memory"),
    "zinf.cli.inference": ("zinf.cli",),
    "zinf.cli.planning": ("zinf.cli",),
    "zinf.cli.training": ("zinf.cli", "zinf.core.config"),
    "zinf.cli.compress": ("zinf.cli",),
    "zinf.cli.report": ("zinf.core.memory",),
    "zinf.data.extract": ("pyarrow",),
    "zinf.cli.errors": ("zinf.core.memory", "zinf.core.optim", "zinf.core.plan"),
}
DUMPING_GROUNDS = {"utils", "util", "common", "helpers", "misc"}


@dataclass(frozen=True)
class Source:
    """A module: its dotted name and its syntax tree."""

    name: str
    tree: ast.Module

    @property
    def package(self) -> str:
        """The part of zinf that it belongs to, "" for `zinf` itself."""
        return package_of(self.name)


def package_of(name: str) -> str:
    """The part of zinf that a module belongs to: `data`, or `core.plan`."""
    parts = name.split(".")[1:]
    return ".".join(parts[: 2 if parts[:1] == ["core"] else 1])


def source(path: Path) -> Source:
    parts = path.relative_to(ROOT).with_suffix("").parts
    if parts[-1] == "__init__":
        parts = parts[:-1]
    return Source(".".join(parts), ast.parse(path.read_text(), path))


@cache
def sources(folder: str) -> tuple[Source, ...]:
    return tuple(map(source, sorted((ROOT / folder).rglob("*.py"))))


def imports(tree: ast.AST) -> Iterator[tuple[ast.stmt, str]]:
    """Each import statement with each dotted name it asks for.

    `from a.b import c` asks for `a.b.c`, be `c` a module or a name inside `a.b`.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node, alias.name
        elif isinstance(node, ast.ImportFrom):
            dots = "." * node.level
            for alias in node.names:
                yield node, f"{dots}{node.module or ''}.{alias.name}"


def is_within(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def not_pointing_down(module: Source) -> list[str]:
    """Imports of zinf that a layer forbids; `zinf/__init__` may import anything."""
    if not module.package:
        return []
    if module.package not in LEVEL:
        return [f"{module.name} is in no layer: add {module.package!r} to LAYERS"]
    level = LEVEL[module.package]
    found = []
    for node, name in imports(module.tree):
        if not is_within(name, "zinf"):
            continue
        used = package_of(name)
        is_sibling = LEVEL.get(used) == level and level != STRANGERS
        is_below = LEVEL.get(used, len(LAYERS)) < level
        if not (used == module.package or is_sibling or is_below):
            found.append(f"{module.name}:{node.lineno} imports {name}")
    return found


def nested_or_relative(module: Source) -> list[str]:
    """Imports that are not absolute, or not at the top level of the module.

    Those of `CHOOSING` may choose in an `if` or a `try`. Any module may import for type
    checkers only, and those in `LATE` a little in functions.
    """
    may_choose = module.name in CHOOSING
    inside = list(functions(module.tree)) if may_choose else module.tree.body
    nested = {
        node
        for statement in inside
        if not is_for_type_checkers(statement)
        for node in ast.walk(statement)
        if node is not statement
    }
    late = LATE.get(module.name, ())
    return [
        f"{module.name}:{node.lineno} imports {name}"
        for node, name in imports(module.tree)
        if name.startswith(".")
        or (node in nested and not any(is_within(name, allowed) for allowed in late))
    ]


def is_for_type_checkers(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.If) and ast.unparse(statement.test) == (
        "TYPE_CHECKING"
    )


def functions(tree: ast.AST) -> Iterator[ast.AST]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def non_public_jax(module: Source) -> list[str]:
    """Uses of jax's insides, imported or reached as attributes."""
    private = ("jax._src", "jax.interpreters", "jaxlib")
    if module.name == COMPAT:
        return []
    names = [(node.lineno, name) for node, name in imports(module.tree)]
    ends = {package.rpartition(".")[2] for package in private}
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Attribute) and node.attr in ends:
            names.append((node.lineno, ast.unparse(node)))
    return [
        f"{module.name}:{line} uses {name}"
        for line, name in names
        if any(is_within(name, package) for package in private)
    ]


def is_pure(module: Source) -> bool:
    return any(is_within(module.name, pure) for pure in WITHOUT_ARRAYS)


def arrays_in_pure_code(module: Source) -> list[str]:
    if not is_pure(module):
        return []
    return [
        f"{module.name}:{node.lineno} imports {name}"
        for node, name in imports(module.tree)
        if any(is_within(name, package) for package in ("jax", "jaxlib", "numpy"))
    ]


def unescaped_output(module: Source) -> list[str]:
    """Commands print by `core.text.complaint`: it escapes what a terminal obeys."""
    if module.package != "cli" or module.name in PRINTS_ITSELF:
        return []
    return [
        f"{module.name} prints by itself in line {node.lineno}"
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Name) and node.id == "print"
    ]


def dependencies(module: Source, names: frozenset[str]) -> set[str]:
    """The modules of `names` that this one imports."""
    used = set()
    for _, name in imports(module.tree):
        owner = name if name in names else name.rpartition(".")[0]
        if owner in names:
            used.add(owner)
    return used


def first_cycle(modules: tuple[Source, ...]) -> list[str] | None:
    names = frozenset(m.name for m in modules)
    try:
        TopologicalSorter({m.name: dependencies(m, names) for m in modules}).prepare()
    except CycleError as error:
        return error.args[1]
    return None


def python(code: str) -> None:
    """Runs code in a process of its own, so that what is imported here is not there."""
    command = [sys.executable, "-c", code]
    asked = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert asked.returncode == 0, asked.stderr


RULES = (
    *(not_pointing_down, nested_or_relative, non_public_jax, arrays_in_pure_code),
    unescaped_output,
)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_no_module_breaks_the_rule(rule):
    assert sources("zinf")
    assert [found for module in sources("zinf") for found in rule(module)] == []


def test_no_module_imports_itself_through_others():
    assert first_cycle(sources("zinf")) is None


# What each rule must catch, and the nearest thing that it must let through.
BROKEN = (
    (not_pointing_down, "core.plan.build", "from zinf.core.engine import state"),
    (not_pointing_down, "core.plan.build", "from zinf import initialize"),
    (not_pointing_down, "core.plan.build", "from zinf.core import engine"),
    (not_pointing_down, "tiling.linear", "import zinf.models.gpt"),
    (not_pointing_down, "novelty", "import zinf.core.program"),
    (not_pointing_down, "core.novelty", "import zinf.core.program"),
    (nested_or_relative, "core.plan.build", "from .check import check"),
    (nested_or_relative, "core.plan.build", "def f():\n    import json"),
    (nested_or_relative, "core.jaxpr.compat", "def f():\n    import json"),
    (nested_or_relative, "core.plan.build", "if not TYPE_CHECKING:\n    import json"),
    (non_public_jax, "core.segment.cut", "from jax import _src"),
    (non_public_jax, "core.segment.cut", "import jax\nx = jax.interpreters.mlir"),
    (arrays_in_pure_code, "core.program", "from jax.numpy import dtype"),
    (unescaped_output, "cli.plan", "print(1)"),
)
SOUND = (
    (not_pointing_down, "core.optim.loss_scale", "from zinf.core.plan.job import Job"),
    (not_pointing_down, "core.plan.build", "from zinf.core import program"),
    (nested_or_relative, "core.jaxpr.compat", "if True:\n    import json"),
    (nested_or_relative, "core.plan.build", "if TYPE_CHECKING:\n    import json"),
    (non_public_jax, "core.jaxpr.compat", "from jax._src import core"),
    (non_public_jax, "core.segment.cut", "import jax.extend.core"),
    (arrays_in_pure_code, "core.planner", "import numpy as np"),
    (unescaped_output, "cli.plan", "console().print(1)"),
)


def test_the_rules_see_what_breaks_them_and_nothing_else():
    for rule, name, code in BROKEN:
        assert rule(Source(f"zinf.{name}", ast.parse(code))), (name, code)
    for rule, name, code in SOUND:
        assert rule(Source(f"zinf.{name}", ast.parse(code))) == [], (name, code)
    package = Source(
        "zinf.core.plan", ast.parse("from zinf.core.plan.check import check")
    )
    member = Source(
        "zinf.core.plan.check", ast.parse("from zinf.core.plan import Plan")
    )
    assert set(first_cycle((package, member)) or ()) == {
        "zinf.core.plan",
        "zinf.core.plan.check",
    }


def test_every_exception_to_top_level_imports_is_used():
    """What `LATE` allows is imported in a function there, so the list stays short."""
    for name, allowed in LATE.items():
        (module,) = (module for module in sources("zinf") if module.name == name)
        top = set(module.tree.body)
        late = [name for node, name in imports(module.tree) if node not in top]
        for package in allowed:
            assert any(is_within(name, package) for name in late), (name, package)


def is_importable(name: str) -> bool:
    """Whether a module of zinf has the libraries that it imports."""
    extras = [extra for package, extra in EXTRAS.items() if is_within(name, package)]
    return all(find_spec(extra) is not None for extra in extras)


def is_module(name: str) -> bool:
    """Whether the name is that of a module of zinf, and not of what is in one."""
    return any(module.name == name for module in sources("zinf"))


LAZY = {
    source(path).name: path
    for path in sorted((ROOT / "zinf").rglob("__init__.py"))
    if "\nmake_lazy(" in path.read_text()
}


@pytest.mark.parametrize("name", LAZY)
def test_a_lazy_package_has_the_names_that_type_checkers_see(name):
    if not is_importable(name):
        pytest.skip(f"{name} needs {EXTRAS[name]}, which an extra brings")
    package = importlib.import_module(name)
    (checked,) = filter(is_for_type_checkers, source(LAZY[name]).tree.body)
    seen = {name.rpartition(".")[2]: name for _, name in imports(checked)}
    assert seen and {*seen} <= {*dir(package)}
    for attribute, full in seen.items():
        assert isinstance(getattr(package, attribute), ModuleType) == is_module(full)
    with pytest.raises(AttributeError, match="has no attribute 'absent'"):
        getattr(package, "absent")  # noqa: B009


def test_pure_code_needs_no_jax_or_numpy_however_indirectly():
    """`zinf/__init__` imports everything, so a stand-in takes its place here."""
    pure = [module.name for module in sources("zinf") if is_pure(module)]
    python(
        "import importlib, sys, types\n"
        "zinf = types.ModuleType('zinf')\n"
        f"zinf.__path__ = [{str(ROOT / 'zinf')!r}]\n"
        "sys.modules.update(zinf=zinf, jax=None, jaxlib=None, numpy=None)\n"
        f"for name in {pure}:\n"
        "    importlib.import_module(name)\n"
    )


def test_importing_zinf_touches_no_device():
    """Once a backend has started, jax refuses to change the number of CPU devices."""
    code = (
        "import importlib, jax\n"
        f"for name in {[m.name for m in sources('zinf') if is_importable(m.name)]}:\n"
        "    importlib.import_module(name)\n"
        "jax.config.update('jax_num_cpu_devices', 3)\n"
    )
    python(code)


def test_the_front_door_is_small_and_the_readme_says_what_each_entry_is_for():
    entries = {path.name for path in (ROOT / "zinf").iterdir()} - {"__pycache__"}
    table = README.partition("| in `zinf/` | what it is for |\n")[2]
    rows = table.partition("\n\n")[0].splitlines()[1:]
    assert {row.split("`")[1].rstrip("/") for row in rows} == entries
    assert len(entries) <= 20


def test_the_readme_draws_the_imports_as_they_are():
    command = [sys.executable, "scripts/reports/house.py", "--check"]
    drawn = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert drawn.returncode == 0, drawn.stderr


def test_no_dumping_grounds():
    folders = ("zinf", "zinf_kernels", "tests", "scripts")
    found = [p for f in folders for p in (ROOT / f).rglob("*")]
    assert [p for p in found if p.stem in DUMPING_GROUNDS] == []


def test_kernels_never_import_zinf():
    kernels = sources("zinf_kernels")
    used = [(k.name, name) for k in kernels for _, name in imports(k.tree)]
    assert [pair for pair in used if is_within(pair[1], "zinf")] == []


def test_every_kernel_has_a_caller_in_zinf():
    """Named in the package docstring too, for those who look for what is used."""
    folders = (ROOT / "zinf_kernels").iterdir()
    ops = {path.name for path in folders if (path / "api.py").exists()}
    called = {
        op
        for module in sources("zinf")
        for _, name in imports(module.tree)
        for op in ops
        if is_within(name, f"zinf_kernels.{op}")
    }
    assert ops and ops <= called
    package = ast.get_docstring(
        ast.parse((ROOT / "zinf_kernels/__init__.py").read_text())
    )
    assert package is not None
    for op in ops:
        assert f"`{op}`" in package
