"""The log of an agent's episodes: what is kept after a kill, means, and pass@k."""

from __future__ import annotations

import dataclasses
import itertools
import math
from pathlib import Path

import pytest

from qrag_jax.errors import InputError
from qrag_jax.metrics.agent_log import AgentRow, append, pass_at, read_partial, summarised

ROW = AgentRow(
    id="q1",
    question="Wo?",
    golds=("Köln",),
    answer="Köln",
    broken="",
    em=1.0,
    f1=1.0,
    recall=0.5,
    searches=({"query": "Wo?", "names": ["p1"], "status": "FOUND"},),
)
BROKEN = dataclasses.replace(ROW, id="q2", answer="", broken="timeout", em=0.0, f1=0.0, recall=None)


def test_a_torn_line_is_dropped(tmp_path: Path) -> None:
    log = tmp_path / "new" / "log.jsonl"
    assert read_partial(log) == []
    append(log, [ROW, BROKEN])
    with log.open("a") as file:
        file.write('{"id": "q3", "ques')
    assert read_partial(log) == [ROW, BROKEN]
    append(log, [ROW])
    assert read_partial(log) == [ROW, BROKEN, ROW]


def test_a_line_of_something_else(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    log.write_text('{"id": "q1"}\n')
    with pytest.raises(InputError, match=r"log\.jsonl, line 1"):
        read_partial(log)


def test_what_cannot_be_read_is_not_written(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    with pytest.raises(ValueError, match="JSON"):
        append(log, [ROW, dataclasses.replace(ROW, f1=math.nan)])
    assert read_partial(log) == []


def test_what_the_model_broke_is_wrong_and_what_the_server_broke_is_left_out() -> None:
    malformed = dataclasses.replace(BROKEN, broken="malformed_call", recall=0.0, searches=())
    found = summarised([ROW, BROKEN, *[malformed] * 3])
    assert (found["questions"], found["broken"], found["failed"]) == (5, 3, 1)
    assert (found["broken_share"], found["failed_share"]) == (0.6, 0.2)
    assert found["em"]["mean"] == found["f1"]["mean"] == found["hops"]["mean"] == 0.25
    assert found["recall"]["mean"] == 0.125


def test_pass_at_k_is_the_share_of_draws_with_a_right_one() -> None:
    episodes = [True, True, False, False, False]
    for k in range(1, 6):
        draws = list(itertools.combinations(episodes, k))
        assert pass_at(k, 2, 5) == pytest.approx(sum(map(any, draws)) / len(draws))
    assert pass_at(3, 0, 3) == 0.0
    with pytest.raises(ValueError, match="pass@4 needs 4"):
        pass_at(4, 1, 3)
