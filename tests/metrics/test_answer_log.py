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
    ("key", "value"),
    [
        *(("em", "1"), ("em", True), ("hops", 1.5), ("chunks", [1, "2"]), ("answers", "Rhein")),
        *(("more", 1), ("type", None)),
    ],
)
def test_wrong_rows_are_refused(tmp_path: Path, key: str, value: object) -> None:
    path = tmp_path / "a.jsonl"
    append(path, [ROW])
    broken = json.dumps(dataclasses.asdict(ROW) | {key: value})
    path.write_text(path.read_text() + broken + "\n")
    with pytest.raises(InputError, match=rf"a\.jsonl, line 2: .*{key}.*--restart"):
        read_partial(path, AnswerRow)


@pytest.mark.parametrize("line", ["{", "[1]", '{"id": "q1"}'])
def test_lines_that_are_no_rows_are_refused(line: str, tmp_path: Path) -> None:
    path = tmp_path / "v.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(InputError, match=r"v\.jsonl, line 1"):
        read_partial(path, VerdictRow)
