"""The command `index`: killed and broken off, full disks, runs and exports, bad input."""

from __future__ import annotations

import json
import random
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.entry_points import Commands, refusal
from tests.retrieval.qdrant_stand_in import Asked, StandIn, running
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
    commands: Commands, tower: Path, tmp_path: Path, given: tuple[str, ...], name: str
) -> None:
    broken = tmp_path / "corpus.jsonl"
    broken.write_text(json.dumps({"id": "a", "text": "one"}) + "\n" + json.dumps({"id": "b"}))
    words = {"OUT": tmp_path / "out", "T": tower, "BROKEN": broken}
    parts = (word.partition("=") for word in given)
    filled = [f"{flag}={words.get(value, value)}" for flag, _, value in parts]
    assert name in refusal(commands.run("index", *filled))
    assert not list((tmp_path / "out").rglob("manifest.json"))


# -------------------------------------------------- the engines faiss and qdrant

PASSAGES, BATCH = 60, 5
SMALL = f"--qdrant_settings=batch={BATCH}"


@pytest.fixture(scope="module")
def finished(
    commands: Commands, tower: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    """The file of a corpus, and the index that the engine exact searches."""
    folder = tmp_path_factory.mktemp("finished")
    source = write_corpus_file(folder / "corpus.jsonl", PASSAGES)
    commands.succeed(
        "index", f"--corpus={source}", f"--encoder={tower}", f"--index={folder / 'index'}"
    )
    return source, folder / "index"


@pytest.fixture
def index(finished: tuple[Path, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished[1], tmp_path / "index"))


@pytest.fixture
def server() -> Iterator[StandIn]:
    with running() as state:
        yield state


@pytest.fixture(scope="module")
def lines(commands: Commands, finished: tuple[Path, Path], tower: Path) -> list[str]:
    """What the engine exact finds."""
    return searched(commands, finished[1], tower)


def searched(commands: Commands, index: Path, tower: Path, *flags: str) -> list[str]:
    given = (f"--index={index}", f"--encoder={tower}", "--k=5", *flags)
    return commands.succeed("search", *given, "which river", "a silver clock").splitlines()


def test_a_file_of_faiss(commands: Commands, index: Path, tower: Path, lines: list[str]) -> None:
    given = (f"--index={index}", "--engine=faiss")
    assert searched(commands, index, tower, "--engine=faiss") == lines  # made in memory
    commands.succeed("index", *given)
    assert searched(commands, index, tower, "--engine=faiss") == lines
    file = index / "faiss" / "index.faiss"
    before = file.stat().st_mtime_ns
    commands.succeed("index", *given)
    assert file.stat().st_mtime_ns == before
    # Without the folder of the vectors the file is enough.
    shutil.rmtree(index / "exact")
    assert searched(commands, index, tower)[0] == "which river"


def test_a_collection_of_a_server(
    commands: Commands,
    finished: tuple[Path, Path],
    server: StandIn,
    tower: Path,
    lines: list[str],
    tmp_path: Path,
) -> None:
    """The corpus is stored, embedded and sent by one command, which is stopped on its way."""
    out = tmp_path / "index"
    given = (f"--corpus={finished[0]}", f"--encoder={tower}", f"--index={out}", SMALL)
    to = (f"--qdrant={server.url}", "--collection=wiki")
    process = commands.start("index", *given, *to)
    stuck, let_go = threading.Event(), threading.Event()

    def waits(asked: Asked) -> int:
        if asked.path == "/points" and len(server.sent()) > 20:
            stuck.set()
            let_go.wait(60)
        return 0

    server.fails = waits
    assert stuck.wait(120), process.communicate()
    process.send_signal(signal.SIGINT)
    let_go.set()
    _, error = process.communicate()
    assert process.returncode == 128 + signal.SIGINT, error[-2000:]
    before = server.sent()
    assert 20 < len(before) < PASSAGES
    missing = (f"--index={out}", "--engine=qdrant", f"--encoder={tower}", "where?")
    assert "qdrant" in refusal(commands.run("search", *missing))

    commands.succeed("index", *given, *to)
    assert set(server.sent()) == set(range(PASSAGES))
    server.asked.clear()
    assert searched(commands, out, tower, "--engine=qdrant") == lines
    assert any(asked.path == "/points/query/batch" for asked in server.asked)
    at = ("--engine=qdrant", f"--qdrant={server.url}")  # as where the server has moved
    assert searched(commands, out, tower, *at) == lines
    # All is there: nothing is sent again.
    commands.succeed("index", f"--index={out}", SMALL, *to)
    assert not server.sent()


@pytest.mark.parametrize(
    ("command", "given", "name"),
    [
        ("index", "--engine=exact --qdrant=http://a", "--qdrant"),
        ("index", "--qdrant=http://me:secret@a", "Qdrant"),
        ("search", "--qdrant=http://a --engine=faiss x", "qdrant"),
    ],
)
def test_what_does_not_fit(
    command: str, given: str, name: str, commands: Commands, finished: tuple[Path, Path]
) -> None:
    said = refusal(commands.run(command, f"--index={finished[1]}", *given.split()))
    assert name in said
    assert "secret" not in said
