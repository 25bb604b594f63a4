"""Draws which package of zinf imports which, into zinf/README.md.

    python scripts/reports/house.py            writes the picture anew
    python scripts/reports/house.py --check    fails if it is not what the imports say

A package stands below all that import it. Packages of one line could change places.
"""

import argparse
import ast
import sys
import textwrap
from collections.abc import Iterable, Mapping
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "zinf/README.md"
BEGIN = "<!-- drawn by scripts/reports/house.py -->\n```\n"
END = "```\n"
COLUMNS = 100


def package_of(name: str) -> str:
    """`core.plan` of `zinf.core.plan.check`, `data` of `zinf.data.text`."""
    parts = name.split(".")[1:]
    return ".".join(parts[: 2 if parts[:1] == ["core"] else 1])


def imported_names(path: Path) -> Iterable[str]:
    """The dotted names of zinf that a module asks for."""
    for node in ast.walk(ast.parse(path.read_text(), path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def imports_by_package(root: Path) -> dict[str, set[str]]:
    """The packages that each package imports; modules beside packages are packages."""
    found: dict[str, set[str]] = {}
    for path in sorted((root / "zinf").rglob("*.py")):
        name = ".".join(path.relative_to(root).with_suffix("").parts)
        package = package_of(name.removesuffix(".__init__"))
        if package in ("", "core", "__main__"):
            continue
        names = (n for n in imported_names(path) if n.startswith("zinf."))
        used = {package_of(n) for n in names}
        found.setdefault(package, set()).update(used - {package, ""})
    return {name: used & {*found} for name, used in found.items()}


def layers_of(imports: Mapping[str, set[str]]) -> list[list[str]]:
    """Packages from the bottom up, each as low as what it imports allows."""
    sorter = TopologicalSorter(imports)
    sorter.prepare()
    layers = []
    while sorter.is_active():
        layers.append(sorted(sorter.get_ready()))
        sorter.done(*layers[-1])
    return layers


def picture(imports: Mapping[str, set[str]]) -> str:
    """One line for each package, the top of the house first."""
    layers = layers_of(imports)
    order = [name for layer in layers for name in layer]
    width = max(map(len, order)) + 2
    lines = []
    for layer in reversed(layers):
        for name in layer:
            used = [other for other in order if other in imports[name]]
            shown = " ".join(reversed(used)).replace("core.", "")
            wrapped = textwrap.wrap(shown, COLUMNS - width) or ["-"]
            lines.append(f"{name:{width}}{wrapped[0]}")
            lines += [f"{'':{width}}{more}" for more in wrapped[1:]]
        lines.append("")
    return "\n".join(lines[:-1]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing")
    options = parser.parse_args()
    before, begin, rest = README.read_text().partition(BEGIN)
    shown, end, after = rest.partition(END)
    if not (begin and end):
        sys.exit(f"{README} has no block after {BEGIN!r}")
    drawn = picture(imports_by_package(ROOT))
    if not options.check:
        README.write_text(before + begin + drawn + end + after)
    elif shown != drawn:
        sys.exit(f"{README} shows other imports: run python scripts/reports/house.py")


if __name__ == "__main__":
    main()
