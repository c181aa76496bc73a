"""What a tracker is sent: each step once, whatever fails; nothing that fails ends a run."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import threading
import time
from collections.abc import Mapping
from contextlib import closing
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from qrag_jax.errors import InputError
from qrag_jax.runtime import trackers
from qrag_jax.runtime.saved_config import LogConfig
from qrag_jax.runtime.trackers import Sender, clean, close_all, without_secrets
from qrag_jax.runtime.writers import Logged, MetricWriter, read_metrics


@dataclasses.dataclass
class Kept:
    """A tracker that keeps `(row, step, name, value)`, and fails at some steps."""

    rows: list[tuple[int, int, str, object]] = dataclasses.field(default_factory=list)
    run: str = "run-1"
    fails_at: tuple[int, ...] = ()
    closes: bool = True
    hold: threading.Event | None = None

    def write(self, row: int, step: int, values: Mapping[str, object]) -> None:
        if self.hold is not None:
            self.hold.wait()
        if step in self.fails_at and "loss" in values:
            raise ConnectionError("http://me:pass@host is away")
        self.rows += [(row, step, name, value) for name, value in values.items()]

    def close(self) -> None:
        if not self.closes:
            raise SystemExit(3)

    def of(self, name: str) -> list[tuple[int, object]]:
        return [(step, value) for _, step, found, value in self.rows if found == name]


@pytest.fixture
def record(tmp_path: Path) -> Path:
    return tmp_path / "record.json"


def test_lines_arrive_in_their_order_and_once_over_all_starts(record: Path) -> None:
    told, tracker = list[str](), Kept()

    def away(kept: str) -> Kept:
        raise SystemExit("no route to host")

    one = Sender("files", away, record, told.append)
    one.put(0, {"eval": 0.5, "episodes": "# text"})
    close_all([one], 10)
    assert "no route to host" in told.pop()
    assert not record.exists()
    first = [(0, {"eval": 0.5, "episodes": "# text"})]
    two = Sender("files", lambda kept: tracker, record, told.append, lambda: first)
    for step in range(6):
        two.put(step, {"loss": float(step)})
    close_all([two], 10)
    # The next start repeats steps 4 and 5, as after a kill, and brings an evaluation of step 4.
    three = Sender("files", lambda kept: Kept(tracker.rows, kept), record, told.append)
    for step in range(4, 8):
        three.put(step, {"loss": float(step), "eval": 0.75, "episodes": "# other"})
    close_all([three], 10)
    assert tracker.of("loss") == [(step, float(step)) for step in range(8)]
    assert tracker.of("eval") == [(0, 0.5), *((step, 0.75) for step in range(4, 8))]
    assert tracker.of("episodes")[:2] == [(0, "# text"), (4, "# other")]
    numbers = [row for row, *_ in tracker.rows]
    assert numbers == sorted(numbers)
    assert not told


def test_a_tracker_that_hangs_holds_nothing_up(
    record: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told, tracker = list[str](), Kept(hold=threading.Event())
    monkeypatch.setattr(trackers, "MOST_WAITING", 5)
    one = Sender("files", lambda kept: tracker, record, told.append)
    began = time.monotonic()
    for step in range(1, 21):
        one.put(step, {"loss": 1.0})
    close_all([one], 0.2)
    assert time.monotonic() - began < 2
    assert any("too many lines are waiting" in line for line in told)
    assert any("has not taken all lines after 0 s, and is left" in line for line in told)
    assert tracker.hold is not None
    tracker.hold.set()
    one.wait(10)


def test_keys_are_taken_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "much-longer")
    text = "POST https://u:p@host/x?key=0123456789abcdef failed (much-longer)"
    safe = "POST https://host/x?key=$WANDB_API_KEY failed ($MLFLOW_TRACKING_PASSWORD)"
    assert without_secrets(text) == safe
    config = {"llm": {"url": "http://u:p@host/v1", "n": 3}, "to": ("a", math.inf)}
    assert clean(config) == {"llm": {"url": "http://host/v1", "n": 3}, "to": ["a", math.inf]}


def test_a_failing_tracker_does_not_end_a_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the writer's side: all lines are written, and the trackers get what they take."""
    tracker = Kept(fails_at=(2, 4), closes=False)
    starts: dict[str, trackers.Start] = {}

    def begin(name: str, start: trackers.Start) -> Kept:
        starts[name] = start
        if name == "mlflow":
            raise OSError("the server is away")
        return tracker

    monkeypatch.setattr(trackers, "begin", begin)
    monkeypatch.setenv("PLANTED_KEY", "planted-key-1234")
    told: list[str] = []
    log = LogConfig(to=("wandb", "mlflow"), project="p")
    config = {"train": {"steps": 3}, "llm": {"url": "http://me:planted-key-1234@host"}}
    workdir = tmp_path / "my-run"
    with closing(MetricWriter(workdir, None, Logged(log, config, told.append))) as writer:
        for step in (1, 2, 3, 4):
            writer.write(step, {"loss": float(step), "nan": math.nan})
        writer.write_episodes(3, "chunks", [], "# text")
    assert [line["step"] for line in read_metrics(workdir / "metrics.jsonl")] == [1, 2, 3, 4]
    assert (tracker.of("loss"), tracker.of("nan")) == ([(1, 1.0), (3, 3.0)], [])
    assert tracker.of("episodes") == [(3, "# text")]
    (line,) = (line for line in told if "a line was not sent" in line)
    assert "http://host is away" in line  # without the password
    assert any("wandb: 3 lines were not sent" in line for line in told)  # the end failed, too
    assert any(line.startswith("mlflow cannot be used (the server is away)") for line in told)
    start = starts["wandb"]
    assert (start.name, start.project) == ("my-run", "p")
    assert start.config == {"train": {"steps": 3}, "llm": {"url": "http://host"}}
    assert not (workdir / "tensorboard").exists()


# ---------------------------------------------------------------------- the config


def test_a_library_that_is_not_installed_or_is_a_folder_of_its_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    for spec in (None, ModuleSpec("wandb", None)):
        monkeypatch.setattr(importlib.util, "find_spec", lambda name, spec=spec: spec)
        with pytest.raises(InputError, match=r"pip install 'qrag_jax\[wandb\]'"):
            trackers.check_usable(LogConfig(to=("tensorboard", "wandb")))


def test_wandb_without_a_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    installed = importlib.util.find_spec("json")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: installed)
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL", "WANDB_IDENTITY_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    file = tmp_path / "netrc"
    monkeypatch.setenv("NETRC", str(file))
    log = LogConfig(to=("wandb",))
    for content in (None, "machine\n"):  # a broken netrc is none
        if content is not None:
            file.write_text(content)
        with pytest.raises(InputError, match="there is no key"):
            trackers.check_usable(log)
    file.write_text("machine api.wandb.ai login user password abc\n")
    file.chmod(0o600)
    trackers.check_usable(log)
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.org:8080")
    with pytest.raises(InputError, match="no key"):
        trackers.check_usable(log)
    for name, value in (("WANDB_MODE", "offline"), ("WANDB_API_KEY", "x")):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            trackers.check_usable(log)
