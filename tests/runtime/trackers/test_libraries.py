"""The trackers' own libraries, on this machine alone: a killed run goes on, no step is there twice.

Each test runs where its library is installed; `make test-trackers` installs all of them.
"""

from __future__ import annotations

import glob
import json
import os
import signal
import sqlite3
import struct
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.entry_points import ROOT

TRACKERS = ("wandb", "mlflow", "trackio")
# Writes the steps after `resume` until `last`; if it is to be killed, when all of them are sent.
WRITER = """
import json, math, os, signal, sys, time
from pathlib import Path
from qrag_jax.runtime import trackers
from qrag_jax.runtime.saved_config import LogConfig
from qrag_jax.runtime.writers import Logged, MetricWriter

workdir, to, resume, last, ends = json.loads(sys.argv[1])
workdir = Path(workdir)
config = {"optimizer": {"learning_rate": 1e-3, "name": "adam"}, "eval": {"stop": -math.inf}}
config["llm"] = {"url": "http://me:" + os.environ["TEST_KEY"] + "@host/v1"}
config |= {f"field{number}": number for number in range(120)}
logged = Logged(LogConfig(to=(to,), project="qrag-test"), config, print)
trackers.check_usable(logged.settings)
writer = MetricWriter(workdir, resume or None, logged)
for step in range(resume + 1, last + 1):
    writer.write(step, {"train/loss": 1 / step, "train/nan": math.nan})
    if step % 2 == 0:
        writer.write(step, {"eval/recall@5": step / 10})
        writer.write_episodes(step, "chunks", [], f"# <Step> {step}")
if ends == "killed":
    steps, record = {}, workdir / "trackers" / f"{to}.json"
    while (steps.get("train/loss"), steps.get("episodes")) != (last, last):
        time.sleep(0.05)
        steps = json.loads(record.read_text())["steps"] if record.exists() else {}
    time.sleep(8)  # what is recorded is on its way
    os.kill(os.getpid(), signal.SIGKILL)
writer.close()
"""


@pytest.fixture(params=TRACKERS)
def tracker(request: pytest.FixtureRequest) -> str:
    pytest.importorskip(request.param, reason=f"{request.param} is not installed")
    return request.param


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    return os.environ | {
        "WANDB_MODE": "offline",
        "MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path}/mlflow.db",
        "TRACKIO_DIR": str(tmp_path / "trackio"),
        "HF_HUB_OFFLINE": "1",
        "TEST_KEY": "a-planted-key-of-nobody",
        "HOME": str(tmp_path),
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }


def write(
    environment: dict[str, str], folder: Path, to: str, resume: int, last: int, ends: str = ""
) -> None:
    given = json.dumps([str(folder / "my-run"), to, resume, last, ends])
    # Files that a library puts into the working folder are not to lie in the repository.
    found = subprocess.run(
        [sys.executable, "-c", WRITER, given],
        **{"cwd": folder, "env": environment, "capture_output": True, "text": True},
        timeout=240,
    )
    assert found.returncode == (-signal.SIGKILL if ends else 0), found.stderr[-3000:]
    assert not any(word in found.stdout for word in ("not sent", "cannot be used"))
    assert environment["TEST_KEY"] not in found.stdout + found.stderr


def sent(tracker: str, folder: Path) -> tuple[list[tuple[str, int, float]], list[int], dict, int]:
    """Scalars (name, step, value), the steps of texts, the config and the number of runs."""
    return {"wandb": _of_wandb, "mlflow": _of_mlflow, "trackio": _of_trackio}[tracker](folder)


def _of_wandb(folder: Path) -> tuple[list[tuple[str, int, float]], list[int], dict, int]:
    scalars, texts, config, runs, last = [], [], {}, set(), -1
    for path in sorted(glob.glob(f"{folder}/my-run/wandb/offline-run-*/*.wandb")):
        for record in _records(path):
            kind = record.WhichOneof("record_type")
            if kind == "run":
                runs.add((record.run.project, record.run.run_id, record.run.display_name))
                found = {i.key: json.loads(i.value_json) for i in record.run.config.update}
                config |= found
            if kind == "history":
                row = {
                    item.key or "/".join(item.nested_key): json.loads(item.value_json)
                    for item in record.history.item
                }
                assert record.history.step.num > last  # W&B drops rows that are not
                last = record.history.step.num
                texts += [row["step"]] if "episodes/path" in row else []
                names = [name for name in row if name.startswith(("train/", "eval/"))]
                scalars += [(name, row["step"], row[name]) for name in names]
    assert {(project, name) for project, _, name in runs} == {("qrag-test", "my-run")}
    return scalars, texts, {"learning_rate": config["optimizer"]["learning_rate"]}, len(runs)


def _records(path: str) -> Iterator:
    """The records of a file as LevelDB writes logs: 7 bytes of a head, then blocks of 32 KiB."""
    from wandb.proto import wandb_internal_pb2

    data, place, whole = Path(path).read_bytes(), 7, b""
    while place + 7 < len(data):
        if (rest := 32768 - place % 32768) < 7:
            place += rest
            continue
        length, kind = struct.unpack("<HB", data[place + 4 : place + 7])
        whole += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            record = wandb_internal_pb2.Record()
            record.ParseFromString(whole)
            whole = b""
            yield record


def _of_mlflow(folder: Path) -> tuple[list[tuple[str, int, float]], list[int], dict, int]:
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{folder}/mlflow.db")
    experiment = client.get_experiment_by_name("qrag-test")
    assert experiment is not None
    runs = client.search_runs([experiment.experiment_id])
    run = runs[0]
    assert (run.info.run_name, run.info.status) == ("my-run", "FINISHED")
    assert len(run.data.params) == 124  # more than one request takes
    artifacts = Path(run.info.artifact_uri.removeprefix("file://"))
    assert json.loads((artifacts / "config.json").read_text())["llm"]["url"] == "http://host/v1"
    scalars = [
        (name.replace("recall_5", "recall@5"), each.step, each.value)
        for name in run.data.metrics
        for each in client.get_metric_history(run.info.run_id, name)
    ]
    texts = [
        int(Path(file.path).stem) for file in client.list_artifacts(run.info.run_id, "episodes")
    ]
    assert (artifacts / f"episodes/{texts[0]:09d}.md").read_text() == f"# <Step> {texts[0]}"
    rate = float(run.data.params["optimizer.learning_rate"])
    return scalars, texts, {"learning_rate": rate}, len(runs)


def _of_trackio(folder: Path) -> tuple[list[tuple[str, int, float]], list[int], dict, int]:
    database = sqlite3.connect(folder / "trackio" / "qrag-test.db")
    scalars, texts, runs = [], [], set()
    for name, step, text in database.execute("select run_name, step, metrics from metrics"):
        runs.add(name)
        row = json.loads(text)
        texts += [step] if "episodes" in row else []
        scalars += [(key, step, value) for key, value in row.items() if key != "episodes"]
    ((config,),) = database.execute("select config from configs").fetchall()
    rate = json.loads(config)["optimizer.learning_rate"]
    assert {name.rpartition("-")[0] for name in runs} == {"my-run"}
    return scalars, texts, {"learning_rate": rate}, len(runs)


def expected(last: int) -> Counter:
    scored = [("eval/recall@5", step, step / 10) for step in range(2, last + 1, 2)]
    return Counter([("train/loss", step, 1 / step) for step in range(1, last + 1)] + scored)


def test_a_killed_run_goes_on_in_the_same_run(
    tracker: str, environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(environment, tmp_path, tracker, 0, 6, "killed")
    write(environment, tmp_path, tracker, 3, 9)  # steps 4 to 6 are done again
    write(environment, tmp_path, tracker, 9, 9)  # a finished run that is started again
    monkeypatch.chdir(tmp_path)
    scalars, texts, config, runs = sent(tracker, tmp_path)
    assert Counter(scalars) == expected(9)
    assert sorted(texts) == [2, 4, 6, 8]
    assert config == {"learning_rate": 1e-3}
    assert runs == 1
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert not any(environment["TEST_KEY"].encode() in path.read_bytes() for path in files)
