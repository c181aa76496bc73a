"""The commands with the engines faiss and qdrant, over vectors that are finished."""

from __future__ import annotations

import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.entry_points import Commands, refusal
from tests.retrieval.qdrant_stand_in import Asked, StandIn, running
from tests.systems.corpora import write_corpus_file, write_tower

COUNT, BATCH = 60, 5
SMALL = f"--qdrant_settings=batch={BATCH},attempts=1"


@pytest.fixture(scope="module")
def tower(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tower(tmp_path_factory.mktemp("tower") / "model")


@pytest.fixture(scope="module")
def finished(
    commands: Commands, tower: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    """The file of a corpus, and the index that the engine exact searches."""
    folder = tmp_path_factory.mktemp("finished")
    source = write_corpus_file(folder / "corpus.jsonl", COUNT)
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
    assert 20 < len(before) < COUNT
    missing = (f"--index={out}", "--engine=qdrant", f"--encoder={tower}", "where?")
    assert "qdrant" in refusal(commands.run("search", *missing))

    commands.succeed("index", *given, *to)
    assert set(server.sent()) == set(range(COUNT))
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
