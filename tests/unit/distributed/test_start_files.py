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


def test_each_pod_of_the_job_set_finds_its_place():
    (found,) = yaml.safe_load_all((LAUNCH / "kubernetes_jobset.yaml").read_text())
    spec, name = found["spec"], found["metadata"]["name"]
    (replicated,) = spec["replicatedJobs"]
    job = replicated["template"]["spec"]
    (container,) = job["template"]["spec"]["containers"]
    environ = {one["name"]: one.get("value", GIVEN) for one in container["env"]}
    count = job["completions"]
    assert (job["completionMode"], job["parallelism"]) == ("Indexed", count)
    assert (replicated["replicas"], job["backoffLimit"]) == (1, 0)
    # JobSet names pod 0 of the first of these jobs so.
    host = f"{name}-{replicated['name']}-0-0.{spec['network']['subdomain']}"
    for index in range(count):
        seat = find_seat(Flags(), environ | {"JOB_COMPLETION_INDEX": str(index)})
        assert seat is not None
        place = Seat("Kubernetes", f"{host}:6200", count, index)
        assert replace(seat, secret=None) == place


@pytest.mark.slow
@pytest.mark.parametrize("name", ["kubernetes_job", "kubernetes_jobset"])
def test_kubernetes_accepts_the_objects(name):
    """By Kubernetes' own schemas, and JobSet's published models."""
    validate = pytest.importorskip("kubernetes_validate").validate
    models = pytest.importorskip("kubeflow_trainer_api.models")
    for found in yaml.safe_load_all((LAUNCH / f"{name}.yaml").read_text()):
        if found["kind"] == "JobSet":
            model = models.JobsetV1alpha2JobSet.from_dict(found)
            # The models drop what they do not know.
            assert model.to_dict() == found
            (replicated,) = found["spec"]["replicatedJobs"]
            job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}}
            found = job | replicated["template"]
        validate(found, "1.37", strict=True)


@pytest.mark.slow
def test_a_wrong_key_of_an_object_would_be_seen(kubernetes):
    found = pytest.importorskip("kubernetes_validate")
    with pytest.raises(found.ValidationError):
        spec = kubernetes["Job"]["spec"] | {"completion": 4}
        found.validate(kubernetes["Job"] | {"spec": spec}, "1.37", strict=True)


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
