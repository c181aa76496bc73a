"""The manifests for Kubernetes and SkyPilot say what they must; no cluster has run them.

Jobs, claims and policies are held against Kubernetes' own schemas.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from tests.launch.test_scripts import LAUNCH, program


def text_of(name: str, changed: bool) -> str:
    """A manifest as it is, or changed by the command in its head."""
    text = (LAUNCH / name).read_text()
    if not changed:
        return text
    command = rf"sed -e 's/^#+ //' -e '/# alone$/d' launch/{name}"
    assert command in text
    words = ["bash", "-c", command]
    return subprocess.run(
        words, cwd=LAUNCH.parent, capture_output=True, text=True, check=True
    ).stdout


def trainer_words(
    command: list[str], folder: Path, python: str, environment: dict[str, str]
) -> list[str]:
    """The words that a manifest's command gives the trainer, which takes the command's place."""
    program(folder / python, 'echo "$$"\nprintf "%s\\n" "$@"\n')
    process = subprocess.Popen(
        command, cwd=folder, env=environment, text=True, stdout=subprocess.PIPE
    )
    lines = process.communicate(timeout=20)[0].splitlines()
    assert process.returncode == 0
    at = lines.index("-m")
    assert int(lines[at - 1]) == process.pid  # no shell is left: a signal reaches the trainer
    assert lines[at + 1] == "qrag_jax.train"
    return lines[at + 2 :]


# ---------------------------------------------------------------- Kubernetes


class Manifest:
    """The parts of kubernetes.yaml, alone or with a model next to the trainer."""

    def __init__(self, with_model: bool) -> None:
        self.parts = list(yaml.safe_load_all(text_of("kubernetes.yaml", with_model)))
        (jobset,) = (part for part in self.parts if part["kind"] == "JobSet")
        jobs = jobset["spec"]["replicatedJobs"]
        self.jobs = {job["name"]: job["template"]["spec"] for job in jobs}
        self.job = self.jobs["trainer"]
        self.pod = self.job["template"]["spec"]
        (self.trainer,) = self.pod["containers"]


@pytest.fixture(scope="module", params=[False, True], ids=["alone", "with a model"])
def manifest(request: pytest.FixtureRequest) -> Manifest:
    return Manifest(request.param)


def test_all_is_as_the_schemas_say(manifest: Manifest) -> None:
    head = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}}
    jobs = [{**head, "spec": job} for job in manifest.jobs.values()]
    for part in jobs + [part for part in manifest.parts if part["kind"] != "JobSet"]:
        for version in ("1.31", kubernetes_validate.latest_version()):  # the oldest that it names
            kubernetes_validate.validate(part, version, strict=True)


def test_refusals_end_the_job_and_keys_are_secrets(manifest: Manifest) -> None:
    (rule,) = manifest.job["podFailurePolicy"]["rules"]
    assert (rule["action"], rule["onExitCodes"]["values"]) == ("FailJob", [2])
    for container in (*manifest.pod["containers"], *manifest.pod.get("initContainers", ())):
        for each in container["env"]:
            is_secret = "secretKeyRef" in each.get("valueFrom", {})
            assert is_secret == each["name"].endswith(("TOKEN", "KEY")), each


def test_a_pod_waits_for_all_names_and_then_is_the_trainer(
    manifest: Manifest, tmp_path: Path
) -> None:
    """The container's own command, with a `getent` that knows the second name at its third try."""
    knows = "[[ $* != *-1.qrag || $(grep -c -- -1.qrag asked) -ge 3 ]]"
    program(tmp_path / "getent", f'echo "$*" >>asked\n{knows}\n')
    program(tmp_path / "sleep", "exit 0\n")
    command, given = manifest.trainer["command"], manifest.trainer["args"]
    environment = {"PODS": "2", "JOB_COMPLETION_INDEX": "1"}
    environment["PATH"] = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    words = trainer_words([*command, *given], tmp_path, "python", environment)
    assert words == [*given, "--hosts=qrag-trainer-0-0.qrag:8476,2,1"]
    assert len((tmp_path / "asked").read_text().splitlines()) == 4


# ---------------------------------------------------------------- SkyPilot


@pytest.mark.parametrize("nodes", [1, 2])
def test_each_machine_installs_and_starts_one_trainer(nodes: int, tmp_path: Path) -> None:
    task = yaml.safe_load(text_of("skypilot.yaml", nodes > 1))
    assert task["num_nodes"] == nodes
    for name in ("python3", "make", ".venv/bin/pip"):
        program(tmp_path / name, f'echo "{name} $*" >>ran\n')
    environment = {
        "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
        "SIDECAR": "yes" if nodes > 1 else "",
        "FLAGS": "--config=c\n  --config.llm.model=m",
        "RUN": "r",
        "SKYPILOT_NUM_NODES": str(nodes),
        "SKYPILOT_NODE_IPS": "10.0.0.7\n10.0.0.9",
        "SKYPILOT_NODE_RANK": "1",
        "SKYPILOT_NUM_GPUS_PER_NODE": "8",
    }
    subprocess.run(["bash", "-c", task["setup"]], cwd=tmp_path, env=environment, check=True)
    assert ("make sidecar" in (tmp_path / "ran").read_text()) == (nodes > 1)
    words = trainer_words(["bash", "-c", task["run"]], tmp_path, ".venv/bin/python", environment)
    hosts = ["--hosts=10.0.0.7:8476,2,1"] if nodes > 1 else []
    assert words == ["--config=c", "--config.llm.model=m", *hosts, "--workdir=/runs/r"]
