"""Searched questions as LeReT's records; preferences are tested with a run's own tries."""

from __future__ import annotations

from pathlib import Path

import pytest

from qrag_jax.data.files.leret import Retrieved, read_records, write_records
from qrag_jax.environments.query_writing.state import QueryState
from qrag_jax.errors import InputError
from qrag_jax.metrics.hop_log import Hop, Searched
from qrag_jax.retrieval.corpus import StoredCorpus
from qrag_jax.retrieval.corpus_writer import write_corpus
from qrag_jax.retrieval.protocol import Passage
from qrag_jax.systems.leret_files import records_of

PASSAGES = [
    Passage("p0", "It is by Ada.", "The Mill"),
    Passage("p1", "It has wheels.", "The Mill"),
    Passage("p2", "Born in Oslo.", "Ada | Berg"),
    Passage("p3", "No title.", ""),
]
MILL, WHEELS = "The Mill | It is by Ada.", "The Mill | It has wheels."
ADA = "Ada   Berg | Born in Oslo."
STATE = QueryState(
    "q1", "Where?", ("Oslo",), gold_ids=("p0", "p1", "p2", "p3"), pages=("the mill", "ada", "x")
)


@pytest.fixture
def corpus(tmp_path: Path) -> StoredCorpus:
    write_corpus(tmp_path / "corpus", PASSAGES)
    return StoredCorpus(tmp_path / "corpus")


def hop(query: str, pool: tuple[str, ...], *found: tuple[str, float], recall: float = 0.5) -> Hop:
    scores = {"recall": recall, "ap": recall / 2, "all_gold": 0.0}
    return Hop(query, "searched" if query else "no_query", pool, scores, found=found)


def test_a_record_has_each_hop_and_the_pool(corpus: StoredCorpus, tmp_path: Path) -> None:
    hops = (
        hop("mill", ("p0", "p1"), ("p0", 2.5), ("p1", 1.0)),
        hop("", ("p0", "p1")),
        hop("ada", ("p0", "p1", "p2"), ("p2", 3.0), ("p0", 0.25), recall=1.0),
    )
    rows = [Searched("q1", "Where?", ("Oslo",), STATE.pages, hops)]
    (record,) = records_of(rows, [STATE], corpus)
    assert record.example_id == "q1"
    assert record.answer == ("The Mill", "Ada | Berg", "p3")
    assert record.hops[1].retrieved == (Retrieved(MILL, 2.5), Retrieved(WHEELS, 1.0))
    assert (record.hops[2].search_query, record.hops[2].retrieved) == ("", ())
    assert (record.hops[3].em, record.hops[3].ap) == (1.0, 0.5)
    assert record.hops[3].retrieved == (Retrieved(ADA, 3.0), Retrieved(MILL, 0.25))
    # The pool keeps the score by which a passage came.
    assert record.full_retrieved == (*record.hops[1].retrieved, Retrieved(ADA, 3.0))
    assert record.context == record.hops[1].retrieved
    assert record.model == 0
    path = tmp_path / "records.json"
    write_records(path, [record])
    assert read_records(path) == [record]


def test_another_corpus_is_refused(corpus: StoredCorpus) -> None:
    rows = [Searched("q1", "Where?", (), STATE.pages, (hop("x", ("p9",), ("p9", 1.0)),))]
    with pytest.raises(InputError, match="lacks 1 passages of the log, for example 'p9'"):
        records_of(rows, [STATE], corpus)
