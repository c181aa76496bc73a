from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from qrag_jax.errors import InputError
from qrag_jax.metrics.answer_log import (
    AnswerRow,
    Miss,
    VerdictRow,
    append,
    read_partial,
    write_misses,
)

ROW = AnswerRow(
    id="q1",
    question="Wo liegt Köln?\u2028Wo?",
    answers=["am Rhein", "Rhein"],
    prediction="Rhein",
    text="Final answer: Rhein\n",
    em=1.0,
    f1=1.0,
    rule="squad",
    chunks=[3, 1],
    cut_chunks=0,
    cut_characters=7,
    version="v1",
    finish_reason="stop",
    hops=2,
    type="",
)
VERDICT = VerdictRow("q1", "Rhein", True, "Final answer: yes", "")
MISS = Miss("q1", "timeout", "no reply.", 3, 2, "bridge")


def test_rows_come_back_as_written(tmp_path: Path) -> None:
    answers, verdicts = tmp_path / "deep" / "a.jsonl", tmp_path / "v.jsonl"
    assert read_partial(answers, AnswerRow) == []
    other = dataclasses.replace(ROW, id="q2", em=0, answers=[])
    append(answers, [ROW])
    append(answers, [])
    append(answers, [other])
    assert read_partial(answers, AnswerRow) == [ROW, other]
    append(verdicts, [VERDICT])
    assert read_partial(verdicts, VerdictRow) == [VERDICT]


def test_a_file_cut_anywhere_in_its_last_line_resumes(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    append(path, [ROW, ROW])
    content = path.read_bytes()
    start = len(content) // 2
    for cut in range(start, len(content), 7):
        path.write_bytes(content[:cut])
        assert read_partial(path, AnswerRow) == [ROW]
        assert path.read_bytes() == content[:start]
        append(path, [ROW])
        assert path.read_bytes() == content


def test_misses_are_written_anew(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "m.jsonl"
    write_misses(path, [])
    write_misses(path, [MISS, MISS])
    write_misses(path, [MISS])
    assert read_partial(path, Miss) == [MISS]
    write_misses(path, [])
    assert not path.exists()


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("em", "1", "field 'em' has a value of the wrong type"),
        ("em", True, "field 'em' has a value of the wrong type"),
        ("hops", 1.5, "field 'hops' has a value of the wrong type"),
        ("chunks", [1, "2"], "field 'chunks' has a value of the wrong type"),
        ("answers", "Rhein", "field 'answers' has a value of the wrong type"),
        ("more", 1, "field 'more' is unknown"),
        ("type", None, "field 'type' has a value of the wrong type"),
    ],
)
def test_wrong_rows_are_refused(tmp_path: Path, key: str, value: object, message: str) -> None:
    path = tmp_path / "a.jsonl"
    append(path, [ROW])
    broken = json.dumps(dataclasses.asdict(ROW) | {key: value})
    path.write_text(path.read_text() + broken + "\n")
    with pytest.raises(InputError, match=rf"a\.jsonl, line 2: {message}; pass --restart"):
        read_partial(path, AnswerRow)


def test_lines_that_are_no_rows_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "v.jsonl"
    for line, message in (
        ("{", "is not valid JSON"),
        ("[1]", "is not a JSON object"),
        ('{"id": "q1"}', "field 'prediction' is missing"),
        (json.dumps(dataclasses.asdict(VERDICT) | {"right": 1}), "field 'right' has a value"),
    ):
        path.write_text(line + "\n")
        with pytest.raises(InputError, match=f"line 1: {message}"):
            read_partial(path, VerdictRow)
