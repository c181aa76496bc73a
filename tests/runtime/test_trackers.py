"""What a tracker is sent: each step once, whatever fails; nothing that fails ends a run."""

from __future__ import annotations

import dataclasses
import glob
import importlib.util
import json
import math
import os
import signal
import sqlite3
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from qrag_jax.errors import InputError
from qrag_jax.runtime import writers
from qrag_jax.runtime.config_fields import LogConfig
from qrag_jax.runtime.writers import Line, Logged, MetricWriter, Opened, Sender, read_metrics
from tests.entry_points import ROOT


@dataclasses.dataclass
class Kept:
    """A tracker that keeps `(row, step, name, value)`, and fails at some steps."""

    rows: list[tuple[int, int, str, object]] = dataclasses.field(default_factory=list)
    fails_at: tuple[int, ...] = ()
    closes: bool = True
    hold: threading.Event | None = None

    def write(self, row: int, step: int, values: Mapping[str, object]) -> None:
        if self.hold is not None:
            self.hold.wait()
        if step in self.fails_at and "loss" in values:
            raise ConnectionError("http://me:pass@host is away (planted-key-1234 longer-key)")
        self.rows += [(row, step, name, value) for name, value in values.items()]

    def close(self) -> None:
        if not self.closes:
            raise SystemExit(3)

    def opened(self) -> Opened:
        return "run-1", self.write, self.close

    def of(self, name: str) -> list[tuple[int, object]]:
        return [(step, value) for _, step, found, value in self.rows if found == name]


def test_lines_arrive_in_their_order_and_once_over_all_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines, tracker, names = list[str](), Kept(), list[str]()

    def begin(name: str, workdir: Path, logged: Logged, kept: str) -> Opened:
        names.append(kept)
        if len(names) == 1:
            raise SystemExit("no route to host")
        return tracker.opened()

    def send(*sent: Line) -> None:
        sender = Sender("files", tmp_path, Logged(tell=lines.append))
        for line in sent:
            sender.put(line)
        sender.put(None)
        sender.wait(10)

    monkeypatch.setattr(writers, "begin", begin)
    send((0, {"eval": 0.5}))
    assert "no route to host" in lines.pop()
    assert not (tmp_path / "trackers/files.json").exists()
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "eval": 0.5}\n')
    send(*((step, {"loss": float(step)}) for step in range(6)))
    # The next start repeats steps 4 and 5, as after a kill, and brings an evaluation of step 4.
    send(*((step, {"loss": float(step), "eval": 0.75, "text": "#"}) for step in range(4, 8)))
    assert tracker.of("loss") == [(step, float(step)) for step in range(8)]
    assert tracker.of("eval") == [(0, 0.5), *((step, 0.75) for step in range(4, 8))]
    assert tracker.of("text") == [(step, "#") for step in range(4, 8)]
    numbers = [row for row, *_ in tracker.rows]
    assert numbers == sorted(numbers)
    assert names == ["", "", "run-1"]
    assert not lines


def test_a_tracker_that_hangs_holds_nothing_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines, tracker = list[str](), Kept(hold=threading.Event())
    monkeypatch.setattr(writers, "MOST_WAITING", 5)
    monkeypatch.setattr(writers, "begin", lambda *start: tracker.opened())
    one = Sender("files", tmp_path, Logged(tell=lines.append))
    began = time.monotonic()
    for step in range(1, 21):
        one.put((step, {"loss": 1.0}))
    one.put(None)
    one.wait(0.2)
    assert time.monotonic() - began < 2
    assert len(lines) == 2  # too many lines wait; it is left after so many seconds
    assert tracker.hold is not None
    tracker.hold.set()
    one.wait(10)


def test_a_failing_tracker_does_not_end_a_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the writer's side: all lines are written, and the trackers get what they take."""
    tracker, starts, lines = Kept(fails_at=(2, 4), closes=False), list[Logged](), list[str]()

    def begin(name: str, workdir: Path, logged: Logged, kept: str) -> Opened:
        starts.append(logged)
        return tracker.opened()

    monkeypatch.setattr(writers, "begin", begin)
    monkeypatch.setenv("WANDB_API_KEY", "planted-key-1234")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "longer-key")
    log = LogConfig(to=("wandb",), project="p")
    config = {"train": {"steps": 3}, "llm": {"url": "http://me:planted-key-1234@host"}}
    workdir = tmp_path / "my-run"
    with closing(MetricWriter(workdir, -1, Logged(log, config, lines.append))) as writer:
        for step in (1, 2, 3, 4):
            writer.write(step, {"loss": float(step), "nan": math.nan})
        writer.write_episodes(3, "chunks", [], "# text")
    assert [line["step"] for line in read_metrics(workdir / "metrics.jsonl")] == [1, 2, 3, 4]
    assert (tracker.of("loss"), tracker.of("nan")) == ([(1, 1.0), (3, 3.0)], [])
    assert tracker.of("episodes") == [(3, "# text")]
    first, last = lines
    assert "http://host is away" in first  # without the password
    assert not any(word in first for word in ("planted-key", "longer-key"))
    assert "wandb: 3 lines were not sent" in last  # the end failed, too
    cleaned = {"train": {"steps": 3}, "llm": {"url": "http://host"}}
    assert [start.config for start in starts] == [cleaned]
    assert not (workdir / "tensorboard").exists()


# ---------------------------------------------------------------------- the config


def test_what_a_tracker_lacks_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its library, in whose place there may be a folder of that name; the key of W&B."""
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL", "WANDB_IDENTITY_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    file, log = tmp_path / "netrc", LogConfig(to=("tensorboard", "wandb"))
    monkeypatch.setenv("NETRC", str(file))
    installed = importlib.util.find_spec("json")
    for spec, named in (
        (None, r"qrag_jax\[wandb\]"),
        (ModuleSpec("wandb", None), r"qrag_jax\[wandb\]"),
        (installed, "WANDB_API_KEY"),
    ):
        monkeypatch.setattr(importlib.util, "find_spec", lambda name, spec=spec: spec)
        with pytest.raises(InputError, match=named):
            writers.check_usable(log)
    file.write_text("machine api.wandb.ai login user password abc\n")
    file.chmod(0o600)
    writers.check_usable(log)
    file.write_text("machine\n")  # a broken one is none
    with pytest.raises(InputError, match="WANDB_API_KEY"):
        writers.check_usable(log)
    monkeypatch.setenv("WANDB_MODE", "offline")
    writers.check_usable(log)


# ---------------------------------------------------------------------- the libraries
# On this machine alone. Each test runs where its library is installed; `make test-trackers`
# installs all of them.

# Writes the steps after `resume` until `last`; if it is to be killed, when all of them are sent.
WRITER = """
import json, math, os, signal, sys, time
from pathlib import Path
from qrag_jax.runtime.config_fields import LogConfig
from qrag_jax.runtime.writers import Logged, MetricWriter, check_usable

workdir, to, resume, last, ends = json.loads(sys.argv[1])
workdir = Path(workdir)
config = {"optimizer": {"learning_rate": 1e-3, "name": "adam"}, "eval": {"stop": -math.inf}}
config["llm"] = {"url": "http://me:" + os.environ["TEST_KEY"] + "@host/v1"}
config |= {f"field{number}": number for number in range(120)}
logged = Logged(LogConfig(to=(to,), project="qrag-test"), config, print)
check_usable(logged.settings)
writer = MetricWriter(workdir, resume or -1, logged)
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


Sent = tuple[list[tuple[str, int, float]], list[int], float, int]


@pytest.mark.parametrize("tracker", ["wandb", "mlflow", "trackio"])
def test_a_killed_run_goes_on_in_the_same_run(
    tracker: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(tracker, reason=f"{tracker} is not installed")
    key = "a-planted-key-of-nobody"
    environment = os.environ | {
        "WANDB_MODE": "offline",
        "MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path}/mlflow.db",
        "TRACKIO_DIR": str(tmp_path / "trackio"),
        "HF_HUB_OFFLINE": "1",
        "TEST_KEY": key,
        "HOME": str(tmp_path),
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    # Steps 4 to 6 are done again; a finished run is started again.
    for resume, last, ends in ((0, 6, "killed"), (3, 9, ""), (9, 9, "")):
        words = json.dumps([str(tmp_path / "my-run"), tracker, resume, last, ends])
        # Files that a library puts into the working folder are not to lie in the repository.
        done = subprocess.run(
            [sys.executable, "-c", WRITER, words],
            **{"cwd": tmp_path, "env": environment, "capture_output": True, "text": True},
            timeout=240,
        )
        assert done.returncode == (-signal.SIGKILL if ends else 0), done.stderr[-3000:]
        assert not any(word in done.stdout for word in ("not sent", "cannot be used"))
        assert key not in done.stdout + done.stderr
    monkeypatch.chdir(tmp_path)
    readers = {"wandb": _of_wandb, "mlflow": _of_mlflow, "trackio": _of_trackio}
    scalars, texts, learning_rate, runs = readers[tracker](tmp_path)
    scored = [("eval/recall@5", step, step / 10) for step in (2, 4, 6, 8)]
    assert sorted(scalars) == sorted([("train/loss", n, 1 / n) for n in range(1, 10)] + scored)
    assert (sorted(texts), learning_rate, runs) == ([2, 4, 6, 8], 1e-3, 1)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert not any(key.encode() in path.read_bytes() for path in files)


# ---- Scalars (name, step, value), the steps of texts, the learning rate, the number of runs


def _of_wandb(folder: Path) -> Sent:
    scalars, texts, config, runs, last = [], [], {}, set(), -1
    for path in sorted(glob.glob(f"{folder}/my-run/wandb/offline-run-*/*.wandb")):
        for record in _records(path):
            kind = record.WhichOneof("record_type")
            if kind == "run":
                runs.add((record.run.project, record.run.run_id, record.run.display_name))
                config |= {i.key: json.loads(i.value_json) for i in record.run.config.update}
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
    return scalars, texts, config["optimizer"]["learning_rate"], len(runs)


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


def _of_mlflow(folder: Path) -> Sent:
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
    return scalars, texts, float(run.data.params["optimizer.learning_rate"]), len(runs)


def _of_trackio(folder: Path) -> Sent:
    database = sqlite3.connect(folder / "trackio" / "qrag-test.db")
    scalars, texts, runs = [], [], set()
    for name, step, text in database.execute("select run_name, step, metrics from metrics"):
        runs.add(name)
        row = json.loads(text)
        texts += [step] if "episodes" in row else []
        scalars += [(key, step, value) for key, value in row.items() if key != "episodes"]
    ((config,),) = database.execute("select config from configs").fetchall()
    assert {name.rpartition("-")[0] for name in runs} == {"my-run"}
    return scalars, texts, json.loads(config)["optimizer.learning_rate"], len(runs)
