"""Pages, tables and samples of episodes: what they hold of each log, and that no text runs."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import math
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qrag_jax.errors import InputError
from qrag_jax.evaluators import analysis
from qrag_jax.evaluators.episode_markdown import LONGEST, markdown_of
from qrag_jax.evaluators.episode_sample import CHUNKS, TOKENS, sampler, spread
from qrag_jax.evaluators.rewrite_log import LOG as REWRITES_LOG
from qrag_jax.evaluators.rewrite_log import RewriteRow
from qrag_jax.evaluators.shown.page import page
from qrag_jax.evaluators.shown.places import find
from qrag_jax.evaluators.shown.sections import POINTS, curves_of, run_of, section_of
from qrag_jax.metrics import agent_log, answer_log, hop_log, predictions, retrieval_log
from qrag_jax.metrics.agent_log import AgentRow
from qrag_jax.metrics.prediction_scores import summarised
from qrag_jax.metrics.predictions import Prediction
from qrag_jax.metrics.retrieval_log import Row
from qrag_jax.runtime.episode_file import EpisodeFile
from tests.evaluators.shown_pages import HOSTILE, Page, prediction
from tests.retrieval_logs import STEPS, played_rows

SETTINGS = {"pqn": {"gamma": 0.9}, "env": {"max_steps": STEPS}, "system": "q_rag"}


def run_folder(folder: Path, config: dict[str, Any] = SETTINGS) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    lines = [{"step": step, "eval/return": step / 10} for step in (0, 5, 10)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def scored_run(folder: Path, rows: list[Row], before: list[Row]) -> Path:
    """A run with logs of its trained and its untrained retriever."""
    run_folder(folder)
    for label, own in (("best-10", rows), ("untrained", before)):
        if own:
            retrieval_log.append(folder / "eval" / label / "eval_seed42.jsonl", own)
    return folder


def shown(*given: Path, most: int = 0) -> Page:
    places = find(given)
    made = [section_of(place, most) for place in places]
    file = given[0] if given[0].is_dir() else given[0].parent
    (file / "page.html").write_bytes(
        page("A page", "", [run_of(place) for place in places], [s for s in made if s is not None])
    )
    return Page(file / "page.html")


def test_episodes_of_chunks(tmp_path: Path) -> None:
    rows, before = played_rows(20, 0), played_rows(20, 1)
    section = shown(scored_run(tmp_path / "run", rows, before)).sections[0]
    assert [each["id"] for each in section["episodes"]] == [row.id for row in rows]
    for row, early, episode in zip(rows, before, section["episodes"], strict=True):
        steps = [[index, section["texts"][text], q] for index, text, q in episode["steps"]]
        q_values = [round(q, 6) for q in row.q_values]
        assert steps == [[*each] for each in zip(row.pred_idx, row.pred_texts, q_values)]
        assert [index for index, _ in episode["gold"]] == row.sf_idx
        assert episode["solved"] == (set(row.sf_idx) <= set(row.pred_idx))
        assert episode["hops"] == len(row.sf_idx)
        facts = len(row.sf_idx)
        best = 0.9 ** (facts - 1) * (0.5 + 0.5 * facts / (facts + 1e-5))
        assert episode["regret"] == pytest.approx(best - row.ret, abs=1e-4)
        assert [index for index, _, _ in episode["before"]["steps"]] == early.pred_idx
    assert len(section["texts"]) == len({*section["texts"]}) == 10  # each text once


def test_what_a_log_lacks_is_said(tmp_path: Path) -> None:
    rows = [dataclasses.replace(row, q_values=[]) for row in played_rows(3, 0)]
    run = scored_run(tmp_path / "run", rows, [])
    (run / "config.json").write_text("no config")
    section = shown(run).sections[0]
    first = section["episodes"][0]
    assert (first["steps"][0][2], first["before"]) == (None, None)
    assert any("Q-values" in note for note in section["notes"])
    assert first["regret"] == pytest.approx(1 - rows[0].ret)
    # Questions whose facts nobody knows.
    bare = {"sf_idx": [], "sf_texts": [], "ret": None, "f1": None, "em": None}
    rows, before = (
        [dataclasses.replace(row, **bare) for row in played_rows(3, seed)] for seed in (0, 1)
    )
    section = shown(scored_run(tmp_path / "bare", rows, before)).sections[0]
    for row, episode in zip(rows, section["episodes"], strict=True):
        assert [index for index, _, _ in episode["steps"]] == row.pred_idx
        names = ("solved", "hops", "score", "regret")
        assert [episode[name] for name in names] == [None] * 4
        assert episode["before"]["score"] is None


def test_the_newest_log_of_trained_weights_is_shown(tmp_path: Path) -> None:
    """A best checkpoint of step 0 is not trained; a log that is named is shown itself."""
    run = scored_run(tmp_path / "run", [], played_rows(3, 0))
    for label in ("best-0", "last-10"):
        retrieval_log.append(run / "eval" / label / "eval_seed42.jsonl", played_rows(3, 1))
        section = shown(run).sections[0]
        assert label in section["title"]
        assert all((each["before"] is None) == (label == "best-0") for each in section["episodes"])
        os.utime(run / "eval/best-0/eval_seed42.jsonl", (2e9, 2e9))  # newer than the log of last-10
    retrieval_log.append(run / "eval/last-10/single_step_eval_seed42.jsonl", played_rows(3, 2))
    assert "last-10/eval_seed42.jsonl" in shown(run).sections[0]["title"]
    section = shown(run / "eval" / "best-0" / "eval_seed42.jsonl").sections[0]
    assert "best-0/eval_seed42.jsonl" in section["title"]


def test_what_the_budget_made_impossible_is_regret(tmp_path: Path) -> None:
    row = dataclasses.replace(played_rows(1, 0)[0], sf_idx=[*range(6)], sf_texts=["a"] * 6, ret=0.0)
    run = scored_run(tmp_path / "run", [row, *played_rows(2, 0, "other")], [])
    section = shown(run).sections[0]
    assert section["episodes"][0]["regret"] == pytest.approx(0.9**5, abs=1e-4)
    assert any("env.max_steps" in note for note in section["notes"])


def test_broken_lines_are_skipped_and_counted(tmp_path: Path) -> None:
    run = scored_run(tmp_path / "run", played_rows(4, 0), played_rows(4, 1))
    log = run / "eval" / "best-10" / "eval_seed42.jsonl"
    lines = log.read_text().splitlines(keepends=True)
    odd = lines[2].replace('"return": ', '"return": 1' + "0" * 400)  # too large for a float
    log.write_text(lines[0] + "{}\n" + lines[1] + "no JSON\n" + odd + lines[3] + '{"id": "torn')
    with (run / "metrics.jsonl").open("a") as file:
        file.write('[1]\n{"step": "x"}\n{"step": 11, "eval/return"')
    read = shown(run)
    assert [each["id"] for each in read.sections[0]["episodes"]] == ["q0", "q1", "q3"]
    assert any("3 broken" in note for note in read.sections[0]["notes"])
    assert any("2 broken" in note for note in read.runs[0]["notes"])
    assert read.runs[0]["curves"][0]["steps"] == [0, 5, 10]


def test_samples_of_a_training_are_shown_where_nothing_was_evaluated(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run")
    (section,) = [*shown(run).sections, None]  # curves alone
    assert section is None
    assert shown(run).runs[0]["curves"][0]["values"] == [0.0, 0.5, 1.0]
    assert len(find([run, run / "."])) == 1  # the same folder twice is one run
    kept = EpisodeFile(run)
    for step, seed in ((0, 1), (5, 2), (10, 3)):
        kept.write(step, "chunks", [retrieval_log.as_json(row) for row in played_rows(3, seed)])
    section = shown(run).sections[0]
    assert "step 10" in section["title"]
    taken = [[index for index, _, _ in each["steps"]] for each in section["episodes"]]
    assert taken == [row.pred_idx for row in played_rows(3, 3)]
    early = [[index for index, _, _ in each["before"]["steps"]] for each in section["episodes"]]
    assert early == [row.pred_idx for row in played_rows(3, 1)]
    many = shown(scored_run(tmp_path / "many", played_rows(50, 0), []), most=6).sections[0]
    assert [each["id"] for each in many["episodes"]] == [f"q{n}" for n in (0, 10, 20, 29, 39, 49)]
    assert any("6 of 50" in note for note in many["notes"])


def test_episodes_of_tokens(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run", {"system": "rlvr", "tools": {"truncated": "masked"}})
    rows = [prediction(0, 0.75), prediction(1, 0.5, "truncated"), prediction(2, None, "timeout")]
    for label, own in (("last-9", rows), ("untrained", [prediction(0, 0.25)])):
        log = run / "eval" / label / "bm25.jsonl"
        answer_log.append(log, own)
        log.with_suffix(".json").write_text(json.dumps({"kind": predictions.KIND}))
    section = shown(run).sections[0]
    episodes, tokens = section["episodes"], section["tokens"]
    turn = episodes[0]["turns"][1]
    assert [tokens[at] for at in turn["sampled"]] == [[12, " s12"], [13, HOSTILE], [14, " s14"]]
    assert turn["log_probs"] == [-0.125, -0.25, -0.375]
    assert [each["trains"] for each in episodes] == [True, False, False]
    assert [each["regret"] for each in episodes] == [0.0, 0.25, None]
    assert [each["solved"] for each in episodes] == [True, True, None]
    assert episodes[0]["before"]["score"] == 0.25
    assert episodes[1]["before"] is None


def test_episodes_that_search(tmp_path: Path) -> None:
    scores = {"recall": 0.5, "ap": 0.25, "all_gold": 0.0}
    hop = hop_log.Hop("oslo", "searched", ("d1", "d2"), scores, 10, 3, (("d1", 1.5), ("d9", 1.0)))
    hops = hop_log.Searched("q1", "Where?", ("Oslo",), ("d1", "d3"), (hop, hop))
    asked = {"query": "oslo", "names": ["d1"], "status": "searched", "answer": "Oslo"}
    agent = AgentRow("q1", "Where?", ("Oslo",), "Bergen", "", 0.0, 0.25, 0.5, (asked,))
    found = tuple((f"d{n}", 1.0 - n / 100) for n in range(40))
    query = RewriteRow("q1", "", "where oslo", "oslo", "rewritten", "<think>", found, 7)
    for label in ("last-4", "untrained"):
        for name, log, row in (("leret", hop_log.LOG, hops), ("deep", REWRITES_LOG, query)):
            folder = run_folder(tmp_path / name, {"system": name}) / "eval"
            log.write(folder / f"{label}.jsonl", [row], {})  # type: ignore[attr-defined]
        folder = run_folder(tmp_path / "harr", {"system": "harr"}) / "eval"
        agent_log.append(folder / label / "agent_seed42.jsonl", [agent])
    read = shown(*(tmp_path / name for name in ("leret", "harr", "deep")))
    leret, harr, deep = (section["episodes"][0] for section in read.sections)
    assert [section["kind"] for section in read.sections] == ["hops", "agents", "rewrites"]
    assert [run["system"] for run in read.runs] == ["leret", "harr", "deep"]
    assert leret["steps"][1]["names"] == [["d1", 1.5, True], ["d9", 1.0, False]]
    assert (leret["regret"], leret["solved"], leret["hops"]) == (0.75, False, 2)
    assert (harr["regret"], harr["score"], harr["solved"]) == (0.75, 0.25, False)
    assert (deep["regret"], deep["solved"]) == (None, None)
    assert all(episode["before"]["steps"] for episode in (leret, harr, deep))


def test_hostile_texts_stay_texts(tmp_path: Path) -> None:
    (row, other) = played_rows(2, 0)
    texts = [HOSTILE] * STEPS
    row = dataclasses.replace(row, question=HOSTILE, answer=HOSTILE, pred_texts=texts)
    run = scored_run(tmp_path / "run", [row, other], [])
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 12, HOSTILE: 1.0}) + "\n")
    read = shown(run)
    assert read.sections[0]["episodes"][0]["question"] == HOSTILE
    assert HOSTILE in read.sections[0]["texts"]
    assert HOSTILE in [curve["name"] for curve in read.runs[0]["curves"]]
    raw = (run / "page.html").read_text(encoding="utf-8")
    assert "onerror" in raw
    assert "<img" not in raw
    assert "<!--" not in raw
    assert "\u2028" not in raw
    # Tags are those of the template, and one element of data for the runs and for each section.
    assert [tag for tag, _ in read.tags if tag == "script"] == ["script"] * 3
    assert not {tag for tag, _ in read.tags} & {"img", "link", "iframe", "a", "object", "form"}
    assert not {name for _, given in read.tags for name in given if name.startswith("on")}


def test_the_policy_allows_the_page_s_own_script_alone(tmp_path: Path) -> None:
    run = scored_run(tmp_path / "run", played_rows(2, 0), [])
    read = shown(run)
    (script,) = read.scripts
    (policy,) = [given["content"] for tag, given in read.tags if "http-equiv" in given]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert policy is not None
    assert policy.startswith("default-src 'none'; ")
    assert f"script-src 'sha256-{digest}'; " in policy
    assert "unsafe" not in policy
    assert "http" not in script.replace("http://www.w3.org/2000/svg", "")  # a name, not an address
    for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
        assert word not in script


def test_long_curves_are_thinned() -> None:
    lines = [{"step": step, "train/loss": 1 / (step + 1)} for step in range(5000)]
    lines += [{"step": 3, "train/loss": float("nan")}, {"step": 4999, "train/loss": 0.5}]
    (curve,) = curves_of(lines)
    assert len(curve.steps) == POINTS
    assert curve.thinned
    assert (curve.steps[0], curve.steps[-1], curve.values[-1]) == (0, 4999, 0.5)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        *(("none", None), ("other.jsonl", '{"a": 1}\n'), ("a.png", "\0\1")),
        *(("mine.jsonl", "{}\n"), ("mine.jsonl", "no\n"), ("mine.json", "no")),
        *(("summary.json", "no"), ("metrics.jsonl", "no\n")),
    ],
)
def test_wrong_inputs(name: str, text: str | None, tmp_path: Path) -> None:
    """By name, for tables of predictions; and, where they are no logs, for pages."""
    if name.startswith("mine"):
        written(tmp_path, [])
    if text is not None:
        (tmp_path / name).write_text(text)
    place = tmp_path if text is not None and name != "a.png" else tmp_path / name

    def analysed() -> None:
        found = analysis.find([place])
        analysis.table(found)
        analysis.write_curves(found, tmp_path)

    # A folder with nothing of interest is named itself.
    with pytest.raises(
        InputError, match=re.escape(str(tmp_path) if name == "other.jsonl" else name)
    ):
        analysed()
    if name in ("none", "other.jsonl", "a.png"):
        run = scored_run(tmp_path / "run", played_rows(1, 0), [])
        with pytest.raises(InputError, match=re.escape(name)):
            find([run, tmp_path / name])


def written(folder: Path, rows: list[Prediction], **record: Any) -> Path:
    file = folder / "mine.jsonl"
    answer_log.append(file, rows)
    told = {"kind": predictions.KIND, "checkpoint": "untrained", "retriever": "bm25", **record}
    file.with_suffix(".json").write_text(json.dumps(told))
    return file


def test_a_page_of_predictions_is_ordered_by_reward(tmp_path: Path) -> None:
    rewards = [*np.random.default_rng(0).random(229).round(6).tolist(), None]
    file = written(tmp_path, [prediction(n, reward) for n, reward in enumerate(rewards)])
    found = analysis.find([tmp_path, tmp_path / "mine.jsonl"])
    assert len(found.predictions) == 1
    whole = analysis.write_page(found, tmp_path / "out", 0)
    assert whole == tmp_path / "out" / "episodes.html"
    (section,) = Page(whole).sections
    ordered = [*sorted(rewards[:-1], reverse=True), None]
    assert [episode["score"] for episode in section["episodes"]] == ordered
    assert str(file) in section["title"]
    few = analysis.write_page(found, tmp_path / "few", 3)
    assert few is not None
    shown = [episode["score"] for episode in Page(few).sections[0]["episodes"]]
    assert shown == [ordered[0], ordered[114], None]


def test_a_table_of_files_and_of_summaries_without_them(tmp_path: Path) -> None:
    file = written(tmp_path, [prediction(n) for n in range(3)])
    file.write_bytes(file.read_bytes() + b'{"id')  # a torn line is left out
    scores = {"bm25": {"untrained": summarised(predictions.read_scores(file))}}
    files = {"bm25": {"untrained": "mine.jsonl"}}
    (tmp_path / "summary.json").write_text(
        json.dumps({"scores": scores, "files": files, "main": {}})
    )
    for name in ("mine.jsonl", "summary.json"):
        lines = analysis.table(analysis.find([tmp_path]))
        assert len(lines) == 2
        assert lines[1].startswith(name)
        assert "1.000" in lines[1]
        file.unlink(missing_ok=True)


def test_the_same_places_are_sampled_each_time() -> None:
    """An episode that no log can hold is left out."""
    rows = played_rows(100, 0)
    rows[33] = dataclasses.replace(rows[33], q_values=[math.nan] * 5)
    sample = sampler(CHUNKS, lambda places: [rows[place] for place in places], len(rows))(4)
    assert [row["id"] for row in sample.rows] == ["q0", "q66", "q99"]
    assert sample.rows[0] == retrieval_log.as_json(rows[0])
    assert (spread(3, 8), spread(100, 0)) == ([0, 1, 2], [])


def test_nothing_in_a_text_is_markup() -> None:
    text = markdown_of([prediction()])
    assert "<" not in text
    assert "`" not in text.replace(r"\`", "")
    sample = sampler(TOKENS, lambda places: [prediction()], 1)(1)
    assert sample.rows[0]["question"] == HOSTILE
    long = dataclasses.replace(prediction(), question="word " * 1000)
    assert max(map(len, markdown_of([long]).splitlines())) < 2 * LONGEST
