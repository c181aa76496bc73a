"""The command `search`: runs, exports, words; bad input."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from qrag_jax import LoadSettings, Retriever
from tests.entry_points import Commands, json_lines, log_rows, refusal
from tests.support.worlds import write_lines
from tests.systems.corpora import tree
from tests.systems.parts import chunks_of


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
    told = commands.succeed("search", *run, *questions).splitlines()
    retriever = Retriever.load(scored_run, LoadSettings(checkpoint="last"))
    retriever.open(index)
    expected = retriever.search(questions)
    ids = [[hit.id for hit in hits] for hits in expected]
    assert all(len(each) == 2 for each in ids)
    assert told[::3] == questions
    printed = [line.split()[2] for at, line in enumerate(told) if at % 3]
    assert printed == [name for each in ids for name in each]

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


def test_words(index: Path, commands: Commands) -> None:
    words = commands.succeed("search", f"--index={index}", "--k=2", "T3 T3").splitlines()
    assert words[1].split()[2] == "p3"


def test_bad_input(
    index: Path, exported: Path, scored_run: Path, commands: Commands, tmp_path: Path
) -> None:
    at, export = f"--index={index}", f"--retriever={exported}"
    run = [at, f"--workdir={scored_run}", "--checkpoint=last"]
    broken = tmp_path / "queries.jsonl"
    broken.write_text('{"asked": "who?"}\n')
    before = tree(index)
    for arguments, name in (
        (["who?"], "--index"),
        ([at, "--engine=boolean", "cat", "(cat"], "(cat"),
        ([at, export, f"--queries={broken}"], "queries.jsonl:1"),
        ([at, export, f"--workdir={scored_run}", "who?"], "--workdir"),
        ([at, f"--retriever={tmp_path}", "who?"], str(tmp_path)),
        ([*run, "--where=colour=red", "who?"], "colour"),
    ):
        assert name in refusal(commands.run("search", *arguments))
    assert tree(index) == before
