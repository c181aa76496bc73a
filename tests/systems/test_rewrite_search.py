"""What rewritten queries search: collections apart, files of rows, Boolean queries, a service."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from qrag_jax.environments.query_rewriting.task import RewriteTask
from qrag_jax.environments.tools.episode import Look, Open
from qrag_jax.errors import InputError
from qrag_jax.llm.outcomes import Failure
from qrag_jax.rollouts.kept_results import KeptResults
from qrag_jax.systems.indexing import IndexSettings, index_corpus
from qrag_jax.systems.rewrite_search import (
    Collections,
    RewriteSearchConfig,
    SearchLibrary,
    ids_in,
    open_collections,
    open_remote,
    passages_of,
)
from tests.retrieval.web_service import Call, Say, pubmed_says, quick, serving
from tests.systems.collections_maker import write_collection, write_documents

NORTH = {"d1": "Oslo is wet in winter", "d2": "the bear sleeps", "d3": "winter in Bergen"}
SOUTH = {"d1": "the lemon grows", "d2": "Rome is dry in winter", "d4": "a bear of honey"}
PLAIN = RewriteSearchConfig()


def task(collection: str, *gold: str, until: str = "") -> RewriteTask:
    grades = dict.fromkeys(gold, 1)
    return RewriteTask.judged("1", "winter?", grades, collection=collection, until=until)


@pytest.fixture
def both(tmp_path: Path) -> dict[str, Path]:
    return {
        "north": write_collection(tmp_path / "north", NORTH, {}),
        "south": write_collection(tmp_path / "south", SOUTH, {}),
    }


def opened(both: dict[str, Path], folder: Path, config: RewriteSearchConfig = PLAIN) -> Collections:
    wanted = {name: partial(passages_of, str(path)) for name, path in both.items()}
    return open_collections(config, wanted, folder)


def ids(library: SearchLibrary | KeptResults, where: RewriteTask, query: str) -> list[str]:
    (found,) = library.look([(where, Look(query, 5))])
    assert not isinstance(found, Failure)
    return sorted(each.id for each in found)


def test_each_task_searches_its_own_collection(both: dict[str, Path], tmp_path: Path) -> None:
    library = opened(both, tmp_path / "search")
    north, south = task("north", "d1"), task("south", "d2")
    asked = [(each, Look("winter", 5)) for each in (south, north, south)]
    found = library.look(asked)
    assert [{document.id for document in each} for each in found] == [  # type: ignore[union-attr]
        {"d2"},
        {"d1", "d3"},
        {"d2"},
    ]
    assert [d.is_supporting for d in found[0]] == [True]  # type: ignore[union-attr]
    assert library.look([]) == []
    texts = [library.open(each, Open("d1")) for each in (north, south)]
    assert [each.text for each in texts] == [NORTH["d1"], SOUTH["d1"]]  # type: ignore[union-attr]
    assert library.open(south, Open("d3")) is None


def test_kept_results_of_two_collections_do_not_mix(both: dict[str, Path], tmp_path: Path) -> None:
    library = opened(both, tmp_path / "search")
    kept = KeptResults(library, 10)
    north, south = task("north"), task("south")
    assert library.digest(north) != library.digest(south)
    for _ in range(2):
        assert ids(kept, north, "bear") == ["d2"]
        assert ids(kept, south, "bear") == ["d4"]
    assert kept.searched == 2


def test_a_folder_that_is_there_is_opened_again(both: dict[str, Path], tmp_path: Path) -> None:
    first = opened(both, tmp_path / "search")
    names = sorted(path.name for path in (tmp_path / "search").iterdir())
    assert names == ["north", "south"]
    again = opened(both, tmp_path / "search")
    assert [e.corpus.digest for e in again.by_name.values()] == [
        e.corpus.digest for e in first.by_name.values()
    ]
    write_collection(both["south"], {**SOUTH, "d5": "new"}, {})
    with pytest.raises(InputError, match="holds other passages than the questions bring now"):
        opened(both, tmp_path / "search")


def test_a_file_of_documents_is_the_corpus_of_rows(tmp_path: Path) -> None:
    path = write_documents(tmp_path / "corpus.jsonl", NORTH)
    library = opened({"": path}, tmp_path / "search", RewriteSearchConfig(corpus=str(path)))
    assert ids(library, task(""), "winter") == ["d1", "d3"]
    assert (tmp_path / "search" / "own").is_dir()
    assert ids_in(library.by_name[""].corpus, ["d2", "d9", "d2"]) == {"d2"}


def test_an_index_serves_rows_and_collections_have_their_own(
    both: dict[str, Path], tmp_path: Path
) -> None:
    source, index = write_documents(tmp_path / "corpus.jsonl", NORTH), tmp_path / "index"
    index_corpus(source, index, None, IndexSettings(engine="bm25"))
    config = RewriteSearchConfig(index=str(index))

    def never() -> Any:
        raise AssertionError("an index needs no passages")

    wanted: dict[str, Any] = {"": never, "south": partial(passages_of, str(both["south"]))}
    library = open_collections(config, wanted, tmp_path / "search")
    assert ids(library, task(""), "bear") == ["d2"]
    assert ids(library, task("south"), "bear") == ["d4"]
    assert not (tmp_path / "search" / "own").exists()


def test_a_boolean_search_obeys_operators(both: dict[str, Path], tmp_path: Path) -> None:
    library = opened(both, tmp_path / "search", RewriteSearchConfig(engine="boolean"))
    north = task("north")
    assert ids(library, north, "winter AND Oslo") == ["d1"]
    assert ids(library, north, "winter NOT Oslo") == ["d3"]
    assert ids(library, north, '"bear sleeps" OR Bergen') == ["d2", "d3"]
    assert ids(library, task("south"), "winter AND Oslo") == []
    # Words alone read AND as one more word.
    words = opened(both, tmp_path / "words")
    assert ids(words, north, "winter AND Oslo") == ["d1", "d3"]


def test_a_service_is_asked_until_the_tasks_day() -> None:
    def script(call: Call) -> Say:
        if call.nth == 0:
            return Say("", status=500)
        return pubmed_says(["30", "1"] if call.fields["maxdate"] == "2001/02/03" else ["7"])

    with serving(script) as server:
        remote = open_remote(quick(server.url))
        assert not server.calls
        kept = KeptResults(remote, 10)
        old, now = task("", "30", until="2001-02-03"), task("", "30")
        for _ in range(2):
            (found,) = kept.look([(old, Look("a AND b", 3))])
            assert [(d.id, d.is_supporting) for d in found] == [  # type: ignore[union-attr]
                ("30", True),
                ("1", False),
            ]
            assert ids(kept, now, "a AND b") == ["7"]
        assert len(server.calls) == 2 * 2  # each once in vain, and once
        assert remote.digest(old) != remote.digest(now)


def test_a_service_that_misbehaves_for_ever_is_a_failure_that_is_not_kept() -> None:
    with serving(lambda call: Say("<html>", status=503)) as server:
        kept = KeptResults(open_remote(quick(server.url, attempts=3)), 10)
        (found,) = kept.look([(task(""), Look("a", 3))])
        assert isinstance(found, Failure)
        assert found.cause == "server"
        server.script = lambda call: pubmed_says(["7"])
        assert ids(kept, task(""), "a") == ["7"]
    assert (kept.searched, kept.failed) == (2, 1)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"engine": "tfidf"}, r"config\.search\.engine is 'tfidf'; use one of bm25, semantic, hyb"),
        (
            {"corpus": "a", "index": "b"},
            r"config\.search\.corpus and config\.search\.index are both given; leave one empty\.",
        ),
        ({"kept": -1}, r"config\.search\.kept is -1; it must be at least 0\."),
        ({"engine": "semantic"}, "compares vectors; name what embeds in config.search.encoder"),
        ({"encoder": "e5"}, "config.search.encoder is e5, but the engine bm25 compares words"),
        ({"max_missing_share": 1.5}, r"config\.search\.max_missing_share is 1\.5; use a share"),
        ({"b": 2.0}, r"config\.search\.b is 2\.0"),
        (
            {"engine": "remote", "corpus": "a"},
            "config.search.engine is 'remote', which searches no corpus of yours; leave "
            "config.search.corpus, index and encoder empty.",
        ),
        (
            {"engine": "remote", "max_missing_share": -0.5},
            r"config\.search\.max_missing_share is -0\.5; use a share",
        ),
    ],
)
def test_fields_that_cannot_be_used(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        RewriteSearchConfig(**fields)


def test_documents_without_a_word_are_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Cranfield has one; no search could find it."""
    path = tmp_path / "corpus.jsonl"
    lines = [{"_id": "1", "title": "", "text": "a wing"}, {"_id": "2", "title": "", "text": ""}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert [each.name for each in passages_of(str(path))] == ["1"]
    assert "1 document(s) without title and text left out" in capsys.readouterr().out
