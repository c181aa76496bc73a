"""The commands `index` and `search`: engines, runs and exports, bad input."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from qrag_jax import LoadSettings, Retriever
from tests.entry_points import Commands, json_lines, log_rows, refusal
from tests.retrieval.qdrant_stand_in import running
from tests.support.worlds import write_lines
from tests.systems.corpora import tree, write_corpus_file, write_tower
from tests.systems.parts import chunks_of

COUNT = 60
FLAGS = ("--compute=float32", "--workers=0")


@pytest.fixture(scope="module")
def tower(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tower(tmp_path_factory.mktemp("tower") / "model")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus_file(tmp_path_factory.mktemp("corpus") / "corpus.jsonl", COUNT)


@pytest.fixture(scope="module")
def unbroken(
    commands: Commands, source: Path, tower: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    out = tmp_path_factory.mktemp("unbroken") / "index"
    given = (f"--corpus={source}", f"--encoder={tower}", f"--index={out}")
    commands.succeed("index", *given, *FLAGS)
    return out


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
        commands.succeed("index", *given, "--engine=qdrant", f"--server={server.url}")
        assert set(server.sent()) == set(range(COUNT))
        server.asked.clear()
        assert searched(commands, tmp_path / "index", tower, "--engine=qdrant") == lines
        assert any(asked.path == "/points/query/batch" for asked in server.asked)
        # All is there: nothing is sent again.
        again = ("--collection=wiki", "--engine=qdrant", f"--server={server.url}")
        commands.succeed("index", out, *again)
        assert not server.sent()


# ------------------------------------------------------------ search


@pytest.fixture(scope="module")
def index(scored_run: Path, commands: Commands, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The chunks of a document as `qrag index` indexes them of a run; and, beside, by words."""
    folder = tmp_path_factory.mktemp("index")
    question = log_rows(scored_run)[0]["question"]
    chunks = chunks_of(scored_run, question, commands.environment["QRAG_CACHE"])
    rows = (
        {"id": f"p{n}", "title": f"T{n}", "text": text, "year": 1980 + n % 2}
        for n, text in enumerate(chunks)
    )
    write_lines(folder / "corpus.jsonl", rows)
    given = (f"--corpus={folder / 'corpus.jsonl'}", f"--index={folder / 'index'}")
    commands.succeed("index", *given, f"--workdir={scored_run}", "--checkpoint=last")
    pytest.importorskip("bm25s")
    commands.succeed("index", *given, "--engine=bm25")
    return folder / "index"


def test_a_run_and_its_export_find_the_same(
    scored_run: Path, exported: Path, index: Path, commands: Commands, tmp_path: Path
) -> None:
    export = (f"--index={index}", f"--retriever={exported}")
    questions = [row["question"] for row in log_rows(scored_run)]
    run = (f"--index={index}", f"--workdir={scored_run}", "--checkpoint=last")
    output = commands.succeed("search", *run, *questions).splitlines()
    retriever = Retriever.load(scored_run, LoadSettings(checkpoint="last"))
    retriever.open(index)
    expected = retriever.search(questions)
    ids = [[hit.id for hit in hits] for hits in expected]
    assert all(len(each) == 2 for each in ids)
    assert output[::3] == questions
    printed = [line.split()[2] for at, line in enumerate(output) if at % 3]
    assert printed == [name for each in ids for name in each]
    by_words = commands.succeed("search", f"--index={index}", "--k=2", "T3 T3").splitlines()
    assert by_words[1].split()[2] == "p3"

    queries, out = tmp_path / "queries.jsonl", tmp_path / "deep" / "hits.jsonl"
    names = ({"_id": "q0", "text": questions[0]}, {"query": questions[1]})
    records = (*names, {"id": 2, "question": questions[2]})
    queries.write_text("\n\n".join(map(json.dumps, records)))
    files = (f"--queries={queries}", f"--out={out}")
    commands.succeed("search", *export, *files, "--steps=1", "--where=year=1980")
    found = json_lines(out)
    assert [row.get("id") for row in found] == ["q0", None, "2"]
    assert [row["question"] for row in found] == questions[:3]
    expected = retriever.search(questions[:3], 1, where={"year": 1980})
    for row, hits in zip(found, expected, strict=True):
        (hit,) = row["hits"]
        assert hit | {"score": 0} == hits[0]._asdict() | {"score": 0}
        assert hit["score"] == pytest.approx(hits[0].score, abs=2e-5)

    # Of the three questions, q0 finds what is relevant, 2 does not; the one in between has no id.
    write_lines(queries, [records[0], records[2]])
    qrels = tmp_path / "qrels.txt"
    qrels.write_text(f"q0 0 {found[0]['hits'][0]['id']} 1\n2 0 nothing 1\nelse 0 p0 1\n")
    judged = (f"--queries={queries}", f"--qrels={qrels}", "--measures=recall@2,rr")
    scored = commands.succeed("search", *export, *judged, "--steps=1", "--where=year=1980")
    assert [line.split()[:2] for line in scored.splitlines()] == [
        ["recall@2", "0.5000"],
        ["rr", "0.5000"],
    ]


def test_refusals(
    index: Path, exported: Path, scored_run: Path, tower: Path, commands: Commands, tmp_path: Path
) -> None:
    out, at, export = f"--index={tmp_path / 'out'}", f"--index={index}", f"--retriever={exported}"
    run = (f"--workdir={scored_run}", "--checkpoint=last")
    broken = tmp_path / "queries.jsonl"
    broken.write_text('{"asked": "who?"}\n')
    before = tree(index)
    for command, words, name in (
        ("index", [out, "--encoder=no/such/folder/at/all"], "no/such/folder"),
        ("index", [out, "--max_chunk_tokens=65", f"--encoder={tower}"], "max_chunk_tokens"),
        ("index", [at, "--engine=qdrant", "--server=http://me:secret@a"], "server"),
        ("search", [at, "--server=http://a", f"--encoder={tower}", "where?"], "--engine"),
        ("search", [at, "--engine=qdrant", f"--encoder={tower}", "where?"], "qdrant"),
        ("search", ["who?"], "--index"),
        ("search", [at, "--engine=boolean", "cat", "(cat"], "(cat"),
        ("search", [at, export, f"--queries={broken}"], "queries.jsonl:1"),
        ("search", [at, export, run[0], "who?"], "--workdir"),
        ("search", [at, *run, "--where=colour=red", "who?"], "colour"),
    ):
        said = refusal(commands.run(command, *words))
        assert name in said
        assert "secret" not in said
    assert tree(index) == before
    assert not list((tmp_path / "out").rglob("manifest.json"))
