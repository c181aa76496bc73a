"""The command that answers a retrieval log, as a user runs it, on a real HTTP server."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from qrag_jax.metrics.rows import RETRIEVALS
from qrag_jax.runtime.whole_files import log_locks
from tests.entry_points import Commands, refusal
from tests.llm.model_server import Call, ModelServer, Reply
from tests.retrieval_logs import played_rows, write_log

ROWS = [
    dataclasses.replace(
        row,
        id=f"{('2hop__{}_9', '3hop1__{}_8_9')[number % 2].format(number)}",
        question=f"Who built house {number}?",
        answer=f"Ada {number} Berg",
        aliases=[f"Berg {number}"],
        pred_texts=[f"House {number} is by Ada {number} Berg .", *row.pred_texts[1:]],
        source="musique",
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


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def options(server: ModelServer, log: Path, out: Path) -> tuple[str, ...]:
    model = ("--llm.model=tiny", "--llm.concurrency=4", "--llm.retry_pause=0.01")
    return (f"--log={log}", f"--out={out}", f"--llm.url={server.url}", *model)


def test_answers_scores_and_goes_on(
    server: ModelServer, log: Path, tmp_path: Path, commands: Commands
) -> None:
    out = tmp_path / "answers.jsonl"
    given = options(server, log, out)

    def limited(call: Call) -> Reply:
        if "house 5?" in call.prompt:
            return Reply("no such model", status=404)
        return reads_builder(call)

    server.script = limited
    commands.succeed("answer", *given)
    assert [row["id"] for row in lines(out)] == [row.id for row in ROWS if row.id != ROWS[5].id]
    (missed,) = lines(tmp_path / "answers.failures.jsonl")
    assert (missed["id"], missed["cause"]) == (ROWS[5].id, "request")
    assert len(server.calls) == 12

    server.script = reads_builder
    said = commands.succeed("answer", *given, "--judge")
    assert not (tmp_path / "answers.failures.jsonl").exists()
    assert len(server.calls) == 12 + 1 + 12  # what failed, and the verdicts
    rows = lines(out)
    assert [row["id"] for row in rows] == [*(r.id for r in ROWS if r != ROWS[5]), ROWS[5].id]
    for row in rows:
        number = int(row["question"].split()[-1][:-1])
        right = number % 4 == 0
        assert row["prediction"] == (f"Ada {number} Berg" if right else f"{number} Berg Ltd")
        # "1 Berg Ltd": 2 of 3 tokens are in "Berg 1", which has 2.
        assert (row["em"], row["f1"]) == (float(right), 1.0 if right else pytest.approx(0.8))
    summary = json.loads((tmp_path / "answers.summary.json").read_text())
    assert summary["scores"]["all"]["f1"]["mean"] == pytest.approx((3 + 9 * 0.8) / 12)
    assert f"{summary['scores']['all']['f1']['mean']:.3f}" in said
    assert summary["scores"]["all"]["judge"]["mean"] == 0.25
    assert summary["scores"]["3hop1"]["em"] == {"mean": 0.0, "low": 0.0, "high": 0.0}
    assert summary["provenance"]["model"] == "tiny"

    # All is there: nothing is asked, and nothing changes.
    before = out.read_bytes()
    commands.succeed("answer", *given, "--judge")
    assert (len(server.calls), out.read_bytes()) == (25, before)
    text = refusal(commands.run("answer", *given, "--llm.max_tokens=9"))
    assert "max_tokens" in text
    assert "--restart" in text

    # Other chunks, answers and types of the data, another rule of scores.
    data = tmp_path / "dev.jsonl"
    records = [{"_id": row.id, "answer": row.answer, "type": "bridge"} for row in ROWS]
    data.write_text("".join(json.dumps(record) + "\n" for record in records))
    words = (f"--data={data}", "--metric=squad", "--filter=gt", "--samples=3", "--restart")
    commands.succeed("answer", *given, *words)
    for row, played in zip(lines(out), ROWS[:3], strict=True):
        assert (row["chunks"], row["prediction"]) == (sorted(played.sf_idx), "unknown")
        assert (row["type"], row["answers"], row["rule"]) == ("bridge", [played.answer], "squad")
    RETRIEVALS.append(log, [dataclasses.replace(ROWS[0], id="another")])
    assert "log" in refusal(commands.run("answer", *given, *words[:-1]))


def test_refusals(server: ModelServer, log: Path, tmp_path: Path, commands: Commands) -> None:
    given = options(server, log, tmp_path / "answers.jsonl")
    bare = write_log(tmp_path / "bare.jsonl", [dataclasses.replace(ROWS[0], answer="", aliases=[])])
    for words, name in (
        ([given[0]], "--out"),
        (given[:2], "--llm.url"),
        ([*given, "--filter=qvalue"], "threshold"),
        ([f"--log={bare}", *given[1:]], ROWS[0].id),
    ):
        assert name in refusal(commands.run("answer", *words))
    out = tmp_path / "answers.jsonl"
    with log_locks(out):
        assert str(out) in refusal(commands.run("answer", *given))
    # Two names that differ in their ending alone have one file of verdicts.
    with log_locks(out.with_name("answers.judge.jsonl")):
        other = options(server, log, tmp_path / "answers.json")
        assert "answers.judge.jsonl" in refusal(commands.run("answer", *other))
    assert not out.exists()
    assert server.calls == []
