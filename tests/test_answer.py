"""The command that answers a retrieval log, as a user runs it, on a real HTTP server."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from qrag_jax.metrics import retrieval_log
from qrag_jax.metrics.bootstrap import mean_interval
from qrag_jax.metrics.retrieval_log import Row
from qrag_jax.runtime.locks import log_locks
from tests.entry_points import Commands, refusal
from tests.llm.model_server import Call, ModelServer, Reply
from tests.retrieval_logs import write_log

pytestmark = pytest.mark.long

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
    said = commands.succeed("answer", *given)
    rows = lines(out)
    assert [row["id"] for row in rows] == [row.id for row in ROWS if row.id != ROWS[5].id]
    assert "no answer: 1 (request 1)" in said
    (missed,) = lines(tmp_path / "answers.failures.jsonl")
    assert (missed["id"], missed["cause"]) == (ROWS[5].id, "request")
    assert len(server.calls) == 12

    server.script = reads_builder
    said = commands.succeed("answer", *given, "--judge")
    assert "no answer" not in said
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
    f1 = [1.0 if number % 4 == 0 else 0.8 for number in range(12)]
    mean, low, high = mean_interval(f1)
    (line,) = (line for line in said.splitlines() if line.startswith("all"))
    assert f"{mean:.3f} [{low:.3f}, {high:.3f}]" in line
    assert line.split()[-3:] == ["12", "0", "0"]
    for group in ("2 hops", "3 hops", "2hop", "3hop1"):
        (line,) = (line for line in said.splitlines() if line.startswith(f"  {group} "))
        assert line.split()[-3:] == ["6", "0", "0"]
    summary = json.loads((tmp_path / "answers.summary.json").read_text())
    assert summary["scores"]["all"]["judge"]["mean"] == 0.25
    assert summary["scores"]["3 hops"]["em"] == {"mean": 0.0, "low": 0.0, "high": 0.0}
    assert summary["provenance"]["model"] == "tiny"

    # All is there: nothing is asked, and the scores are the same.
    before = out.read_bytes()
    again = commands.succeed("answer", *given, "--judge")
    assert len(server.calls) == 25
    assert again.splitlines()[1:7] == said.splitlines()[1:7]
    assert f"12 questions are answered in {out} already" in again
    assert out.read_bytes() == before

    text = refusal(commands.run("answer", *given, "--llm.max_tokens=9"))
    assert "was begun with other settings, max_tokens (was 256, now 9): pass --restart" in text
    assert "filter" in refusal(commands.run("answer", *given, "--filter=gt"))
    commands.succeed("answer", *given, "--filter=gt", "--restart", "--samples=3")
    rows = lines(out)
    assert [(row["chunks"], row["prediction"]) for row in rows] == [
        ([1, 3], "unknown"),
        ([0, 1, 3], "unknown"),
        ([1, 3], "unknown"),
    ]
    retrieval_log.append(log, [musique_row(12)])
    text = refusal(commands.run("answer", *given, "--filter=gt"))
    assert "golds (was" in text
    assert "log (was" in text


UNKNOWN = "[UNK]"


def tokenizer(folder: Path) -> Path:
    made = Tokenizer(WordLevel({UNKNOWN: 0}, unk_token=UNKNOWN))
    made.pre_tokenizer = WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=made, unk_token=UNKNOWN)
    fast.chat_template = (
        "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}"
        "{% if add_generation_prompt %}assistant{% endif %}"
    )
    fast.save_pretrained(folder)
    return folder


def test_aliases_types_and_budget(
    server: ModelServer, log: Path, tmp_path: Path, commands: Commands
) -> None:
    data = tmp_path / "dev.jsonl"
    types = ("bridge", "comparison")
    records = [
        {"_id": row.id, "answer": row.answer, "type": types[number % 3 == 0], "more": 1}
        for number, row in enumerate(ROWS)
    ]
    data.write_text("".join(json.dumps(record) + "\n" for record in records))
    out = tmp_path / "answers.jsonl"
    given = options(server, log, out)
    commands.succeed("answer", *given, f"--data={data}", "--samples=4", "--metric=squad")
    assert [(row["type"], row["answers"]) for row in lines(out)] == [
        (types[number % 3 == 0], [f"Ada {number} Berg"]) for number in range(4)
    ]

    folder = tokenizer(tmp_path / "model")
    budget = len(server.calls[0].prompt.split()) + 2  # with the roles; the system's goes beyond
    sent = len(server.calls)
    limits = ("--llm.max_prompt_tokens=%d", f"--llm.tokenizer={folder}", "--restart")
    system = len(server.calls[0].body["messages"][0]["content"].split())
    limits = (limits[0] % (budget + system - 6), *limits[1:])
    said = commands.succeed("answer", *given, *limits, "--samples=2")
    assert "cut to fit: 2 prompts" in said
    assert all(row["cut_characters"] > 0 for row in lines(out))
    asked = sorted(call.prompt.splitlines()[-1] for call in server.calls[sent:])
    assert asked == [f"Question: Who built house {number}?" for number in range(2)]
    assert not any("is by" in call.prompt for call in server.calls[sent:])

    tight = commands.run("answer", *given, "--llm.max_prompt_tokens=5", *limits[1:])
    assert tight.returncode == 1
    assert "no answer: 12 (too_long 12)" in tight.stdout
    assert len(server.calls) == sent + 2
    assert not out.exists() or out.read_text() == ""


def test_a_file_that_another_process_writes_or_wrote_to(
    server: ModelServer, log: Path, tmp_path: Path, commands: Commands
) -> None:
    out = tmp_path / "answers.jsonl"
    given = options(server, log, out)
    with log_locks(out):
        text = refusal(commands.run("answer", *given))
    assert f"{out} is being written by process {os.getpid()} on " in text
    assert "give another --out" in text
    # Two names that differ in their ending alone have one file of verdicts.
    with log_locks(out.with_name("answers.judge.jsonl")):
        text = refusal(commands.run("answer", *options(server, log, tmp_path / "answers.json")))
    assert "answers.judge.jsonl is being written by process" in text
    assert server.calls == []
    assert not out.exists()
    commands.succeed("answer", *given)
    both = out.read_bytes() + out.read_bytes().splitlines(keepends=True)[0]  # as two would write
    out.write_bytes(both)
    text = refusal(commands.run("answer", *given))
    assert f"{out} has 13 rows, but there are 12 questions: more than one process wrote" in text
    assert "--restart" in text
    assert out.read_bytes() == both
    commands.succeed("answer", *given, "--restart")
    assert len(lines(out)) == 12


def test_refusals(server: ModelServer, log: Path, tmp_path: Path, commands: Commands) -> None:
    out = tmp_path / "answers.jsonl"
    given = options(server, log, out)

    def says(*arguments: str) -> str:
        return refusal(commands.run("answer", *arguments))

    assert "give --log=RETRIEVAL_LOG and --out" in says(f"--log={log}")
    assert "give --llm.url=http://127.0.0.1:8000/v1" in says(*given[:2])
    assert "needs --llm.tokenizer=FOLDER" in says(*given, "--llm.max_prompt_tokens=100")
    assert "--llm.nonsense: the config has no field" in says(*given, "--llm.nonsense=1")
    assert "--llm.wait_limit is -1.0; use" in says(*given, "--llm.wait_limit=-1")
    assert "--llm.url is 'ftp://here'; give" in says(*given, "--llm.url=ftp://here")
    assert f"--llm.cache={tmp_path} cannot be opened" in says(*given, f"--llm.cache={tmp_path}")
    assert "qvalue needs threshold" in says(*given, "--filter=qvalue")
    data = tmp_path / "dev.jsonl"
    data.write_text('{"id": "x", "answer": "y"}\n')
    assert "has no record of 12 of the log's questions" in says(*given, f"--data={data}")
    bare = tmp_path / "bare.jsonl"
    write_log(bare, [Row(**{**vars_of(ROWS[0]), "answer": "", "aliases": []})])
    assert f"{bare}: sample 2hop__0_9 has no right answer" in says(f"--log={bare}", *given[1:])
    assert not out.exists()
    assert server.calls == []
    under = f"--out={log}/below.jsonl"
    assert "cannot be written" in says(given[0], under, *given[2:])


def vars_of(row: Row) -> dict[str, Any]:
    return {name: getattr(row, name) for name in Row.__dataclass_fields__}
