"""What query writers search: pooled passages or an index, and what is refused at this door."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qrag_jax.data.generators.bridge_world import BridgeQuestion, bridge_question
from qrag_jax.data.query_questions import of_bridge, read_query_questions
from qrag_jax.data.sample import Page
from qrag_jax.environments.query_writing.state import BY_PASSAGE, BY_TITLE, QueryState, key_of
from qrag_jax.environments.tools.episode import Document, Look
from qrag_jax.errors import InputError
from qrag_jax.retrieval.bm25 import BM25Config, BM25Index
from qrag_jax.retrieval.boolean_search import BooleanIndex
from qrag_jax.retrieval.exact import ExactIndex
from qrag_jax.retrieval.hybrid import FusedIndex
from qrag_jax.retrieval.opening import BM25, BOOLEAN, CORPUS
from qrag_jax.rollouts.corpus_library import CorpusLibrary
from qrag_jax.rollouts.query_states import states_on
from qrag_jax.systems import query_search
from qrag_jax.systems.indexing import IndexSettings, index_corpus
from qrag_jax.systems.query_search import SearchConfig, check_same_corpus, open_query_search
from tests.data.real_data import real
from tests.systems.corpora import records, write_corpus_file, write_tower

COUNT = 60
QUICK = SearchConfig(k1=0.9, b=0.4, stemmer="", stop_words="")
PAGES = [Page(str(record["title"]), str(record["text"])) for record in records(24)]
SHORT = [Page("Lamp", "silver river"), Page("Clock", "paper stone"), Page("Piano", "a forest")]
ANYONE = QueryState("q", "Which river?", ("a stone",))


@pytest.fixture(scope="module")
def bridges() -> list[BridgeQuestion]:
    return [bridge_question(0, split, i) for split in ("train", "dev") for i in range(COUNT)]


@pytest.fixture(scope="module")
def world(bridges: list[BridgeQuestion], tmp_path_factory: pytest.TempPathFactory) -> CorpusLibrary:
    """The passages of all questions of both splits, pooled."""
    pages = (page for each in bridges for page in of_bridge(each).passages)
    return open_query_search(QUICK, pages, tmp_path_factory.mktemp("world") / "search")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A tower, an index of words and vectors by it, and one of words alone over other passages."""
    folder = tmp_path_factory.mktemp("indexes")
    tower = write_tower(folder / "tower")
    # Three short passages: one shape to compile.
    both = SearchConfig(engine="hybrid", encoder=str(tower), passage_prefix="river ")
    library = open_query_search(both, SHORT, folder / "both")
    assert library.searched is not None
    assert isinstance(library.searched.index, FusedIndex)
    other = write_corpus_file(folder / "other.jsonl", 3, seed=1)
    index_corpus(other, folder / "words", None, IndexSettings(engine=BM25))
    return {name: str(folder / name) for name in ("tower", "both", "words")}


def found_by(library: CorpusLibrary, query: str, k: int = 4) -> tuple[Document, ...]:
    (found,) = library.look([(ANYONE, Look(query, k))])
    assert isinstance(found, tuple)
    return found


def all_gold(
    library: CorpusLibrary,
    states: Sequence[QueryState],
    first: Sequence[str],
    second: Callable[[int, str], str],
) -> float:
    """The share of questions all of whose gold pages two searches of three passages find.

    Args:
        second: the query of the second hop, of a question's number and the first passage found.
    """
    one = library.look([(s, Look(query, 3)) for s, query in zip(states, first, strict=True)])
    then = [second(number, found[0].text) for number, found in enumerate(one)]  # type: ignore[index]
    two = library.look([(s, Look(query, 3)) for s, query in zip(states, then, strict=True)])
    solved = [
        set(state.pages) <= {key_of(each, BY_TITLE) for each in (*a, *b)}  # type: ignore[misc]
        for state, a, b in zip(states, one, two, strict=True)
    ]
    return float(np.mean(solved))


@pytest.mark.parametrize("split", ["train", "dev"])
def test_only_the_bridge_solves_a_question_of_the_invented_world(
    split: str, world: CorpusLibrary, bridges: list[BridgeQuestion]
) -> None:
    """Over 2,000 questions, 0.01, 0.12, 1.00 and 1.00."""
    own = [each for each in bridges if f"-{split}-" in each.id]
    states = states_on([of_bridge(each) for each in own], world.corpus, BY_TITLE).states
    asked, named = [each.question for each in own], [each.entity for each in own]
    assert len(own) == len(states) == COUNT
    assert all_gold(world, states, asked, lambda i, _: asked[i]) <= 0.1
    assert all_gold(world, states, asked, lambda i, text: f"{asked[i]} {text}") <= 0.35
    assert all_gold(world, states, asked, lambda i, _: own[i].bridge) >= 0.95
    assert all_gold(world, states, named, lambda i, _: own[i].bridge) >= 0.95


def test_entities_of_different_questions_rarely_share_a_title(
    world: CorpusLibrary, bridges: list[BridgeQuestion]
) -> None:
    """Of 23,000 passages, 8 did."""
    passages = list(world.corpus)
    assert len(passages) == len(bridges) * 10  # none is there twice
    assert len({each.name for each in passages}) == len(passages)
    assert len({each.title for each in passages}) > 0.99 * len(passages)


def test_keys_by_title_and_by_passage_agree_where_titles_are_unique(
    world: CorpusLibrary, bridges: list[BridgeQuestion]
) -> None:
    questions = [of_bridge(each) for each in bridges[:20]]
    by_title = states_on(questions, world.corpus, BY_TITLE).states
    by_passage = states_on(questions, world.corpus, BY_PASSAGE).states
    for one, other in zip(by_title, by_passage, strict=True):
        assert one.gold_ids == other.gold_ids == other.pages
        assert one.hops == other.hops == 2


def test_the_pool_is_searched_with_the_words_of_the_config(tmp_path: Path) -> None:
    library = open_query_search(QUICK, PAGES, tmp_path / "quick")
    index = BM25Index.open(tmp_path / "quick" / BM25, library.corpus)
    assert index.config == BM25Config(k1=0.9, b=0.4, stemmer="", stop_words="")
    assert found_by(library, "rivers") == ()
    stemmed = open_query_search(SearchConfig(), PAGES, tmp_path / "stemmed")
    assert len(found_by(stemmed, "rivers")) == 4


def test_a_pool_is_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "search"
    first = open_query_search(QUICK, PAGES, folder)
    monkeypatch.setattr(BM25Index, "build", None)  # nothing is built again
    monkeypatch.setattr(query_search, "write_corpus", None)
    for pages in (PAGES, iter(PAGES), None):
        again = open_query_search(QUICK, pages, folder)
        check_same_corpus(first.corpus.digest, again.corpus.digest)
        assert found_by(again, "river stone") == found_by(first, "river stone")


def test_the_pool_of_a_refused_start_gives_way_to_another(tmp_path: Path) -> None:
    folder = tmp_path / "search"
    first = open_query_search(QUICK, PAGES[:9], folder).corpus.digest
    # The same passages are kept, with their indexes.
    (folder / "mark").touch()
    assert open_query_search(QUICK, PAGES[:9], folder, begun=False).corpus.digest == first
    assert (folder / "mark").exists()
    library = open_query_search(QUICK, PAGES, folder, begun=False)
    whole = open_query_search(QUICK, PAGES, tmp_path / "whole")
    assert library.corpus.digest == whole.corpus.digest != first
    assert not (folder / "mark").exists()
    assert found_by(library, "river stone") == found_by(whole, "river stone")
    # Other words: the index is built anew, the passages stay.
    stemmed = open_query_search(SearchConfig(), PAGES, folder, begun=False)
    assert stemmed.corpus.digest == whole.corpus.digest
    assert len(found_by(stemmed, "rivers")) == 4
    with pytest.raises(InputError, match="holds other passages"):
        open_query_search(SearchConfig(), PAGES[:9], folder)


def test_a_pool_that_was_not_finished_is_written_again(tmp_path: Path) -> None:
    whole = open_query_search(QUICK, PAGES, tmp_path / "whole")
    folder = tmp_path / "search"
    open_query_search(QUICK, PAGES[:9], folder)
    (folder / CORPUS / "corpus.json").unlink()
    shutil.rmtree(folder / BM25)
    again = open_query_search(QUICK, PAGES, folder)
    assert again.corpus.digest == whole.corpus.digest


def test_an_index_of_the_user(folders: dict[str, str], tmp_path: Path) -> None:
    """The pool is no other than an index that `qrag index` builds."""
    words = SearchConfig(index=folders["both"])
    library = open_query_search(words, PAGES, tmp_path / "search")
    assert len(library.corpus) == len(SHORT)
    assert [each.title for each in found_by(library, SHORT[1].whole)][:1] == [SHORT[1].title]
    vectors = dataclasses.replace(
        words, engine="semantic", encoder=folders["tower"], passage_prefix="river "
    )
    searched = open_query_search(vectors, None, tmp_path / "search").searched
    assert searched is not None
    assert isinstance(searched.index, ExactIndex)
    assert not (tmp_path / "search").exists()


def titles(library: CorpusLibrary, query: str) -> set[str]:
    return {each.title for each in found_by(library, query)}


def test_boolean_queries_over_the_pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = dataclasses.replace(QUICK, engine="boolean")
    folder = tmp_path / "search"
    library = open_query_search(config, SHORT, folder)
    assert not (folder / BM25).exists()
    with monkeypatch.context() as patch:
        patch.setattr(BooleanIndex, "build", None)  # nothing is built again
        patch.setattr(BooleanIndex, "over", None)
        again = open_query_search(config, None, folder)
    for each in (library, again):
        assert titles(each, "silver OR forest") == {"Lamp", "Piano"}
        assert titles(each, "(silver OR forest) AND NOT lamp") == {"Piano"}
        assert titles(each, '"silver river"') == {"Lamp"}
        assert titles(each, '"river silver"') == titles(each, "silver AND") == set()
    # Another engine's index lies beside it, and knows no operators.
    words = open_query_search(QUICK, SHORT, folder)
    assert titles(words, "silver AND NOT lamp") == {"Lamp"}
    with pytest.raises(InputError, match=r"search/boolean was built with other settings of BM25"):
        open_query_search(dataclasses.replace(config, b=0.5), SHORT, folder)


def test_boolean_queries_over_an_index_of_the_user(folders: dict[str, str], tmp_path: Path) -> None:
    """In memory, over its index of words: the folder stays as it is."""
    config = SearchConfig(index=folders["both"], engine="boolean")
    library = open_query_search(config, None, tmp_path / "search")
    assert library.searched is not None
    assert isinstance(library.searched.index, BooleanIndex)
    assert titles(library, "rivers OR forest NOT piano") == {"Lamp"}
    assert not (Path(folders["both"]) / BOOLEAN).exists()
    vectors = tmp_path / "vectors"
    shutil.copytree(folders["both"], vectors)
    shutil.rmtree(vectors / BM25)
    told = r"holds no finished index of bm25; build it there with qrag index --engine="
    with pytest.raises(InputError, match=told):
        open_query_search(SearchConfig(index=str(vectors), engine="boolean"), None, tmp_path / "s")


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"index": "nowhere"}, "config.search.index is nowhere, which holds no index; build one"),
        (
            {"index": "words", "engine": "semantic", "encoder": "tower"},
            "compares words; use another config.search.engine.",
        ),
        (
            {"index": "both", "engine": "semantic", "encoder": "tower"},
            "was embedded by another encoder, or with another dtype, pooling, prefix or length",
        ),
    ],
)
def test_an_index_that_cannot_be_searched(
    fields: dict[str, str], told: str, folders: dict[str, str], tmp_path: Path
) -> None:
    config = SearchConfig(**{name: folders.get(value, value) for name, value in fields.items()})  # type: ignore[arg-type]
    with pytest.raises(InputError) as error:
        open_query_search(config, None, tmp_path / "search")
    assert told in str(error.value)


@pytest.mark.parametrize("engine", ["bm25", "semantic"])
def test_an_index_that_does_not_belong_to_its_corpus(
    engine: str, folders: dict[str, str], tmp_path: Path
) -> None:
    mixed = tmp_path / "mixed"
    shutil.copytree(folders["both"], mixed)
    shutil.rmtree(mixed / CORPUS)
    shutil.copytree(Path(folders["words"]) / CORPUS, mixed / CORPUS)
    config = SearchConfig(
        index=str(mixed),
        engine=engine,
        encoder="" if engine == "bm25" else folders["tower"],
        passage_prefix="" if engine == "bm25" else "river ",
    )
    told = r"in the field corpus, but .* is asked for; give the corpus that the index was built"
    with pytest.raises(InputError, match=told):
        open_query_search(config, None, tmp_path / "search")


def test_a_corpus_of_which_a_byte_has_changed(folders: dict[str, str], tmp_path: Path) -> None:
    index = tmp_path / "index"
    shutil.copytree(folders["words"], index)
    file = index / CORPUS / "passages.jsonl"
    file.write_bytes(file.read_bytes().replace(b"river", b"rover", 1))
    with pytest.raises(InputError, match=r"is not what corpus\.json was written for"):
        open_query_search(SearchConfig(index=str(index)), None, tmp_path / "search")


def test_a_corpus_that_changes_between_two_openings(tmp_path: Path) -> None:
    folder = tmp_path / "search"
    old = open_query_search(QUICK, PAGES, folder).corpus.digest
    changed = [*PAGES[:-1], PAGES[-1]._replace(text="another text")]
    for pages in (changed, PAGES[:-1], PAGES[::-1]):
        with pytest.raises(InputError, match=r"holds other passages than the questions bring now"):
            open_query_search(QUICK, pages, folder)
    with pytest.raises(InputError, match=r"was built with other settings of BM25 than"):
        open_query_search(dataclasses.replace(QUICK, b=0.5), PAGES, folder)
    new = open_query_search(QUICK, changed, tmp_path / "other").corpus.digest
    check_same_corpus(old, old)
    with pytest.raises(InputError) as error:
        check_same_corpus(old, new)
    assert str(error.value).startswith(
        "the corpus that is searched has changed since the run began (its digest was "
        f"{old[:12]}, and is {new[:12]})"
    )


def test_questions_without_passages_need_an_index(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"bring no passages .* index to search in config\.search"):
        open_query_search(QUICK, [], tmp_path / "search")
    with pytest.raises(InputError, match=r"search/corpus has no pooled passages; train there"):
        open_query_search(QUICK, None, tmp_path / "search")


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"engine": "colbert"}, "config.search.engine is 'colbert'; use one of bm25, semantic"),
        ({"engine": "golden"}, "config.search.engine is 'golden'"),
        (
            {"engine": "semantic"},
            "config.search.engine is 'semantic', which compares vectors; name what embeds in "
            "config.search.encoder, or use bm25.",
        ),
        ({"engine": "hybrid"}, "name what embeds in config.search.encoder"),
        (
            {"encoder": "minilm"},
            "config.search.encoder is minilm, but the engine bm25 compares words; leave it empty",
        ),
        (
            {"engine": "boolean", "encoder": "minilm"},
            "config.search.encoder is minilm, but the engine boolean compares words; leave it",
        ),
        ({"gold_by": "id"}, "config.search.gold_by is 'id'; use one of passage, title."),
        ({"max_missing_share": 1.5}, "config.search.max_missing_share is 1.5; use a share"),
        ({"max_missing_share": float("nan")}, "config.search.max_missing_share is nan"),
        ({"k1": -1.0}, "config.search.k1 is -1.0; it must be at least 0"),
        ({"k1": float("inf")}, "config.search.k1 is inf; it must be a finite number."),
        ({"b": 1.5}, "config.search.b is 1.5; it must be at most 1."),
        ({"stemmer": "klingon"}, "config.search.stemmer is 'klingon'; use one of"),
        ({"stop_words": "klingon"}, "config.search.stop_words is 'klingon'; use one of"),
    ],
)
def test_settings_that_are_refused(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(InputError) as error:
        SearchConfig(**fields)
    assert told in str(error.value)


def test_real_questions_over_the_open_corpus(tmp_path: Path) -> None:
    """2Wiki's training questions, and those without a context, on one corpus of 9,594 passages."""
    folder = real("2wikimultihopqa")
    index_corpus(folder / "open_corpus.jsonl.gz", tmp_path, None, IndexSettings(engine=BM25))
    library = open_query_search(SearchConfig(index=str(tmp_path)), None, tmp_path / "none")
    assert len(library.corpus) == 9594
    dev, _ = read_query_questions(f"{folder / 'open_dev.jsonl.gz'},,dev")
    train, _ = read_query_questions(f"{folder},,train")
    for questions, count in ((dev, 220), (train, 276)):
        by_title = states_on(questions, library.corpus, BY_TITLE)
        by_passage = states_on(questions, library.corpus, BY_PASSAGE)
        assert by_title.lacking == by_passage.lacking == []
        assert len(by_title.states) == count
        pairs = zip(by_title.states, by_passage.states, strict=True)
        assert all(one.gold_ids == other.gold_ids for one, other in pairs)
    first = library.look([(s, Look(s.question, 3)) for s in by_title.states])
    recall = np.mean([sum(d.is_supporting for d in f) / s.hops  # type: ignore[union-attr]
                      for s, f in zip(by_title.states, first, strict=True)])  # fmt: skip
    assert 0.5 < recall < 0.75
