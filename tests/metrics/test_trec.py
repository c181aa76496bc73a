from __future__ import annotations

import gzip
import random
from pathlib import Path

import pytest

from qrag_jax.errors import InputError
from qrag_jax.metrics.trec import BEIR_HEADER, read_qrels, read_run, write_qrels, write_run


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


def test_the_lines_of_a_run_are_trecs(tmp_path: Path) -> None:
    write_run(tmp_path / "run", {"q1": {"b": 1.5, "a": -2.0}}, tag="bm25")
    assert (tmp_path / "run").read_text() == "q1 Q0 b 1 1.5 bm25\nq1 Q0 a 2 -2.0 bm25\n"


def test_scores_order_a_run_and_not_ranks_or_lines(tmp_path: Path) -> None:
    path = tmp_path / "run"
    path.write_text("q Q0 a 1 0.5 t\n\nq\tQ0\tb\t2\t3e1\tt\r\nq Q0 c 3 0.5 t\n")
    assert list(read_run(path)["q"].items()) == [("b", 30.0), ("a", 0.5), ("c", 0.5)]


def test_a_run_without_hits_is_empty(tmp_path: Path) -> None:
    write_run(tmp_path / "run", {"q": {}})
    assert read_run(tmp_path / "run") == {}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("q Q0 a 1 0.5", "has 5 columns instead of 6"),
        ("q Q0 a b 1 0.5 t", "has 7 columns instead of 6"),
        ("q Q0 a first 0.5 t", "the rank 'first' is not a whole number"),
        ("q Q0 a 1 high t", "the score 'high' is not a finite number"),
        ("q Q0 a 1 nan t", "the score 'nan' is not a finite number"),
        ("q Q0 a 1 inf t", "the score 'inf' is not a finite number"),
        ("q Q0 known 2 0.1 t", "document known is listed for query q again"),
    ],
)
def test_malformed_lines_of_a_run_are_refused(line: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "run"
    path.write_text(f"q Q0 known 1 0.7 t\n{line}\n")
    with pytest.raises(InputError) as caught:
        read_run(path)
    assert str(caught.value).startswith(f"{path}, line 2: {message}")


@pytest.mark.parametrize(
    ("run", "message"),
    [
        ({"q": {"a b": 1.0}}, "white space"),
        ({"": {"a": 1.0}}, "white space"),
        ({"q": {"a": 1.0, "b": 2.0}}, "score of document"),
        ({"q": {"a": float("nan")}}, "score of document"),
        ({"q": {"a": float("-inf")}}, "score of document"),
    ],
)
def test_rankings_that_no_run_can_hold_are_refused(
    run: dict[str, dict[str, float]], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "run"
    path.write_text("as before")
    with pytest.raises(InputError, match=message):
        write_run(path, run)
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


def test_a_byte_order_mark_and_windows_line_ends_do_not_matter(tmp_path: Path) -> None:
    path = tmp_path / "qrels.tsv"
    path.write_bytes(b"\xef\xbb\xbf" + f"{BEIR_HEADER}\r\nq\td\t2\r\n".encode())
    assert read_qrels(path) == {"q": {"d": 2}}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("q 0 d 1\nq d 1\n", "4 columns"),
        (f"{BEIR_HEADER}\nq d 1\n", "3 columns"),
        (f"{BEIR_HEADER}\nq\t\t1\n", "3 columns"),
        ("q\td\t1\n", "line 1: does not have 4 columns.*BEIR's header"),
        ("q 0 d 0.5\n", r"'0.5'"),
        ("q 0 d 1\nq 0 d 2\n", "line 2: document"),
        ("\n", "holds no judgement"),
        (f"{BEIR_HEADER}\n", "holds no judgement"),
    ],
)
def test_malformed_qrels_are_refused(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "qrels"
    path.write_text(text)
    with pytest.raises(InputError, match=message):
        read_qrels(path)


def test_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        read_qrels(tmp_path / "none.tsv")
    (tmp_path / "run.gz").write_bytes(gzip.compress(b"q Q0 a 1 0.5 t\n")[:-9])
    with pytest.raises(InputError, match="sound gzip"):
        read_run(tmp_path / "run.gz")
    (tmp_path / "run").write_bytes(b"q Q0 a 1 0.5 t\nq Q0 \xff 2 0.4 t\n")
    with pytest.raises(InputError, match="line 2: is not UTF-8"):
        read_run(tmp_path / "run")
