"""What the README, the configs and the packaging promise about each other."""

import ast
import re
import shutil
import subprocess
import sys
import tomllib
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from zinf.config import Config

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CONFIGS = sorted(
    path.relative_to(ROOT)
    for path in (ROOT / "configs").glob("*")
    if path.suffix in {".yaml", ".yml", ".json"}
)
# A home or work folder of somebody's machine, at the start of a path.
MACHINE_PATH = re.compile(r"(?<![\w./~-])/(?:work|root|home|Users|tmp/envs)\b")
OURS = {"zinf", "zinf_kernels"}
NOT_OURS = {".git", ".nox", "__pycache__", "build", "dist", "runs"}

# `python3 -m venv FOLDER` whose python prints what pytest would.
STAND_IN = """#!/bin/sh
mkdir -p "$3/bin"
for name in python pip ruff pyrefly; do
  cat >"$3/bin/$name" <<'END'
#!/bin/sh
case "$*" in
  *pytest*slow) name=slow ;;
  *pytest*) name=fast ;;
  *) exit 0 ;;
esac
printf 'details\\n== short test summary info ==\\n%s passed\\n' $name
END
  chmod +x "$3/bin/$name"
done
"""


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


def run_ci(folder: Path, python: str) -> subprocess.CompletedProcess[str]:
    """`.ci/run` with a stand-in for `python3`, and a browser that is there already."""
    for name, content in (("python3", python), ("chromium", "#!/bin/sh\n")):
        stand_in = folder / name
        stand_in.write_text(content)
        stand_in.chmod(0o755)
    environment = {"PATH": f"{folder}:/usr/local/bin:/usr/bin:/bin"}
    command = [ROOT / ".ci/run"]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def test_ci_runs_the_test_command_of_the_readme(tmp_path):
    """A stand-in for `python3` notes its arguments and ends the README's command."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    log = tmp_path / "log"
    asked = run_ci(tmp_path, f'#!/bin/sh\necho "$(pwd): $*" >>{log}\nexit 1\n')
    assert asked.returncode != 0
    steps = set_up_commands()[1].split(" && ")
    commands = [line for line in asked.stdout.splitlines() if "bash -c" in line]
    # It sets up, and ends there: nothing else is tried without an environment.
    assert [x.partition("bash -c ")[2] for x in commands] == [" && ".join(steps[:2])]
    [extras] = re.findall(r"^extras=([\w,-]+)$", (ROOT / ".ci/run").read_text(), re.M)
    # What is for devices, and what the fast tests have installed.
    others = {"cuda", "tpu", "test", "parquet"}
    assert {*extras.split(",")} == {*PROJECT["optional-dependencies"]} - others
    folder, arguments = log.read_text().splitlines()[0].split(": ")
    assert arguments == "-m venv .venv-test"
    assert not Path(folder).exists(), "the clone is left behind"


def test_ci_ends_with_the_summaries_of_the_test_runner(tmp_path):
    """Stand-ins for the programs of the README's command print one each."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    asked = run_ci(tmp_path, STAND_IN)
    assert asked.returncode == 0, asked.stderr
    lines = asked.stdout.splitlines()
    fast, slow = (i for i, line in enumerate(lines) if line.startswith("== the"))
    assert lines[fast + 1 : slow] == ["== short test summary info ==", "fast passed"]
    assert lines[slow + 1 :] == ["== short test summary info ==", "slow passed"]


def test_readme_names_only_files_that_exist():
    folders = r"(?:\.ci|configs|scripts|tests|zinf|zinf_kernels)"
    named = re.findall(rf"(?<![\w/.-]){folders}/[\w./-]*\w", README)
    named += re.findall(r"\]\((?!\w+:|#)([^)#]+)", README)
    assert named
    assert [name for name in sorted({*named}) if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("path", CONFIGS, ids=str)
def test_every_shipped_config_loads(path):
    Config.load(ROOT / path)


def test_no_tracked_file_names_a_path_of_somebodys_machine():
    assert tracked_files()
    found = []
    for path in tracked_files():
        text = path.read_text(errors="replace")
        for number, line in enumerate(text.splitlines(), 1):
            if MACHINE_PATH.search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()}")
    assert found == []


@pytest.mark.parametrize("text", ["/" + "root/x", "cd /" + "work", "a=/" + "home/me"])
def test_a_path_of_somebodys_machine_is_seen(text):
    assert MACHINE_PATH.search(text)


@pytest.mark.parametrize("text", ["net/work", "./home", "~/" + "home", "/workers"])
def test_other_paths_are_no_machine_paths(text):
    assert not MACHINE_PATH.search(text)


def test_every_import_of_zinf_is_a_declared_dependency():
    # What an extra brings is imported late, with an error that names the extra.
    extras = PROJECT["optional-dependencies"]
    brought = ("parquet", "hf", "lm-eval", "ray")
    more = [text for name in brought for text in extras[name]]
    wanted = [*PROJECT["dependencies"], *more]
    declared = {requirement_name(text) for text in wanted}
    providers = packages_distributions()
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
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    for package in tools["hatch"]["build"]["targets"]["wheel"]["packages"]:
        assert ROOT / package / "py.typed" in tracked_files()


def requirement_name(text: str) -> str:
    return normal(re.match(r"[\w.-]+", text)[0])


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
