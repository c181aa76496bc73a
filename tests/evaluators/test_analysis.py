"""Analyses: pages that show each token once and escape all of it, their order, tables, errors."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qrag_jax.errors import InputError
from qrag_jax.evaluators import analysis
from qrag_jax.evaluators.episode_page import EPISODES, Shown, page
from qrag_jax.metrics import answer_log, predictions
from qrag_jax.metrics.prediction_scores import OF_PARTS, summarised
from qrag_jax.metrics.predictions import Prediction
from qrag_jax.rollouts.trajectories import TokenTrajectory, Turn

HOSTILE = '<script>alert("x")</script> &amp; \'</pre>'
TALLY = {
    **dict.fromkeys(("turns", "searches", "malformed", "unknown_tool", "repeated"), 2),
    **dict.fromkeys(("completed", "truncated"), False),
}


def prediction(number: int = 0, reward: float | None = 0.5, status: str = "done") -> Prediction:
    """An episode of two turns; the tokens' texts are its words."""
    segment, turns = [], []
    for observed, sampled in (([5, 6, 7], [8, 9]), ([10, 11], [12, 13, 14])):
        log_probs = -np.arange(1, len(sampled) + 1, dtype=np.float32) / 8
        ids = np.array(observed, np.int32), np.array(sampled, np.int32)
        segment.append(Turn(*ids, log_probs, "stop", ""))
        texts = {"observed_tokens": [f"o{i}\n" for i in observed]}
        texts["sampled_tokens"] = [HOSTILE if i == 13 else f" s{i}" for i in sampled]
        turns.append({"segment": 0, "observed": "", "sampled": "", **texts})
    parts = {} if reward is None else dict.fromkeys(OF_PARTS, 1.0) | {"reward": reward}
    facts = {"tally": TALLY, "answer": HOSTILE, "cited": ["1"], "seen": ["1", "2"]}
    whole = TokenTrajectory(number, 0, 1, (tuple(segment),), status, parts, facts)
    return Prediction(
        id=f"q{number}",
        question=HOSTILE,
        answers=["Right"],
        hops=2,
        draw=0,
        prediction=HOSTILE,
        reward=reward,
        turns=turns,
        trajectory=whole.to_json(),
    )


class Reader(HTMLParser):
    """The tokens of a page with their class and hover text, all tags, and the headings."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tokens: list[list[str]] = []
        self.tags: set[str] = set()
        self.heads: list[str] = []
        self._in = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self._in = tag
        given = dict(attrs)
        if "title" in given:
            self.tokens.append([given.get("class") or "", given["title"] or "", ""])
        elif tag in "bi":
            self._in = "legend"

    def handle_endtag(self, tag: str) -> None:
        self._in = ""

    def handle_data(self, data: str) -> None:
        if self._in in ("b", "i"):
            self.tokens[-1][2] += data
        elif self._in == "h2":
            self.heads.append(data)


def test_each_token_is_shown_once_and_nothing_of_it_is_html() -> None:
    read = Reader(page("Ti<tle", "All.", [Shown("f, line 1", prediction(), False)], {}))
    assert not read.tags & {"script", "img", "link", "iframe", "a"}
    assert [each[0] for each in read.tokens] == [""] * 3 + ["t"] * 2 + [""] * 2 + ["t"] * 3
    ids = [int(each[1].split(",")[0].removeprefix("id ")) for each in read.tokens]
    assert ids == [*range(5, 15)]
    assert read.tokens[4][1] == "id 9, log-prob -0.2500, p 0.7788"
    assert read.tokens[0][1] == "id 5"
    assert read.tokens[0][2] == "o5↵\n"
    assert read.tokens[8][2] == HOSTILE


@pytest.mark.parametrize(
    ("given", "masks", "kind"),
    [
        (prediction(status="truncated"), True, "s"),
        (prediction(status="truncated"), False, "t"),
        (prediction(), True, "t"),
        (prediction(reward=None, status="timeout"), False, "s"),
    ],
)
def test_what_trains(given: Prediction, masks: bool, kind: str) -> None:
    read = Reader(page("T", "A", [Shown("f", given, masks)], {}))
    assert {each[0] for each in read.tokens} == {"", kind}


def written(folder: Path, rows: list[Prediction], **record: Any) -> Path:
    file = folder / "mine.jsonl"
    answer_log.append(file, rows)
    told = {"kind": predictions.KIND, "checkpoint": "untrained", "retriever": "bm25", **record}
    file.with_suffix(".json").write_text(json.dumps(told))
    return file


def test_pages_are_ordered_by_reward(tmp_path: Path) -> None:
    rewards = [*np.random.default_rng(0).random(229).round(6).tolist(), None]
    written(tmp_path, [prediction(n, reward) for n, reward in enumerate(rewards)])
    found = analysis.find([tmp_path, tmp_path / "mine.jsonl"])
    assert len(found.predictions) == 1
    pages = analysis.write_pages(found, tmp_path / "out", 0)
    assert [each.name for each in pages] == ["episodes.html", "episodes-2.html", "episodes-3.html"]
    heads = [Reader(each.read_text()).heads for each in pages]
    assert [len(each) for each in heads] == [EPISODES, EPISODES, 30]
    told = [head.split(":")[0].split(". ")[1] for own in heads for head in own]
    ordered = sorted(rewards[:-1], reverse=True)
    assert told == [*(f"reward {each:.3f}" for each in ordered), "no reward"]
    (single,) = analysis.write_pages(found, tmp_path / "few", 3)
    told = [head.split(":")[0] for head in Reader(single.read_text()).heads]
    assert told == [f"1. reward {ordered[0]:.3f}", f"2. reward {ordered[114]:.3f}", "3. no reward"]


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
        ("other.jsonl", "{}\n", "holds no predictions, no evaluation with tools and no metrics"),
        ("mine.jsonl", "{}\n", r"mine\.jsonl, line 1: field 'answers' is missing"),
        ("mine.jsonl", "no\n", r"mine\.jsonl, line 1: is not valid JSON"),
        ("mine.json", "no", r"mine\.json, which says what mine\.jsonl was made with, cannot"),
        ("summary.json", "no", r"summary\.json is no summary"),
        ("metrics.jsonl", "no\n", r"metrics\.jsonl, line 1: is not valid JSON"),
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
