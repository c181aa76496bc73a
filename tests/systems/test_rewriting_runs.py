"""A trained rewriter: its scores beside all that it is compared with, and files it rewrites."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ir_measures
import numpy as np
import pytest
from ml_collections import ConfigDict

from configs import deepretrieval
from qrag_jax import train
from qrag_jax.data.queries import read_qrels
from qrag_jax.environments.episode import Document, Look, ToolTask
from qrag_jax.environments.queries import BARE, REWRITTEN, read_output
from qrag_jax.errors import FeedbackLost, InputError
from qrag_jax.llm.outcomes import Failure
from qrag_jax.metrics.ranking import ranking_columns
from qrag_jax.metrics.rows import REWRITES, RewriteRow
from qrag_jax.retrieval.bm25 import BM25Index
from qrag_jax.retrieval.corpus import StoredCorpus
from qrag_jax.retrieval.multi_step import SingleStepSearch
from qrag_jax.rollouts.libraries import KeptResults
from qrag_jax.systems.config import load_config
from qrag_jax.systems.deepretrieval_scoring import open_rewriter, score_rewriter
from qrag_jax.systems.scoring import ScoreOptions
from tests.systems.corpora import write_collection

SCRIPT, STEPS, QUERIES, PART = 60, 62, 6, 4
TINY: dict[str, Any] = {
    **{"model.tiny.layers": 1, "model.tiny.weights": "", "model.tiny.hidden": 32},
    **{"model.tiny.intermediate": 32, "model.tiny.vocab": 420, "queries.held_out": 2},
    **{"queries.made_test": QUERIES, "writing.query_tokens": 64, "script.steps": SCRIPT},
    **{"script.learning_rate": 0.02, "styles.entity": 0.8, "styles.copy": 0.0},
    **{"styles.no_stop_words": 0.2, "styles.some_words": 0.0, "styles.wrong_clause": 0.0},
    **{"train.steps": STEPS - SCRIPT, "train.eval_every": 1000, "eval.greedy": False},
    **{"optimizer.matrices": "adam", "train.batch_size": PART},
}
MAIN = f"last checkpoint of step {STEPS}"
LOGS = {
    MAIN: f"last-{STEPS}",
    f"SFT alone, step {SCRIPT}": f"script-{SCRIPT}",
    "untrained": "untrained",
    "original query": "original",
    "without function words": "content_words",
}
ASKED = [f"In which town was the owner of mill number {n} born, if I may ask?" for n in range(7)]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = deepretrieval.get_config("tiny").unlock()
    config.update_from_flattened_dict(TINY)
    workdir = tmp_path_factory.mktemp("deepretrieval") / "run"
    assert train.train(config, workdir) == 0
    return workdir


@pytest.fixture(scope="module")
def scored(run: Path) -> Path:
    score(run)
    return run / "eval"


def score(run: Path, out: Path | None = None, **fields: Any) -> dict[str, Any]:
    return score_rewriter(run, config_of(run, **fields), ScoreOptions("last", out=out))


def config_of(run: Path, **fields: Any) -> ConfigDict:
    config = load_config(run / "config.json")
    config.update_from_flattened_dict({k.replace("__", "."): v for k, v in fields.items()})
    return config


def summary_of(folder: Path) -> dict:
    return json.loads((folder / "summary.json").read_text())


# ---------------------------------------------------------------- scores


def test_scores_are_those_of_the_logs(scored: Path) -> None:
    found = summary_of(scored)["pooled"]
    assert [*found["scores"]] == [*LOGS]
    assert found["queries"] == found["scored"] == QUERIES
    qrels = read_qrels(scored / "trec" / "made" / "qrels.txt")
    by_way = {}
    for told, name in LOGS.items():
        rows = REWRITES.read(scored / f"{name}.jsonl")
        assert [row.id for row in rows] == [*qrels]
        rankings = {row.id: row.ranking for row in rows}
        (values,) = ranking_columns(rankings, qrels, ["ndcg@10"]).values()
        by_way[told] = np.array([*values.values()])
        assert found["scores"][told]["ndcg@10"]["mean"] == pytest.approx(by_way[told].mean())
    for told, gain in found["gains"].items():
        difference = (by_way[MAIN] - by_way[told]).mean()
        assert gain["ndcg@10"]["mean"] == pytest.approx(difference)


def test_logs_of_other_settings_or_queries_are_refused(run: Path, scored: Path) -> None:
    for fields in ({"sampling__temperature": 0.5}, {"search__k1": 2.0}):
        with pytest.raises(InputError, match="--restart"):
            score(run, scored, **fields)
    with pytest.raises(InputError, match=r"config\.queries\.made_test"):
        score(run, queries__made_test=4)


ONE = {"1": "rivers of Norway run cold", "2": "goats eat grass", "3": "the moon is far"}
TWO = {"1": "ships sail to Oslo", "2": "bread needs flour and salt", "3": "cats sleep long"}
ASKED_ONE = {"1": "cold rivers", "2": "goats and grass"}
ASKED_TWO = {"1": "ships of Oslo", "2": "flour"}


def collection(folder: Path, documents: Mapping[str, str], queries: Mapping[str, str]) -> Path:
    """In BEIR's layout; the query `n` is judged by the document `n`."""
    judged = {name: (text, {name: 1}) for name, text in queries.items()}
    return write_collection(folder, documents, {"dev": judged})


def test_collections_with_the_same_ids(run: Path, tmp_path: Path) -> None:
    """Each query is searched for in its own collection, and judged there."""
    one = collection(tmp_path / "one", ONE, ASKED_ONE)
    two = collection(tmp_path / "two", TWO, ASKED_TWO)
    out = tmp_path / "eval"
    found = score(run, out, queries__test=f"{one},dev;{two},dev")
    assert [*found["collections"]] == ["one", "two"]
    for name in ("one", "two"):
        own = found["collections"][name]
        assert own["queries"] == 2
        assert own["scores"]["original query"]["ndcg@10"]["mean"] == 1.0
        ranked = ir_measures.read_trec_run(str(out / "trec" / name / "original.run"))
        assert {each.query_id for each in ranked} == {"1", "2"}
        assert not (run / "search" / name).exists()
    assert found["pooled"]["queries"] == 4
    rows = REWRITES.read(out / "original.jsonl")
    assert [row.collection for row in rows] == ["one", "one", "two", "two"]
    assert [row.ranking[0] for row in rows] == ["1", "2", "1", "2"]


def failing(monkeypatch: pytest.MonkeyPatch, dead: Sequence[str]) -> None:
    """Searches for these queries fail."""
    look = KeptResults.look

    def broken(
        self: KeptResults, asked: Sequence[tuple[ToolTask, Look]]
    ) -> list[tuple[Document, ...] | Failure]:
        return [
            Failure("server", "status 500", 0) if step.query in dead else found
            for (_, step), found in zip(asked, look(self, asked), strict=True)
        ]

    monkeypatch.setattr(KeptResults, "look", broken)


def test_a_failed_search_is_no_zero(
    run: Path, scored: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    whole = REWRITES.read(scored / "original.jsonl")
    failing(monkeypatch, [whole[2].original])
    found = score(run, tmp_path / "eval")["pooled"]
    assert found["failed"]["original query"] == 1
    assert found["failed"]["without function words"] == 0
    assert (found["queries"], found["scored"]) == (QUERIES, QUERIES - 1)
    kept = [row for place, row in enumerate(whole) if place != 2]
    qrels = read_qrels(tmp_path / "eval" / "trec" / "made" / "qrels.txt")
    own = {row.id: qrels[row.id] for row in kept}
    (values,) = ranking_columns({r.id: r.ranking for r in kept}, own, ["ndcg@10"]).values()
    mean = found["scores"]["original query"]["ndcg@10"]["mean"]
    assert mean == pytest.approx(np.mean([*values.values()]))
    assert found["gains"]["original query"]["queries"] == QUERIES - 1
    # Too many of them: nothing is kept, so that the same command tries again.
    failing(monkeypatch, [row.original for row in whole])
    out = Path(shutil.copytree(scored, tmp_path / "lost"))
    (out / "original.jsonl").unlink()
    with pytest.raises(FeedbackLost, match="6 of 6"):
        score(run, out)
    assert not (out / "original.jsonl").exists()


# ---------------------------------------------------------------- files of queries


@pytest.fixture(scope="module")
def listed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("asked") / "queries.txt"
    path.write_text("\n".join(ASKED) + "\n")
    return path


def rewritten(
    run: Path, out: Path, which: str = "last", *, restart: bool = False, **how: Any
) -> list[RewriteRow]:
    config = load_config(run / "config.json")
    with open_rewriter(config, run, **how) as rewriter:
        weights = rewriter.weights(which)
        assert weights is not None
        rewriter.predict(weights, out, restart=restart)
    return REWRITES.read(out)


def test_a_line_has_what_became_of_a_query(run: Path, listed: Path, tmp_path: Path) -> None:
    rows = rewritten(run, tmp_path / "all.jsonl", queries=listed)
    assert [row.original for row in rows] == ASKED
    folder = run / "search" / "made"
    index = BM25Index.open(folder / "bm25", StoredCorpus(folder / "corpus"))
    for row, hits in zip(
        rows, SingleStepSearch(index).search([row.query for row in rows], 100), strict=True
    ):
        cut_off = row.outcome == "query_too_long"
        assert (row.query, row.outcome) == read_output(row.text, BARE, cut_off=cut_off)
        found = [(hit.id, hit.score) for hit in hits] if row.outcome == REWRITTEN else []
        assert [tuple(each) for each in row.found or ()] == found
        assert row.sampled > 0
    assert any(row.found for row in rows)


def test_queries_of_a_collection_that_the_run_has_not(
    run: Path, listed: Path, tmp_path: Path
) -> None:
    """They are rewritten, and not searched for."""
    path = tmp_path / "rows.jsonl"
    given = [{"_id": "1", "text": ASKED[0], "collection": name} for name in ("made", "other")]
    path.write_text("".join(json.dumps(row) + "\n" for row in given))
    one, other = rewritten(run, tmp_path / "out.jsonl", queries=path)
    assert one.found is not None
    assert other.found is None
    bare = tmp_path / "run"
    shutil.copytree(run, bare, ignore=shutil.ignore_patterns("search", "eval"))
    rows = rewritten(bare, tmp_path / "bare.jsonl", queries=listed)
    assert [row.found for row in rows] == [None] * len(ASKED)
    assert not (bare / "search").exists()
