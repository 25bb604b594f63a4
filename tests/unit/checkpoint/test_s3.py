"""Checkpoints on a server of S3 on this machine; needs the extra s3-tests."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

pytest.importorskip("moto")
pytest.importorskip("boto3")

import boto3
from moto.server import ThreadedMotoServer

from tests.unit.checkpoint.cases import ARRAYS, SavedEngine
from tests.unit.checkpoint.test_bucket import EMBED, advance
from zinf.checkpoint import Checkpoints, Saved
from zinf.program import Tier

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


def test_checkpoints_are_saved_kept_listed_and_resumed(client, open_residents):
    url = "s3://bucket/kept"
    engine = SavedEngine(open_residents([Tier.NVME, Tier.HOST, Tier.DEVICE]), {})
    with Checkpoints(url, keep=2) as checkpoints:
        for step in (5, 10, 15):
            advance(engine, step)
            checkpoints.save(step, engine, {"position": step})
    assert {key.split("/")[1] for key in keys(client, "kept/")} == {"10", "15"}
    fresh = SavedEngine(open_residents([Tier.HOST]), {})
    with Checkpoints(url, keep=2) as again:
        assert again.latest_step() == 15
        assert again.restore(fresh) == {"position": 15}
    assert fresh.state == {"num_steps": 15}
    np.testing.assert_array_equal(fresh.residents.read(EMBED), ARRAYS[EMBED] + 15)
    # What another program damages is told.
    (chunk,) = keys(client, "kept/15/state/param/embed/c.")
    client.put_object(Bucket="bucket", Key=chunk, Body=b"x" * 192)
    with Saved(f"{url}/15/state") as saved:
        assert [damage.array for damage in saved.verify()] == [EMBED]


def test_a_bucket_that_is_not_there_is_named(client):
    with pytest.raises(OSError, match="there is no bucket 'absent'"):
        Checkpoints("s3://absent/run")
