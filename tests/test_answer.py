"""The command that answers a retrieval log, as a user runs it, on a real HTTP server."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from qrag_jax.metrics.bootstrap import mean_interval
from qrag_jax.metrics.rows import RETRIEVALS, Row
from qrag_jax.runtime.whole_files import log_locks
from tests.entry_points import Commands, refusal
from tests.llm.model_server import Call, ModelServer, Reply
from tests.retrieval_logs import write_log

KINDS = ("2hop__{}_9", "3hop1__{}_8_9")


def musique_row(number: int) -> Row:
    facts = [3, 1] if number % 2 == 0 else [3, 1, 0]
    return Row(
        id=KINDS[number % 2].format(number),
        question=f"Who built house {number}?",
        answer=f"Ada {number} Berg",
        sf_idx=facts,
        pred_idx=[3, 2, 1],
        q_values=[0.75, 0.25, 0.5],
        sf_texts=[f"fact {index}" for index in facts],
        pred_texts=[f"House {number} is by Ada {number} Berg .", "It rains .", "Houses last ."],
        ret=1.0,
        text_len=99,
        f1=0.8,
        em=1.0,
        aliases=[f"Berg {number}"],
        source="musique",
    )


ROWS = [musique_row(number) for number in range(12)]


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
    assert len(rows) == 12
    for row in rows:
        number = int(row["question"].split()[-1][:-1])
        right = number % 4 == 0
        assert row["prediction"] == (f"Ada {number} Berg" if right else f"{number} Berg Ltd")
        assert row["answers"] == [f"Ada {number} Berg", f"Berg {number}"]
        # "1 Berg Ltd": 2 of 3 tokens are in "Berg 1", which has 2.
        assert (row["em"], row["f1"]) == (float(right), 1.0 if right else pytest.approx(0.8))
        assert (row["rule"], row["finish_reason"], row["chunks"]) == ("musique", "stop", [3, 2, 1])
    # Question 5 was answered last, yet the scores are those of the log's order.
    assert rows[-1]["id"] == ROWS[5].id
    mean, low, high = mean_interval([1.0 if number % 4 == 0 else 0.8 for number in range(12)])
    summary = json.loads((tmp_path / "answers.summary.json").read_text())
    assert summary["scores"]["all"]["f1"] == pytest.approx({"mean": mean, "low": low, "high": high})
    assert f"{mean:.3f}" in said
    assert summary["scores"]["all"]["judge"]["mean"] == 0.25
    assert summary["scores"]["3 hops"]["em"] == {"mean": 0.0, "low": 0.0, "high": 0.0}
    assert {"2 hops", "2hop", "3hop1"} <= summary["scores"].keys()
    assert summary["provenance"]["model"] == "tiny"

    # All is there: nothing is asked, and nothing changes.
    before = out.read_bytes()
    commands.succeed("answer", *given, "--judge")
    assert (len(server.calls), out.read_bytes()) == (25, before)

    text = refusal(commands.run("answer", *given, "--llm.max_tokens=9"))
    assert "max_tokens" in text
    assert "--restart" in text
    commands.succeed("answer", *given, "--filter=gt", "--restart", "--samples=3")
    found = [(row["chunks"], row["prediction"]) for row in lines(out)]
    assert found == [([1, 3], "unknown"), ([0, 1, 3], "unknown"), ([1, 3], "unknown")]
    RETRIEVALS.append(log, [musique_row(12)])
    assert "log" in refusal(commands.run("answer", *given, "--filter=gt"))


def test_answers_and_types_of_the_data(
    server: ModelServer, log: Path, tmp_path: Path, commands: Commands
) -> None:
    data = tmp_path / "dev.jsonl"
    types = ("bridge", "comparison")
    records = [
        {"_id": row.id, "answer": row.answer, "type": types[number % 3 == 0]}
        for number, row in enumerate(ROWS)
    ]
    data.write_text("".join(json.dumps(record) + "\n" for record in records))
    out = tmp_path / "answers.jsonl"
    given = options(server, log, out)
    commands.succeed("answer", *given, f"--data={data}", "--samples=4", "--metric=squad")
    assert [(row["type"], row["answers"]) for row in lines(out)] == [
        (types[number % 3 == 0], [f"Ada {number} Berg"]) for number in range(4)
    ]


def test_refusals(server: ModelServer, log: Path, tmp_path: Path, commands: Commands) -> None:
    given = options(server, log, tmp_path / "answers.jsonl")
    bare = tmp_path / "bare.jsonl"
    write_log(bare, [dataclasses.replace(ROWS[0], answer="", aliases=[])])
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
