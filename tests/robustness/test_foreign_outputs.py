"""Commands that write to a folder leave the files of others in it as they are."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from tests.command import run as zinf

# A user's tree, with names that zinf has for its own files and folders too.
FOREIGN = {
    "notes.txt": b"mine",
    "photos/2019/a.jpg": b"\xff\xd8mine",
    "2020/b.jpg": b"\xff\xd8mine",
    "data/raw.jsonl": b'{"text": "mine"}',
    "data/text-0123456789abcdef.text": b"mine",
    "run.7/run.json": b"{}",
    "arrays/000001/c.0": b"mine",
    "thesis.lock": b"mine",
    "report.partial": b"mine",
    ".zinf-notes": b"mine",
}
# Foreign files with the very name of a lock or record: the command is refused.
IN_THE_WAY = {"run.lock": b"mine", "checkpoints.lock": b'{"pid": 1}'}


def tree(folder: Path, files: dict[str, bytes]) -> Path:
    """The files below a folder, and a symbolic link out of it."""
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    outside = folder.with_name(f"{folder.name}-outside")
    outside.mkdir(exist_ok=True)
    (outside / "thesis.tex").write_bytes(b"mine")
    (folder / "link").symlink_to(outside)
    return folder


def check(folder: Path, files: dict[str, bytes]) -> None:
    assert {name: (folder / name).read_bytes() for name in files} == files
    assert (folder / "link").is_symlink()
    assert (folder / "link/thesis.tex").read_bytes() == b"mine"


def config(folder: Path, **changes: Any) -> Path:
    letters = np.random.default_rng(0).integers(97, 105, 2000).astype(np.uint8)
    (folder / "text.txt").write_bytes(letters.tobytes())
    path = folder / "config.yaml"
    raw = {
        "model": {"num_layers": 1, "num_heads": 1, "embed_dim": 8, "max_length": 8},
        "data": {"paths": [str(folder / "text.txt")], "sequence_length": 8},
        "train_batch_size": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "run": {"steps": 1, "output": str(folder / "out")},
    }
    path.write_text(yaml.safe_dump(raw | changes))
    return path


def test_training_reporting_and_importing_leave_foreign_files_alone(
    tmp_path: Path,
) -> None:
    """Twice: the second run moves the files of the first, and nothing else."""
    out, path = tree(tmp_path / "out", FOREIGN), config(tmp_path)
    for _ in range(2):
        zinf("train", path)
        check(out, FOREIGN)
    zinf("train", path, "--steps", 2, "--set", "run.resume=true")
    zinf("report", out)
    zinf("plot", out / "trace.json", code=None)  # A fused step has no trace.
    model = tmp_path / "model"
    zinf("checkpoint", "export", out / "checkpoints", model)
    check(out, FOREIGN)
    other = tree(tmp_path / "other", FOREIGN)
    elsewhere = ("--set", f"run.output={other}")
    zinf("checkpoint", "import", model, path, *elsewhere)
    check(other, FOREIGN)
    # An export goes to a new folder only.
    zinf("checkpoint", "export", out / "checkpoints", other, code=2)
    check(other, FOREIGN)


@pytest.mark.parametrize("name", IN_THE_WAY)
def test_a_file_in_the_way_of_a_lock_is_refused_untouched(
    name: str, tmp_path: Path
) -> None:
    files = FOREIGN | {name: IN_THE_WAY[name]}
    out, path = tree(tmp_path / "out", files), config(tmp_path)
    before = sorted(out.rglob("*"))
    assert "It is left as it is" in zinf("train", path, code=2).output
    check(out, files)
    assert sorted(out.rglob("*")) == before


def test_a_drive_with_foreign_files_is_refused_or_keeps_them(tmp_path: Path) -> None:
    nvme = tree(tmp_path / "nvme", FOREIGN)
    offload = {"stage": 3, "offload_optimizer": {"device": "nvme"}}
    memory = {"nvme": [str(nvme)]}
    path = config(tmp_path, zero_optimization=offload, memory=memory)
    before = sorted(nvme.rglob("*"))
    assert "that zinf did not make" in zinf("train", path, code=2).output
    check(nvme, FOREIGN)
    assert sorted(nvme.rglob("*")) == before


def test_an_analysis_leaves_foreign_files_alone(tmp_path: Path) -> None:
    out = tree(tmp_path / "difficulty", FOREIGN)
    config(tmp_path)
    asked = ("data", "analyze", tmp_path / "text.txt", "--output", out)
    asked += ("--metric", "vocabulary_rarity", "--sequence-length", 8)
    zinf(*asked)
    check(out, FOREIGN)


@pytest.mark.parametrize(
    "name",
    ["about.json", "token_counts.npy", "vocabulary_rarity.values"],
)
def test_an_analysis_refuses_files_in_its_way(name: str, tmp_path: Path) -> None:
    files = FOREIGN | {name: b"mine"}
    out = tree(tmp_path / "difficulty", files)
    config(tmp_path)
    before = sorted(out.rglob("*"))
    asked = ("data", "analyze", tmp_path / "text.txt", "--output", out)
    asked += ("--metric", "vocabulary_rarity", "--sequence-length", 8)
    assert "is left as it is" in zinf(*asked, code=2).output
    check(out, files)
    assert sorted(out.rglob("*")) == before
