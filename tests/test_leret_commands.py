"""LeReT by the commands: what its run and its scores leave, its predictions, pairs and answers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from qrag_jax.metrics.rows import HOPS
from qrag_jax.retrieval.corpus import StoredCorpus
from tests.entry_points import COURSES, Commands, metric_lines, refusal
from tests.llm.model_server import Call, ModelServer, Reply

SCRIPT, SFT, PAIRS, STEPS = 12, 2, 2, COURSES["leret"].steps


@pytest.fixture(scope="module")
def run(scored: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the scored run."""
    workdir = tmp_path_factory.mktemp("leret") / "run"
    return Path(shutil.copytree(scored("leret"), workdir))


def of(run: Path, which: str = "last") -> tuple[str, ...]:
    return (f"--workdir={run}", f"--checkpoint={which}")


@pytest.fixture(scope="module")
def predicted(commands: Commands, run: Path) -> Path:
    """The log of the run's last weights."""
    commands.succeed("predict", *of(run))
    return run / "predictions" / f"last-{STEPS}.jsonl"


def test_what_a_run_leaves(run: Path) -> None:
    pairs = [line["step"] for line in metric_lines(run) if "train/accuracy" in line]
    assert pairs == [15, 16, 19, 20]
    for number in (1, 2):
        folder = run / "tries" / f"iteration-{number}"
        assert {path.name for path in folder.iterdir()} >= {"hop-1.jsonl", "hop-2.jsonl"}
        report = json.loads((folder / "report.json").read_text())
        assert report["states"]["paired"] > 0
        assert report["prompts"] == ["question", "entity"]
    stages = sorted(int(each.name) for each in (run / "checkpoints" / "stages").iterdir())
    assert stages == [12, 14, 16, 18]


def test_all_weights_and_rules_are_scored(run: Path) -> None:
    summary = json.loads((run / "eval" / "summary.json").read_text())
    # The last weights, those after four stages, the untrained, two prompts, and two rules.
    assert len(summary["scores"]) == 10
    assert (summary["main"], summary["notes"]) == (f"last checkpoint of step {STEPS}", [])
    asked = summary["questions"]
    assert (asked["choosing"], asked["reported"], asked["apart"]) == (1, 4, True)
    out = (run / "evaluate.txt").read_text()
    for name, scores in summary["scores"].items():
        assert scores["questions"] == 4
        assert name in out
    rules = summary["scores"]["the question"]
    assert (rules["read_tokens"], rules["sampled_tokens"]) == (0, 0)
    # Hop 1 finds the first passage; the same query again finds nothing more.
    assert rules["hop1/recall"] == rules["hop2/recall"]
    assert "hop2/all_gold" in summary["gains"]["untrained"]


# ---------------------------------------------------------------------- predictions


def test_questions_of_a_file_bring_their_passages(
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
    assert "config.questions.dev" in refusal(commands.run("predict", *given))
    commands.succeed("predict", *given, f"--out={out}")
    (row,) = HOPS.read(out)
    assert (row.id, row.answers) == ("own", ("Vlimp",))
    corpus = StoredCorpus(tmp_path / "own.search" / "corpus")
    passages = corpus.passages(corpus.numbers(row.pages))
    assert [each.title for each in passages] == ["Plimp Mill", "Ada Quost"]


def test_preferences_of_an_iteration(commands: Commands, run: Path, tmp_path: Path) -> None:
    file = tmp_path / "pairs.jsonl"
    given = (f"--workdir={run}", f"--preferences={file}")
    commands.succeed("predict", *given, "--iteration=1")
    folder = run / "tries" / "iteration-1"
    pairs = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(pairs) == json.loads((folder / "report.json").read_text())["pairs"]
    tries = [
        json.loads(line)
        for path in sorted(folder.glob("hop-*.jsonl"))
        for line in path.read_text().splitlines()
    ]
    written = {each["query"] for each in tries if "query" in each}
    for each in pairs:
        assert [*each] == ["prompt", "chosen", "rejected"]
        assert each["chosen"] != each["rejected"]
        assert {each["chosen"], each["rejected"]} <= written
    assert "--iteration=3" in refusal(commands.run("predict", *given, "--iteration=3"))
    assert "--iteration" in refusal(commands.run("predict", *given))
    unfinished = folder / "hop-2.jsonl"
    whole = unfinished.read_bytes()
    unfinished.write_bytes(b"")
    refused = refusal(commands.run("predict", *given, "--iteration=1"))
    unfinished.write_bytes(whole)
    assert str(folder.parent.name) in refused
    assert "--sampled" in refusal(commands.run("predict", *of(run), "--sampled=2"))


def test_answers_over_the_final_pools(
    commands: Commands, run: Path, predicted: Path, tmp_path: Path
) -> None:
    def counts(call: Call) -> Reply:
        return Reply(f"Final answer: {call.prompt.count('# ')} passages")

    out = tmp_path / "answers.jsonl"
    with ModelServer(counts) as server:
        model = (f"--llm.url={server.url}", "--llm.model=tiny", f"--log={predicted}")
        given = ("answer", *model, f"--out={out}")
        refusal(commands.run(*given))  # the log has ids alone
        commands.succeed(*given, f"--corpus={run / 'search'}")
        rows = {row["id"]: row for row in map(json.loads, out.read_text().splitlines())}
        for row in HOPS.read(predicted):
            answer = rows[row.id]
            assert answer["answers"] == [*row.answers]
            assert len(answer["chunks"]) == len(row.hops[-1].pool)
            assert answer["prediction"] == f"{len(row.hops[-1].pool)} passages"
        # The gold pages themselves, for a bound from above.
        gold = ("answer", *model, f"--out={tmp_path / 'gold.jsonl'}", "--filter=gt")
        commands.succeed(*gold, f"--corpus={run / 'search'}")
    assert '"prediction": "2 passages"' in (tmp_path / "gold.jsonl").read_text()
