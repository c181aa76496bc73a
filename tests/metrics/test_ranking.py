"""Measures of rankings and of hops against trec_eval's code; TREC's files."""

from __future__ import annotations

import gzip
import math
import random
from pathlib import Path
from typing import Any

import ir_measures
import pytest

from qrag_jax.errors import InputError
from qrag_jax.metrics.ranking import (
    STANDARD,
    episode_ndcg,
    episode_recall,
    hop_ndcg,
    hop_recall,
    ndcg,
    novelty,
    ranking_columns,
    recall,
    reciprocal_rank,
)
from qrag_jax.metrics.trec import BEIR_HEADER, read_qrels, read_run, write_qrels, write_run


@pytest.mark.parametrize("seed", range(4))
def test_scores_are_those_of_trec_eval(seed: int) -> None:
    """Random rankings, grades from -1 to 3, some rankings empty, some shorter than k."""
    draw = random.Random(seed)
    documents = [f"d{number}" for number in range(30)]
    qrels, rankings = {}, {}
    for number in range(25):
        judged = {d: draw.choice((-1, 0, 0, 1, 2, 3)) for d in draw.sample(documents, 9)}
        qrels[f"q{number}"] = judged | {"d0": 1}
        rankings[f"q{number}"] = draw.sample(documents, draw.choice((0, 1, 3, 20, 30)))
    theirs = {
        "recall": ir_measures.R,
        "hit": ir_measures.Success,
        "ap": ir_measures.AP,
        "ndcg": ir_measures.nDCG,
    }
    measures = {f"{n}@{k}": m @ k for n, m in theirs.items() for k in (1, 2, 3, 10, 100)}
    measures |= {"rr": ir_measures.RR, "ap": ir_measures.AP, "ndcg": ir_measures.nDCG}
    columns = ranking_columns(rankings, qrels, list(measures))
    run = {q: {d: -float(n) for n, d in enumerate(own)} for q, own in rankings.items() if own}
    for name, measure in measures.items():
        expected = dict.fromkeys(qrels, 0.0)
        for each in ir_measures.pytrec_eval.iter_calc([measure], qrels, run):
            expected[each.query_id] = each.value
        assert columns[name] == pytest.approx(expected, rel=0, abs=1e-9), name


def test_scores_by_hand() -> None:
    """Relevant documents at the places 2 and 4; the first three of the best are 3, 2, 1."""
    ranking, grades = ["x", "b", "y", "a", "z"], {"a": 3, "b": 1, "c": 2}
    best = 3 + 2 / math.log2(3) + 1 / 2
    assert ndcg(ranking, grades, 5) == pytest.approx((1 / math.log2(3) + 3 / math.log2(5)) / best)
    assert ndcg(ranking, grades, 2) == pytest.approx(1 / math.log2(3) / (3 + 2 / math.log2(3)))
    assert recall(ranking, grades, 5) == pytest.approx(2 / 3)
    assert (reciprocal_rank(ranking, grades), reciprocal_rank(ranking, grades, 1)) == (1 / 2, 0.0)
    # A document counts at its first place.
    assert ndcg(["a", "a", "a"], {"a": 2, "b": 2}, 3) == ndcg(["a", "x"], {"a": 2, "b": 2}, 3)
    assert recall(["a", "a", "b"], {"a": 1, "b": 1}, 2) == 0.5


def test_the_order_counts_and_not_the_names() -> None:
    """trec_eval orders equal scores by name, descending; a ranking keeps its own order."""
    for ranking in (["a", "b"], ["b", "a"]):
        columns = ranking_columns({"q": ranking}, {"q": {"a": 1}}, ["rr"])
        assert columns["rr"] == {"q": 1.0 / (1 + ranking.index("a"))}
    for name in ("map", "recall", "ndcg@0", "ap@k", "RR@10", ""):
        with pytest.raises(InputError, match=f"'{name}'"):
            ranking_columns({"q": ["a"]}, {"q": {"a": 1}}, [name])


def test_a_query_without_relevant_documents_is_left_out() -> None:
    qrels = {"nothing": {"a": 0, "b": -1}, "unjudged": {}, "found": {"a": 1}, "missed": {"a": 1}}
    rankings = {"nothing": ["a"], "unjudged": ["a"], "found": ["a"], "unknown": ["a"]}
    columns = ranking_columns(rankings, qrels)
    assert {*columns} == {*STANDARD}
    for column in columns.values():
        assert column == {"found": 1.0, "missed": 0.0}  # the query without a ranking has 0
    with pytest.raises(InputError, match="relevant document"):
        ranking_columns(rankings, {"nothing": {"a": 0}})


FOUND = [["a", "b", "c"], ["a", "d", "b"], [], ["d", "e", "f"]]


GOLD = {"a", "d", "x"}


def test_the_episode() -> None:
    assert episode_recall(GOLD, FOUND) == 2 / 3
    ideal = 1 + 1 / math.log2(3) + 1 / 2
    assert episode_ndcg(GOLD, FOUND) == pytest.approx((1 + 1 / math.log2(5)) / ideal)
    assert episode_recall(GOLD, []) == episode_ndcg(GOLD, []) == episode_recall({"x"}, FOUND) == 0


def test_hop_by_hop() -> None:
    assert hop_recall(GOLD, FOUND) == (1 / 3, 1 / 3, 0, 0)
    assert novelty(FOUND) == (1, 1 / 3, 0, 2 / 3)
    ideal_3, ideal_2 = 1 + 1 / math.log2(3) + 1 / 2, 1 + 1 / math.log2(3)
    assert hop_ndcg(GOLD, FOUND) == pytest.approx((1 / ideal_3, (1 / math.log2(3)) / ideal_2, 0, 0))
    # A passage that one search returns twice counts once, and takes one place.
    assert hop_ndcg({"a", "b"}, [["a", "a", "b"]]) == (1,)
    # Nothing is left to find after the first hop.
    assert hop_ndcg({"a"}, FOUND) == (1, 0, 0, 0)
    assert hop_recall(GOLD, []) == novelty([]) == hop_ndcg(GOLD, []) == ()


@pytest.mark.parametrize("name", ["run.txt", "run.txt.gz"])
def test_a_run_comes_back_as_it_was(name: str, tmp_path: Path) -> None:
    draw = random.Random(0)
    run = {}
    for query in ("7", "q-ä", "3"):
        scores = sorted((draw.uniform(-5, 5) for _ in range(20)), reverse=True)
        scores[4] = scores[5]  # a tie keeps its order
        run[query] = {f"d{draw.randrange(10**6)}": score for score in scores}
    write_run(tmp_path / name, run | {"none": {}})
    back = read_run(tmp_path / name)
    assert back == run
    assert [list(each) for each in back.values()] == [list(each) for each in run.values()]


def test_scores_order_a_run_and_not_ranks_or_lines(tmp_path: Path) -> None:
    path = tmp_path / "run"
    write_run(path, {"q1": {"b": 1.5, "a": -2.0}}, tag="bm25")
    assert path.read_text() == "q1 Q0 b 1 1.5 bm25\nq1 Q0 a 2 -2.0 bm25\n"
    path.write_text("q Q0 a 1 0.5 t\n\nq\tQ0\tb\t2\t3e1\tt\r\nq Q0 c 3 0.5 t\n")
    assert list(read_run(path)["q"].items()) == [("b", 30.0), ("a", 0.5), ("c", 0.5)]


def test_rankings_that_no_run_can_hold_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "run"
    path.write_text("as before")
    nan, inf = float("nan"), float("inf")
    for run in ({"a b": 1.0}, {"a": 1.0, "b": 2.0}, {"a": nan}, {"a": -inf}):
        with pytest.raises(InputError, match=r"a|b"):
            write_run(path, {"q": run})
    with pytest.raises(InputError, match="white space"):
        write_run(path, {"": {"a": 1.0}})
    assert path.read_text() == "as before"


@pytest.mark.parametrize("name", ["qrels.tsv", "qrels.tsv.gz", "qrels.txt", "qrels.txt.gz"])
def test_qrels_come_back_as_they_were(name: str, tmp_path: Path) -> None:
    qrels = {"q1": {"d1": 1, "d2": 0, "ü": -1}, "2": {"d1": 3}}
    write_qrels(tmp_path / name, qrels)
    assert read_qrels(tmp_path / name) == qrels
    if name.endswith(".gz"):
        first = gzip.decompress((tmp_path / name).read_bytes()).decode().splitlines()[0]
    else:
        first = (tmp_path / name).read_text().splitlines()[0]
    assert first == (BEIR_HEADER if ".tsv" in name else "q1 0 d1 1")


def test_names_with_blanks_fit_into_beirs_form_alone(tmp_path: Path) -> None:
    qrels = {"q": {"a title with blanks": 1}}
    write_qrels(tmp_path / "qrels.tsv", qrels)
    assert read_qrels(tmp_path / "qrels.tsv") == qrels
    with pytest.raises(InputError, match="white space"):
        write_qrels(tmp_path / "qrels.txt", qrels)
    for name in ("a\tb", "a\nb", "a\r", " "):
        with pytest.raises(InputError, match="white space"):
            write_qrels(tmp_path / "qrels.tsv", {"q": {name: 1}})


@pytest.mark.parametrize(
    ("read", "text"),
    [
        (read_run, b"q Q0 a 1 0.7 t\nq Q0 b 2 0.5"),
        (read_run, b"q Q0 a 1 0.7 t\nq Q0 b first 0.5 t"),
        (read_run, b"q Q0 a 1 0.7 t\nq Q0 b 2 high t"),
        (read_run, b"q Q0 a 1 0.7 t\nq Q0 b 2 nan t"),
        (read_run, b"q Q0 a 1 0.7 t\nq Q0 b 2 inf t"),
        (read_run, b"q Q0 a 1 0.7 t\nq Q0 a 2 0.1 t"),
        (read_run, b"q Q0 a 1 0.7 t\nq Q0 \xff 2 0.4 t"),
        (read_qrels, b"q 0 d 1\nq d 1"),
        (read_qrels, f"{BEIR_HEADER}\nq\t\t1".encode()),
        (read_qrels, b"q 0 d 1\nq 0 e 0.5"),
        (read_qrels, b"q 0 d 1\nq 0 d 2"),
    ],
)
def test_malformed_lines_are_refused_by_number(read: Any, text: bytes, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(text + b"\n")
    with pytest.raises(InputError, match="file, line 2"):
        read(path)


def test_whole_files_are_refused(tmp_path: Path) -> None:
    for text in ("\n", f"{BEIR_HEADER}\n", "q\td\t1\n"):
        (tmp_path / "qrels").write_text(text)
        with pytest.raises(InputError, match="qrels"):
            read_qrels(tmp_path / "qrels")
    with pytest.raises(InputError, match="none"):
        read_qrels(tmp_path / "none.tsv")
    (tmp_path / "run.gz").write_bytes(gzip.compress(b"q Q0 a 1 0.5 t\n")[:-9])
    with pytest.raises(InputError, match=r"run\.gz"):
        read_run(tmp_path / "run.gz")
    write_run(tmp_path / "run", {"q": {}})
    assert read_run(tmp_path / "run") == {}
    # A mark of byte order, and ends of lines as Windows has them.
    path = tmp_path / "qrels.tsv"
    path.write_bytes(b"\xef\xbb\xbf" + f"{BEIR_HEADER}\r\nq\td\t2\r\n".encode())
    assert read_qrels(path) == {"q": {"d": 2}}
