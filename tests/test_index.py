"""The command `index`: killed and broken off, full disks, runs and exports, bad input."""

from __future__ import annotations

import random
import shutil
import signal
from pathlib import Path

import pytest

from tests.entry_points import Commands, end, refusal, wait_until
from tests.retrieval.qdrant_stand_in import running
from tests.systems.corpora import tree, write_corpus_file, write_tower

COUNT, PART = 160, 8
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


def test_a_command_that_was_killed_ends_with_the_same_bytes(
    commands: Commands, source: Path, tower: Path, unbroken: Path, tmp_path: Path
) -> None:
    """Nor do two commands write one index at once."""
    out = tmp_path / "index"
    given = arguments(source, tower, out)
    process = commands.start("index", *given)
    at = random.randint(1, PARTS // 3)
    wait_until(lambda: len(list(out.glob("exact/vectors.*.json"))) >= at, process)
    process.send_signal(signal.SIGSTOP)
    try:
        assert str(out) in refusal(commands.run("index", *given))
    finally:
        assert end(process, signal.SIGKILL).returncode == -signal.SIGKILL
    assert not (out / "exact" / "manifest.json").exists()
    finished = len(list(out.glob("exact/vectors.*.json")))
    told = commands.succeed("index", *given)
    assert f"embedded {COUNT - PART * finished} of them" in told
    assert tree(out) == tree(unbroken)


# -------------------------------------------------- the engines faiss and qdrant


@pytest.fixture(scope="module")
def lines(commands: Commands, unbroken: Path, tower: Path) -> list[str]:
    """What the engine exact finds."""
    return searched(commands, unbroken, tower)


def searched(commands: Commands, index: Path, tower: Path, *flags: str) -> list[str]:
    given = (f"--index={index}", f"--encoder={tower}", "--k=5", *flags)
    return commands.succeed("search", *given, "which river", "a silver clock").splitlines()


def test_a_file_of_faiss(
    commands: Commands, unbroken: Path, tower: Path, lines: list[str], tmp_path: Path
) -> None:
    index = Path(shutil.copytree(unbroken, tmp_path / "index"))
    commands.succeed("index", f"--index={index}", "--engine=faiss")
    shutil.rmtree(index / "exact")  # without the folder of the vectors the file is enough
    assert searched(commands, index, tower) == lines


def test_a_collection_of_a_server(
    commands: Commands, source: Path, tower: Path, lines: list[str], tmp_path: Path
) -> None:
    """The corpus is stored, embedded and sent by one command."""
    out = f"--index={tmp_path / 'index'}"
    given = (out, f"--corpus={source}", f"--encoder={tower}", "--collection=wiki", *FLAGS)
    with running() as server:
        commands.succeed("index", *given, f"--qdrant={server.url}")
        assert set(server.sent()) == set(range(COUNT))
        server.asked.clear()
        assert searched(commands, tmp_path / "index", tower, "--engine=qdrant") == lines
        assert any(asked.path == "/points/query/batch" for asked in server.asked)
        # All is there: nothing is sent again.
        commands.succeed("index", out, "--collection=wiki", f"--qdrant={server.url}")
        assert not server.sent()


def test_refusals(commands: Commands, unbroken: Path, tower: Path, tmp_path: Path) -> None:
    out, index = f"--index={tmp_path / 'out'}", f"--index={unbroken}"
    for command, words, name in (
        ("index", [out, "--encoder=no/such/folder/at/all"], "no/such/folder"),
        ("index", [out, "--max_chunk_tokens=65", f"--encoder={tower}"], "max_chunk_tokens"),
        ("index", [index, "--qdrant=http://me:secret@a"], "Qdrant"),
        ("search", [index, "--engine=qdrant", f"--encoder={tower}", "where?"], "qdrant"),
    ):
        said = refusal(commands.run(command, *words))
        assert name in said
        assert "secret" not in said
    assert not list((tmp_path / "out").rglob("manifest.json"))
