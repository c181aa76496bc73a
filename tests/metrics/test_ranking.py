"""Measures of rankings and of hops against slow definitions and trec_eval's code; TREC's files."""

from __future__ import annotations

import gzip
import itertools
import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from qrag_jax.errors import InputError
from qrag_jax.metrics import hops
from qrag_jax.metrics.ranking import STANDARD, ranking_columns, ranking_summary
from qrag_jax.metrics.trec import BEIR_HEADER, read_qrels, read_run, write_qrels, write_run


def recall(ranking: Sequence[str], judged: dict[str, int], k: int) -> float:
    relevant = {document for document, grade in judged.items() if grade >= 1}
    return len(relevant & set(ranking[:k])) / len(relevant)


def hit(ranking: Sequence[str], judged: dict[str, int], k: int) -> float:
    return float(any(judged.get(document, 0) >= 1 for document in ranking[:k]))


def rr(ranking: Sequence[str], judged: dict[str, int], k: int) -> float:
    for place, document in enumerate(ranking[:k], 1):
        if judged.get(document, 0) >= 1:
            return 1.0 / place
    return 0.0


def ap(ranking: Sequence[str], judged: dict[str, int], k: int) -> float:
    found, total = 0, 0.0
    for place, document in enumerate(ranking[:k], 1):
        if judged.get(document, 0) >= 1:
            found += 1
            total += found / place
    return total / sum(grade >= 1 for grade in judged.values())


def ndcg(ranking: Sequence[str], judged: dict[str, int], k: int) -> float:
    def gained(grades: Sequence[int]) -> float:
        return sum(max(g, 0) / math.log2(place + 1) for place, g in enumerate(grades[:k], 1))

    ideal = sorted(judged.values(), reverse=True)
    return gained([judged.get(document, 0) for document in ranking]) / gained(ideal)


DEFINED: dict[str, Callable[[Sequence[str], dict[str, int], int], float]] = {
    "recall": recall,
    "hit": hit,
    "rr": rr,
    "ap": ap,
    "ndcg": ndcg,
}


@pytest.mark.parametrize("seed", range(4))
def test_scores_are_those_of_the_definitions(seed: int) -> None:
    """Random rankings, grades from -1 to 3, some rankings empty, some shorter than k."""
    draw = random.Random(seed)
    documents = [f"d{number}" for number in range(30)]
    qrels, rankings = {}, {}
    for number in range(25):
        judged = {d: draw.choice((-1, 0, 0, 1, 2, 3)) for d in draw.sample(documents, 9)}
        qrels[f"q{number}"] = judged | {"d0": 1}
        rankings[f"q{number}"] = draw.sample(documents, draw.choice((0, 1, 3, 20, 30)))
    for k in (1, 2, 3, 10, 100):
        names = [f"{kind}@{k}" for kind in DEFINED]
        columns = ranking_columns(rankings, qrels, names)
        for kind, name in zip(DEFINED, names):
            for query, judged in qrels.items():
                expected = DEFINED[kind](rankings[query], judged, k)
                assert columns[name][query] == pytest.approx(expected, abs=1e-6), (name, query)
    whole = ranking_columns(rankings, qrels, ("rr", "ap", "ndcg"))
    for name, column in whole.items():
        for query, score in column.items():
            expected = DEFINED[name](rankings[query], qrels[query], 10**6)
            assert score == pytest.approx(expected, abs=1e-6)


def test_the_order_counts_and_not_the_names() -> None:
    """trec_eval orders equal scores by name, descending; a ranking keeps its own order."""
    for ranking in (["a", "b"], ["b", "a"]):
        columns = ranking_columns({"q": ranking}, {"q": {"a": 1}}, ["rr"])
        assert columns["rr"] == {"q": 1.0 / (1 + ranking.index("a"))}
    with pytest.raises(ValueError, match="'q'"):
        ranking_columns({"q": ["a", "b", "c", "b"]}, {"q": {"a": 1}})
    for name in ("map", "recall", "ndcg@0", "ap@k", "RR@10", ""):
        with pytest.raises(InputError, match=f"'{name}'"):
            ranking_columns({"q": ["a"]}, {"q": {"a": 1}}, [name])


def test_a_query_without_relevant_documents_is_left_out_and_counted() -> None:
    qrels = {"nothing": {"a": 0, "b": -1}, "unjudged": {}, "found": {"a": 1}, "missed": {"a": 1}}
    rankings = {"nothing": ["a"], "unjudged": ["a"], "found": ["a"], "unknown": ["a"]}
    summary = ranking_summary(rankings, qrels)
    assert set(summary) == {*STANDARD, "queries", "without_relevant", "without_hits"}
    assert (summary["queries"], summary["without_relevant"]) == (2, 2)
    assert summary["without_hits"] == 1
    for name in STANDARD:
        assert summary[name]["mean"] == 0.5  # the query without a ranking has 0
        assert summary[name]["low"] < 0.5 < summary[name]["high"]
    with pytest.raises(InputError, match="relevant document"):
        ranking_columns(rankings, {"nothing": {"a": 0}})


FOUND = [["a", "b", "c"], ["a", "d", "b"], [], ["d", "e", "f"]]


GOLD = {"a", "d", "x"}


def test_the_episode() -> None:
    assert hops.recall(GOLD, FOUND) == 2 / 3
    ideal = 1 + 1 / math.log2(3) + 1 / 2
    assert hops.ndcg(GOLD, FOUND) == pytest.approx((1 + 1 / math.log2(5)) / ideal)
    assert hops.recall(GOLD, []) == hops.ndcg(GOLD, []) == hops.recall({"x"}, FOUND) == 0


def test_hop_by_hop() -> None:
    assert hops.hop_recall(GOLD, FOUND) == (1 / 3, 1 / 3, 0, 0)
    assert hops.novelty(FOUND) == (1, 1 / 3, 0, 2 / 3)
    ideal_3, ideal_2 = 1 + 1 / math.log2(3) + 1 / 2, 1 + 1 / math.log2(3)
    assert hops.hop_ndcg(GOLD, FOUND) == pytest.approx(
        (1 / ideal_3, (1 / math.log2(3)) / ideal_2, 0, 0)
    )
    # A passage that one search returns twice counts once, and takes one place.
    assert hops.hop_ndcg({"a", "b"}, [["a", "a", "b"]]) == (1,)
    # Nothing is left to find after the first hop.
    assert hops.hop_ndcg({"a"}, FOUND) == (1, 0, 0, 0)
    assert hops.hop_recall(GOLD, []) == hops.novelty([]) == hops.hop_ndcg(GOLD, []) == ()


def test_an_episodes_scores_are_trec_evals() -> None:
    rng = random.Random(0)
    names = [str(number) for number in range(12)]
    for _ in range(100):
        found = [rng.sample(names, 3) for _ in range(rng.randint(1, 4))]
        gold = set(rng.sample(names, rng.randint(1, 4)))
        ranking = list(dict.fromkeys(itertools.chain(*found)))
        columns = ranking_columns(
            {"q": ranking}, {"q": dict.fromkeys(gold, 1)}, ["ndcg", "recall@100"]
        )
        assert hops.ndcg(gold, found) == pytest.approx(columns["ndcg"]["q"])
        assert hops.recall(gold, found) == pytest.approx(columns["recall@100"]["q"])
        assert sum(hops.hop_recall(gold, found)) == pytest.approx(hops.recall(gold, found))


def test_gold_passages_are_needed() -> None:
    for score in (hops.recall, hops.ndcg, hops.hop_recall, hops.hop_ndcg):
        with pytest.raises(ValueError, match="gold passage"):
            score([], FOUND)


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
