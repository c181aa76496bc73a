"""The commands with the engines faiss and qdrant, over vectors that are finished."""

from __future__ import annotations

import json
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from qrag_jax.retrieval.vector_files import open_vectors
from tests.entry_points import Commands, refusal
from tests.retrieval.qdrant_stand_in import Asked, StandIn, running
from tests.serving.served import serving
from tests.systems.corpora import write_corpus_file, write_tower

pytestmark = pytest.mark.long

COUNT, BATCH = 60, 5
SMALL = f"--qdrant_settings=batch={BATCH},pause=0,attempts=2"


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


def change_vectors(index: Path, like: int = 43) -> None:
    """Makes the first passage the best one wherever passage `like` is found."""
    vectors = open_vectors(index / "exact").vectors
    first = np.memmap(index / "exact" / "vectors.0.float32", np.float32, "r+", shape=vectors.width)
    first[:] = 100 * vectors.rows([like])[0]
    first.flush()


def test_a_file_of_faiss(commands: Commands, index: Path, tower: Path, lines: list[str]) -> None:
    given = (f"--index={index}", "--engine=faiss")
    assert searched(commands, index, tower, "--engine=faiss") == lines  # made in memory
    told = commands.succeed("index", *given)
    assert told.splitlines()[-1] == f"{index / 'faiss'}: {COUNT} passages"
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
    told, error = process.communicate()
    assert process.returncode == 128 + signal.SIGINT, error[-2000:]
    assert told.splitlines()[-1].startswith("SIGINT: stopped, what is finished is kept; give the")
    before = server.sent()
    assert 20 < len(before) < COUNT
    missing = (f"--index={out}", "--engine=qdrant", f"--encoder={tower}", "where?")
    assert "holds no finished index of qdrant" in refusal(commands.run("search", *missing))

    told = commands.succeed("index", *given, *to)
    assert told.splitlines()[-2] == f"the collection wiki at {server.url} is filled"
    assert told.splitlines()[-1] == f"{out / 'qdrant'}: {COUNT} passages"
    assert set(server.sent()) == set(range(COUNT))
    server.asked.clear()
    assert searched(commands, out, tower, "--engine=qdrant") == lines
    assert any(asked.path == "/points/query/batch" for asked in server.asked)
    # All is there: nothing is sent again.
    commands.succeed("index", f"--index={out}", SMALL, *to)
    assert not server.sent()


@pytest.mark.slow
def test_a_server_that_moved(
    commands: Commands, index: Path, server: StandIn, tower: Path, lines: list[str]
) -> None:
    """The corpus and the manifest are enough where the server is another one."""
    commands.succeed("index", f"--index={index}", f"--qdrant={server.url}", SMALL)
    shutil.rmtree(index / "exact")
    manifest = index / "qdrant" / "manifest.json"
    said = json.loads(manifest.read_text())
    assert said["settings"]["server"]["url"] == server.url
    said["settings"]["server"]["url"] = "http://127.0.0.1:1"
    manifest.write_text(json.dumps(said))
    search = (f"--index={index}", f"--encoder={tower}", "where?")
    assert "at http://127.0.0.1:1 does not answer" in refusal(commands.run("search", *search))
    at = f"--qdrant={server.url}"
    assert searched(commands, index, tower, at) == lines
    with serving(commands, index, f"--encoder={tower}", at, "--max_batch=8") as served:
        answer = served.post("/search", {"questions": ["which river"], "topk": 5}).json()
        found = [hit["id"] for hit in answer["hits"][0]]
    assert found == [line.split()[2] for line in lines[1:6]]


@pytest.mark.slow
def test_a_collection_is_replaced_on_demand_alone(
    commands: Commands, index: Path, server: StandIn, tower: Path
) -> None:
    given = (f"--index={index}", f"--qdrant={server.url}", SMALL)
    commands.succeed("index", *given)
    change_vectors(index)
    told = refusal(commands.run("index", *given))
    assert "the collection passages of the Qdrant server at" in told
    assert "--replace" in told
    assert not any(asked.method == "DELETE" for asked in server.asked)
    commands.succeed("index", *given, "--replace")
    assert searched(commands, index, tower, "--engine=qdrant")[1].split()[2] == "p0"


@pytest.mark.parametrize(
    ("command", "given", "told"),
    [
        ("index", "--engine=exact --qdrant=http://a", "--qdrant is for --engine=qdrant; leave"),
        ("index", "--collection=a", "--collection is for --engine=qdrant; leave it out"),
        ("index", "--qdrant=http://me:secret@a", "the URL of Qdrant has more than server and"),
        ("index", "--engine=qdrant --collection=a/b", "the name of the collection is 'a/b'"),
        ("index", "--engine=qdrant --qdrant_settings=shard=2", "--qdrant_settings has 'shard=2'"),
        ("index", "--engine=faiss --pooling=cls", "--pooling is for --encoder; leave it out."),
        ("search", "--qdrant=db:6333 x", "the URL of Qdrant is 'db:6333'; give a server such"),
        ("search", "--qdrant=http://a --engine=faiss x", "for the engine qdrant, not for faiss"),
        ("serve", "--qdrant=http://a --engine=exact", "for the engine qdrant, not for exact"),
    ],
)
def test_what_does_not_fit(
    command: str, given: str, told: str, commands: Commands, finished: tuple[Path, Path]
) -> None:
    said = refusal(commands.run(command, f"--index={finished[1]}", *given.split()))
    assert told in said
    assert "secret" not in said
