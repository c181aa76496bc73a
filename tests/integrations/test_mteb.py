"""mteb's own evaluation of the adapter, on a task of this file: its scores are ours."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qrag_jax import LoadSettings, Retriever
from qrag_jax.errors import InputError
from qrag_jax.metrics.ranking import ranking_columns
from tests.integrations.conftest import COUNT
from tests.systems.corpora import records

mteb = pytest.importorskip("mteb", reason="needs the extra mteb")
import datasets
from mteb.abstasks import AbsTaskRetrieval
from mteb.abstasks.task_metadata import TaskMetadata
from mteb.models import SearchProtocol

from qrag_jax.integrations.mteb import QRagSearch

EMPTY = {"id": "nothing", "title": "", "text": ""}
PASSAGES = [{key: str(r[key]) for key in ("id", "title", "text")} for r in records(COUNT)]
QUERIES = {f"q{n}": " ".join(p["text"].split()[:6]) for n, p in enumerate(PASSAGES) if n % 4 == 0}
# Relevance 2 for the passage of the words, 1 for the next two.
QRELS = {
    f"q{n}": {f"p{n}": 2, f"p{(n + 1) % COUNT}": 1, f"p{(n + 2) % COUNT}": 1}
    for n in range(0, COUNT, 4)
}


ABOUT = {
    **{"name": "QRagSmall", "description": "Few words.", "reference": "https://example.com/small"},
    **{"dataset": {"path": "none/none", "revision": "1"}, "type": "Retrieval", "category": "t2t"},
    **{"modalities": ["text"], "eval_splits": ["test"], "eval_langs": ["eng-Latn"]},
    **{"main_score": "ndcg_at_10", "date": ("2026-01-01", "2026-01-02"), "domains": ["Written"]},
    **{"task_subtypes": [], "license": "mit", "annotations_creators": "derived", "dialect": []},
    **{"sample_creation": "created", "bibtex_citation": ""},
}


class SmallTask(AbsTaskRetrieval):
    """Passages of a few words, held in memory."""

    metadata = TaskMetadata(**ABOUT)

    def load_data(self, *args: Any, **kwargs: Any) -> None:
        queries = [
            {"id": name, "text": text, "instruction": None} for name, text in QUERIES.items()
        ]
        queries[0] |= {"text": "a silver", "instruction": "piano"}
        split = {
            "corpus": datasets.Dataset.from_list([*PASSAGES, EMPTY]),
            "queries": datasets.Dataset.from_list(queries),
            "relevant_docs": {query: dict(docs) for query, docs in QRELS.items()},
            "top_ranked": None,
        }
        self.dataset = {"default": {"test": split}}
        self.data_loaded = True


def evaluated(search: QRagSearch, folder: Path, task: SmallTask | None = None) -> dict[str, Any]:
    """mteb's scores; its predictions are in the folder."""
    more: dict[str, Any] = {"prediction_folder": folder, "show_progress_bar": False}
    result = mteb.evaluate(search, task or SmallTask(), cache=None, **more)
    return result.task_results[0].scores["test"][0]


@pytest.fixture(scope="module")
def retriever(exported: Path) -> Retriever:
    return Retriever.load(exported, LoadSettings(dtype="float32"))


@pytest.fixture(scope="module")
def search(retriever: Retriever, tmp_path_factory: pytest.TempPathFactory) -> QRagSearch:
    return QRagSearch(retriever, tmp_path_factory.mktemp("mteb"))


def test_scores_are_our_own(search: QRagSearch, retriever: Retriever, tmp_path: Path) -> None:
    assert isinstance(search, SearchProtocol)
    assert search.mteb_model_meta.revision == search.retriever.digest()
    found = evaluated(search, tmp_path)
    scores = json.loads((tmp_path / "QRagSmall_predictions.json").read_text())["default"]["test"]
    rankings = {q: sorted(docs, key=docs.get, reverse=True) for q, docs in scores.items()}
    names = {"ndcg@10": "ndcg_at_10", "recall@5": "recall_at_5", "ap@100": "map_at_100"}
    names |= {"rr@10": "mrr_at_10", "hit@3": "hit_rate_at_3"}
    columns = ranking_columns(rankings, QRELS, list(names))
    for ours, theirs in names.items():
        assert found[theirs] == pytest.approx(np.mean(list(columns[ours].values())), abs=1e-5)
    assert 0 < found["ndcg_at_10"] < 1
    assert all(sorted(ranked) == sorted(p["id"] for p in PASSAGES) for ranked in rankings.values())
    with pytest.raises(InputError, match="index"):  # the user's own is as it was
        retriever.search("river")
    with pytest.raises(InputError):
        QRagSearch(Retriever.load("bm25"), tmp_path)
    # A ranking begins with the passages of the steps.
    for query, question in (QUERIES | {"q0": "a silver piano"}).items():
        path = [hit.id for hit in search.retriever.search(question)]
        assert len(path) == 2
        assert rankings[query][:2] == path
        first = [hit.id for hit in search.retriever.search(question, topk=2 * COUNT)]
        assert rankings[query][2:] == [name for name in first if name not in path]
    # A finished index is opened again.
    (folder,) = [path for path in search.folder.iterdir() if path.is_dir()]
    times = {path: path.stat().st_mtime_ns for path in (folder / "exact").rglob("*")}
    evaluated(search, tmp_path)
    assert {path: path.stat().st_mtime_ns for path in (folder / "exact").rglob("*")} == times


def test_a_reranking_is_refused(search: QRagSearch, tmp_path: Path) -> None:
    class Reranking(SmallTask):
        def load_data(self, *args: Any, **kwargs: Any) -> None:
            super().load_data()
            self.dataset["default"]["test"]["top_ranked"] = {q: ["p0", "p1"] for q in QUERIES}

    with pytest.raises(InputError, match="QRagSmall"):
        evaluated(search, tmp_path, Reranking())
