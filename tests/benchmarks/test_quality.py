"""The suite quality: its data, how lists and logs are scored, paired intervals, how it resumes."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.quality.corpora import (
    Asked,
    Passage,
    Setting,
    write_halves,
)
from benchmarks.quality.figures import interval, paired
from benchmarks.quality.logs import NDCG, by_turns, fused, lists_of, scores_of, the_log
from benchmarks.quality.peers import batches
from benchmarks.quality.runner import Kept, once, write_lines
from qrag_jax.data.reading import load_samples
from qrag_jax.errors import InputError
from tests.support.worlds import record_of

PARAGRAPHS = [("Dusk", ["By Ada."]), ("Dawn", ["A film."]), ("Ada", ["Born in Oslo."])]


@pytest.mark.parametrize("source", ["hotpotqa", "musique"])
def test_halves_share_no_question_with_each_other_nor_with_training(
    source: str, tmp_path: Path
) -> None:
    data, dev = tmp_path / "data", [f"d{i}" for i in range(200)]
    for file, names in (("train", ["t1", "t2", "d3", "d4", "d5", "d6"]), ("dev", dev)):
        records = (
            record_of(source, name, f"Question {name}?", "Oslo", PARAGRAPHS, [0, 2])
            for name in names
        )
        write_lines(data / f"{file}.jsonl", records)
    ids = {
        name: {sample.id for sample in load_samples(source, str(path), "dev")[0]}
        for name, path in write_halves(source, data, tmp_path / "out").items()
    }
    assert ids["train"] == {"t1", "t2"}
    assert ids["half0"] | ids["half1"] == {*dev}
    assert not ids["half0"] & ids["half1"]
    assert min(len(ids["half0"]), len(ids["half1"])) > 50


def test_contrastive_batches_have_no_gold_passage_as_a_negative() -> None:
    rng = np.random.default_rng(0)
    names = [f"p{n}" for n in range(60)]
    questions = []
    for number in range(40):
        context = tuple(rng.permutation(names)[:6].tolist())
        questions.append(Asked(f"q{number}", "?", (), context[:2], context))
    gold = {asked.id: {*asked.gold} for asked in questions}
    made = batches(questions, 8, rng)
    assert sum(map(len, made)) >= 60
    for batch in made:
        for pair, other in itertools.permutations(batch, 2):
            assert pair.question != other.question
            assert not gold[pair.question] & {other.gold, other.negative}


# ---------------------------------------------------------------- scores of lists and logs


def test_a_list_is_scored_right() -> None:
    corpus = [Passage(f"p{n}", f"Title {n}", f"Words of {n}.") for n in range(12)]
    asked = [
        Asked("a", "A?", ("words of 1",), ("p0", "p1")),
        Asked("b", "B?", ("yes",), ("p2", "p3", "p4")),
        Asked("c", "C?", ("nowhere",), ("p5",)),
    ]
    given = Setting(Path(), corpus, {"test": asked}, 0)
    found = given.scores({"a": ("p0", "p9", "p8", "p1"), "b": ("p4", "p7", "p3")}, ["c"])
    assert {*found} == {"a", "b"}  # c failed, so nobody knows its list
    assert [found["a"][f"all@{k}"] for k in (2, 4, 6, 10)] == [0.0, 1.0, 1.0, 1.0]
    assert found["a"]["recall@2"] == 0.5
    assert found["a"]["ap@10"] == pytest.approx((1 / 1 + 2 / 4) / 2)
    assert (found["a"]["answer@2"], found["a"]["answer@4"]) == (0.0, 1.0)
    assert found["b"]["recall@4"] == pytest.approx(2 / 3)
    assert "answer@4" not in found["b"]  # yes is looked for in no passage
    assert not any(given.scores({"a": ("p0",)})["c"].values())  # it found nothing
    assert by_turns([["a", "b", "c"], ["b", "d"]]) == ("a", "b", "d", "c")
    both = fused({"q": ("a", "b", "c")}, {"q": ("c", "d", "a")})
    assert both["q"] == ("a", "c", "b", "d")


def test_logs_of_every_system(tmp_path: Path) -> None:
    def log(name: str, *rows: dict[str, Any]) -> Path:
        write_lines(tmp_path / f"{name}.jsonl", rows)
        return tmp_path / f"{name}.jsonl"

    q_rag = log("q_rag", {"id": 1, "sf_idx": [3, 4], "pred_idx": [4, 0, 7, 8]})
    scores = {"fact_em": 0.0, "fact_f1": 1 / 3, "fact_precision": 0.25, "fact_recall": 0.5}
    assert scores_of(q_rag)["1"] == pytest.approx(scores)
    agent = {"em": 0.0, "f1": 0.5, "recall": None, "searches": [{"names": ["x", "y"]}]}
    ends = {"a": "", "b": "timeout", "c": "no_retrieval"}
    harr = log("harr", *({"id": name, "broken": end, **agent} for name, end in ends.items()))
    assert scores_of(harr) == {name: {"em": 0.0, "f1": 0.5} for name in "ac"}
    assert lists_of(harr)[1] == {"b"}
    played = {"hops": 2, "trajectory": {"parts": {"em": 1.0}, "facts": {"seen": ["x", "x", "y"]}}}
    rlvr = log("rlvr", {"id": "a", "reward": 0.7, **played}, {"id": "b", "reward": None, **played})
    assert scores_of(rlvr) == {"a": {"em": 1.0, "reward": 0.7}}
    assert lists_of(rlvr) == ({"a": ("x", "y")}, {"b"})
    hops = [
        {"outcome": "searched", "scores": {"ap": 0.5}, "found": [["x", 2.0], ["y", 1.0]]},
        {"outcome": "no_query", "scores": {"ap": 0.6}, "found": []},
    ]
    leret = log("leret", {"id": "a", "hops": hops})
    assert scores_of(leret) == {"a": {"hop1/ap": 0.5, "hop2/ap": 0.6}}
    assert lists_of(leret)[0] == {"a": ("x", "y")}
    hits = [{"step": 1, "id": "x"}, {"step": 1, "id": "y"}, {"step": 2, "id": "z"}]
    assert lists_of(log("search", {"id": "a", "hits": hits}))[0] == {"a": ("x", "z", "y")}
    # Rewritten queries: by the judgements of their collection; failures are left out.
    rows = [
        {"id": name, "collection": of, "original": "?", "outcome": end, "found": [["d1", 1.0]]}
        for name, of, end in (("q", "one", ""), ("q", "two", ""), ("lost", "one", "timeout"))
    ]
    log("last-1", *rows)
    for name, gold in (("one", "d1"), ("two", "d2")):
        (tmp_path / "trec" / name).mkdir(parents=True)
        (tmp_path / "trec" / name / "qrels.txt").write_text(f"q 0 {gold} 1\nlost 0 d1 1\n")
    found = scores_of(the_log(tmp_path, "last-*.jsonl"))
    assert found == {"one/q": {NDCG: 1.0}, "two/q": {NDCG: 0.0}}
    with pytest.raises(InputError, match="best"):
        the_log(tmp_path, "best-*.jsonl")


# ---------------------------------------------------------------- intervals and cases


def runs_of(table: np.ndarray) -> list[dict[str, dict[str, float]]]:
    return [{f"q{n}": {"em": float(value)} for n, value in enumerate(run)} for run in table]


def test_differences_are_paired_by_question_and_seed() -> None:
    rng = np.random.default_rng(0)
    hard = rng.normal(size=(3, 200)) * 5
    gain = paired(runs_of(hard + 0.5), runs_of(hard), "em")
    assert gain is not None
    assert (gain.mean, gain.low, gain.high) == pytest.approx((0.5, 0.5, 0.5))
    # Three trainings and one: the mean is that of the difference, whichever comes first.
    one = runs_of(hard.mean(axis=0, keepdims=True))
    more, less = paired(runs_of(hard + 1), one, "em"), paired(one, runs_of(hard + 1), "em")
    assert more is not None
    assert less is not None
    assert (more.mean, less.mean) == pytest.approx((1.0, -1.0))
    assert more.low < more.mean < more.high  # trainings differ
    # Chance is not away from zero.
    chance = paired(*(runs_of(rng.integers(0, 2, (1, 100))) for _ in range(2)), "em")
    assert chance is not None
    assert chance.low < 0 < chance.high
    # Questions that a training lacks are left out of all.
    first, second = runs_of(np.array([[1.0, 1.0, 0.0]])), runs_of(np.array([[0.0, 1.0]]))
    both = interval([*first, *second], "em")
    assert both is not None
    assert (both.mean, both.questions) == (0.75, 2)
    assert interval(first, "f1") is None


# ---------------------------------------------------------------- parts, and resuming


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A small tree of code."""
    for name in ("qrag_jax/train.py", "configs/a.py", "benchmarks/quality/parts.py"):
        path = tmp_path / "tree" / name
        path.parent.mkdir(parents=True)
        path.write_text("# code\n")
    return tmp_path / "tree"


def test_a_suite_resumes_and_a_failed_part_stops_no_other(tree: Path) -> None:
    kept, calls = Kept.of(tree / "runs", tree), list[str]()

    def part(name: str) -> Any:
        def run() -> dict[str, Any]:
            calls.append(name)
            if name == "broken" and calls.count(name) == 1:
                raise RuntimeError("killed")
            return {"name": name}

        return run

    parts = {name: part(name) for name in ("a", "broken", "x/c")}
    assert kept.finish(parts, [*parts]) == ["broken"]
    assert {*kept.finished(parts)} == {"a", "x/c"}
    assert kept.finish(parts, [*parts]) == []
    assert calls == ["a", "broken", "x/c", "broken"]
    assert kept.finished(parts)["x/c"]["name"] == "x/c"
    with pytest.raises(ZeroDivisionError):  # a step that failed is not done
        once(tree / "done", lambda: 1 // 0)
    for words in (("a", 1), ("a", 1), ("a", 2)):
        once(tree / "done", lambda *given: calls.append(str(given)), *words)
    assert calls[4:] == ["('a', 1)", "('a', 2)"]
