"""What is searched and served, of every engine: pools, collections, indexes, a service."""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
from functools import partial
from pathlib import Path
from typing import Any

import jax
import pytest

from qrag_jax import systems
from qrag_jax.data.sample import Passage, Sample
from qrag_jax.environments.episode import Document, Look, Open, ToolTask
from qrag_jax.environments.queries import QueryState
from qrag_jax.errors import InputError
from qrag_jax.llm.config import RerankerConfig
from qrag_jax.llm.outcomes import Failure
from qrag_jax.retrieval.corpus import pooled
from qrag_jax.retrieval.index_folder import BM25, BOOLEAN
from qrag_jax.retrieval.pubmed import RemoteEngine
from qrag_jax.rollouts.libraries import (
    Collections,
    CorpusLibrary,
    KeptResults,
    RemoteLibrary,
    SearchLibrary,
)
from qrag_jax.runtime.mesh import make_mesh
from qrag_jax.systems.indexing import IndexSettings, index_corpus
from qrag_jax.systems.search import SearchConfig, open_search
from tests.json_server import Call as HttpCall
from tests.json_server import listening
from tests.llm.model_server import ModelServer
from tests.retrieval.web_service import Call, Say, pubmed_says, quick, serving
from tests.systems.corpora import records, write_collection, write_corpus_file, write_tower
from tests.systems.small_runs import SMALL

QUICK = SearchConfig(k1=0.9, b=0.4, stemmer="", stop_words="")
PAGES = [Passage("", str(record["text"]), str(record["title"])) for record in records(24)]
SHORT = [
    Passage("", "silver river", "Lamp"),
    Passage("", "paper stone", "Clock"),
    Passage("", "a forest", "Piano"),
]
ANYONE = QueryState("q", "Which river?", ("a stone",))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A tower, an index of words and vectors by it, and one of words alone over other passages."""
    folder = tmp_path_factory.mktemp("indexes")
    tower = write_tower(folder / "tower")
    # Three short passages: one shape to compile.
    both = SearchConfig(engine="hybrid", encoder=str(tower), passage_prefix="river ")
    open_pages(both, SHORT, folder / "both")
    other = write_corpus_file(folder / "other.jsonl", 3, seed=1)
    index_corpus(other, folder / "words", None, IndexSettings(engine=BM25))
    return {name: str(folder / name) for name in ("tower", "both", "words")}


def open_pages(
    config: SearchConfig, pages: list[Passage] | None, folder: Path, *, begun: bool = True
) -> CorpusLibrary:
    passages = None if pages is None else partial(pooled, pages)
    return open_search(config, passages, folder, begun=begun)


def found_by(library: CorpusLibrary, query: str, k: int = 4) -> tuple[Document, ...]:
    (found,) = library.look([(ANYONE, Look(query, k))])
    assert isinstance(found, tuple)
    return found


def test_the_pool_of_a_refused_start_gives_way_to_another(tmp_path: Path) -> None:
    folder = tmp_path / "search"
    first = open_pages(QUICK, PAGES[:9], folder).corpus.digest
    # The same passages are kept, with their indexes.
    (folder / "mark").touch()
    assert open_pages(QUICK, PAGES[:9], folder, begun=False).corpus.digest == first
    assert (folder / "mark").exists()
    library = open_pages(QUICK, PAGES, folder, begun=False)
    whole = open_pages(QUICK, PAGES, tmp_path / "whole")
    assert library.corpus.digest == whole.corpus.digest != first
    assert not (folder / "mark").exists()
    assert found_by(library, "river stone") == found_by(whole, "river stone")
    # Other words: the index is built again.
    assert len(found_by(open_pages(SearchConfig(), PAGES, folder, begun=False), "rivers")) == 4
    # A run that has begun keeps its passages.
    assert open_pages(SearchConfig(), PAGES[:9], folder).corpus.digest == whole.corpus.digest


def test_an_index_of_the_user(folders: dict[str, str], tmp_path: Path) -> None:
    """The pool is no other than an index that `qrag index` builds; its folder stays as it is."""
    words = SearchConfig(index=folders["both"])
    library = open_pages(words, PAGES, tmp_path / "search")
    assert len(library.corpus) == len(SHORT)
    assert [each.title for each in found_by(library, SHORT[1].whole)][:1] == [SHORT[1].title]
    by = {"engine": "semantic", "encoder": folders["tower"], "passage_prefix": "river "}
    searched = open_pages(dataclasses.replace(words, **by), None, tmp_path / "search")
    assert len(found_by(searched, "piano")) == len(SHORT)  # words would find one
    by_faiss = open_pages(dataclasses.replace(words, **by | {"engine": "faiss"}), None, tmp_path)
    assert found_by(by_faiss, "piano") == found_by(searched, "piano")
    boolean = open_pages(dataclasses.replace(words, engine="boolean"), None, tmp_path / "search")
    (found,) = found_by(boolean, "rivers OR forest NOT piano")
    assert found.title == "Lamp"
    assert not (Path(folders["both"]) / BOOLEAN).exists()
    assert not (tmp_path / "search").exists()


def test_a_corpus_is_indexed_once_for_all_runs(
    folders: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its content, for words and for vectors; other content has an index of its own."""
    monkeypatch.setenv("QRAG_CACHE", str(tmp_path / "cache"))
    texts, run = [str(record["text"]) for record in records(3, 1)], tmp_path / "search"
    corpus, other = (write_corpus_file(tmp_path / f"{n}.jsonl", 3, seed=1) for n in (1, 2))
    by = {"engine": "semantic", "encoder": folders["tower"], "dtype": "int8"}
    for config in (QUICK, dataclasses.replace(QUICK, **by)):
        library = open_pages(dataclasses.replace(config, corpus=str(corpus)), PAGES, run)
        assert [passage.text for passage in library.corpus] == texts
        assert found_by(library, texts[0])
        (library.corpus.folder / "mark").touch()
        again = open_pages(dataclasses.replace(config, corpus=str(other)), None, run)
        assert (again.corpus.folder / "mark").exists()
    assert library.searched.index.storage == "int8"
    write_corpus_file(corpus, 2, seed=1)
    assert len(open_pages(dataclasses.replace(QUICK, corpus=str(corpus)), None, run).corpus) == 2
    assert not run.exists()


def test_an_index_that_cannot_be_searched(folders: dict[str, str], tmp_path: Path) -> None:
    """One of words alone, one of vectors with another prefix, and one of vectors alone."""
    vectors = Path(shutil.copytree(folders["both"], tmp_path / "vectors"))
    shutil.rmtree(vectors / BM25)
    with pytest.raises(InputError, match=r"config\.search\.encoder"):
        open_pages(SearchConfig(engine="semantic"), PAGES, tmp_path / "search")
    for index, engine, named in (
        (folders["words"], "semantic", "config.search"),
        (folders["both"], "semantic", "both"),
        (str(vectors), "boolean", f"{vectors}.* bm25"),
    ):
        config = SearchConfig(index=index, engine=engine, encoder=folders["tower"])
        with pytest.raises(InputError, match=named):
            open_pages(config, None, tmp_path / "search")


TEXTS = {
    "north": {"d1": "Oslo is wet in winter", "d2": "the bear sleeps", "d3": "winter in Bergen"},
    "south": {"d1": "the lemon grows", "d2": "Rome is dry in winter", "d4": "a bear of honey"},
}


def task(collection: str, *gold: str, until: str = "") -> Sample:
    grades = tuple((name, 1) for name in gold)
    return Sample("1", "winter?", grades=grades, collection=collection, until=until)


def ids(library: SearchLibrary | KeptResults, where: Sample, query: str) -> list[str]:
    (found,) = library.look([(where, Look(query, 5))])
    assert not isinstance(found, Failure)
    return sorted(each.id for each in found)


def test_each_task_searches_its_own_collection(tmp_path: Path) -> None:
    folders = {name: write_collection(tmp_path / name, texts, {}) for name, texts in TEXTS.items()}
    configs = {name: dataclasses.replace(QUICK, corpus=str(path)) for name, path in folders.items()}
    library = Collections({n: open_search(each, None, tmp_path) for n, each in configs.items()})
    north, south = task("north", "d1"), task("south", "d2")
    found: Any = library.look([(each, Look("winter", 5)) for each in (south, north, south)])
    assert [{document.id for document in each} for each in found] == [{"d2"}, {"d1", "d3"}, {"d2"}]
    assert found[0][0].text == TEXTS["south"]["d2"]


def test_a_service_is_asked_until_the_tasks_day() -> None:
    def script(call: Call) -> Say:
        if call.nth == 0:
            return Say("", status=500)
        return pubmed_says(["30", "1"] if call.fields["maxdate"] == "2001/02/03" else ["7"])

    with serving(script) as server:
        remote = RemoteLibrary(RemoteEngine(quick(server.url)))
        assert not server.calls
        kept = KeptResults(remote, 10)
        old, now = task("", "30", until="2001-02-03"), task("", "30")
        for _ in range(2):
            assert ids(kept, old, "a AND b") == ["1", "30"]
            assert ids(kept, now, "a AND b") == ["7"]
        assert len(server.calls) == 2 * 2  # each once in vain, and once
        assert remote.digest(old) != remote.digest(now)


def test_a_reranker_searches_a_questions_own_documents(tmp_path: Path) -> None:
    own = tuple(Document(n, "", n, False) for n in ("silver river", "paper stone", "a forest"))
    config, mesh = SearchConfig(engine="semantic"), make_mesh((1, 1, 1), jax.devices()[:1])
    with ModelServer() as server:
        reranker = RerankerConfig(url=server.url, model="tiny")
        library = open_search(config, None, tmp_path, of_each=mesh, reranker=reranker)
        (found,) = library.look([(ToolTask("q", "Which?", (), own), Look("a silver river", 2))])
        assert [call.path.rpartition("/")[2] for call in server.calls] == ["rerank"]
    assert len(found) == 2
    assert found[0].id == "silver river"


@pytest.mark.parametrize("system", ["harr", "leret", "deepretrieval"])
def test_what_reads_passages_searches_a_corpus(system: str) -> None:
    """Neither a server, nor what belongs to a question's own documents."""
    for field, value in (("index", "http://127.0.0.1:8000/retrieve"), ("engine", "golden")):
        with pytest.raises(InputError, match=f"config.search.{field}"):
            systems.check(SMALL[system](**{f"search__{field}": value}))


def test_a_server_in_search_r1s_form_is_searched(tmp_path: Path) -> None:
    gold = Document("g", "Lamp", "# Lamp\nsilver  river", True)
    other = Document("1", "Clock", "# Clock\npaper stone", False)
    asked = ToolTask("q", "Which river?", ("silver",), (gold, other))
    bodies: list[Any] = []

    def answer(call: HttpCall) -> tuple[int, Any]:
        bodies.append(json.loads(call.body))
        if call.path != "/retrieve" or "broken" in bodies[-1]["queries"]:
            return 400, {"error": "no"}
        both = [('"Lamp"\nsilver river', 2.0), ('"Piano"\na forest', 1.0)]
        hits = [{"document": {"id": "1", "contents": text}, "score": s} for text, s in both]
        return 200, {"result": [hits] * len(bodies[-1]["queries"])}

    with listening(answer) as url:
        library = open_search(SearchConfig(index=f"{url}/retrieve"), None, tmp_path)
        looks = [(asked, Look("river", 2)), (asked, Look("river", 1)), (asked, Look("lamp", 1))]
        found: Any = library.look(looks)
        (failed,) = library.look([(asked, Look("broken", 1))])
    assert bodies[0] == {"queries": ["river", "lamp"], "topk": 2, "return_scores": True}
    # It knows the question's own document, and gives no other the id of one.
    expected = [("g", "Lamp", 2.0), ("passage 1", "Piano", 1.0)]
    assert [(d.id, d.title, d.score) for d in found[0]] == expected
    assert found[0][1].text == "# Piano\na forest"
    assert found[1] == found[2] == found[0][:1]
    assert isinstance(failed, Failure)
    assert failed.cause == "server"
    assert isinstance(library.open(asked, Open("g")), Failure)


def test_what_compares_no_words_needs_no_stemmer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "Stemmer", None)
    systems.check(SMALL["harr"]())
