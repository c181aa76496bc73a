"""The command that answers a retrieval log, as a user runs it, on a real HTTP server."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from qrag_jax.runtime.whole_files import log_locks
from tests.entry_points import Commands, json_lines, refusal
from tests.llm.model_server import Call, ModelServer, Reply
from tests.retrieval_logs import played_rows, write_log
from tests.support.worlds import write_lines

ROWS = [
    dataclasses.replace(
        row,
        id=f"q{number}",
        question=f"Who built house {number}?",
        answer=f"Ada {number} Berg",
        pred_texts=[f"House {number} is by Ada {number} Berg .", *row.pred_texts[1:]],
    )
    for number, row in enumerate(played_rows(12, 0))
]


def reads_builder(call: Call) -> Reply:
    """Right for every fourth house, half right for others; knows nothing without the chunk."""
    if "Given answer:" in call.prompt:
        gold, given = re.findall(r"answers?: <\w+>(.*)</\w+>", call.prompt)[:2]
        return Reply(f"**Final answer:** {'yes' if given in gold else 'no'}")
    found = re.search(r"House (\d+) is by (Ada \d+ Berg)", call.prompt)
    if not found:
        return Reply("Final answer: unknown")
    builder, right = found[2], int(found[1]) % 4 == 0
    said = builder if right else f"{builder.removeprefix('Ada ')} Ltd."
    return Reply(f"<think>Hm.</think>\nFinal answer: {said}")


@pytest.fixture
def server() -> Iterator[ModelServer]:
    with ModelServer(reads_builder) as running:
        yield running


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return write_log(tmp_path / "log.jsonl", ROWS)


def options(server: ModelServer, log: Path, out: Path) -> tuple[str, ...]:
    model = ("--llm.model=tiny", "--llm.concurrency=4", "--llm.retry_pause=0.01")
    return (f"--log={log}", f"--out={out}", f"--llm.url={server.url}", *model)


def test_answers_scores_and_goes_on(
    server: ModelServer, log: Path, tmp_path: Path, commands: Commands
) -> None:
    """Failures, torn rows and verdicts are those of `evaluators/test_answers.py`."""
    out, data = tmp_path / "answers.jsonl", tmp_path / "dev.jsonl"
    write_lines(data, [{"_id": r.id, "answer": r.answer, "type": "bridge"} for r in ROWS])
    given = (*options(server, log, out), f"--data={data}", "--metric=squad", "--judge")
    commands.succeed("answer", *given, "--samples=4")
    assert [row["id"] for row in json_lines(out)] == [row.id for row in ROWS[:4]]
    commands.succeed("answer", *given)
    assert len(server.calls) == 2 * len(ROWS)  # each and its verdict, once
    for number, (row, asked) in enumerate(zip(json_lines(out), ROWS, strict=True)):
        right = number % 4 == 0
        assert row["prediction"] == (f"Ada {number} Berg" if right else f"{number} Berg Ltd")
        # "1 Berg Ltd": 2 of 3 tokens are in "Ada 1 Berg", which has 3.
        assert (row["em"], row["f1"]) == (float(right), 1.0 if right else pytest.approx(2 / 3))
        assert (row["id"], row["type"], row["answers"]) == (asked.id, "bridge", [asked.answer])
    summary = json.loads((tmp_path / "answers.summary.json").read_text())
    assert summary["scores"]["all"]["f1"]["mean"] == pytest.approx((3 + 9 * 2 / 3) / 12)
    assert summary["scores"]["all"]["judge"]["mean"] == 0.25
    assert summary["provenance"]["model"] == "tiny"

    text = refusal(commands.run("answer", *given, "--llm.max_tokens=9"))
    assert "max_tokens" in text
    assert "--restart" in text
    commands.succeed("answer", *given, "--filter=gt", "--samples=3", "--restart")
    for row, played in zip(json_lines(out), ROWS[:3], strict=True):
        assert (row["chunks"], row["prediction"]) == (sorted(played.sf_idx), "unknown")


def test_refusals(server: ModelServer, log: Path, tmp_path: Path, commands: Commands) -> None:
    given = options(server, log, tmp_path / "answers.jsonl")
    for words, name in (
        ([given[0]], "--out"),
        (given[:2], "--llm.url"),
        ([*given, "--filter=qvalue"], "threshold"),
    ):
        assert name in refusal(commands.run("answer", *words))
    out = tmp_path / "answers.jsonl"
    # Two names that differ in their ending alone have one file of verdicts.
    with log_locks(out.with_name("answers.judge.jsonl")):
        other = options(server, log, tmp_path / "answers.json")
        assert "answers.judge.jsonl" in refusal(commands.run("answer", *other))
    assert not out.exists()
    assert server.calls == []
