"""Checkpoints on a server of S3 on this machine; needs the extra s3-tests."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("moto")
pytest.importorskip("boto3")

import boto3
import yaml
from moto.server import ThreadedMotoServer

from tests.command import run
from tests.unit.interchange.test_cli import config_in

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def client() -> Iterator[Any]:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        patch.setenv("AWS_ACCESS_KEY_ID", "key")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        client = boto3.client("s3", endpoint_url=f"http://{host}:{port}")
        client.create_bucket(Bucket="bucket")
        yield client
    server.stop()


def keys(client: Any, prefix: str) -> list[str]:
    found = client.get_paginator("list_objects_v2").paginate(
        Bucket="bucket", Prefix=prefix
    )
    return [item["Key"] for page in found for item in page.get("Contents", ())]


def losses(folder: Path) -> dict[int, float]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["loss"] for line in lines}


def test_a_command_that_is_killed_goes_on_from_its_bucket(client, tmp_path):
    """Killed with an upload under way: the losses are those of an undisturbed run."""
    letters = np.random.default_rng(0).integers(97, 105, 4000).astype(np.uint8)
    (tmp_path / "text.txt").write_bytes(letters.tobytes())
    config = config_in(tmp_path)
    config["run"] |= {"steps": 3, "checkpoint_every": 1}
    url = "s3://bucket/train"
    for name, where in (("plain", None), ("killed", url)):
        output = str(tmp_path / name)
        changed = config["run"] | {"output": output, "checkpoints": where}
        text = yaml.safe_dump(config | {"run": changed})
        (tmp_path / f"{name}.yaml").write_text(text)
    run("train", tmp_path / "plain.yaml")
    command = ["train", str(tmp_path / "killed.yaml")]
    killed = subprocess.Popen([sys.executable, "-c", KILLED, *command])
    assert killed.wait() == -signal.SIGKILL
    found = {key.split("/")[1] for key in keys(client, "train/")}
    assert found == {"1", "2"}  # of step 2, not all
    listed = run("checkpoint", "ls", url)
    assert "s3://bucket/train/2 cannot be used: saving" in listed.output
    assert not (tmp_path / "killed" / "checkpoints").exists()

    refused = run(*command, code=2)
    assert "has checkpoints of an earlier run" in refused.output
    resumed = run(*command, "--set", "run.resume=true")
    assert "Resuming after step 1" in resumed.output
    assert losses(tmp_path / "killed") == losses(tmp_path / "plain")
    missing = run("checkpoint", "ls", "s3://absent/run", code=2)
    assert "there is no bucket 'absent'" in missing.output
    run("checkpoint", "diff", url, tmp_path / "plain" / "checkpoints")
    run("checkpoint", "verify", url)
    # What another program damages is told.
    (chunk,) = keys(client, "train/3/state/param/token_embedding/c.")
    size = client.head_object(Bucket="bucket", Key=chunk)["ContentLength"]
    client.put_object(Bucket="bucket", Key=chunk, Body=b"x" * size)
    run("checkpoint", "verify", url, code=1)


# Dies of SIGKILL in the second save, when it has begun to upload it.
KILLED = """
import os, signal
from zinf.checkpoint.bucket.store import Store
from zinf.cli import main

put = Store.put

def dies(self, name, content):
    if self.folder.prefix.endswith("2/state") and name.startswith("state1/"):
        os.kill(os.getpid(), signal.SIGKILL)
    done = put(self, name, content)
    done.wait()
    return done

Store.put = dies
main()
"""
