"""Analyses: the order of a page's episodes, tables, errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qrag_jax.errors import InputError
from qrag_jax.evaluators import analysis
from qrag_jax.metrics import answer_log, predictions
from qrag_jax.metrics.prediction_scores import summarised
from qrag_jax.metrics.predictions import Prediction
from tests.evaluators.shown_pages import Page, prediction


def written(folder: Path, rows: list[Prediction], **record: Any) -> Path:
    file = folder / "mine.jsonl"
    answer_log.append(file, rows)
    told = {"kind": predictions.KIND, "checkpoint": "untrained", "retriever": "bm25", **record}
    file.with_suffix(".json").write_text(json.dumps(told))
    return file


def test_a_page_is_ordered_by_reward(tmp_path: Path) -> None:
    rewards = [*np.random.default_rng(0).random(229).round(6).tolist(), None]
    file = written(tmp_path, [prediction(n, reward) for n, reward in enumerate(rewards)])
    found = analysis.find([tmp_path, tmp_path / "mine.jsonl"])
    assert len(found.predictions) == 1
    whole = analysis.write_page(found, tmp_path / "out", 0)
    assert whole == tmp_path / "out" / "episodes.html"
    (section,) = Page(whole).sections
    ordered = [*sorted(rewards[:-1], reverse=True), None]
    assert [episode["score"] for episode in section["episodes"]] == ordered
    assert section["title"] == str(file)
    few = analysis.write_page(found, tmp_path / "few", 3)
    assert few is not None
    shown = [episode["score"] for episode in Page(few).sections[0]["episodes"]]
    assert shown == [ordered[0], ordered[114], None]


def test_there_is_no_page_without_predictions(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "train/loss": 0.5}\n')
    assert analysis.write_page(analysis.find([tmp_path]), tmp_path / "out", 0) is None


def test_a_table_of_files_and_of_summaries_without_them(tmp_path: Path) -> None:
    file = written(tmp_path, [prediction(n) for n in range(3)])
    scores = {"bm25": {"untrained": summarised(predictions.read_scores(file))}}
    files = {"bm25": {"untrained": "mine.jsonl"}}
    summary = {"scores": scores, "files": files, "main": {}}
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    with_file = analysis.table(analysis.find([tmp_path]))
    assert len(with_file) == 2
    assert with_file[1].startswith("mine.jsonl: untrained, bm25  1.000 [1.000, 1.000]")
    file.unlink()
    without = analysis.table(analysis.find([tmp_path]))
    assert without[1].startswith("summary.json: untrained, bm25  1.000 [1.000, 1.000]")


def analysed(place: Path, out: Path) -> None:
    found = analysis.find([place])
    analysis.table(found)
    analysis.write_curves(found, out)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("none", None, "none does not exist; give a folder"),
        ("other.jsonl", "{}\n", "holds no predictions"),
        ("mine.jsonl", "{}\n", r"mine\.jsonl"),
        ("mine.jsonl", "no\n", r"mine\.jsonl"),
        ("mine.json", "no", r"mine\.json"),
        ("summary.json", "no", r"summary\.json"),
        ("metrics.jsonl", "no\n", r"metrics\.jsonl"),
    ],
)
def test_wrong_inputs(name: str, text: str | None, said: str, tmp_path: Path) -> None:
    if name.startswith("mine"):
        written(tmp_path, [])
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(InputError, match=said):
        analysed(tmp_path if text is not None else tmp_path / name, tmp_path)


def test_a_torn_last_line_is_left_out(tmp_path: Path) -> None:
    file = written(tmp_path, [prediction(0), prediction(1)])
    file.write_bytes(file.read_bytes() + b'{"id')
    assert [each.id for each in predictions.read_scores(file)] == ["q0", "q1"]
    second = predictions.read_scores(file)[1]
    assert predictions.read_at(file, second.offset) == prediction(1)
