"""The page and the samples of episodes: what they hold of each log, and that no text runs."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import math
import os
from pathlib import Path
from typing import Any

import pytest

from qrag_jax.evaluators.evaluation import sampler
from qrag_jax.metrics import row_log as logs
from qrag_jax.metrics.row_log import AgentRow, Hop, RewriteRow, Row, Searched
from qrag_jax.show import page
from qrag_jax.show import shown as shown_run
from tests.evaluators.shown_pages import HOSTILE, prediction, read_page
from tests.retrieval_logs import STEPS, played_rows

SETTINGS = {"pqn": {"gamma": 0.9}, "env": {"max_steps": STEPS}, "system": "q_rag"}
HOP = Hop(
    *("oslo", "searched", ("d1", "d2"), {"recall": 0.5, "ap": 0.25, "all_gold": 0.0}, 10, 3),
    (("d1", 1.5), ("d9", 1.0)),
)
SEARCHED = Searched("q1", "Where?", ("Oslo",), ("d1", "d3"), (HOP, HOP))
SEARCH = {"query": "oslo", "names": ["d1"], "status": "searched", "answer": "Oslo"}
AGENT = AgentRow("q1", "Where?", ("Oslo",), "Bergen", "", 0.0, 0.25, 0.5, (SEARCH,))
REWRITTEN = RewriteRow(
    *("q1", "", "where oslo", "oslo", "rewritten", "<think>"),
    tuple((f"d{n}", 1.0 - n / 100) for n in range(40)),
    7,
)


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
            logs.RETRIEVALS.append(folder / "eval" / label / "eval_seed42.jsonl", own)
    return folder


def shown(*given: Path, most: int = 0) -> dict[str, Any]:
    runs, made = zip(*(shown_run(path, most) for path in given), strict=True)
    file = (given[0] if given[0].is_dir() else given[0].parent) / "page.html"
    file.write_bytes(page("A page", "", runs, [each for each in made if each is not None]))
    return read_page(file)


def found(steps: list[dict[str, Any]]) -> list[list[Any]]:
    """What was found in the steps: name, score, gold, text."""
    return [each for step in steps for each in step["found"]]


def test_episodes_of_chunks(tmp_path: Path) -> None:
    rows, before = played_rows(20, 0), played_rows(20, 1)
    section = shown(scored_run(tmp_path / "run", rows, before))["sections"][0]
    for row, early, episode in zip(rows, before, section["episodes"], strict=True):
        assert found(episode["steps"]) == [
            [f"chunk {index}", q, index in row.sf_idx, text]
            for index, q, text in zip(row.pred_idx, row.q_values, row.pred_texts, strict=True)
        ]
        left = [index for index in row.sf_idx if index not in row.pred_idx]
        assert [name for name, *_ in episode["missed"]] == [f"chunk {index}" for index in left]
        assert episode["solved"] == (not left)
        best = 0.9 ** (len(row.sf_idx) - 1)
        assert episode["regret"] == pytest.approx(best - row.ret, abs=1e-4)
        names = [name for name, *_ in found(episode["before"]["steps"])]
        assert names == [f"chunk {index}" for index in early.pred_idx]


def test_what_a_log_lacks(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run")
    read = shown(run)  # nothing was evaluated: curves alone
    assert read["sections"] == []
    assert read["runs"][0]["curves"][0]["values"] == [0.0, 0.5, 1.0]
    rows = [dataclasses.replace(row, q_values=[]) for row in played_rows(3, 0)]
    scored_run(run, rows, [])
    (run / "config.json").write_text("no config")
    first = shown(run)["sections"][0]["episodes"][0]
    assert (first["steps"][0]["found"][0][1], first["before"]) == (None, None)
    assert first["regret"] == pytest.approx(1 - rows[0].ret)


def test_episodes_of_tokens(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run", {"system": "rlvr", "tools": {"truncated": "masked"}})
    rows = [prediction(0, 0.75), prediction(1, 0.5, "truncated"), prediction(2, None, "timeout")]
    for label, own in (("last-9", rows), ("untrained", [prediction(0, 0.25)])):
        log = run / "eval" / label / "bm25.jsonl"
        logs.PREDICTIONS.append(log, own)
    section = shown(run)["sections"][0]
    episodes = section["episodes"]
    observed, sampled = episodes[0]["steps"][2:]
    assert sampled["tokens"] == [[12, " s12"], [13, HOSTILE], [14, " s14"]]
    assert sampled["log_probs"] == [-0.125, -0.25, -0.375]
    assert (observed["kind"], observed["log_probs"]) == ("observed", [])
    kinds = [each["steps"][3]["kind"] for each in episodes]
    assert kinds == ["trained", "sampled", "sampled"]
    assert [each["regret"] for each in episodes] == [0.0, 0.25, None]
    assert [each["solved"] for each in episodes] == [True, True, None]
    assert episodes[0]["before"]["score"] == 0.25
    assert episodes[1]["before"] is None


def test_episodes_that_search(tmp_path: Path) -> None:
    for label in ("last-4", "untrained"):
        for name, log, row in (("leret", logs.HOPS, SEARCHED), ("deep", logs.REWRITES, REWRITTEN)):
            folder = run_folder(tmp_path / name, {"system": name}) / "eval"
            log.write(folder / f"{label}.jsonl", [row], {})
        folder = run_folder(tmp_path / "harr", {"system": "harr"}) / "eval"
        logs.AGENTS.append(folder / label / "agent_seed42.jsonl", [AGENT])
    sections = shown(*(tmp_path / name for name in ("leret", "harr", "deep")))["sections"]
    leret, harr, deep = (section["episodes"][0] for section in sections)
    hits = [each[:3] for each in found(leret["steps"][1:])]
    assert hits == [["d1", 1.5, 1], ["d9", 1.0, 0]]
    assert (leret["regret"], leret["solved"], leret["hops"]) == (0.75, False, 2)
    assert (harr["regret"], harr["score"], harr["solved"]) == (0.75, 0.25, False)
    assert (deep["regret"], deep["solved"]) == (None, None)
    assert (len(found(deep["steps"])), deep["steps"][0]["head"][-1]) == (30, "40 found")
    assert all(episode["before"]["steps"] for episode in (leret, harr, deep))


def test_hostile_texts_stay_texts(tmp_path: Path) -> None:
    (row, other) = played_rows(2, 0)
    texts = [HOSTILE] * STEPS
    row = dataclasses.replace(row, question=HOSTILE, answer=HOSTILE, pred_texts=texts)
    run = scored_run(tmp_path / "run", [row, other], [])
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 12, HOSTILE: 1.0}) + "\n")
    episode = shown(run)["sections"][0]["episodes"][0]
    assert (episode["question"], episode["steps"][0]["found"][0][3]) == (HOSTILE, HOSTILE)
    raw = (run / "page.html").read_text(encoding="utf-8")
    assert "onerror" in raw
    assert "\u2028" not in raw
    assert raw.count("<") == page("", "", [], []).count(b"<")  # tags are those of the template


def test_the_policy_allows_the_page_s_own_script_alone() -> None:
    raw = page("", "", [], []).decode()
    script = raw.split("<script>")[1].split("</script>")[0]
    policy = raw.split('Content-Security-Policy" content="')[1].split('"')[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert policy.startswith("default-src 'none'; ")
    assert f"script-src 'sha256-{digest}'; " in policy
    assert "unsafe" not in policy
    assert "http" not in script.replace("http://www.w3.org/2000/svg", "")  # a name, not an address
    for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
        assert word not in script


def test_the_same_places_are_sampled_each_time() -> None:
    """An episode that no log can hold is left out."""
    rows = played_rows(100, 0)
    rows[33] = dataclasses.replace(rows[33], q_values=[math.nan] * 5)
    sample = sampler(logs.RETRIEVALS, rows)(4)
    assert [row["id"] for row in sample.rows] == ["q0", "q66", "q99"]


def test_the_newest_log_of_trained_weights_is_shown(tmp_path: Path) -> None:
    """A best checkpoint of step 0 is not trained, but no rule that is scored beside it, either."""
    run = scored_run(tmp_path / "run", [], played_rows(3, 0))
    rule = run / "eval" / "question_and_passage.jsonl"
    logs.RETRIEVALS.append(rule, played_rows(3, 2))
    os.utime(rule, (2.1e9, 2.1e9))
    for label in ("best-0", "last-10"):
        logs.RETRIEVALS.append(run / "eval" / label / "eval_seed42.jsonl", played_rows(3, 1))
        section = shown(run)["sections"][0]
        assert label in section["title"]
        assert all((each["before"] is None) == (label == "best-0") for each in section["episodes"])
        os.utime(run / "eval/best-0/eval_seed42.jsonl", (2e9, 2e9))  # newer than that of last-10
