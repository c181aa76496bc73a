"""LeReT's commands around a run: what it predicts, its pairs, and answers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from qrag_jax.metrics import hop_log
from qrag_jax.retrieval.corpus import StoredCorpus
from tests.entry_points import Commands, refusal
from tests.llm.model_server import Call, ModelServer, Reply

pytestmark = pytest.mark.long

TINY = (
    "--config=configs/leret.py:tiny",
    "--config.model.tiny.layers=1",
    "--config.model.tiny.copies=False",
    "--config.model.tiny.hidden=32",
    "--config.model.tiny.intermediate=32",
    "--config.questions.bridge_train=12",
    "--config.questions.bridge_corpus=12",
    "--config.questions.bridge_dev=5",
    "--config.styles.most_words=4",
    "--config.writing.query_tokens=40",
    "--config.tries.questions=4",
    "--config.tries.samples=2",
    "--config.pairs.tied_share=1.0",
    "--config.iterations=1",
    "--config.script.steps=60",
    "--config.script.learning_rate=1e-2",
    "--config.sft.steps=1",
    "--config.preference.steps=1",
    "--config.train.eval_every=100",
)
QUESTIONS, LAST = 5, 62


@pytest.fixture(scope="module")
def run(commands: Commands, tmp_path_factory: pytest.TempPathFactory) -> Path:
    workdir = tmp_path_factory.mktemp("leret") / "run"
    commands.succeed("train", *TINY, f"--workdir={workdir}")
    return workdir


@pytest.fixture(scope="module")
def predicted(commands: Commands, run: Path) -> Path:
    """The log of the run's last weights."""
    out = commands.succeed("predict", *of(run))
    file = run / "predictions" / f"last-{LAST}.jsonl"
    assert f"5 questions hop by hop, last checkpoint of step {LAST}: {file}" in out
    return file


def of(run: Path, which: str = "last") -> tuple[str, ...]:
    return (f"--workdir={run}", f"--checkpoint={which}")


def test_a_line_has_all_hops_of_a_question(predicted: Path, run: Path) -> None:
    rows = hop_log.read(predicted)
    assert len({row.id for row in rows}) == QUESTIONS
    assert all(len(row.hops) == 2 for row in rows)
    for row in rows:
        found: list[str] = []
        for hop in row.hops:
            found += [name for name, _ in hop.found]
            assert hop.pool == tuple(dict.fromkeys(found))
            assert hop.outcome == "searched" or not hop.found
            assert min(hop.read, hop.sampled) > 0
    assert any(hop.found for row in rows for hop in row.hops)
    record = hop_log.read_record(predicted)
    assert record["kind"] == "hops of a query writer"
    assert record["search"]["gold_by"] == "passage"


def test_a_killed_prediction_goes_on(commands: Commands, run: Path, predicted: Path) -> None:
    """Parts have four questions."""
    whole = predicted.read_text()
    lines = whole.splitlines(keepends=True)
    other = run / "other.jsonl"
    shutil.copy(predicted.with_suffix(".json"), other.with_suffix(".json"))
    other.write_text("".join(lines[:4]) + lines[4][:30])
    commands.succeed("predict", *of(run), f"--out={other}")
    assert other.read_text() == whole
    told = refusal(commands.run("predict", *of(run, "sft"), f"--out={other}"))
    assert "was begun with other settings, data or weights; give --restart" in told
    out = commands.succeed("predict", *of(run, "first"), f"--out={other}", "--restart")
    assert f"5 questions hop by hop, untrained: {other}" in out
    assert other.read_text() != whole


def test_other_questions_bring_their_passages(
    commands: Commands, run: Path, tmp_path: Path
) -> None:
    context = [["Plimp Mill", ["It is by Ada Quost."]], ["Ada Quost", ["Born in Vlimp."]]]
    asked = {
        "_id": "own",
        "question": "Where was the founder of Plimp Mill born?",
        "answer": "Vlimp",
        "supporting_facts": [[title, 0] for title, _ in context],
        "context": context,
        "type": "bridge",
        "level": "hard",
    }
    questions, out = tmp_path / "questions.jsonl", tmp_path / "own.jsonl"
    questions.write_text(json.dumps(asked) + "\n")
    given = (*of(run), f"--questions={questions},hotpotqa,dev")
    told = refusal(commands.run("predict", *given))
    assert "not as in its config: config.questions.dev); give the file to write" in told
    commands.succeed("predict", *given, f"--out={out}")
    (row,) = hop_log.read(out)
    assert (row.id, row.answers) == ("own", ("Vlimp",))
    corpus = StoredCorpus(tmp_path / "own.search" / "corpus")
    assert len(corpus) == len(StoredCorpus(run / "search" / "corpus")) - 5 * 10 + 2
    passages = corpus.passages(corpus.numbers(row.pages))
    assert [each.title for each in passages] == ["Plimp Mill", "Ada Quost"]


def test_preferences_of_an_iteration(commands: Commands, run: Path, tmp_path: Path) -> None:
    file = tmp_path / "pairs.jsonl"
    given = (f"--workdir={run}", f"--preferences={file}")
    out = commands.succeed("predict", *given, "--iteration=1")
    report = json.loads((run / "tries" / "iteration-1" / "report.json").read_text())
    pairs = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(pairs) == report["pairs"]
    assert (
        f"{len(pairs)} pairs of {report['states']['paired']} states of iteration 1: {file}; " in out
    )
    tries = [
        json.loads(line)
        for path in sorted((run / "tries" / "iteration-1").glob("hop-*.jsonl"))
        for line in path.read_text().splitlines()
    ]
    written = {each["query"] for each in tries if "query" in each}
    for each in pairs:
        assert [*each] == ["prompt", "chosen", "rejected"]
        assert "In the style" not in each["prompt"]
        assert each["chosen"] != each["rejected"]
        assert {each["chosen"], each["rejected"]} <= written
    told = refusal(commands.run("predict", *given, "--iteration=2"))
    assert "--iteration=2: the run has the iterations 1 to 1" in told
    assert "go together; give both" in refusal(commands.run("predict", *given))
    started = run / "tries" / "iteration-1" / "hop-2.jsonl"
    whole = started.read_bytes()
    started.write_bytes(b"")
    told = refusal(commands.run("predict", *given, "--iteration=1"))
    started.write_bytes(whole)
    assert "the tries of iteration 1 in" in told
    assert "are not finished; train on" in told


def test_what_is_for_others_is_refused(commands: Commands, run: Path) -> None:
    told = refusal(commands.run("predict", *of(run), "--sampled=2"))
    assert "--sampled and --retriever are for runs of rlvr." in told
    told = refusal(commands.run("predict", *TINY[:1], "--out=x.jsonl"))
    assert "of which runs alone predict" in told
    given = ("--config=configs/rlvr.py:tiny", "--out=x.jsonl", "--iteration=1")
    assert "are for runs of leret" in refusal(commands.run("predict", *given))


@pytest.fixture
def server() -> Iterator[ModelServer]:
    def counts(call: Call) -> Reply:
        return Reply(f"Final answer: {call.prompt.count('# ')} passages")

    with ModelServer(counts) as running:
        yield running


def test_answers_over_the_final_pools(
    commands: Commands, run: Path, predicted: Path, server: ModelServer, tmp_path: Path
) -> None:
    out = tmp_path / "answers.jsonl"
    given = (f"--log={predicted}", f"--out={out}", f"--llm.url={server.url}", "--llm.model=tiny")
    told = refusal(commands.run("answer", *given))
    assert "has the ids of passages alone; give the folder of what was searched" in told
    commands.succeed("answer", *given, f"--corpus={run / 'search'}")
    rows: dict[str, Any] = {row["id"]: row for row in map(json.loads, out.read_text().splitlines())}
    for row in hop_log.read(predicted):
        answer = rows[row.id]
        assert answer["answers"] == [*row.answers]
        assert len(answer["chunks"]) == len(row.hops[-1].pool)
        assert answer["prediction"] == f"{len(row.hops[-1].pool)} passages"
    # The gold pages themselves, for a bound from above.
    gold = (*given[:1], f"--out={tmp_path / 'gold.jsonl'}", *given[2:], "--filter=gt")
    commands.succeed("answer", *gold, f"--corpus={run / 'search'}")
    assert '"prediction": "2 passages"' in (tmp_path / "gold.jsonl").read_text()
