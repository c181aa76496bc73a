from __future__ import annotations

import dataclasses
import math

from qrag_jax.evaluators.episode_markdown import LONGEST, markdown_of
from qrag_jax.evaluators.episode_sample import CHUNKS, TOKENS, sampler, spread
from qrag_jax.metrics import retrieval_log
from tests.evaluators.shown_pages import HOSTILE, prediction
from tests.retrieval_logs import played_rows


def test_the_same_places_are_sampled_each_time() -> None:
    rows = played_rows(100, 0)
    sample = sampler(CHUNKS, lambda places: [rows[place] for place in places], len(rows))(4)
    assert [row["id"] for row in sample.rows] == ["q0", "q33", "q66", "q99"]
    assert sample.rows[0] == retrieval_log.as_json(rows[0])
    assert spread(3, 8) == [0, 1, 2]
    assert spread(100, 0) == []


def test_an_episode_that_no_log_can_hold_is_left_out() -> None:
    rows = played_rows(2, 0)
    rows[0] = dataclasses.replace(rows[0], q_values=[math.nan] * 5)
    sample = sampler(CHUNKS, lambda places: [rows[place] for place in places], 2)(8)
    assert [row["id"] for row in sample.rows] == ["q1"]


def test_markdown_marks_gold_and_what_is_missing() -> None:
    (row,) = played_rows(1, 0)
    row = dataclasses.replace(row, sf_idx=[row.pred_idx[1], 77], sf_texts=["here", "not *here*"])
    lines = markdown_of([row]).splitlines()
    assert "1 of 2 facts" in lines[2]
    assert lines[5].startswith(f"2. **GOLD** Q {row.q_values[1]:.3f}, chunk {row.pred_idx[1]}: ")
    assert lines[-1] == r"- not found, **GOLD** chunk 77: not \*here\*"


def test_nothing_in_a_text_is_markup() -> None:
    text = markdown_of([prediction()])
    assert "<" not in text
    assert "`" not in text.replace(r"\`", "")
    sample = sampler(TOKENS, lambda places: [prediction()], 1)(1)
    assert sample.rows[0]["question"] == HOSTILE
    long = dataclasses.replace(prediction(), question="word " * 1000)
    assert max(map(len, markdown_of([long]).splitlines())) < 2 * LONGEST
