"""What the README, configs, tests and packaging promise about each other."""

import ast
import re
import shutil
import subprocess
import sys
import tomllib
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
CI = (ROOT / ".ci/run").read_text()
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
# A home or work folder of somebody's machine, at the start of a path.
MACHINE_PATH = re.compile(r"(?<![\w./~-])/(?:work|root|home|Users|tmp/envs)\b")
OURS = {"zinf", "zinf_kernels"}
NOT_OURS = {".git", ".nox", "__pycache__", "build", "dist", "runs"}
# Folders of tests that hold promises of the whole: the README of zinf names each.
PROMISING = (
    *("checkpoint", "distributed", "equivalence", "memory"),
    *("overlap", "property", "ray", "robustness"),
)


def set_up_commands() -> list[str]:
    blocks = re.findall(r"^```(?:bash|sh)\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
    lines = [line for block in blocks for line in block.splitlines()]
    return [line for line in lines if "-m venv" in line]


@cache
def tracked_files() -> list[Path]:
    """What git tracks; without git or a checkout, all but what is plainly generated."""
    git = shutil.which("git")
    if git:
        listing = [git, "-C", ROOT, "ls-files", "-z"]
        asked = subprocess.run(listing, capture_output=True, text=True)
        if asked.returncode == 0:
            names = asked.stdout.split("\0")
            return [ROOT / n for n in names if n and (ROOT / n).is_file()]
    found = (path for path in ROOT.rglob("*") if path.is_file())
    return [path for path in found if not is_generated(path.relative_to(ROOT))]


def is_generated(path: Path) -> bool:
    caches = {part for part in path.parts if part.endswith("_cache")}
    return bool(caches or NOT_OURS & {*path.parts} or path.parts[0].startswith(".venv"))


def test_readme_has_two_set_up_commands_that_need_nothing_but_python():
    train, test = set_up_commands()
    for command in (train, test):
        steps = command.split(" && ")
        venv = steps[0].removeprefix("python3 -m venv ")
        assert venv.startswith(".venv")
        assert all(step.startswith(f"{venv}/bin/") for step in steps[1:])
    assert "bin/zinf train configs/quickstart.yaml" in train
    # A worker takes neighbouring tests: most files stay whole, so what their tests
    # share is computed once, and yet both workers end at the same time.
    assert test.endswith("bin/python -m pytest -n 2 --dist worksteal")


def test_ci_runs_the_test_command_of_the_readme_after_all_cheap_checks():
    [pattern] = re.findall(r"grep -E '(.*)' README.md", CI)
    assert re.findall(pattern, README, re.MULTILINE) == set_up_commands()[1:]
    steps = ["ruff check", "ruff format --check", "pyrefly check", "stop_if_failed\n\n"]
    steps += ['check_tests fast .*bash -c "\\$test_command"', "-m slow"]
    places = [[m.start() for m in re.finditer(step, CI)] for step in steps]
    assert all(len(found) == 1 for found in places[:3] + places[4:])
    order = [found[0] for found in places]
    assert order == sorted(order)
    [extras] = re.findall(r"^extras=([\w,-]+)$", CI, re.MULTILINE)
    # What is for devices, and what the fast tests have installed.
    others = {"cuda", "tpu", "test", "parquet"}
    assert {*extras.split(",")} == {*PROJECT["optional-dependencies"]} - others


def test_readme_names_only_files_that_exist():
    folders = r"(?:\.ci|configs|scripts|tests|zinf|zinf_kernels)"
    named = re.findall(rf"(?<![\w/.-]){folders}/[\w./-]*\w", README)
    named += re.findall(r"\]\((?!\w+:|#)([^)#]+)", README)
    assert named
    assert [name for name in sorted({*named}) if not (ROOT / name).exists()] == []


def named_tests() -> set[str]:
    """The tests in the table of promises of zinf/README.md, by their paths.

    A name without a folder is in the folder of the name before it.
    """
    text = (ROOT / "zinf/README.md").read_text().partition("| promise | test |\n")[2]
    rows = text.partition("\n\n")[0].splitlines()[1:]
    found: set[str] = set()
    for row in rows:
        folder = ""
        for name in re.findall(r"`([^`]+)`", row.rstrip("| ").rpartition(" | ")[2]):
            path = name if "/" in name else f"{folder}/{name}"
            folder = path.rpartition("/")[0]
            found.add(path)
    return found


def test_every_promise_names_tests_that_exist_and_every_folder_of_promises_is_named():
    named = named_tests()
    assert len(named) > len(PROMISING)
    for name in named:
        paths = [*ROOT.glob(name.rstrip("/"))]
        files = [f for path in paths for f in (path, *path.rglob("test_*.py"))]
        texts = [file.read_text() for file in files if file.is_file()]
        # A promise may also name a script, which says how to run it.
        word = "def test_" if name.startswith("tests/") else "__main__"
        assert any(word in text for text in texts), name
    for folder in PROMISING:
        assert any(name.startswith(f"tests/{folder}/") for name in named), folder


def test_no_tracked_file_names_a_path_of_somebodys_machine():
    for text in ("/" + "root/x", "cd /" + "work", "a=/" + "home/me"):
        assert MACHINE_PATH.search(text)
    for text in ("net/work", "./home", "~/" + "home", "/workers"):
        assert not MACHINE_PATH.search(text)
    assert tracked_files()
    found = []
    for path in tracked_files():
        text = path.read_text(errors="replace")
        for number, line in enumerate(text.splitlines(), 1):
            if MACHINE_PATH.search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()}")
    assert found == []


def test_every_import_of_zinf_is_a_declared_dependency():
    # What an extra brings is imported late, with an error that names the extra.
    extras = PROJECT["optional-dependencies"]
    brought = ("parquet", "hf", "lm-eval", "ray")
    more = [text for name in brought for text in extras[name]]
    wanted = [*PROJECT["dependencies"], *more]
    declared = {requirement_name(text) for text in wanted}
    # Also where it is not installed.
    providers = {"PIL": ["pillow"]} | packages_distributions()
    missing = {
        f"{path.relative_to(ROOT)} imports {name}"
        for path in (ROOT / "zinf").rglob("*.py")
        for name in top_level_imports(path) - sys.stdlib_module_names - OURS
        if not declared & {normal(x) for x in (name, *providers.get(name, ()))}
    }
    assert missing == set()


def top_level_imports(path: Path) -> set[str]:
    nodes = list(ast.walk(ast.parse(path.read_text(), path)))
    plain = [a.name for n in nodes if isinstance(n, ast.Import) for a in n.names]
    named = [n.module for n in nodes if isinstance(n, ast.ImportFrom) and n.module]
    return {name.partition(".")[0] for name in (*plain, *named)}


def test_packages_are_marked_as_typed():
    """Hatch puts every file of a package that git tracks into the wheel."""
    for package in PYPROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]:
        assert ROOT / package / "py.typed" in tracked_files()


def requirement_name(text: str) -> str:
    return normal(re.match(r"[\w.-]+", text)[0])


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
