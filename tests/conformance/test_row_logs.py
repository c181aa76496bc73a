"""What every log of rows does. A new kind of log is tested by registering it here."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import math
import pkgutil
import resource
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from qrag_jax import evaluators, metrics
from qrag_jax.errors import InputError
from qrag_jax.evaluators import rewrite_log
from qrag_jax.evaluators.rewrite_log import RewriteRow
from qrag_jax.metrics import agent_log, answer_log, hop_log, predictions, retrieval_log, reward_log
from qrag_jax.metrics.agent_log import AgentRow
from qrag_jax.metrics.answer_log import AnswerRow, Miss, VerdictRow
from qrag_jax.metrics.hop_log import Hop, Searched
from qrag_jax.metrics.reward_log import RewardRow
from qrag_jax.metrics.row_log import RowLog
from tests.evaluators.shown_pages import prediction
from tests.retrieval_logs import played_rows

TEXT = "Wo liegt Köln?\u2028Wo? 🙂\n"


class Log(NamedTuple):
    """A kind of log.

    rows: three of its kind, with foreign letters and ends of lines; number: a field of them.
    append: adds rows. resume: reads what a kill left, and cuts it to whole rows; None: nobody
    does. read: reads without a change; None: nobody does.
    """

    rows: list[Any]
    number: str
    append: Callable[[Path, Iterable[Any]], None]
    resume: Callable[[Path], list[Any]] | None = None
    read: Callable[[Path], list[Any]] | None = None


def named(row: Any) -> list[Any]:
    return [dataclasses.replace(row, id=f"{n}{TEXT}") for n in range(3)]


def answers(kind: type, row: Any, number: str) -> Log:
    return Log(named(row), number, answer_log.append, partial(answer_log.read_partial, kind=kind))


HOP = Hop("a query", "searched", ("p1", "ü"), {"recall": 0.5}, 20, 4, (("p2", 1.5), ("p1", 0.3)))
SEARCH = {"query": "Wo?", "names": ["p1"], "status": "FOUND"}
ANSWER = AnswerRow(
    *("", TEXT, ["am Rhein"], "Rhein", TEXT, 1.0, 0.25, "squad", [3, 1], 0, 7, "v1", "stop", 2, "")
)
LOGS = {
    "retrieval": Log(
        [dataclasses.replace(row, question=TEXT) for row in played_rows(3, 0)],
        *("ret", retrieval_log.append, retrieval_log.read_partial, retrieval_log.read),
    ),
    "answers": answers(AnswerRow, ANSWER, "f1"),
    "verdicts": answers(VerdictRow, VerdictRow("", "Rhein", True, TEXT, ""), ""),
    "misses": answers(Miss, Miss("", "timeout", TEXT, 3, 2, "bridge"), ""),
    "rewards": answers(
        RewardRow, reward_log.row(("", TEXT), [0.5, "timeout", 1.0]), "mean"
    )._replace(read=partial(reward_log.read, field="config.questions.kept")),
    "predictions": answers(predictions.Prediction, prediction(), "reward")._replace(
        read=lambda path: [*predictions.read(path)]
    ),
    "agents": Log(
        named(AgentRow("", TEXT, ("Köln",), "Bonn", "", 1.0, 0.5, None, (SEARCH,))),
        *("f1", agent_log.append, agent_log.read_partial, agent_log.LOG.read),
    ),
    "hops": Log(
        named(Searched("", TEXT, ("x",), ("g1", "g2"), (HOP, HOP))),
        "",
        hop_log.append,
        lambda path: hop_log.read_parts(path, 1, 3),
        hop_log.read,
    ),
    "rewrites": Log(
        named(RewriteRow("", "a", TEXT, "q", "server", TEXT, None, 7)),
        "",
        rewrite_log.append,
        lambda path: rewrite_log.read_parts(path, 1, 3),
        rewrite_log.read,
    ),
}
READERS = [
    (name, reader) for name, log in LOGS.items() for reader in (log.resume, log.read) if reader
]
every_log = pytest.mark.parametrize("log", LOGS.values(), ids=LOGS)
every_reader = pytest.mark.parametrize(
    ("log", "reader"), [(LOGS[name], reader) for name, reader in READERS]
)


def test_every_kind_is_registered() -> None:
    kinds = {type(log.rows[0]) for log in LOGS.values()}
    for package in (metrics, evaluators):
        for each in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            for value in vars(importlib.import_module(each.name)).values():
                assert not isinstance(value, RowLog) or value.kind in kinds


@every_reader
def test_what_is_written_is_read(log: Log, reader: Any, tmp_path: Path) -> None:
    """But for numbers that JSON lacks, with which nothing is written."""
    path = tmp_path / "new" / "log.jsonl"
    for rows in (log.rows[:1], [], log.rows[1:]):
        log.append(path, rows)
    before = path.read_bytes()
    if log.number:
        bad = dataclasses.replace(log.rows[1], **{log.number: math.nan})
        with pytest.raises(ValueError, match=r"JSON|NaN"):
            log.append(path, [log.rows[2], bad])
    assert reader(path) == log.rows
    assert path.read_bytes() == before
    assert before.count(b"\n") == 3


@every_log
def test_a_log_cut_anywhere_in_its_last_line_goes_on(log: Log, tmp_path: Path) -> None:
    """What only reads leaves the file alone, and takes nothing of the torn line for a row."""
    path = tmp_path / "log.jsonl"
    assert log.resume is not None
    assert log.resume(path) == []
    log.append(path, log.rows)
    whole = path.read_bytes()
    start = whole[:-1].rindex(b"\n") + 1
    step = (len(whole) - start) // 12
    for cut in (*range(start, len(whole) - 1, step), len(whole) - 2, len(whole) - 1):
        path.write_bytes(whole[:cut])
        if log.read is not None and cut > start:
            with contextlib.suppress(InputError):  # some want finished logs
                found = log.read(path)
                assert found == log.rows[: len(found)]
                assert len(found) == 2 or cut == len(whole) - 1
            assert path.read_bytes() == whole[:cut]
        assert log.resume(path) == log.rows[:2]
        assert path.read_bytes() == whole[:start]
        log.append(path, log.rows[2:])
        assert path.read_bytes() == whole


@every_reader
def test_lines_that_are_no_rows_are_refused(log: Log, reader: Any, tmp_path: Path) -> None:
    """By file and line; nothing is cut off."""
    path = tmp_path / "log.jsonl"
    log.append(path, log.rows)
    lines = path.read_bytes().split(b"\n")
    row = json.loads(lines[1])
    wrong = [b"", b"[1, 2]", b"no", lines[1][:20], b"\xff" + lines[1], b"[" * 200_000]
    wrong += [json.dumps(row | {"more": 1}).encode(), json.dumps(row | {"id": 3}).encode()]
    wrong.append(json.dumps({name: row[name] for name in list(row) if name != "id"}).encode())
    if log.number:
        field = "return" if log.number == "ret" else log.number
        old = f'"{field}": {json.dumps(row[field])}'.encode()
        assert old in lines[1]
        for number in (b"NaN", b"1e999", b'"1"'):
            wrong.append(lines[1].replace(old, f'"{field}": '.encode() + number, 1))
    for line in wrong:
        damaged = b"\n".join([lines[0], line, lines[2], b""])
        path.write_bytes(damaged)
        with pytest.raises(InputError, match=r"log\.jsonl, line 2"):
            reader(path)
        assert path.read_bytes() == damaged


@pytest.mark.parametrize(
    ("log", "reader"),
    [(LOGS[name], reader) for name, reader in READERS if name in ("retrieval", "rewards", "hops")],
)
def test_a_line_of_two_gigabytes_is_refused(log: Log, reader: Any, tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    with path.open("wb") as file:
        file.truncate(2 << 30)  # zeros, which take no room on the disk
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(InputError, match=r"log\.jsonl"):
        reader(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500 * 1024
    assert path.stat().st_size == 2 << 30  # nothing was cut off


@every_log
def test_a_full_disk_leaves_whole_rows(log: Log, tmp_path: Path) -> None:
    """The file may not grow beyond some size, so a write ends in the middle of a row."""
    path = tmp_path / "log.jsonl"
    log.append(path, log.rows)
    size = path.stat().st_size
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 30, limits[1]))
    try:
        with pytest.raises(OSError, match="large"):
            log.append(path, log.rows[:1])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.stat().st_size == size + 30
    assert log.resume is not None
    assert log.resume(path) == log.rows


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("kept", range(6))
def test_a_log_of_parts_goes_on_behind_its_last_whole_part(
    size: int, kept: int, tmp_path: Path
) -> None:
    """The last part of a finished log may be smaller."""
    path, rows = tmp_path / "x.jsonl", [*LOGS["hops"].rows, *LOGS["hops"].rows[:2]]
    hop_log.append(path, rows[:kept])
    with path.open("a") as file:
        file.write('{"id"')
    whole = kept if kept == len(rows) else kept // size * size
    assert hop_log.read_parts(path, size, len(rows)) == rows[:whole]
    hop_log.append(path, rows[whole:])
    assert hop_log.read(path) == rows


# ---------------------------------------------------------------------- headers


def test_a_log_goes_on_under_its_own_settings_alone(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    meta = {"checkpoint": 300, "config": {"a": 1, "b": None}, "lengths": (64, 128)}
    retrieval_log.append(log, LOGS["retrieval"].rows)
    with pytest.raises(InputError, match=r"meta\.json"):  # rows of nobody knows what
        retrieval_log.check_meta(log, meta)
    retrieval_log.discard(log)
    for _ in range(2):
        retrieval_log.check_meta(log, meta)
        assert retrieval_log.read_meta(log) == meta | {"lengths": [64, 128]}
    for other, name in (
        (meta | {"checkpoint": 400}, r"checkpoint \(was 300, now 400\)"),
        (meta | {"config": {"a": 1}}, r"config\.b "),
        (meta | {"new": 1}, "new "),
    ):
        with pytest.raises(InputError, match=name):
            retrieval_log.check_meta(log, other)
    for text in ("{", "[]", ""):
        retrieval_log.meta_path(log).write_text(text)
        with pytest.raises(InputError, match=r"meta\.json"):
            retrieval_log.check_meta(log, meta)
    retrieval_log.discard(log)
    assert list(tmp_path.iterdir()) == []
    assert retrieval_log.read_meta(log) == {}


def test_an_agents_log_is_of_its_record(tmp_path: Path) -> None:
    log, record = tmp_path / "run" / "log.jsonl", {"weights": "ab", "k": [1, 2]}
    agent_log.begin(log, record, restart=False)
    agent_log.append(log, LOGS["agents"].rows)
    agent_log.begin(log, record, restart=False)
    for other in ({"weights": "cd", "k": [1, 2]}, record | {"new": None}):
        with pytest.raises(InputError, match=r"log\.jsonl"):
            agent_log.begin(log, other, restart=False)
    log.with_suffix(".json").write_text(json.dumps({"weights": "cd"}))
    with pytest.raises(InputError, match=r"log\.jsonl"):  # the header was edited
        agent_log.begin(log, record, restart=False)
    assert agent_log.read_partial(log) == LOGS["agents"].rows
    agent_log.begin(log, record, restart=True)
    assert agent_log.read_partial(log) == []
