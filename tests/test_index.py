"""The command `index`: killed and broken off, full disks, runs and exports, bad input."""

from __future__ import annotations

import json
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.entry_points import Commands, refusal
from tests.systems.corpora import tree, write_corpus_file, write_tower

COUNT, PART = 600, 8
PARTS = COUNT // PART
FLAGS = ("--compute=float32", f"--part={PART}", "--workers=0")


@pytest.fixture(scope="module")
def tower(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tower(tmp_path_factory.mktemp("tower") / "model")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus_file(tmp_path_factory.mktemp("corpus") / "corpus.jsonl", COUNT)


def arguments(source: Path, tower: Path, out: Path) -> list[str]:
    return [f"--corpus={source}", f"--encoder={tower}", f"--index={out}", *FLAGS]


@pytest.fixture(scope="module")
def unbroken(
    commands: Commands, source: Path, tower: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    out = tmp_path_factory.mktemp("unbroken") / "index"
    told = commands.succeed("index", *arguments(source, tower, out))
    assert f"{COUNT} passages" in told
    return out


def finished_parts(out: Path) -> set[Path]:
    return set((out / "exact").glob("vectors.*.json"))


def broken_off(commands: Commands, given: list[str], out: Path, at: int, how: int) -> Any:
    """Starts the command and sends a signal once `at` parts are finished; returns the process."""
    process = commands.start("index", *given)
    deadline = time.monotonic() + 200
    while len(finished_parts(out)) < at:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.002)
    time.sleep(random.uniform(0, 0.05))
    process.send_signal(how)
    return process


def test_a_command_that_was_killed_and_stopped_ends_with_the_same_bytes(
    commands: Commands, source: Path, tower: Path, unbroken: Path, tmp_path: Path
) -> None:
    """Nor do two commands write one index at once."""
    out = tmp_path / "index"
    given = arguments(source, tower, out)
    process = broken_off(commands, given, out, random.randint(1, PARTS // 3), signal.SIGSTOP)
    try:
        assert str(out) in refusal(commands.run("index", *given))
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert not (out / "exact" / "manifest.json").exists()
    before = {path: path.stat().st_mtime_ns for path in finished_parts(out)}
    process = broken_off(commands, given, out, len(before) + 2, signal.SIGINT)
    _, error = process.communicate()
    assert process.returncode == 128 + signal.SIGINT, error[-2000:]
    assert "Traceback" not in error
    kept = {path: path.stat().st_mtime_ns for path in finished_parts(out)}
    assert before.items() <= kept.items()  # what was finished is not written again
    told = commands.succeed("index", *given)
    assert f"embedded {COUNT - PART * len(kept)} of them" in told
    assert tree(out) == tree(unbroken)


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ((), "--index"),
        (("--index=OUT", "--encoder=no/such/folder/at/all"), "no/such/folder"),
        (("--index=OUT", "--max_chunk_tokens=65", "--encoder=T"), "max_chunk_tokens"),
        (("--index=OUT", "--corpus=BROKEN", "--encoder=T"), "corpus.jsonl:2"),
    ],
)
def test_bad_flags(
    commands: Commands,
    tower: Path,
    finished_run: Path,
    tmp_path: Path,
    given: tuple[str, ...],
    name: str,
) -> None:
    broken = tmp_path / "corpus.jsonl"
    broken.write_text(json.dumps({"id": "a", "text": "one"}) + "\n" + json.dumps({"id": "b"}))
    words = {"OUT": tmp_path / "out", "T": tower, "BROKEN": broken, "RUN": finished_run}
    parts = (word.partition("=") for word in given)
    filled = [f"{flag}={words.get(value, value)}" for flag, _, value in parts]
    assert name in refusal(commands.run("index", *filled))
    assert not list((tmp_path / "out").rglob("manifest.json"))
