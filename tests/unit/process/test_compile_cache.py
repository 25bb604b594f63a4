"""Where compiled programs are kept, and who decides it."""

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.compilation_cache import compilation_cache

import zinf
from zinf.core.process import compile_cache
from zinf.core.process.compile_cache import DIRECTORY, keep_compiled, starts_folder
from zinf.core.process.user_cache import own_files, prune


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The caches of a user who has told jax nothing."""
    before = folder()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(compile_cache, "_named", set())
    compile_cache._prune_once.cache_clear()
    jax.config.update(DIRECTORY, None)
    yield tmp_path
    jax.config.update(DIRECTORY, before)
    compilation_cache.reset_cache()


def folder() -> str | None:
    return getattr(jax.config, DIRECTORY)


def test_programs_are_kept_in_the_users_cache_and_that_is_said_once(home, caplog):
    # A program that was compiled earlier, when there was no folder.
    jax.jit(lambda x: x + 1)(jnp.ones(3))
    with caplog.at_level(logging.WARNING):
        keep_compiled("auto")
        keep_compiled("auto")
    (said,) = caplog.messages
    kept = folder()
    assert kept is not None and kept.startswith(f"{home}/zinf/compiled/jaxlib-")
    assert kept in said
    jax.jit(lambda x: x * 3 - 1)(jnp.ones(3)).block_until_ready()
    assert any(name.endswith("-cache") for name in os.listdir(kept))
    assert starts_folder() == Path(kept) / "starts"
    keep_compiled(False)
    assert folder() is None and starts_folder() is None
    keep_compiled("auto")
    assert folder() == kept and len(caplog.messages) == 1


def test_a_folder_that_jax_was_told_stays(home):
    jax.config.update(DIRECTORY, str(home / "own"))
    for asked in ("auto", home / "other", False):
        keep_compiled(asked)
        assert folder() == str(home / "own") and starts_folder() is None
    assert not list(home.iterdir())


def test_a_named_folder_is_made_and_one_that_cannot_be_is_done_without(home):
    (home / "file").write_text("")
    keep_compiled(home / "file" / "in it")
    assert folder() is None
    keep_compiled(home / "named")
    assert folder() == str(home / "named")


def test_what_was_used_last_is_kept_within_the_bound(tmp_path):
    (tmp_path / "a folder").mkdir()
    for age, name in enumerate(["new", "older", "oldest", "too old"]):
        path = tmp_path / name
        path.write_bytes(bytes(10))
        used = path.stat().st_mtime - age * 100
        os.utime(path, (used, used))
    prune(tmp_path, max_bytes=1000, max_seconds=250)
    assert {p.name for p in tmp_path.iterdir()} == {
        "a folder",
        "new",
        "older",
        "oldest",
    }
    prune(tmp_path, max_bytes=25, max_seconds=250)
    assert {p.name for p in tmp_path.iterdir()} == {"a folder", "new", "older"}


def test_what_starts_find_out_is_forgotten_when_any_module_changes():
    """`machine_digest` has the content of all of them, and of the kernels."""
    found = {path.as_posix() for path in own_files()}
    package = Path(zinf.__file__).parent
    names = "core/plan/choose.py", "core/process/user_cache.py", "__init__.py"
    assert found >= {(package / name).as_posix() for name in names}
    assert any("/zinf_kernels/attention/" in name for name in found)
