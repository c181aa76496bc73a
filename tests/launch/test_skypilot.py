"""The SkyPilot task says what it must, and its commands do so; no cloud has run it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.launch.scripts import LAUNCH, program

# Fields of a task, and of its resources, in SkyPilot 0.14, as far as they are used or near.
FIELDS = {
    *("name", "workdir", "num_nodes", "resources", "envs", "secrets", "file_mounts", "volumes"),
    *("setup", "run"),
}
RESOURCES = {"accelerators", "use_spot", "disk_size", "job_recovery", "cpus", "memory", "infra"}


@pytest.fixture(params=["one", "several"])
def task(request: pytest.FixtureRequest) -> dict[str, Any]:
    text = (LAUNCH / "skypilot.yaml").read_text()
    if request.param == "several":
        said = r"sed -e 's/^#+ //' -e '/# alone$/d' launch/skypilot.yaml"  # as the file's head says
        assert said in text
        text = subprocess.run(
            ["bash", "-c", said], cwd=LAUNCH.parent, capture_output=True, text=True, check=True
        ).stdout
    return yaml.safe_load(text) | {"several": request.param == "several"}


def test_its_fields_are_known(task: dict[str, Any]) -> None:
    assert task.keys() - {"several"} <= FIELDS
    assert task["resources"].keys() <= RESOURCES
    assert all(isinstance(value, str) for value in (task["envs"] | task["secrets"]).values())


def test_it_runs_on_spot_machines_of_any_cloud_and_comes_back(task: dict[str, Any]) -> None:
    resources = task["resources"]
    assert resources["use_spot"] is True
    assert "infra" not in resources
    assert resources["job_recovery"]["max_restarts_on_errors"] >= 1
    # A bucket cannot be shared by machines that write.
    if task["several"]:
        assert task["num_nodes"] == 2
        assert task["volumes"] == {"/runs": "qrag-runs"}
        assert "file_mounts" not in task
    else:
        assert task["num_nodes"] == 1
        assert task["file_mounts"]["/runs"]["mode"] == "MOUNT_CACHED"
        assert "volumes" not in task


def test_no_key_is_in_it(task: dict[str, Any]) -> None:
    assert task["secrets"] == {"HF_TOKEN": "", "VLLM_API_KEY": ""}
    assert not any(name.endswith(("TOKEN", "KEY")) for name in task["envs"])


@pytest.mark.parametrize("sidecar", ["", "yes"])
def test_the_setup_installs_the_trainer(task: dict[str, Any], tmp_path: Path, sidecar: str) -> None:
    for name in ("python3", "make", ".venv/bin/pip"):
        program(tmp_path / name, f'echo "{name} $*" >>ran\n')
    environment = {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "SIDECAR": sidecar}
    subprocess.run(["bash", "-c", task["setup"]], cwd=tmp_path, env=environment, check=True)
    ran = (tmp_path / "ran").read_text().splitlines()
    assert ran[:2] == ["python3 -m venv .venv", ".venv/bin/pip install --quiet -e .[cuda12,hub]"]
    assert ran[2:] == (["make sidecar"] if sidecar else [])


@pytest.mark.parametrize("nodes", ["1", "2"])
def test_each_machine_starts_one_process(task: dict[str, Any], tmp_path: Path, nodes: str) -> None:
    program(tmp_path / ".venv" / "bin" / "python", 'echo "$$"\nprintf "%s|" "$@"\n')
    environment = {
        "FLAGS": "--config=c\n  --config.llm.model=m",
        "RUN": "r",
        "SKYPILOT_NUM_NODES": nodes,
        "SKYPILOT_NODE_IPS": "10.0.0.7\n10.0.0.9",
        "SKYPILOT_NODE_RANK": "1",
        "SKYPILOT_NUM_GPUS_PER_NODE": "8",
        "PATH": os.environ["PATH"],
    }
    command = ["bash", "-c", task["run"]]
    process = subprocess.Popen(
        command, cwd=tmp_path, env=environment, text=True, stdout=subprocess.PIPE
    )
    out, _ = process.communicate(timeout=20)
    assert process.returncode == 0
    said, number, words = out.splitlines()
    assert said == f"machine 1 of {nodes}, 8 GPUs"
    assert int(number) == process.pid  # a signal reaches the trainer itself
    hosts = ["--hosts=10.0.0.7:8476,2,1"] if nodes == "2" else []
    given = ["-m", "qrag_jax.train", "--config=c", "--config.llm.model=m", *hosts]
    assert words == "|".join([*given, "--workdir=/runs/r", ""])


def test_its_own_flags_split_over_the_gpus(task: dict[str, Any]) -> None:
    from configs import hotpotqa

    flags = dict(word.split("=", 1) for word in task["envs"]["FLAGS"].split())
    assert flags.pop("--config") == "configs/hotpotqa.py"
    assert flags == {"--config.train.accumulation": "1"}
    gpus = int(task["resources"]["accelerators"].partition(":")[2]) * task["num_nodes"]
    assert hotpotqa.get_config().train.batch_size % gpus == 0
