"""The command `search`: runs, exports, other encoders, words; bad input."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from qrag_jax import LoadSettings, Retriever
from qrag_jax.systems.deployed import NOTE
from tests.entry_points import ROOT, Commands, log_rows, refusal
from tests.serving.served import started
from tests.systems.corpora import write_corpus_file, write_tower
from tests.systems.parts import chunks_of

pytestmark = pytest.mark.long

COUNT = 40


@pytest.fixture(scope="module")
def corpus(scored_run: Path, commands: Commands, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The chunks of a document, with titles."""
    chunks = chunks_of(
        scored_run, log_rows(scored_run)[0]["question"], commands.environment["QRAG_CACHE"]
    )
    lines = [
        {"id": f"p{n}", "title": f"T{n}", "text": text, "year": 1980 + n % 2}
        for n, text in enumerate(chunks)
    ]
    path = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture(scope="module")
def index(
    corpus: Path, scored_run: Path, commands: Commands, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """As `qrag index` builds it of a run; then one of words in the same folder."""
    out = tmp_path_factory.mktemp("index") / "index"
    given = (f"--corpus={corpus}", f"--index={out}")
    commands.succeed("index", *given, f"--workdir={scored_run}", "--checkpoint=last")
    pytest.importorskip("bm25s")
    commands.succeed("index", *given, "--engine=bm25")
    return out


def test_a_run_and_its_export_find_the_same(
    scored_run: Path, exported: Path, index: Path, commands: Commands, tmp_path: Path
) -> None:
    questions = [row["question"] for row in log_rows(scored_run)]
    run = (f"--index={index}", f"--workdir={scored_run}", "--checkpoint=last")
    told = commands.succeed("search", *run, *questions)
    retriever = Retriever.load(scored_run, LoadSettings(checkpoint="last"))
    retriever.open(index)
    lines = []
    for question, hits in zip(questions, retriever.search(questions), strict=True):
        lines.append(question)
        assert len(hits) == 2
        for hit in hits:
            text = " ".join(hit.text.split())
            lines.append(f"  {hit.step}  {hit.score:9.4f}  {hit.id}  {hit.title} {text}")
    assert told.splitlines() == lines

    queries, out = tmp_path / "queries.jsonl", tmp_path / "deep" / "hits.jsonl"
    records = [json.dumps({"_id": "q0", "text": questions[0]}), ""]
    records.append(json.dumps({"query": questions[1]}))
    records.append(json.dumps({"id": 2, "question": questions[2]}))
    queries.write_text("\n".join(records))
    files = (f"--queries={queries}", f"--out={out}")
    export = (f"--index={index}", f"--retriever={exported}")
    commands.succeed("search", *export, *files, "--steps=1", "--where=year=1980")
    found = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row.get("id") for row in found] == ["q0", None, "2"]
    assert [row["question"] for row in found] == questions[:3]
    expected = retriever.search(questions[:3], 1, where={"year": 1980})
    for row, hits in zip(found, expected, strict=True):
        (hit,) = row["hits"]
        assert hit | {"score": 0} == hits[0]._asdict() | {"score": 0}
        assert hit["score"] == pytest.approx(hits[0].score, abs=2e-5)
        assert hit["metadata"] == {"year": 1980}

    # The export opened the index, so that torch may do so now.
    by_torch = subprocess.run(
        [sys.executable, "-m", "qrag_jax.search", *export, "--backend=torch", *questions],
        cwd=ROOT,
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert by_torch.returncode == 0, by_torch.stderr[-3000:]
    pairs = zip(by_torch.stdout.splitlines(), lines, strict=True)
    assert all(one.split()[2:] == other.split()[2:] for one, other in pairs)


def test_a_run_is_served_without_warnings_of_its_checkpoints(
    scored_run: Path, index: Path, commands: Commands
) -> None:
    server = started(commands, index, f"--workdir={scored_run}", "--checkpoint=last")
    (hits,) = server.post("/search", {"questions": ["who?"]}).json()["hits"]
    assert [hit["step"] for hit in hits] == [1, 2]
    server.process.terminate()
    status, told = server.ended()
    assert status == 0
    assert told.endswith("stopped by SIGTERM\n")
    assert "absl" not in told  # Orbax warns that it may only read the run's checkpoints


def test_importing_the_command_needs_no_jax() -> None:
    code = "import sys, qrag_jax.search; assert not {'jax', 'torch'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_other_encoders_and_words(index: Path, commands: Commands, tmp_path: Path) -> None:
    tower = write_tower(tmp_path / "model")
    source = write_corpus_file(tmp_path / "corpus.jsonl", COUNT)
    out = tmp_path / "index"
    flags = (f"--encoder={tower}", "--max_chunk_tokens=32")
    commands.succeed("index", f"--corpus={source}", f"--index={out}", *flags)
    record = json.loads(source.read_text().splitlines()[7])
    whole = f"{record['title']} {record['text']}".strip()
    told = commands.succeed("search", f"--index={out}", *flags, "--k=3", whole).splitlines()
    assert told[0] == whole
    assert len(told) == 4
    scores = [float(line.split()[1]) for line in told[1:]]
    assert scores == sorted(scores, reverse=True)
    other = commands.run("search", f"--index={out}", flags[0], "where")
    assert "embedded by another encoder, or with another dtype, pooling, prefix" in refusal(other)
    assert "questions: --workdir=RUN, --retriever=EXPORT or" in refusal(
        commands.run("search", f"--index={out}", "where")
    )
    words = commands.succeed("search", f"--index={index}", "--k=2", "T3 T3").splitlines()
    assert words[1].split()[2] == "p3"
    nothing = commands.succeed("search", f"--index={index}", "xyzzyx")
    assert nothing.splitlines() == ["xyzzyx", "  nothing was found"]


def test_a_question_that_is_no_text_fails_alone(
    exported: Path, index: Path, commands: Commands, tmp_path: Path
) -> None:
    queries, out = tmp_path / "queries.jsonl", tmp_path / "hits.jsonl"
    asked = ["who?", "\ud800", "where?"]
    queries.write_text("".join(json.dumps({"question": each}) + "\n" for each in asked))
    for retriever in ((f"--retriever={exported}",), ()):  # () searches words
        given = (f"--index={index}", *retriever, f"--queries={queries}")
        commands.succeed("search", *given, f"--out={out}")
        rows = [json.loads(line) for line in out.read_text().splitlines()]
        assert [row["question"] for row in rows] == asked
        assert ["error" in row for row in rows] == [False, True, False]
        assert "who?" in commands.succeed("search", *given)


def test_bad_input_is_one_sentence(
    index: Path, exported: Path, scored_run: Path, commands: Commands, tmp_path: Path
) -> None:
    index = Path(shutil.copytree(index, tmp_path / "index"))
    (index / NOTE).unlink(missing_ok=True)
    at, export = f"--index={index}", f"--retriever={exported}"
    run = [f"--index={index}", f"--workdir={scored_run}", "--checkpoint=last"]
    broken = tmp_path / "queries.jsonl"
    broken.write_text('{"asked": "who?"}\n')
    empty = tmp_path / "empty.jsonl"
    empty.write_text('{"question": " "}\n')
    for arguments, told in (
        (["who?"], "give the folder of an index"),
        ([at], 'give questions in quotes, such as "who wrote it?", or --queries=FILE'),
        ([at, "who?", " "], "a question is empty; ask something"),
        ([at, "--engine=boolean", "cat", "(cat"], "(cat"),
        ([at, export, f"--queries={broken}", "who?"], "give questions in quotes"),
        ([at, export, f"--queries={broken}"], "queries.jsonl:1"),
        ([at, export, f"--queries={empty}"], "empty.jsonl:1"),
        ([at, export, f"--queries={tmp_path}/none"], f"{tmp_path}/none"),
        ([at, export, "--threshold=nan", "who?"], "--threshold"),
        ([at, export, "--threshold=inf", "who?"], "--threshold"),
        ([at, export, f"--workdir={scored_run}", "who?"], "give one of --workdir and --retriever"),
        ([at, export, "--k=3", "who?"], "--k is for a search with --encoder or words alone; lea"),
        ([at, "--steps=3", "who?"], "--steps is for a search with --workdir or --retriever;"),
        ([at, export, "--where=year", "who?"], "--where=year must be FIELD=VALUE"),
        ([at, export, "--backend=endpoint", "who?"], "give --url=http://HOST:8000/v1 with"),
        ([f"--index={exported}", export, "who?"], "holds no finished index; build one there"),
        ([at, export, "--engine=bm25", "who?"], "the engine bm25 compares words; a trained retr"),
        ([at, export, "--engine=hybrid", "who?"], "hybrid compares words and vectors; a trained"),
        ([at, export, "--question_prefix=q: ", "who?"], "--question_prefix is for a search with "),
        ([at, export, "--checkpoint=last", "who?"], "--checkpoint is for a search with --workdir;"),
        ([at, "--engine=exact", "who?"], "the engine exact compares vectors; give what makes"),
        ([at, f"--retriever={tmp_path}", "who?"], "holds no retriever"),
        # Nothing says yet that the run, whose index it is, and the export have the same tower.
        ([at, export, "who?"], "or by the run that it was exported from"),
        ([*run, "--steps=7", "who?"], "steps is 7; this retriever was trained on 2 steps"),
        ([*run, "--where=colour=red", "who?"], "colour"),
        ([*run, "--backend=torch", "who?"], "is the folder of a run, which jax alone computes"),
    ):
        assert told in refusal(commands.run("search", *arguments))
