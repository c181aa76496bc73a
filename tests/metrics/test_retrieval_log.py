from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest

from qrag_jax.errors import InputError
from qrag_jax.metrics.retrieval_log import (
    Row,
    append,
    check_count,
    check_meta,
    discard,
    log_name,
    meta_path,
    read,
    read_meta,
    read_partial,
)

ROW = Row(
    id="hotpot-1",
    question="Wo liegt Köln?\u2028Wo?",
    answer="am Rhein",
    sf_idx=[0, 3],
    pred_idx=[3, 1],
    q_values=[0.5, -0.25],
    sf_texts=["Köln liegt am Rhein.", "Der Rhein\nfließt."],
    pred_texts=["Der Rhein\nfließt.", "🙂"],
    ret=0.99,
    text_len=1234,
    f1=0.5,
    em=0.0,
)


def rows(count: int) -> list[Row]:
    return [dataclasses.replace(ROW, id=f"q{number}") for number in range(count)]


def test_names() -> None:
    assert log_name(42) == "eval_seed42.jsonl"
    assert log_name(7, num_chunks=400_000) == "eval_seed7_ns400000.jsonl"


def test_a_line_has_the_keys_other_tools_read(tmp_path: Path) -> None:
    append(tmp_path / "log.jsonl", [ROW])
    record = json.loads((tmp_path / "log.jsonl").read_text())
    assert list(record) == [
        *("id", "question", "answer", "sf_idx", "pred_idx", "q_values"),
        *("sf_texts", "pred_texts", "return", "text_len", "f1", "em"),
    ]
    assert record["return"] == 0.99
    assert record["question"] == ROW.question


def test_aliases_are_written_where_there_are_any(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    row = dataclasses.replace(ROW, id="3hop", aliases=["Rhein", "Rhine"], source="musique")
    append(log, [ROW, row])
    assert ["aliases" in json.loads(line) for line in log.read_text().splitlines()] == [False, True]
    assert read_partial(log) == [ROW, row]
    log.write_text(log.read_text().replace('["Rhein", "Rhine"]', '["Rhein", 1]'))
    with pytest.raises(InputError, match="aliases"):
        read_partial(log)


def test_rows_come_back_as_written(tmp_path: Path) -> None:
    log = tmp_path / "run" / "log.jsonl"
    assert read_partial(log) == []
    append(log, rows(2))
    append(log, [ROW])
    assert read_partial(log) == [*rows(2), ROW]


def test_a_log_cut_anywhere_in_its_last_line_resumes(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    append(log, rows(3))
    content = log.read_bytes()
    start = content[:-1].rindex(b"\n") + 1
    # Every cut from "nothing of the third line" to "all but its newline".
    for cut in range(start, len(content)):
        log.write_bytes(content[:cut])
        assert read_partial(log) == rows(2)
        assert log.read_bytes() == content[:start]
    append(log, rows(3)[2:])
    assert log.read_bytes() == content


def test_reading_a_whole_log_leaves_it_alone(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    append(log, rows(2))
    before = log.read_bytes()
    assert read_partial(log) == rows(2)
    assert log.read_bytes() == before


def test_reading_only_never_writes_and_leaves_a_torn_line_out(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    append(log, rows(3))
    content = log.read_bytes()
    start = content[:-1].rindex(b"\n") + 1
    assert read(log) == rows(3)
    for cut in range(start, len(content) - 1):
        log.write_bytes(content[:cut])
        assert read(log) == rows(2)
        assert log.read_bytes() == content[:cut]
    log.write_bytes(content[:-1])  # whole, but for its newline
    assert read(log) == rows(3)


def test_rows_without_a_chunk_taken_come_back(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    stopped = dataclasses.replace(ROW, pred_idx=[], q_values=[], pred_texts=[], f1=0.0)
    facts = dataclasses.replace(ROW, q_values=[])  # not played
    append(log, [stopped, facts])
    assert read(log) == read_partial(log) == [stopped, facts]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sf_idx": [], "sf_texts": []}, "'sf_idx' is empty"),
        ({"sf_texts": ["a"]}, "'sf_texts'"),
        ({"pred_texts": []}, "'pred_texts'"),
        ({"q_values": [0.5]}, "'q_values'"),
        ({"pred_idx": [3, -1]}, "'sf_idx'"),
        ({"pred_idx": [3, 3]}, "'pred_idx'"),
    ],
)
def test_a_row_that_cannot_be_scored_is_named(tmp_path: Path, change, message: str) -> None:
    log = tmp_path / "log.jsonl"
    append(log, [ROW, dataclasses.replace(ROW, **change)])
    with pytest.raises(InputError, match=message) as error:
        read(log)
    assert f"{log}, line 2: " in str(error.value)
    assert "write the log anew" in str(error.value)


def test_numbers_that_are_not_finite_are_named(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    for number in ("1e999", "NaN"):
        append(log, [ROW])
        log.write_bytes(log.read_bytes().replace(b"-0.25", number.encode()))
        with pytest.raises(InputError, match=r"log\.jsonl, line 1"):
            read(log)
        log.unlink()


def test_a_log_with_nothing_to_read_is_named(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    with pytest.raises(InputError, match=r"log\.jsonl"):
        read(log)
    with pytest.raises(InputError, match=r"\(Is a directory\)"):
        read(tmp_path)
    for content in (b"", b'{"id": "q'):
        log.write_bytes(content)
        with pytest.raises(InputError, match=r"log\.jsonl"):
            read(log)
        assert log.read_bytes() == content


def test_meta_is_read_as_it_was_written(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    assert read_meta(log) == {}
    check_meta(log, {"checkpoint": 300})
    assert read_meta(log) == {"checkpoint": 300}
    meta_path(log).write_text("[]")
    with pytest.raises(InputError, match="JSON object: delete"):
        read_meta(log)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda line: line[:40], ""),
        (lambda line: b"[1, 2]", ""),
        (lambda line: b"", ""),
        (lambda line: b"\xff" + line, "UTF-8"),
        (lambda line: line.replace(b"0.99", b"NaN"), "NaN"),
        (lambda line: line.replace(b'"id": "', b'"id": "\\ud800'), "surrogates"),
        (lambda line: line.replace(b'"em"', b'"ex"'), "em"),
        (lambda line: line[:-1] + b', "x": 1}', "x"),
        (lambda line: line.replace(b"[3, 1]", b'[3, "1"]'), "pred_idx"),
        (lambda line: line.replace(b"1234", b'"1234"'), "text_len"),
    ],
)
def test_a_broken_line_in_the_middle_is_named(tmp_path: Path, change, message: str) -> None:
    log = tmp_path / "log.jsonl"
    append(log, rows(3))
    lines = log.read_bytes().split(b"\n")
    assert change(lines[1]) != lines[1]
    lines[1] = change(lines[1])
    log.write_bytes(b"\n".join(lines))
    before = log.read_bytes()
    with pytest.raises(InputError, match=rf"log\.jsonl, line 2: .*{message}"):
        read_partial(log)
    assert log.read_bytes() == before


def test_a_row_that_is_not_json_writes_nothing(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    broken = dataclasses.replace(ROW, id="q9", q_values=[math.nan])
    with pytest.raises(ValueError, match="q9"):
        append(log, [ROW, broken])
    assert not log.exists()


def test_meta_lets_the_same_evaluation_go_on(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    meta = {"checkpoint": 300, "config": "ab12", "lengths": (64, 128)}
    check_meta(log, meta)
    append(log, [ROW])
    check_meta(log, dict(reversed(meta.items())))
    assert json.loads(meta_path(log).read_text()) == meta | {"lengths": [64, 128]}
    assert [path.name for path in sorted(tmp_path.iterdir())] == [
        "log.jsonl",
        "log.jsonl.meta.json",
    ]


def test_meta_refuses_another_checkpoint(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    check_meta(log, {"checkpoint": 300, "config": "ab12", "old": None})
    with pytest.raises(InputError) as error:
        check_meta(log, {"checkpoint": 400, "config": "ab12"})
    message = str(error.value)
    assert "checkpoint (was 300, now 400)" in message
    assert "old" in message
    assert "config" not in message
    assert "--restart" in message
    discard(log)
    check_meta(log, {"checkpoint": 400, "config": "ab12"})


def test_rows_of_unknown_origin_are_refused(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    append(log, [ROW])
    with pytest.raises(InputError, match=r"meta\.json is missing"):
        check_meta(log, {"checkpoint": 1})
    assert not meta_path(log).exists()


@pytest.mark.parametrize("content", ["{", "[]", ""])
def test_a_broken_meta_file_is_named(tmp_path: Path, content: str) -> None:
    log = tmp_path / "log.jsonl"
    meta_path(log).write_text(content)
    with pytest.raises(InputError, match=r"log\.jsonl\.meta\.json is not"):
        check_meta(log, {"checkpoint": 1})
    discard(log)
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------------- two writers


def test_more_rows_than_questions_are_refused(tmp_path):
    log = tmp_path / "log.jsonl"
    check_count(log, 3, 3)
    check_count(log, 0, 3)
    with pytest.raises(InputError) as error:
        check_count(log, 4, 3)
    assert str(error.value) == (
        f"{log} has 4 rows, but there are 3 questions: more than one process wrote to it; pass "
        "--restart, or delete the log, to begin anew"
    )


def test_rows_without_known_facts(tmp_path: Path) -> None:
    """What needs the facts is left out of the line, and never 0."""
    path = tmp_path / "log.jsonl"
    bare = {"sf_idx": [], "sf_texts": [], "ret": None, "f1": None, "em": None}
    unknown = dataclasses.replace(ROW, id="own-1", **bare)  # type: ignore[arg-type]
    rewarded = dataclasses.replace(unknown, id="own-2", ret=0.5)
    append(path, [unknown, rewarded, ROW])
    first = json.loads(path.read_text().splitlines()[0])
    assert not {"return", "f1", "em"} & first.keys()
    assert read(path, needs_facts=False) == read_partial(path) == [unknown, rewarded, ROW]
    with pytest.raises(InputError, match="'sf_idx'"):
        read(path)
    lines = path.read_text().splitlines()
    del (known := json.loads(lines[2]))["em"]
    path.write_text(json.dumps(known) + "\n")
    with pytest.raises(InputError, match="em"):
        read(path, needs_facts=False)
