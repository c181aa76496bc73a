"""BM25 against its formulas and on real collections; words of all scripts."""

from __future__ import annotations

import random
import re
import string
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qrag_jax.data.corpora import read_corpus
from qrag_jax.data.queries import qrels_path, read_qrels, read_queries
from qrag_jax.metrics.ranking import ranking_columns
from qrag_jax.retrieval.bm25 import VARIANTS, BM25Config, BM25Index, Words
from qrag_jax.retrieval.boolean_search import BooleanIndex
from qrag_jax.retrieval.corpus import write_corpus
from qrag_jax.retrieval.protocol import NONE, Passage, Queries
from tests.data.real_data import real
from tests.retrieval.small_corpus import slow_bm25, stored

PLAIN: dict[str, Any] = {"stemmer": "", "stop_words": ""}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("k1", "b"), [(1.5, 0.75), (1.2, 0.0), (0.0, 0.5)])
def test_scores_are_those_of_the_formula(variant: str, k1: float, b: float, tmp_path: Path) -> None:
    """Small random corpora with a word in every passage, rare ones, and passages of one word."""
    config = BM25Config(k1=k1, b=b, variant=variant, **PLAIN)
    draw = random.Random(k1)
    lengths, weights = (0, 1, 3, 30), [8, 7, 5, 3, 2, 1, 1, 1]
    known = ["aa", "bb", "cc", "dd", "ee", "ff", "gg", "hh"]
    words = [["all", *draw.choices(known, weights, k=draw.choice(lengths))] for _ in range(25)]
    index = BM25Index.build(stored(tmp_path, [" ".join(each) for each in words]), config)
    queries = ["aa", "all", "hh gg", "aa aa bb", "bb aa aa", "never", "aa never bb", ""]
    queries.append("all aa hh hh hh")
    hits = index.search(Queries(queries), len(words))
    for query, numbers, scores in zip(queries, hits.numbers, hits.scores):
        slow = slow_bm25(words, query.split(), config)
        found = numbers[numbers != NONE]
        assert set(found) == set(np.flatnonzero(slow > 0))
        np.testing.assert_allclose(scores[: len(found)], slow[found], rtol=1e-5)
        assert np.all(np.diff(scores[: len(found)]) <= 0)
        assert np.all(scores[len(found) :] == -np.inf)


@pytest.mark.parametrize(
    ("text", "query"),
    [
        *(("हिन्दी भाषा में लिखा", "भाषा हिन्दी"), ("İstanbul'da bir köprü", "istanbul")),
        *(("ISPARTA İZMİR", "izmir"), ("un cafe\u0301 noir", "caf\u00e9")),
        *(("كِتَابٌ جَدِيدٌ", "كِتَابٌ"), ("ספר בְּרֵאשִׁית", "בְּרֵאשִׁית")),
        *(("نمی\u200cخواهم بروم", "نمی\u200cخواهم"), ("我的北京大学在哪里", "北京")),
        *(("今日は東京タワーへ行く", "タワー"), ("대한민국의 수도는 서울이다", "수도")),
        *(("กรุงเทพมหานครเป็นเมืองหลวง", "เมือง"), ("Python3入門", "python3")),
        *(("Ｆｕｌｌ width ﬁne ﾃｽﾄ", "full fine テスト"), ("猫", "猫")),
        *(("საქართველოს დედაქალაქი", "დედაქალაქი"), ("an exam\u00adple", "example")),
    ],
)
def test_words_of_all_scripts_are_found(text: str, query: str, tmp_path: Path) -> None:
    index = BM25Index.build(stored(tmp_path, ["other words", text, "еще слова"]))
    assert index.search(Queries([query]), 3).numbers.tolist() == [[1, NONE, NONE]]
    prefix = Queries([query.split()[0] + "*"])
    assert BooleanIndex.over(index).search(prefix, 3).numbers.tolist() == [[1, NONE, NONE]]


def test_runs_without_spaces_are_words_of_two_characters() -> None:
    words = Words(BM25Config())
    assert words("我的北京 大 abc北京") == ["我的", "的北", "北京", "大", "abc", "北京"]
    assert words("เป็นเมือง") == ["เป็", "ป็น", "นเ", "เมื", "มือ", "อง"]  # with their marks
    # What is usual in English, with or without ASCII, has the words that it always had.
    draw = random.Random(5)
    letters = string.printable * 3 + "éÜßñçøДжжΩλ\u2013\u2019\u201c\u2026"
    bare = Words(BM25Config(stemmer="", stop_words=""))
    for _ in range(500):
        text = "".join(draw.choices(letters, k=60))
        assert bare(text) == re.findall(r"\w\w+", text.lower())


BEFORE_DEVICES = """
import sys
from jax._src import xla_bridge
from qrag_jax.retrieval import bm25
assert "bm25s" not in sys.modules
assert bm25.Words(bm25.BM25Config())("the running dogs") == ["run", "dog"]
assert "bm25s" in sys.modules
print(xla_bridge.backends_are_initialized())
import jax
print(jax.lax.top_k(jax.numpy.arange(5), 1)[1])
"""


def test_searching_words_asks_jax_for_no_device() -> None:
    """bm25s alone starts JAX's devices when it is imported."""
    done = subprocess.run(
        [sys.executable, "-c", BEFORE_DEVICES], check=True, capture_output=True, text=True
    )
    assert done.stdout.split() == ["False", "[4]"]


@pytest.mark.parametrize(("name", "least"), [("scifact", 0.695), ("cranfield", 0.375)])
def test_the_quality_on_real_collections_is_that_of_the_books(
    name: str, least: float, tmp_path: Path
) -> None:
    """nDCG@10 of the defaults on the dev queries: SciFact 0.701, Cranfield 0.383 as of writing."""
    folder = real(f"ir/{name}")
    documents = [Passage(*read.document) for read in read_corpus(folder)]
    corpus = write_corpus(tmp_path, (each for each in documents if each.text))
    index = BM25Index.build(corpus)
    queries = read_queries(folder, "dev")
    hits = index.search(Queries(list(queries.values())), 100)
    run = {
        query: [passage.name for passage in corpus.passages(numbers[numbers != NONE])]
        for query, numbers in zip(queries, hits.numbers)
    }
    (column,) = ranking_columns(run, read_qrels(qrels_path(folder, "dev")), ["ndcg@10"]).values()
    assert least < np.mean([*column.values()]) < least + 0.02
