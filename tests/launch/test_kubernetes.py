"""The manifests for Kubernetes say what they must; no cluster has run them.

Jobs, claims and policies are held against Kubernetes' own schemas, and the fields of a JobSet
(jobset.x-k8s.io/v1alpha2), for which there is no schema to install, against the list here.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from tests.launch.scripts import LAUNCH, program

VERSION = "1.31"  # the oldest that the manifests name
PLAIN, BESIDE = "kubernetes.yaml", "kubernetes.yaml with the model"
# Names of fields in JobSet's types, each with those below it.
JOBSET: dict[str, Any] = {
    "network": {"enableDNSHostnames": None, "subdomain": None, "publishNotReadyAddresses": None},
    "successPolicy": {"operator": None, "targetReplicatedJobs": None},
    "failurePolicy": {
        "maxRestarts": None,
        "restartStrategy": None,
        "rules": {
            "name": None,
            "action": None,
            "onJobFailureReasons": None,
            "targetReplicatedJobs": None,
        },
    },
    "replicatedJobs": {
        "name": None,
        "replicas": None,
        "template": None,
        "dependsOn": {"name": None, "status": None},
    },
}


def text_of(name: str) -> str:
    if name != BESIDE:
        return (LAUNCH / name).read_text()
    # As the file's head says.
    said = r"sed -e 's/^#+ //' -e '/# alone$/d' launch/kubernetes.yaml"
    assert said in (LAUNCH / PLAIN).read_text()
    return subprocess.run(
        ["bash", "-c", said], cwd=LAUNCH.parent, capture_output=True, text=True, check=True
    ).stdout


@pytest.fixture(params=[PLAIN, BESIDE])
def parts(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(text_of(request.param)))


def spec_of(parts: list[dict[str, Any]]) -> dict[str, Any]:
    (found,) = [part for part in parts if part["kind"] == "JobSet"]
    assert found["apiVersion"] == "jobset.x-k8s.io/v1alpha2"
    return found["spec"]


def jobs_of(parts: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {job["name"]: job["template"]["spec"] for job in spec_of(parts)["replicatedJobs"]}


def trainer_of(parts: list[dict[str, Any]]) -> dict[str, Any]:
    (found,) = jobs_of(parts)["trainer"]["template"]["spec"]["containers"]
    return found


def containers(parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    pods = [job["template"]["spec"] for job in jobs_of(parts).values()]
    return [c for pod in pods for c in (*pod["containers"], *pod.get("initContainers", ()))]


def check_fields(value: Any, known: dict[str, Any] | None, at: str) -> None:
    if known is None:
        return
    for each in value if isinstance(value, list) else [value]:
        for name, below in each.items():
            assert name in known, f"{at}.{name} is no field of a JobSet"
            check_fields(below, known[name], f"{at}.{name}")


def test_all_is_as_the_schemas_say(parts: list[dict[str, Any]]) -> None:
    check_fields(spec_of(parts), JOBSET, "spec")
    jobs = [
        {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, "spec": job}
        for job in jobs_of(parts).values()
    ]
    for each in jobs + [part for part in parts if part["kind"] != "JobSet"]:
        for version in (VERSION, kubernetes_validate.latest_version()):
            kubernetes_validate.validate(each, version, strict=True)


def test_the_schemas_find_a_wrong_field(parts: list[dict[str, Any]]) -> None:
    job = jobs_of(parts)["trainer"]
    job["template"]["spec"]["containers"][0]["comand"] = []
    whole = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, "spec": job}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(whole, VERSION, strict=True)
    with pytest.raises(AssertionError, match=r"spec\.failurePolicy\.restarts"):
        check_fields({"failurePolicy": {"restarts": 1}}, JOBSET, "spec")


def test_pods_find_each_other_and_are_as_many_as_they_think(parts: list[dict[str, Any]]) -> None:
    spec, job = spec_of(parts), jobs_of(parts)["trainer"]
    assert spec["network"] == {"enableDNSHostnames": True, "publishNotReadyAddresses": True}
    assert job["completionMode"] == "Indexed"
    assert job["parallelism"] == job["completions"] == 2
    (pods,) = [e["value"] for e in trainer_of(parts)["env"] if e["name"] == "PODS"]
    assert pods == str(job["completions"])


def test_what_fails_is_tried_again_but_not_what_was_refused(parts: list[dict[str, Any]]) -> None:
    spec, job = spec_of(parts), jobs_of(parts)["trainer"]
    assert spec["failurePolicy"]["maxRestarts"] > 0
    (rule,) = spec["failurePolicy"]["rules"]
    assert (rule["action"], rule["onJobFailureReasons"]) == ("FailJobSet", ["PodFailurePolicy"])
    (rule,) = job["podFailurePolicy"]["rules"]
    assert rule["action"] == "FailJob"
    assert rule["onExitCodes"] == {"containerName": "trainer", "operator": "In", "values": [2]}
    assert job["backoffLimit"] == 0
    assert job["template"]["spec"]["restartPolicy"] == "Never"  # podFailurePolicy asks for it


def test_a_pod_has_time_to_save_and_disks(parts: list[dict[str, Any]]) -> None:
    pod, trainer = jobs_of(parts)["trainer"]["template"]["spec"], trainer_of(parts)
    assert pod["terminationGracePeriodSeconds"] >= 120
    mounts = {each["mountPath"]: each["name"] for each in trainer["volumeMounts"]}
    volumes = {each["name"]: each for each in pod["volumes"]}
    assert volumes[mounts["/runs"]]["persistentVolumeClaim"]["claimName"] == "qrag-runs"
    assert volumes[mounts["/dev/shm"]]["emptyDir"]["medium"] == "Memory"  # noqa: S108
    assert any(word.startswith("--workdir=/runs/") for word in trainer["args"])
    claims = [part for part in parts if part["kind"] == "PersistentVolumeClaim"]
    assert all(claim["spec"]["accessModes"] == ["ReadWriteMany"] for claim in claims)


def test_keys_come_from_secrets_alone(parts: list[dict[str, Any]]) -> None:
    for container in containers(parts):
        for each in container["env"]:
            secret = "secretKeyRef" in each.get("valueFrom", {})
            assert secret == each["name"].endswith(("TOKEN", "KEY")), each
        assert not re.search(r"--api-key|sk-|hf_", " ".join(container.get("args", ())))


def test_only_pods_of_the_set_reach_each_other(parts: list[dict[str, Any]]) -> None:
    (policy,) = [part["spec"] for part in parts if part["kind"] == "NetworkPolicy"]
    own = {"podSelector": {"matchLabels": {"jobset.sigs.k8s.io/jobset-name": "qrag"}}}
    assert policy == {**own, "policyTypes": ["Ingress"], "ingress": [{"from": [own]}]}


def test_the_batch_splits_over_the_gpus(parts: list[dict[str, Any]]) -> None:
    from configs import babilong, hotpotqa

    trainer = trainer_of(parts)
    gpus = (
        trainer["resources"]["limits"]["nvidia.com/gpu"] * jobs_of(parts)["trainer"]["parallelism"]
    )
    flags = dict(word.split("=", 1) for word in trainer["args"])
    name = flags["--config"]
    config = hotpotqa.get_config() if "hotpotqa" in name else babilong.get_config("qa1")
    batch = int(flags.get("--config.train.batch_size", config.train.batch_size))
    assert batch % (gpus * int(flags["--config.train.accumulation"])) == 0
    assert config.eval.batch_size % gpus == 0


def test_the_model_beside_the_trainer_is_there_before_it() -> None:
    parts = list(yaml.safe_load_all(text_of(BESIDE)))
    (model,) = jobs_of(parts)["trainer"]["template"]["spec"]["initContainers"]
    assert model["restartPolicy"] == "Always"  # it runs beside the trainer, and ends after it
    assert "--host=127.0.0.1" in model["args"]
    assert "127.0.0.1:8100/health" in model["startupProbe"]["exec"]["command"][-1]
    assert "--config.llm.url=http://127.0.0.1:8100/v1" in trainer_of(parts)["args"]
    gpus = [c["resources"]["limits"]["nvidia.com/gpu"] for c in (model, trainer_of(parts))]
    assert sum(gpus) == 8
    assert f"--tensor-parallel-size={gpus[0]}" in model["args"]


def test_a_pod_waits_for_all_names_and_then_is_the_trainer(
    parts: list[dict[str, Any]], tmp_path: Path
) -> None:
    """The container's own command, with a `getent` that knows the second name at its third try."""
    program(
        tmp_path / "getent",
        'echo "$*" >>asked\n[[ $* != *-1.qrag || $(grep -c -- -1.qrag asked) -ge 3 ]]\n',
    )
    program(tmp_path / "sleep", "exit 0\n")
    program(tmp_path / "python", 'echo "$$"\nprintf "%s|" "$@"\n')
    trainer = trainer_of(parts)
    environment = {"PODS": "2", "JOB_COMPLETION_INDEX": "1"}
    process = subprocess.Popen(
        [*trainer["command"], *trainer["args"]],
        cwd=tmp_path,
        env={**environment, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"},
        text=True,
        stdout=subprocess.PIPE,
    )
    out, _ = process.communicate(timeout=20)
    assert process.returncode == 0
    asked = (tmp_path / "asked").read_text().splitlines()
    assert asked == [f"hosts qrag-trainer-0-{n}.qrag" for n in (0, 1, 1, 1)]
    number, words = out.splitlines()
    assert int(number) == process.pid  # no shell is left, which would keep SIGTERM from it
    hosts = "--hosts=qrag-trainer-0-0.qrag:8476,2,1"
    assert words == "|".join(["-m", "qrag_jax.train", *trainer["args"], hosts, ""])
