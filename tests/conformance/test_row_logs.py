"""What every log of rows does. A new kind of log is tested by registering it here."""

from __future__ import annotations

import dataclasses
import importlib
import json
import math
import pkgutil
from pathlib import Path
from typing import Any

import pytest

from qrag_jax import evaluators, metrics
from qrag_jax.errors import InputError
from qrag_jax.metrics import row_log as kinds
from qrag_jax.metrics.row_log import (
    AgentRow,
    AnswerRow,
    Hop,
    Miss,
    RewriteRow,
    RowLog,
    Searched,
    VerdictRow,
    begin,
    read_record,
    record_path,
    refuse_other,
)
from qrag_jax.metrics.summaries import reward_row
from tests.evaluators.shown_pages import prediction
from tests.retrieval_logs import played_rows

TEXT = "Wo liegt Köln?\u2028Wo? 🙂\n"


def named(row: Any) -> list[Any]:
    """Three rows, with foreign letters and ends of lines."""
    return [dataclasses.replace(row, id=f"{n}{TEXT}") for n in range(3)]


HOP = Hop("a query", "searched", ("p1", "ü"), {"recall": 0.5}, 20, 4, (("p2", 1.5), ("p1", 0.3)))
SEARCH = {"query": "Wo?", "names": ["p1"], "status": "FOUND"}
ANSWER = AnswerRow(
    *("", TEXT, ["am Rhein"], "Rhein", TEXT, 1.0, 0.25, "squad", [3, 1], 0, 7, "v1", "stop", 2, "")
)
# log → its rows, and a field of them that is a number ("": there is none).
LOGS: list[tuple[RowLog, list[Any], str]] = [
    (kinds.RETRIEVALS, named(played_rows(1, 0)[0]), "ret"),
    (kinds.ANSWERS, named(ANSWER), "f1"),
    (kinds.VERDICTS, named(VerdictRow("", "Rhein", True, TEXT, "")), ""),
    (kinds.MISSES, named(Miss("", "timeout", TEXT, 3, 2, "bridge")), ""),
    (kinds.REWARDS, named(reward_row(("", TEXT), [0.5, "timeout", 1.0])), "mean"),
    (kinds.PREDICTIONS, named(prediction()), "reward"),
    (kinds.AGENTS, named(AgentRow("", TEXT, ("Köln",), "", "", 1.0, 0.5, None, (SEARCH,))), "f1"),
    (kinds.HOPS, named(Searched("", TEXT, ("x",), ("g1", "g2"), (HOP, HOP))), ""),
    (kinds.REWRITES, named(RewriteRow("", "a", TEXT, "q", "server", TEXT, None, 7)), ""),
]
every_log = pytest.mark.parametrize(
    ("log", "rows", "number"), LOGS, ids=[log.name for log, *_ in LOGS]
)


def test_every_kind_is_registered() -> None:
    known = [log for log, *_ in LOGS]
    for package in (metrics, evaluators):
        for each in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            for value in vars(importlib.import_module(each.name)).values():
                assert not isinstance(value, RowLog) or value in known


@every_log
def test_what_is_written_is_read(log: RowLog, rows: list, number: str, tmp_path: Path) -> None:
    """But for numbers that JSON lacks, with which nothing is written."""
    path = tmp_path / "new" / "log.jsonl"
    for part in (rows[:1], [], rows[1:]):
        log.append(path, part)
    before = path.read_bytes()
    if number:
        with pytest.raises(ValueError, match="JSON"):
            log.append(path, [rows[2], dataclasses.replace(rows[1], **{number: math.nan})])
    assert log.read(path) == log.read_partial(path) == rows
    assert path.read_bytes() == before
    assert before.count(b"\n") == 3


def test_half_of_a_surrogate_pair_which_models_do_write_spoils_no_log(tmp_path: Path) -> None:
    """UTF-8 has none: a question mark takes its place."""
    path = tmp_path / "log.jsonl"
    kinds.VERDICTS.write(path, [VerdictRow("a", "b", True, "\ud83d\ude42", "\ud800!")], {})
    assert [row.version for row in kinds.VERDICTS.each(path)] == ["?!"]


@every_log
def test_a_log_cut_anywhere_in_its_last_line_goes_on(
    log: RowLog, rows: list, number: str, tmp_path: Path
) -> None:
    """What only reads leaves the file alone, and takes nothing of the torn line for a row."""
    path = tmp_path / "log.jsonl"
    assert log.read_partial(path) == []
    log.append(path, rows)
    whole = path.read_bytes()
    start = whole[:-1].rindex(b"\n") + 1
    step = (len(whole) - start) // 12
    for cut in (*range(start, len(whole) - 1, step), len(whole) - 2, len(whole) - 1):
        path.write_bytes(whole[:cut])
        assert log.read(path) == rows[:2]
        assert path.read_bytes() == whole[:cut]
        assert log.read_partial(path) == rows[:2]
        assert path.read_bytes() == whole[:start]
        log.append(path, rows[2:])
        assert path.read_bytes() == whole


@every_log
def test_lines_that_are_no_rows_are_refused(
    log: RowLog, rows: list, number: str, tmp_path: Path
) -> None:
    """By file and line; nothing is cut off."""
    path = tmp_path / "log.jsonl"
    log.append(path, rows)
    lines = path.read_bytes().split(b"\n")
    row = json.loads(lines[1])
    for line in (b"", b"[1, 2]", lines[1][:20], json.dumps(row | {"id": 3}).encode()):
        damaged = b"\n".join([lines[0], line, lines[2], b""])
        path.write_bytes(damaged)
        for reader in (log.read, log.read_partial):
            with pytest.raises(InputError, match=r"log\.jsonl, line 2"):
                reader(path)
        assert path.read_bytes() == damaged


@pytest.mark.parametrize("kept", range(6))
def test_a_log_of_parts_goes_on_behind_its_last_whole_part(kept: int, tmp_path: Path) -> None:
    """The last part of a finished log may be smaller."""
    path, log, rows, size = tmp_path / "x.jsonl", kinds.HOPS, [*LOGS[-2][1], *LOGS[-2][1][:2]], 2
    log.append(path, rows[:kept])
    with path.open("a") as file:
        file.write('{"id"')
    whole, seen = kept if kept == len(rows) else kept // size * size, list[Any]()
    assert log.resume(path, size, len(rows), seen.append) == whole
    assert seen == rows[:kept]
    log.append(path, rows[whole:])
    assert log.read(path) == rows


# ---------------------------------------------------------------------- records


def test_a_log_goes_on_under_its_own_settings_alone(tmp_path: Path) -> None:
    path, (log, rows, _) = tmp_path / "run" / "log.jsonl", LOGS[0]
    record = {"checkpoint": 300, "config": {"a": 1, "b": None}, "lengths": (64, 128)}
    log.append(path, rows)
    with pytest.raises(InputError, match=r"log\.json "):  # rows of nobody knows what
        begin(path, record)
    begin(path, record, restart=True)
    assert log.read_partial(path) == []
    begin(path, record | {"new": 1})  # there are no rows yet
    begin(path, record)
    log.append(path, rows)
    begin(path, record)
    assert read_record(path) == record | {"lengths": [64, 128]}
    for other, name in (
        (record | {"checkpoint": 400}, r"checkpoint \(was 300, now 400\)"),
        (record | {"config": {"a": 1}}, r"config\.b "),
        (record | {"new": 1}, "new "),
    ):
        with pytest.raises(InputError, match=name):
            begin(path, other)
    refuse_other(path, {"checkpoint": 300})
    with pytest.raises(InputError, match="new "):
        refuse_other(path, {"checkpoint": 300, "new": None})
    for text in ("{", "[]", ""):
        record_path(path).write_text(text)
        assert read_record(path) == {}
        with pytest.raises(InputError, match=r"log\.jsonl"):
            begin(path, record)
    assert log.read(path) == rows
    assert record_path(tmp_path / "answers.json") != tmp_path / "answers.json"
