"""The files that start several processes fit what zinf reads from them."""

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from zinf.distributed import Flags, Seat, find_seat
from zinf.distributed.launch import SECRET

LAUNCH = Path(__file__).resolve().parents[3] / "scripts" / "launch"
GIVEN = "of the cluster's own secrets"


def objects(name: str) -> dict[str, Any]:
    """The objects of a file, by kind."""
    text = (LAUNCH / f"{name}.yaml").read_text()
    return {found["kind"]: found for found in yaml.safe_load_all(text)}


def check_places(job: dict[str, Any], host: str) -> None:
    """Each pod of an indexed job finds its place, with pod 0 at `host`."""
    count = job["completions"]
    assert (job["completionMode"], job["parallelism"]) == ("Indexed", count)
    (container,) = job["template"]["spec"]["containers"]
    environ = {one["name"]: one.get("value", GIVEN) for one in container["env"]}
    for index in range(count):
        found = find_seat(Flags(), environ | {"JOB_COMPLETION_INDEX": str(index)})
        assert found is not None
        expected = Seat("Kubernetes", f"{host}:6200", count, index, (), GIVEN, True)
        assert found == expected
    # A pod starts without the secret too.
    (given,) = [one for one in container["env"] if one["name"] == SECRET]
    assert given["valueFrom"]["secretKeyRef"]["optional"] is True


def test_each_pod_of_the_job_finds_its_place():
    job, service = map(objects("kubernetes_job").get, ("Job", "Service"))
    name, subdomain = job["metadata"]["name"], service["metadata"]["name"]
    # Kubernetes names pod 0 of an indexed job so, within a headless service.
    assert job["spec"]["template"]["spec"]["subdomain"] == subdomain
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"job-name": name}
    check_places(job["spec"], f"{name}-0.{subdomain}")


def test_each_pod_of_the_job_set_finds_its_place():
    found = objects("kubernetes_jobset")["JobSet"]
    spec, name = found["spec"], found["metadata"]["name"]
    (replicated,) = spec["replicatedJobs"]
    job = replicated["template"]["spec"]
    assert (replicated["replicas"], job["backoffLimit"]) == (1, 0)
    # JobSet names pod 0 of the first of these jobs so.
    host = f"{name}-{replicated['name']}-0-0.{spec['network']['subdomain']}"
    check_places(job, host)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["kubernetes_job", "kubernetes_jobset"])
def test_kubernetes_accepts_the_objects(name):
    """By Kubernetes' own schemas, and JobSet's published models."""
    kubernetes = pytest.importorskip("kubernetes_validate")
    validate = kubernetes.validate
    models = pytest.importorskip("kubeflow_trainer_api.models")
    for found in objects(name).values():
        if found["kind"] == "JobSet":
            model = models.JobsetV1alpha2JobSet.from_dict(found)
            # The models drop what they do not know.
            assert model.to_dict() == found
            (replicated,) = found["spec"]["replicatedJobs"]
            job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}}
            found = job | replicated["template"]
        validate(found, "1.37", strict=True)
        wrong = found | {"spec": found["spec"] | {"completion": 4}}
        with pytest.raises(kubernetes.ValidationError):
            validate(wrong, "1.37", strict=True)


def test_the_slurm_script_is_bash_and_leaves_the_places_to_srun():
    script = LAUNCH / "slurm_train.sh"
    subprocess.run(["bash", "-n", str(script)], check=True)
    text = script.read_text()
    assert "\nsrun " in text
    assert "--process-id" not in text
    assert f"export {SECRET}=" in text.partition("\nsrun ")[0]
