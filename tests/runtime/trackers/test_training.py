"""A training that is killed goes on in the same run of each tracker, whose steps are the run's."""

from __future__ import annotations

import signal
import subprocess
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.entry_points import SHARED, Commands, losses
from tests.runtime.trackers.test_libraries import TRACKERS, sent


@pytest.fixture
def environment(commands: Commands, tmp_path: Path) -> dict[str, str]:
    for name in TRACKERS:
        pytest.importorskip(name, reason=f"{name} is not installed")
    return commands.environment | {
        "WANDB_MODE": "offline",
        "MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path}/mlflow.db",
        "TRACKIO_DIR": str(tmp_path / "trackio"),
    }


def test_a_killed_training(commands: Commands, environment: dict[str, str], tmp_path: Path) -> None:
    workdir = tmp_path / "my-run"
    # MLflow puts artifacts into the working folder, here the repository, unless it is told a place.
    mlflow = pytest.importorskip("mlflow")
    client = mlflow.MlflowClient(environment["MLFLOW_TRACKING_URI"])
    client.create_experiment("qrag-test", artifact_location=f"file://{tmp_path}/artifacts")
    words = (
        *SHARED,
        f"--workdir={workdir}",
        f"--config.log.to={','.join(TRACKERS)}",
        "--config.log.project=qrag-test",
    )
    options = {"env": environment, "stdin": subprocess.DEVNULL}
    process = commands.start("train", *words, **options)
    while len(losses(workdir)) < 10:
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    killed_at = losses(workdir)[-1][0]
    told = commands.succeed("train", *words, **options)
    assert "resumed" in told
    for name in TRACKERS:
        scalars, texts, _, runs = sent(name, tmp_path)
        found = Counter((step, value) for key, step, value in scalars if key == "train/loss")
        assert runs == 1
        assert max(found.values()) == 1
        # What waited when it was killed may be missing, never be there twice or be another number.
        missing = Counter(losses(workdir)) - found
        assert not found - Counter(losses(workdir))
        assert all(step <= killed_at for step, _ in missing)
        assert len(texts) == len({*texts})
