from __future__ import annotations

import concurrent.futures
import json
import math
import random
import re
import string
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qrag_jax.data.files.beir import qrels_path, read_documents, read_queries
from qrag_jax.errors import InputError
from qrag_jax.metrics.ranking import ranking_summary
from qrag_jax.metrics.trec import read_qrels
from qrag_jax.retrieval.bm25 import VARIANTS, BM25Config, BM25Index, Words
from qrag_jax.retrieval.boolean_search import BooleanIndex
from qrag_jax.retrieval.corpus import StoredCorpus
from qrag_jax.retrieval.corpus_writer import write_corpus
from qrag_jax.retrieval.protocol import NONE, Passage, Queries
from tests.data.real_data import real
from tests.retrieval.small_corpus import stored

PLAIN: dict[str, Any] = {"stemmer": "", "stop_words": "", "word": r"\w+"}


def slow_scores(
    passages: Sequence[Sequence[str]], query: Sequence[str], config: BM25Config
) -> np.ndarray:
    """float64 `[passages]`: the formulas, word by word and passage by passage."""
    count, mean = len(passages), sum(map(len, passages)) / len(passages)
    scores = np.zeros(count)
    for word in query:
        df = sum(word in passage for passage in passages)
        for number, passage in enumerate(passages):
            tf = Counter(passage)[word]
            if not tf:
                continue
            pivot = config.k1 * (1 - config.b + config.b * len(passage) / mean)
            if config.variant == "lucene":
                gain = math.log(1 + (count - df + 0.5) / (df + 0.5)) * tf / (tf + pivot)
            elif config.variant == "robertson":
                idf = math.log((count - df + 0.5) / (df + 0.5))
                gain = max(0.0, idf) * tf / (tf + pivot)
            else:
                gain = math.log(count / df) * (config.k1 + 1) * tf / (tf + pivot)
            scores[number] += gain
    return scores


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("k1", "b"), [(1.5, 0.75), (0.9, 0.4), (1.2, 0.0), (2.0, 1.0), (0.0, 0.5)])
def test_scores_are_those_of_the_formula(variant: str, k1: float, b: float, tmp_path: Path) -> None:
    """Small random corpora with a word in every passage, rare ones, and passages of one word."""
    config = BM25Config(k1=k1, b=b, variant=variant, **PLAIN)
    for seed in range(3):
        draw = random.Random(seed)
        texts = [
            " ".join(
                [
                    "all",
                    *draw.choices(
                        "abcdefgh", [8, 7, 5, 3, 2, 1, 1, 1], k=draw.choice((0, 1, 3, 30))
                    ),
                ]
            )
            for _ in range(25)
        ]
        index = BM25Index.build(stored(tmp_path / f"{seed}", texts), config)
        queries = ["a", "all", "h g", "a a b", "b a a", "never", "a never b", "", "all a h h h"]
        hits = index.search(Queries(queries), len(texts))
        for query, numbers, scores in zip(queries, hits.numbers, hits.scores):
            slow = slow_scores([text.split() for text in texts], query.split(), config)
            found = numbers[numbers != NONE]
            assert set(found) == set(np.flatnonzero(slow > 0))
            np.testing.assert_allclose(scores[: len(found)], slow[found], rtol=1e-5)
            assert np.all(np.diff(scores[: len(found)]) <= 0)
            assert np.all(scores[len(found) :] == -np.inf)


@pytest.mark.parametrize("k", [1, 2, 3, 5, 8, 20, 59, 60, 61, 1000])
def test_ties_go_by_number_whatever_k_is(k: int, tmp_path: Path) -> None:
    """Three kinds of passages, mixed, so that each cut but few goes through a tie."""
    draw = random.Random(1)
    texts = [draw.choice(("cat", "cat dog", "dog dog dog")) for _ in range(60)]
    index = BM25Index.build(stored(tmp_path / "c", texts), BM25Config(**PLAIN))
    hits = index.search(Queries(["cat", "dog", "dog cat"]), k)
    assert hits.numbers.shape == hits.scores.shape == (3, k)
    for query, numbers, scores in zip(("cat", "dog", "dog cat"), hits.numbers, hits.scores):
        slow = slow_scores([t.split() for t in texts], query.split(), index.config).round(9)
        order = [n for n in sorted(range(60), key=lambda n: (-slow[n], n)) if slow[n] > 0][:k]
        assert numbers.tolist() == order + [NONE] * (k - len(order))
        assert np.isneginf(scores).tolist() == [number == NONE for number in numbers]


def test_nothing_is_ranked_where_bm25_says_nothing(tmp_path: Path) -> None:
    texts = ["the heat of wings", "the flow", "...", "The THE the"]
    index = BM25Index.build(stored(tmp_path / "c", texts), BM25Config())
    hits = index.search(Queries(["", "  ", "the", "unknown", "?!", "heat"]), 2)
    assert hits.numbers.tolist() == [[NONE, NONE]] * 5 + [[0, NONE]]
    assert np.isneginf(hits.scores).tolist() == [[True, True]] * 5 + [[False, True]]
    assert hits.numbers.dtype == np.int64
    assert hits.scores.dtype == np.float32


def test_a_word_in_every_passage_says_nothing_in_atire_and_robertson(tmp_path: Path) -> None:
    corpus = stored(tmp_path / "c", ["all one", "all two", "all three"])
    for variant, found in (("lucene", [0, 1, 2]), ("robertson", [NONE] * 3), ("atire", [NONE] * 3)):
        index = BM25Index.build(corpus, BM25Config(variant=variant, **PLAIN))
        assert index.search(Queries(["all"]), 3).numbers.tolist() == [found]


def test_a_filter_leaves_scores_and_ties_as_they_are(tmp_path: Path) -> None:
    texts = ["cat", "cat dog", "cat", "dog", "cat"]
    corpus = stored(tmp_path / "c", texts, year=[1, 1, 2, 2, 2])
    index = BM25Index.build(corpus, BM25Config(**PLAIN))
    whole = index.search(Queries(["cat"]), 5)
    scores = dict(zip(whole.numbers[0].tolist(), whole.scores[0].tolist()))
    some = index.search(Queries(["cat"]), 5, {"year": 2})
    assert some.numbers.tolist() == [[2, 4, NONE, NONE, NONE]]
    assert some.scores[0, :2].tolist() == [scores[2], scores[4]]
    assert index.search(Queries(["cat"]), 1, {"year": [1, 2]}).numbers.tolist() == [[0]]
    assert index.search(Queries(["cat"]), 2, {"year": 3}).numbers.tolist() == [[NONE, NONE]]
    assert index.search(Queries(["cat"]), 5, {}).numbers.tolist() == whole.numbers.tolist()
    with pytest.raises(InputError, match="month"):
        index.search(Queries(["cat"]), 2, {"month": 3})
    with pytest.raises(InputError, match="k is 0"):
        index.search(Queries(["cat"]), 0)


def test_threads_search_at_once(tmp_path: Path) -> None:
    """PyStemmer's stemmers mix up their words when threads share one."""
    draw = random.Random(3)
    texts = [" ".join(f"walking{draw.choice('abcdef')}ing" for _ in range(20)) for _ in range(40)]
    index = BM25Index.build(stored(tmp_path / "c", texts))
    batches = [Queries(draw.sample(texts, 30)) for _ in range(16)]
    alone = [index.search(each, 5) for each in batches]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda each: index.search(each, 5), batches))
    for one, other in zip(alone, together):
        np.testing.assert_array_equal(one.numbers, other.numbers)


def test_titles_are_searched_too(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path, [Passage("1", "text", "The title"), Passage("2", "text")])
    assert BM25Index.build(corpus).search(Queries(["titles"]), 1).numbers.tolist() == [[0]]


def test_words_are_read_as_the_settings_say() -> None:
    text = "The Running DOGS' naïve x-ray of 3D Straße"
    assert Words(BM25Config(**PLAIN))(text) == (
        ["the", "running", "dogs", "naïve", "x", "ray", "of", "3d", "straße"]
    )
    assert Words(BM25Config(stemmer="", stop_words="", lower=False))(text) == (
        ["The", "Running", "DOGS", "naïve", "ray", "of", "3D", "Straße"]
    )
    assert Words(BM25Config())(text) == ["run", "dog", "naïv", "ray", "3d", "straße"]
    assert Words(BM25Config(stemmer="german", stop_words="german"))("Die Häuser und der Wald") == (
        ["haus", "wald"]
    )
    assert Words(BM25Config(word="[a-z]+", stemmer=""))("Caf\u00e9 au lait") == [
        "caf",
        "au",
        "lait",
    ]


@pytest.mark.parametrize(
    ("text", "query"),
    [
        ("हिन्दी भाषा में लिखा", "भाषा हिन्दी"),
        ("İstanbul'da bir köprü", "istanbul"),
        ("ISPARTA İZMİR", "izmir"),
        ("un cafe\u0301 noir", "caf\u00e9"),
        ("كِتَابٌ جَدِيدٌ", "كِتَابٌ"),
        ("ספר בְּרֵאשִׁית", "בְּרֵאשִׁית"),
        ("نمی\u200cخواهم بروم", "نمی\u200cخواهم"),
        ("我的北京大学在哪里", "北京"),
        ("今日は東京タワーへ行く", "タワー"),
        ("대한민국의 수도는 서울이다", "수도"),
        ("กรุงเทพมหานครเป็นเมืองหลวง", "เมือง"),
        ("Python3入門", "python3"),
        ("Ｆｕｌｌ width ﬁne ﾃｽﾄ", "full fine テスト"),
        ("猫", "猫"),
        ("საქართველოს დედაქალაქი", "დედაქალაქი"),
        ("an exam\u00adple", "example"),
    ],
)
def test_words_of_all_scripts_are_found(text: str, query: str, tmp_path: Path) -> None:
    index = BM25Index.build(stored(tmp_path, ["other words", text, "еще слова"]))
    assert index.search(Queries([query]), 3).numbers.tolist() == [[1, NONE, NONE]]
    assert numbers_of(BooleanIndex.over(index), query.split()[0] + "*") == [1]


def numbers_of(index: BooleanIndex, query: str) -> list[int]:
    found = index.search(Queries([query]), 3).numbers[0]
    return found[found != NONE].tolist()


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


def test_an_index_of_another_rule_is_searched_by_that_rule(tmp_path: Path) -> None:
    corpus = stored(tmp_path / "c", ["北京大学", "北京"])
    for config, wanted in ((BM25Config(), [1, 0]), (BM25Config(word=r"\w\w+"), [1, NONE])):
        BM25Index.build(corpus, config).save(tmp_path / config.word.strip("\\"))
        index = BM25Index.open(tmp_path / config.word.strip("\\"), corpus)
        assert index.search(Queries(["北京"]), 2).numbers.tolist() == [wanted]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"k1": -0.1}, r"config\.bm25\.k1 is -0\.1"),
        ({"k1": float("nan")}, r"config\.bm25\.k1 is nan"),
        ({"k1": float("inf")}, r"config\.bm25\.k1 is inf"),
        ({"b": 1.1}, r"config\.bm25\.b"),
        ({"b": -1.0}, r"config\.bm25\.b is -1\.0"),
        ({"variant": "bm25+"}, "one of lucene"),
        ({"stemmer": "klingon"}, r"config\.bm25\.stemmer is 'klingon'"),
        ({"stop_words": "klingon"}, r"config\.bm25\.stop_words is 'klingon'"),
        ({"word": "("}, r"config\.bm25\.word"),
        ({"word": r"(\w)\w"}, "without groups"),
        ({"word": r"\w*"}, "match the empty"),
    ],
)
def test_settings_that_cannot_be_used_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        BM25Config(**settings)


def test_a_corpus_without_a_word_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no passage of the corpus"):
        BM25Index.build(stored(tmp_path, ["...", "the a of"]))


def test_a_saved_index_finds_the_same_and_holds_no_pickle(tmp_path: Path) -> None:
    draw = random.Random(2)
    texts = [
        " ".join(draw.choices(["ab", "ba", "été", "ça", "日本", "run", "running"], k=9))
        for _ in range(50)
    ]
    corpus = stored(tmp_path / "c", texts)
    config = BM25Config(k1=1.2, b=0.6, variant="atire", stop_words="french", stemmer="french")
    index = BM25Index.build(corpus, config)
    index.save(tmp_path / "i")
    again = BM25Index.open(tmp_path / "i", StoredCorpus(tmp_path / "c"))
    assert again.config == config
    queries = Queries(["ab", "ba été", "runs 日本", "none"])
    for one, other in zip(index.search(queries, 50), again.search(queries, 50)):
        np.testing.assert_array_equal(one, other)
    said = json.loads((tmp_path / "i" / "manifest.json").read_bytes())
    assert said["settings"]["words"]["k1"] == 1.2
    assert set(said["settings"]["versions"]) == {"bm25s", "PyStemmer"}
    for path in (tmp_path / "i").iterdir():
        if path.suffix == ".npy":
            array = np.load(path, allow_pickle=False, mmap_mode="r")
            assert array.dtype.kind in "fi"
        else:
            json.loads(path.read_bytes())
    assert isinstance(again._scores.scores["data"], np.memmap)


def test_an_index_is_saved_where_it_was_opened(tmp_path: Path) -> None:
    """Its arrays are maps of the files that are replaced."""
    corpus = stored(tmp_path, [f"cat {'dog ' * (i % 7)}" for i in range(5000)])
    built = BM25Index.build(corpus)
    wanted = built.search(Queries(["dog cat"]), 50)
    built.save(tmp_path)
    opened = BM25Index.open(tmp_path, corpus)
    opened.save(tmp_path)
    for index in (opened, BM25Index.open(tmp_path, corpus)):
        np.testing.assert_array_equal(
            index.search(Queries(["dog cat"]), 50).numbers, wanted.numbers
        )
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".bm25")]


def test_another_index_is_not_overwritten(tmp_path: Path) -> None:
    corpus = stored(tmp_path / "c", ["cat", "dog"])
    BooleanIndex.build(corpus).save(tmp_path / "i")
    with pytest.raises(InputError, match="field engine"):
        BM25Index.build(corpus).save(tmp_path / "i")
    other = stored(tmp_path / "o", ["cat"])
    BM25Index.build(corpus).save(tmp_path / "b")
    with pytest.raises(InputError, match="field corpus"):
        BM25Index.build(other).save(tmp_path / "b")
    assert BooleanIndex.open(tmp_path / "i", corpus).search(Queries(["dog"]), 1).numbers == [[1]]


def test_an_array_of_objects_is_not_unpickled(tmp_path: Path) -> None:
    """A file with a pickle in it is refused, though it has the size that the manifest says."""
    corpus = stored(tmp_path / "c", ["cat", "dog"])
    BM25Index.build(corpus).save(tmp_path / "i")
    evil = tmp_path / "i" / "data.csc.index.npy"
    np.save(evil, np.array([{"a": 1}], dtype=object), allow_pickle=True)
    said = json.loads((tmp_path / "i" / "manifest.json").read_bytes())
    said["files"][evil.name] = evil.stat().st_size
    (tmp_path / "i" / "manifest.json").write_text(json.dumps(said))
    with pytest.raises(InputError, match="is damaged"):
        BM25Index.open(tmp_path / "i", corpus)


def test_an_index_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    corpus = stored(tmp_path / "c", ["cat", "dog", "cat dog"])
    other = stored(tmp_path / "o", ["cat", "dog", "cat dogs"])
    BM25Index.build(corpus).save(tmp_path / "i")
    with pytest.raises(InputError, match="field corpus"):
        BM25Index.open(tmp_path / "i", other)
    with pytest.raises(InputError, match="holds no finished"):
        BM25Index.open(tmp_path / "none", corpus)
    manifest = tmp_path / "i" / "manifest.json"
    whole = json.loads(manifest.read_bytes())
    for words in ({"k1": "high"}, {"k9": 1}, {"b": 0.5}):
        said = whole | {"settings": {"words": whole["settings"]["words"] | words}}
        manifest.write_text(json.dumps(said))
        with pytest.raises(InputError, match=r"cannot be used|do not belong together"):
            BM25Index.open(tmp_path / "i", corpus)
    manifest.write_text(json.dumps(whole))
    words_file = tmp_path / "i" / "vocab.index.json"
    words_file.write_text(words_file.read_text().replace("cat", "{{{").replace('"', "'"))
    with pytest.raises(InputError, match="is damaged"):
        BM25Index.open(tmp_path / "i", corpus)
    with (tmp_path / "i" / "data.csc.index.npy").open("ab") as file:
        file.truncate(20)
    with pytest.raises(InputError, match=r"data\.csc\.index\.npy"):
        BM25Index.open(tmp_path / "i", corpus)


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


def test_without_the_packages_the_fix_is_named() -> None:
    hide = "import sys; sys.modules['bm25s'] = None; "
    code = hide + "from qrag_jax.retrieval import bm25; bm25.Words(bm25.BM25Config())"
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert "pip install 'qrag_jax[retrieval]'" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize(("name", "least"), [("scifact", 0.695), ("cranfield", 0.375)])
def test_the_quality_on_real_collections_is_that_of_the_books(
    name: str, least: float, tmp_path: Path
) -> None:
    """nDCG@10 of the defaults on the dev queries: SciFact 0.701, Cranfield 0.383 as of writing."""
    folder = real(f"ir/{name}")
    documents = [Passage(*each) for each in read_documents(folder)]
    corpus = write_corpus(tmp_path, (each for each in documents if each.text))
    index = BM25Index.build(corpus)
    queries = read_queries(folder, "dev")
    hits = index.search(Queries(list(queries.values())), 100)
    run = {
        query: [passage.name for passage in corpus.passages(numbers[numbers != NONE])]
        for query, numbers in zip(queries, hits.numbers)
    }
    summary = ranking_summary(run, read_qrels(qrels_path(folder, "dev")))
    assert least < summary["ndcg@10"]["mean"] < least + 0.02
