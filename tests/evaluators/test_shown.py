"""The page of runs: what it holds of each log, its regret, what it lacks, and that nothing runs."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest

from qrag_jax.errors import InputError
from qrag_jax.evaluators.rewrite_log import LOG as REWRITES_LOG
from qrag_jax.evaluators.rewrite_log import RewriteRow
from qrag_jax.evaluators.shown import sections
from qrag_jax.evaluators.shown.page import page
from qrag_jax.evaluators.shown.places import find
from qrag_jax.evaluators.shown.sections import POINTS, curves_of, run_of, section_of
from qrag_jax.metrics import agent_log, answer_log, hop_log, predictions, retrieval_log
from qrag_jax.metrics.agent_log import AgentRow
from qrag_jax.metrics.retrieval_log import Row
from qrag_jax.rollouts import trajectories
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


# ---------------------------------------------------------------------- Q-RAG


def test_episodes_of_chunks(tmp_path: Path) -> None:
    rows, before = played_rows(20, 0), played_rows(20, 1)
    section = shown(scored_run(tmp_path / "run", rows, before)).sections[0]
    assert section["title"] == "run: episodes of best-10/eval_seed42.jsonl"
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
    assert section["episodes"][0]["steps"][0][2] is None
    assert [episode["before"] for episode in section["episodes"]] == [None] * 3
    notes = " ".join(section["notes"])
    assert "3 episodes without Q-values" in notes
    assert "What would have been taken before training is not here" in notes
    assert "1 minus the return" in section["words"]["regret"]
    assert section["episodes"][0]["regret"] == pytest.approx(1 - rows[0].ret)


def test_a_best_checkpoint_of_step_0_is_not_shown_as_trained(tmp_path: Path) -> None:
    run = scored_run(tmp_path / "run", [], played_rows(3, 0))
    for label in ("best-0", "last-10"):
        retrieval_log.append(run / "eval" / label / "eval_seed42.jsonl", played_rows(3, 1))
        section = shown(run).sections[0]
        assert label in section["title"]
        assert all((each["before"] is None) == (label == "best-0") for each in section["episodes"])
        os.utime(run / "eval/best-0/eval_seed42.jsonl", (2e9, 2e9))  # newer than the log of last-10


def test_what_the_budget_made_impossible_is_regret(tmp_path: Path) -> None:
    row = dataclasses.replace(played_rows(1, 0)[0], sf_idx=[*range(6)], sf_texts=["a"] * 6, ret=0.0)
    run = scored_run(tmp_path / "run", [row, *played_rows(2, 0, "other")], [])
    section = shown(run).sections[0]
    assert section["episodes"][0]["regret"] == pytest.approx(0.9**5, abs=1e-4)
    assert any("1 question of 3" in n and "env.max_steps" in n for n in section["notes"])


def test_questions_whose_facts_nobody_knows(tmp_path: Path) -> None:
    unknown = {"sf_idx": [], "sf_texts": [], "ret": None, "f1": None, "em": None}
    rows, before = (
        [dataclasses.replace(row, **unknown) for row in played_rows(3, seed)] for seed in (0, 1)
    )
    section = shown(scored_run(tmp_path / "run", rows, before)).sections[0]
    for row, episode in zip(rows, section["episodes"], strict=True):
        assert [index for index, _, _ in episode["steps"]] == row.pred_idx
        names = ("solved", "hops", "score", "regret")
        assert [episode[name] for name in names] == [None] * 4
        assert episode["before"]["score"] is None
        assert ["gold chunks taken", "not known"] in episode["facts"]


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
    assert any("3 broken lines of" in note for note in read.sections[0]["notes"])
    assert any("2 broken lines of" in note for note in read.runs[0]["notes"])
    assert read.runs[0]["curves"][0]["steps"] == [0, 5, 10]


def test_the_newest_log_of_trained_weights_is_shown(tmp_path: Path) -> None:
    run = scored_run(tmp_path / "run", played_rows(2, 0), played_rows(2, 1))
    for name in ("last-20/eval_seed42.jsonl", "last-20/single_step_eval_seed42.jsonl"):
        retrieval_log.append(run / "eval" / name, played_rows(2, 2))
    section = shown(run).sections[0]
    assert section["title"] == "run: episodes of last-20/eval_seed42.jsonl"
    others = next(note for note in section["notes"] if note.startswith("Other logs"))
    assert "best-10/eval_seed42.jsonl" in others
    assert "single_step_eval_seed42.jsonl" in others
    assert "untrained" not in others
    # A log that is named is shown itself, beside the untrained one of its run.
    own = shown(run / "eval" / "best-10" / "eval_seed42.jsonl").sections[0]
    assert own["title"] == "run: episodes of best-10/eval_seed42.jsonl"
    assert own["episodes"][0]["before"]["steps"]
    assert own["words"]["regret"].startswith("the return of an episode that takes")


def test_the_sample_of_a_training_is_shown_where_nothing_was_evaluated(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run")
    kept = EpisodeFile(run)
    for step, seed in ((0, 1), (5, 2), (10, 3)):
        kept.write(step, "chunks", [retrieval_log.as_json(row) for row in played_rows(3, seed)])
    section = shown(run).sections[0]
    assert section["title"] == "run: episodes of step 10"
    taken = [[index for index, _, _ in each["steps"]] for each in section["episodes"]]
    assert taken == [row.pred_idx for row in played_rows(3, 3)]
    early = [[index for index, _, _ in each["before"]["steps"]] for each in section["episodes"]]
    assert early == [row.pred_idx for row in played_rows(3, 1)]


def test_some_of_many_episodes_are_shown_and_it_is_said(tmp_path: Path) -> None:
    section = shown(scored_run(tmp_path / "run", played_rows(50, 0), []), most=6).sections[0]
    assert [each["id"] for each in section["episodes"]] == [
        f"q{n}" for n in (0, 10, 20, 29, 39, 49)
    ]
    assert "Shown are 6 of 50 episodes, spread evenly." in section["notes"]


# ---------------------------------------------------------------------- other systems


def test_episodes_of_tokens(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run", {"system": "rlvr", "tools": {"truncated": "masked"}})
    rows = [prediction(0, 0.75), prediction(1, 0.5, "truncated"), prediction(2, None, "timeout")]
    for label, own in (("last-9", rows), ("untrained", [prediction(0, 0.25)])):
        log = run / "eval" / label / "bm25.jsonl"
        answer_log.append(log, own)
        log.with_suffix(".json").write_text(json.dumps({"kind": predictions.KIND}))
    section = shown(run).sections[0]
    first, cut, failed = section["episodes"]
    tokens = section["tokens"]
    assert [tokens[at] for at in first["turns"][1]["sampled"]] == [
        [12, " s12"],
        [13, HOSTILE],
        [14, " s14"],
    ]
    assert first["turns"][1]["log_probs"] == [-0.125, -0.25, -0.375]
    assert [each["trains"] for each in (first, cut, failed)] == [True, False, False]
    assert [each["regret"] for each in (first, cut, failed)] == [0.0, 0.25, None]
    assert [each["solved"] for each in (first, cut, failed)] == [True, True, None]
    assert first["before"]["score"] == 0.25
    assert first["before"]["turns"]
    assert cut["before"] is None
    assert "2 episodes without an episode before training." in section["notes"]


def test_the_name_of_masking_is_that_of_trajectories() -> None:
    assert sections._MASKED == trajectories.MASKED


def test_episodes_that_search(tmp_path: Path) -> None:
    scores = {"recall": 0.5, "ap": 0.25, "all_gold": 0.0}
    hop = hop_log.Hop("oslo", "searched", ("d1", "d2"), scores, 10, 3, (("d1", 1.5), ("d9", 1.0)))
    hops = hop_log.Searched("q1", "Where?", ("Oslo",), ("d1", "d3"), (hop, hop))
    made = {"query": "oslo", "names": ["d1"], "status": "searched", "answer": "Oslo"}
    agent = AgentRow("q1", "Where?", ("Oslo",), "Bergen", "", 0.0, 0.25, 0.5, (made,))
    found = tuple((f"d{n}", 1.0 - n / 100) for n in range(40))
    written = RewriteRow("q1", "", "where oslo", "oslo", "rewritten", "<think>", found, 7)
    for name, row in (("leret", hops), ("harr", agent), ("deep", written)):
        folder = run_folder(tmp_path / name, {"system": name}) / "eval"
        folder.mkdir()
        if isinstance(row, AgentRow):
            for label in ("last-4", "untrained"):
                agent_log.append(folder / label / "agent_seed42.jsonl", [row])
            continue
        log = REWRITES_LOG if isinstance(row, RewriteRow) else hop_log.LOG
        for label in ("last-4", "untrained"):
            log.write(folder / f"{label}.jsonl", [row], {})
    read = shown(*(tmp_path / name for name in ("leret", "harr", "deep")))
    leret, harr, deep = (section["episodes"][0] for section in read.sections)
    assert [section["kind"] for section in read.sections] == ["hops", "agents", "rewrites"]
    assert [run["system"] for run in read.runs] == ["leret", "harr", "deep"]
    assert leret["steps"][1]["names"] == [["d1", 1.5, True], ["d9", 1.0, False]]
    assert (leret["regret"], leret["solved"], leret["hops"]) == (0.75, False, 2)
    assert (harr["regret"], harr["score"], harr["solved"]) == (0.75, 0.25, False)
    assert harr["steps"][0]["text"] == "read as the answer of this search: Oslo"
    assert (deep["regret"], deep["solved"]) == (None, None)
    assert deep["steps"][0]["names"][-1] == ["and 10 more", None, False]
    assert all(episode["before"]["steps"] for episode in (leret, harr, deep))


# ---------------------------------------------------------------------- the page itself


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


# ---------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("none", None, "none does not exist; give the folder of a run"),
        ("empty/other.txt", "", r"metrics.jsonl"),
        ("empty/config.json", "{}", "empty holds nothing"),
        ("a.jsonl", '{"a": 1}\n', r"a\.jsonl"),
        ("a.png", "\0\1", r"a\.png"),
    ],
)
def test_wrong_places(name: str, text: str | None, said: str, tmp_path: Path) -> None:
    path = tmp_path / name
    if text is not None:
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    place = path.parent if name.startswith("empty") else path
    with pytest.raises(InputError, match=said):
        find([scored_run(tmp_path / "run", played_rows(1, 0), []), place])


def test_a_run_without_logs_has_curves_alone(tmp_path: Path) -> None:
    read = shown(run_folder(tmp_path / "run"))
    assert read.sections == []
    assert any("There are curves alone" in note for note in read.runs[0]["notes"])
    assert read.runs[0]["curves"][0]["values"] == [0.0, 0.5, 1.0]
    # The same folder twice is one run.
    assert len(find([tmp_path / "run", tmp_path / "run" / "."])) == 1
