"""The files that start several processes fit what zinf reads from them."""

import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from zinf.distributed import Flags, Seat, find_seat
from zinf.distributed.launch import SECRET
from zinf.distributed.secret import Secret

LAUNCH = Path(__file__).resolve().parents[3] / "scripts" / "launch"
GIVEN = "of the cluster's own secrets"


@pytest.fixture(scope="module")
def kubernetes() -> dict[str, Any]:
    """The objects of the file, by kind."""
    text = (LAUNCH / "kubernetes_job.yaml").read_text()
    return {found["kind"]: found for found in yaml.safe_load_all(text)}


def test_each_pod_of_the_job_finds_its_place(kubernetes):
    job, service = kubernetes["Job"], kubernetes["Service"]
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    environ = {one["name"]: one.get("value", GIVEN) for one in container["env"]}
    count = job["spec"]["completions"]
    assert job["spec"]["completionMode"] == "Indexed"
    assert job["spec"]["parallelism"] == count
    # Kubernetes names pod 0 of an indexed job so, within a headless service.
    assert pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    address = f"{job['metadata']['name']}-0.{service['metadata']['name']}:6200"
    for index in range(count):
        found = find_seat(Flags(), environ | {"JOB_COMPLETION_INDEX": str(index)})
        assert found is not None
        assert found.secret == Secret(GIVEN.encode(), SECRET)
        assert replace(found, secret=None) == Seat("Kubernetes", address, count, index)


def test_a_pod_starts_without_the_secret_too(kubernetes):
    pod = kubernetes["Job"]["spec"]["template"]["spec"]
    (given,) = [one for one in pod["containers"][0]["env"] if one["name"] == SECRET]
    assert given["valueFrom"]["secretKeyRef"]["optional"] is True


def test_the_slurm_script_is_bash_and_leaves_the_places_to_srun():
    script = LAUNCH / "slurm_train.sh"
    subprocess.run(["bash", "-n", str(script)], check=True)
    text = script.read_text()
    assert "\nsrun " in text
    assert "--process-id" not in text
    assert f"export {SECRET}=" in text.partition("\nsrun ")[0]
