"""The validation command: what it counts and how it ends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from qrag_jax.validate_data import main
from tests.support.worlds import record_of


def record(name: str, paragraphs: int) -> dict[str, Any]:
    context = [(f"T{place}", ["one two"] * (place + 1)) for place in range(paragraphs)]
    return record_of("hotpotqa", name, "Who?", "Ada", context, [0, 1])


def write(path: Path, items: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(item) + "\n" for item in items))
    return path


def test_what_is_kept_mended_and_skipped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "mine.jsonl", [record("a", 2), record("b", 3), record("c", 4)])
    assert main(["--source", "hotpotqa", "--path", str(path)]) == 0
    out = capsys.readouterr().out
    assert "3 read, 3 kept, 0 skipped" in out
    assert "min 2, median 3, max 4" in out  # chunks of a question
    assert "min 3, median 5, max 9" in out  # words of a chunk
    bad = record("x", 3) | {"supporting_facts": [["T9", 0]]}
    beyond = record("b", 2) | {"supporting_facts": [["T1", 7], ["T0", 0]]}
    write(tmp_path / "dev.jsonl", [record("a", 2), bad, bad, record("a", 2), beyond])
    write(tmp_path / "train.jsonl", [record("a", 2)])
    arguments = ["--source", "hotpotqa", "--path", str(tmp_path)]
    assert main([*arguments, "--split", "dev"]) == 1
    out = capsys.readouterr().out
    assert "5 read, 2 kept, 3 skipped" in out
    for place in ("dev.jsonl:2", "dev.jsonl:4", "dev.jsonl:5"):  # the first of each kind
        assert place in out
    assert main(arguments) == 0


def test_refusals(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, missing = write(tmp_path / "mine.jsonl", [{"text": "no question"}]), tmp_path / "none"
    for source, given, name in (
        ("hotpotqa", str(path), "_id"),
        ("nonesuch", str(path), "nonesuch"),
        ("hotpotqa", "", "--path"),
        ("hotpotqa", str(missing), str(missing)),
    ):
        assert main(["--source", source, "--path", given]) == 2
        told = capsys.readouterr()
        assert told.out == ""
        assert told.err.startswith("error: ")
        assert name in told.err


def test_story_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--source", "babilong", "--path", str(tmp_path)]
    assert main(arguments) == 2
    text = "1 Ada went to the hall.\n2 Bo went out.\n3 Where is Ada?\thall\t1\n"
    (tmp_path / "qa1_train.txt").write_text(text * 2)
    assert main(arguments) == 0
    assert "2 questions" in capsys.readouterr().out
    (tmp_path / "qa20_train.txt").write_text(text.replace("\t1\n", "\t9\n"))
    assert main(arguments) == 2
    assert "qa20_train.txt" in capsys.readouterr().err
