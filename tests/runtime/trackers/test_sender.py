"""What a tracker is sent: each step once, whatever fails; nothing that fails ends a run."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import threading
import time
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

import pytest

from qrag_jax.errors import InputError
from qrag_jax.runtime import trackers
from qrag_jax.runtime.trackers import clean, sender, without_secrets
from qrag_jax.runtime.trackers.sender import Sender, close_all
from qrag_jax.runtime.train_config import LogConfig
from qrag_jax.runtime.writers import read_metrics


@dataclasses.dataclass
class FileTracker:
    """A tracker that keeps rows in a file, and fails at the steps it is told to fail at."""

    path: Path
    run: str = "run-1"
    fails_at: tuple[int, ...] = ()
    closes: bool = True
    hold: threading.Event | None = None

    def write(self, row: int, step: int, scalars: Mapping[str, float]) -> None:
        if self.hold is not None:
            self.hold.wait()
        if step in self.fails_at:
            raise ConnectionError("http://me:pass@host is away")
        self._add(row, step, *sorted(scalars.items()))

    def write_text(self, row: int, step: int, name: str, text: str) -> None:
        self._add(row, step, (name, text))

    def _add(self, row: int, step: int, *pairs: tuple[str, object]) -> None:
        with self.path.open("a") as file:
            file.writelines(f"{row} {step} {name} {value}\n" for name, value in pairs)

    def close(self) -> None:
        if not self.closes:
            raise SystemExit(3)

    def rows(self) -> list[tuple[int, int, str, str]]:
        lines = [line.split(" ", 3) for line in self.path.read_text().splitlines()]
        return [(int(row), int(step), name, value) for row, step, name, value in lines]


@pytest.fixture
def tracker(tmp_path: Path) -> FileTracker:
    return FileTracker(tmp_path / "rows")


def started(tracker: FileTracker, told: list[str], **more: object) -> Sender:
    def begin(kept: str) -> FileTracker:
        assert kept in ("", tracker.run)
        return tracker

    path = tracker.path.with_name("record.json")
    return Sender("files", begin, path, told.append, **more)  # type: ignore[arg-type]


def test_lines_arrive_in_their_order_and_once_over_all_starts(tracker: FileTracker) -> None:
    told: list[str] = []
    one = started(tracker, told)
    one.put(0, {"eval": 0.5, "episodes": "# text"})
    for step in range(1, 6):
        one.put(step, {"loss": float(step)})
    close_all([one], 10)
    # The next start repeats steps 4 and 5, as after a kill, and brings an evaluation of step 4.
    two = started(tracker, told)
    for step in range(4, 8):
        two.put(step, {"loss": float(step)})
        if step == 4:
            two.put(step, {"eval": 0.75, "episodes": "# other"})
    close_all([two], 10)
    rows = tracker.rows()
    assert [step for _, step, name, _ in rows if name == "loss"] == [1, 2, 3, 4, 5, 6, 7]
    assert [(s, v) for _, s, name, v in rows if name == "eval"] == [(0, "0.5"), (4, "0.75")]
    assert [(s, v) for _, s, n, v in rows if n == "episodes"] == [(0, "# text"), (4, "# other")]
    numbers = [row for row, *_ in rows]
    assert numbers == sorted({*numbers})
    assert not told


def test_a_failing_line_is_told_once_and_counted(tracker: FileTracker) -> None:
    told: list[str] = []
    tracker.fails_at, tracker.closes = (2, 3, 5), False
    one = started(tracker, told)
    for step in range(1, 7):
        one.put(step, {"loss": float(step)})
    close_all([one], 10)
    assert [step for _, step, *_ in tracker.rows()] == [1, 4, 6]
    assert one.failed == 4  # the end failed, too
    first, last = told
    assert first.startswith("files: a line was not sent (http://host is away); the training goes")
    assert last == "files: 4 lines were not sent; metrics.jsonl has every line"


def test_a_tracker_that_cannot_begin_gets_all_from_the_next_start(tracker: FileTracker) -> None:
    told: list[str] = []

    def begin(kept: str) -> FileTracker:
        raise SystemExit("no route to host")

    path = tracker.path.with_name("record.json")
    one = Sender("files", begin, path, told.append)
    one.put(1, {"loss": 1.0})
    close_all([one], 10)
    (only,) = told
    assert only.startswith("files cannot be used (no route to host); the training goes on without")
    assert not path.exists()
    two = started(tracker, told, earlier=lambda: [(1, {"loss": 1.0}), (2, {"loss": 2.0})])
    two.put(2, {"loss": 2.0})
    two.put(3, {"loss": 3.0})
    close_all([two], 10)
    assert [step for _, step, *_ in tracker.rows()] == [1, 2, 3]
    assert len(told) == 1


def test_a_tracker_that_hangs_holds_nothing_up(
    tracker: FileTracker, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    tracker.hold = threading.Event()
    monkeypatch.setattr(sender, "MOST_WAITING", 5)
    one = started(tracker, told)
    began = time.monotonic()
    for step in range(1, 21):
        one.put(step, {"loss": 1.0})
    assert time.monotonic() - began < 1
    close_all([one], 0.2)
    assert any("too many lines are waiting" in line for line in told)
    assert any("has not taken all lines after 0 s, and is left" in line for line in told)
    tracker.hold.set()
    one.wait(10)


@pytest.mark.skipif(os.geteuid() != 0, reason="a small disk needs root")
def test_a_full_disk_sends_nothing_twice(full_disk: Path) -> None:
    tracker = FileTracker(full_disk / "rows")
    told: list[str] = []
    one = started(tracker, told)
    one.put(1, {"loss": 1.0})
    while not tracker.path.exists():
        time.sleep(0.01)
    with contextlib.suppress(OSError), (full_disk / "filler").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    one.put(2, {"loss": 2.0})
    close_all([one], 10)
    assert "No space left on device" in told[0]
    assert [step for _, step, *_ in tracker.rows()] == [1]


def test_keys_are_taken_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "much-longer")
    text = "POST https://u:p@host/x?key=0123456789abcdef failed (much-longer)"
    safe = "POST https://host/x?key=$WANDB_API_KEY failed ($MLFLOW_TRACKING_PASSWORD)"
    assert without_secrets(text) == safe
    config = {"llm": {"url": "http://u:p@host/v1", "n": 3}, "to": ("a", math.inf)}
    assert clean(config) == {"llm": {"url": "http://host/v1", "n": 3}, "to": ["a", math.inf]}


def test_a_netrc_that_cannot_be_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_IDENTITY_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    (tmp_path / "netrc").write_text("machine\n")
    assert not trackers.has_wandb_key()


def test_a_failing_tracker_does_not_end_a_training(
    tracker: FileTracker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the writer's side: all lines are written, and the trackers get what they take."""
    from qrag_jax.runtime.writers import Logged, MetricWriter

    tracker.fails_at, tracker.closes = (2,), False
    starts: list[tuple[str, trackers.Start]] = []

    def begin(name: str, start: trackers.Start) -> FileTracker:
        starts.append((name, start))
        if name == "mlflow":
            raise OSError("the server is away")
        return tracker

    monkeypatch.setattr(trackers, "begin", begin)
    monkeypatch.setenv("PLANTED_KEY", "planted-key-1234")
    told: list[str] = []
    log = LogConfig(to=("wandb", "mlflow"), project="p")
    config = {"train": {"steps": 3}, "llm": {"url": "http://me:planted-key-1234@host"}}
    workdir = tmp_path / "my-run"
    with MetricWriter(workdir, None, Logged(log, config, told.append)) as writer:
        for step in (1, 2, 3):
            writer.write(step, {"loss": float(step), "nan": math.nan})
        writer.write_text(3, "episodes", "# text")
    assert [line["step"] for line in read_metrics(workdir / "metrics.jsonl")] == [1, 2, 3]
    assert {(s, n, v) for _, s, n, v in tracker.rows()} == {
        (1, "loss", "1.0"),
        (3, "loss", "3.0"),
        (3, "episodes", "# text"),
    }
    assert sum("a line was not sent" in line for line in told) == 1
    assert sum(line.startswith("mlflow cannot be used (the server is away)") for line in told) == 1
    assert {(name, start.name, start.project) for name, start in starts} == {
        ("wandb", "my-run", "p"),
        ("mlflow", "my-run", "p"),
    }
    assert starts[0][1].config == {"train": {"steps": 3}, "llm": {"url": "http://host"}}
    assert not (workdir / "tensorboard").exists()


def test_a_folder_of_a_trackers_name_is_not_its_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = [name for name in ("wandb", "mlflow", "trackio") if find_spec(name) is None]
    for name in missing:  # none of them where all are installed
        (tmp_path / name).mkdir()
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.setenv("WANDB_MODE", "offline")
        with pytest.raises(InputError, match=name):
            trackers.check_usable(LogConfig(to=(name,), project="p"))
