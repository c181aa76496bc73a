"""A run in an object store: `file://` is a store of fsspec that several processes can use."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from qrag_jax.errors import InputError
from qrag_jax.runtime import buckets
from qrag_jax.runtime.run import Run
from qrag_jax.runtime.whole_files import STEP_METADATA

STEP = "checkpoints/last/8"


@pytest.fixture
def url(tmp_path: Path) -> str:
    return (tmp_path / "store" / "run").as_uri()


def on_machine(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What follows is done by a machine with a disk of its own."""
    monkeypatch.setenv("QRAG_CACHE", str(tmp_path / name))
    monkeypatch.setattr(buckets.socket, "gethostname", lambda: name)


def contents(folder: Path) -> dict[str, str]:
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return {
        path.relative_to(folder).as_posix(): path.read_text()
        for path in paths
        if path.name not in (buckets.RECORD, buckets.IN_USE) and path.suffix != ".lock"
    }


def test_another_machine_goes_on_with_what_was_sent(url, tmp_path, monkeypatch):
    on_machine("first", tmp_path, monkeypatch)
    with buckets.opened(url) as folder:
        (folder / STEP).mkdir(parents=True)
        (folder / STEP / "array").write_text("old")
        (folder / STEP / STEP_METADATA).write_text("{}")
        (folder / "metrics.jsonl").write_text("1\n")
    on_machine("second", tmp_path, monkeypatch)
    with buckets.opened(url) as there:
        assert there != folder
        assert contents(there) == contents(folder)
        (there / STEP / "array").write_text("new")
        (there / "metrics.jsonl").unlink()
    on_machine("first", tmp_path, monkeypatch)
    with buckets.opened(url) as back:
        assert back == folder
        assert contents(back) == {f"{STEP}/array": "new", f"{STEP}/{STEP_METADATA}": "{}"}


def test_what_a_killed_process_had_not_sent_stays_here(url, tmp_path, monkeypatch):
    on_machine("first", tmp_path, monkeypatch)
    with buckets.opened(url) as folder:
        (folder / "metrics.jsonl").write_text("1\n")
    (folder / "metrics.jsonl").write_text("1\n2\n")  # as by a process that is killed now
    with buckets.opened(url):
        assert contents(folder) == {"metrics.jsonl": "1\n2\n"}
    assert contents(Path(url.removeprefix("file://"))) == {"metrics.jsonl": "1\n2\n"}


def test_changes_are_sent_while_a_command_runs(url, tmp_path, monkeypatch):
    on_machine("first", tmp_path, monkeypatch)
    monkeypatch.setattr(buckets, "INTERVAL", 0.05)
    store = Path(url.removeprefix("file://"))
    with buckets.opened(url) as folder:
        (folder / "metrics.jsonl").write_text("1\n")
        end = time.monotonic() + 20
        while not (store / "metrics.jsonl").exists():
            assert time.monotonic() < end
            time.sleep(0.05)


SENDING = """
import os, sys
from qrag_jax.runtime import buckets
from qrag_jax.runtime.whole_files import STEP_METADATA
bucket = buckets.Bucket(sys.argv[1])
step = bucket.folder / "checkpoints/last/8"
step.mkdir(parents=True)
for number in range(200):
    (step / f"array{number:03}").write_bytes(os.urandom(2**20))
(step / STEP_METADATA).write_text("{}")
print("sends", flush=True)
bucket.send()
"""


def test_a_step_that_a_kill_left_half_sent_is_not_fetched(url, tmp_path, monkeypatch):
    on_machine("first", tmp_path, monkeypatch)
    with buckets.opened(url) as folder:
        older = folder / "checkpoints/last/4"
        older.mkdir(parents=True)
        (older / STEP_METADATA).write_text("{}")
    on_machine("third", tmp_path, monkeypatch)
    sender = subprocess.Popen(
        [sys.executable, "-c", SENDING, url], stdout=subprocess.PIPE, text=True
    )
    assert sender.stdout is not None
    assert sender.stdout.readline() == "sends\n"
    arrays = Path(url.removeprefix("file://")) / STEP
    while not list(arrays.glob("*")):
        assert sender.poll() is None
    sender.send_signal(signal.SIGKILL)
    sender.wait()
    assert not (arrays / STEP_METADATA).exists()
    on_machine("second", tmp_path, monkeypatch)
    with buckets.opened(url) as there:
        assert [path.name for path in (there / "checkpoints/last").iterdir()] == ["4"]


def test_one_machine_trains_at_a_time(url, tmp_path, monkeypatch):
    monkeypatch.setattr(buckets, "INTERVAL", 0.2)
    on_machine("first", tmp_path, monkeypatch)
    with buckets.opened(url) as first, Run.open(first, 0.0):
        on_machine("second", tmp_path, monkeypatch)
        with (
            buckets.opened(url) as second,
            pytest.raises(InputError, match="first"),
            Run.open(second, 0.0),
        ):
            pass
    with buckets.opened(url) as second, Run.open(second, 0.0):  # at once: the lease was given up
        pass
    on_machine("third", tmp_path, monkeypatch)
    lease = Path(url.removeprefix("file://")) / buckets.LEASE
    lease.write_text('{"host": "killed", "folder": "killed:/there", "round": 3}')
    with buckets.opened(url) as third, Run.open(third, 0.0):  # nobody renews it
        assert "third" in lease.read_text()


def write_in(words: list[str]) -> None:
    with buckets.staged(words) as resolved:
        folder = Path(resolved[-1].removeprefix("--workdir="))
        (folder / "metrics.jsonl").write_text("1\n")


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--workdir=nowhere://run"], "nowhere"),
        (["--workdir", "file:///proc/1/run"], "file:///proc/1/run"),
        (["--hosts=auto", "--workdir=file:///tmp/run"], "--hosts"),
    ],
)
def test_wrong_places_end_in_a_sentence(words, named, tmp_path, monkeypatch):
    on_machine("first", tmp_path, monkeypatch)
    with pytest.raises(InputError, match=named):
        write_in(words)


def test_a_name_that_leads_out_of_the_folder_is_refused(url, tmp_path, monkeypatch):
    on_machine("first", tmp_path, monkeypatch)
    bucket = buckets.Bucket(url)
    monkeypatch.setattr(bucket, "_listed", lambda: {"../../../evil": "1"})
    bucket.folder.mkdir(parents=True)
    with pytest.raises(InputError, match="evil"), (bucket.folder / "x").open("ab") as file:
        bucket.fetch(file.fileno())


def test_other_folders_stay_as_they_are():
    with buckets.staged(["--workdir=runs/a", "--config.data.path=s3://b"]) as words:
        assert words == ["--workdir=runs/a", "--config.data.path=s3://b"]
