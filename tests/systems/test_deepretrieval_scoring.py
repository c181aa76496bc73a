"""A trained rewriter: its scores beside all that it is compared with, and files it rewrites."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ir_measures
import numpy as np
import pytest

from qrag_jax.data.corpora import read_qrels
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
from tests.entry_points import COURSES
from tests.systems.corpora import write_collection
from tests.systems.small_runs import with_fields

SCRIPT, STEPS = 4, COURSES["deepretrieval"].steps
MAIN = f"last checkpoint of step {STEPS}"
LOGS = {
    MAIN: f"last-{STEPS}",
    f"after script, step {SCRIPT}": f"script-{SCRIPT}",
    "untrained": "untrained",
    "original query": "original",
    "without function words": "content_words",
}
ASKED = [f"In which town was the owner of mill number {n} born, if I may ask?" for n in range(7)]


@pytest.fixture(scope="module")
def run(scored: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the scored run."""
    workdir = tmp_path_factory.mktemp("deepretrieval") / "run"
    return Path(shutil.copytree(scored("deepretrieval"), workdir))


def score(run: Path, out: Path | None = None, **fields: Any) -> dict[str, Any]:
    config = with_fields(load_config(run / "config.json"), fields)
    return score_rewriter(run, config, ScoreOptions("last", out=out))


def mean_ndcg(rows: Sequence[RewriteRow], folder: Path) -> float:
    """By `metrics.ranking`, of the rows' rankings and the written judgements."""
    judged = read_qrels(folder / "trec" / "made" / "qrels.txt")
    qrels = {row.id: judged[row.id] for row in rows}
    (values,) = ranking_columns({r.id: r.ranking for r in rows}, qrels, ["ndcg@10"]).values()
    return float(np.mean([*values.values()]))


# ---------------------------------------------------------------- scores


def test_scores_are_those_of_the_logs(run: Path) -> None:
    folder = run / "eval"
    found = json.loads((folder / "summary.json").read_text())["pooled"]
    rows = {way: REWRITES.read(folder / f"{name}.jsonl") for way, name in LOGS.items()}
    means = {way: mean_ndcg(own, folder) for way, own in rows.items()}
    counts = [(each["queries"], each["failed"]) for each in found["scores"].values()]
    assert {*counts} == {(len(rows[MAIN]), 0)}
    assert len(rows[MAIN]) > 2
    assert {way: each["ndcg@10"]["mean"] for way, each in found["scores"].items()} == (
        pytest.approx(means)
    )
    assert {way: each["ndcg@10"]["mean"] for way, each in found["gains"].items()} == (
        pytest.approx({way: means[MAIN] - mean for way, mean in means.items() if way != MAIN})
    )


def test_logs_of_other_settings_or_queries_are_refused(run: Path, tmp_path: Path) -> None:
    for fields in ({"sampling__temperature": 0.5}, {"search__k1": 2.0}):
        with pytest.raises(InputError, match="--restart"):
            score(run, run / "eval", **fields)
    with pytest.raises(InputError, match=r"config\.queries\.made_test"):
        score(run, queries__made_test=4)
    out = Path(shutil.copytree(run / "eval", tmp_path / "eval"))
    log = out / "original.jsonl"
    first, *others = REWRITES.read(log)
    log.unlink()
    REWRITES.append(log, [dataclasses.replace(first, id="another"), *others])
    with pytest.raises(InputError, match=r"original\.jsonl"):
        score(run, out)


def test_weights_that_are_not_kept_are_not_scored(run: Path, tmp_path: Path) -> None:
    bare = tmp_path / "run"
    shutil.copytree(run, bare, ignore=shutil.ignore_patterns("stages", "eval"))
    found = score(bare)
    (note,) = found["notes"]
    assert "after script" in note
    assert [*found["pooled"]["scores"]] == [way for way in LOGS if "script" not in way]


ONE = {"1": "rivers of Norway run cold", "2": "goats eat grass", "3": "the moon is far"}
TWO = {"1": "ships sail to Oslo", "2": "bread needs flour and salt", "3": "cats sleep long"}


def test_collections_with_the_same_ids(run: Path, tmp_path: Path) -> None:
    """Each query is searched for in its own collection, and judged there."""
    for name, documents, asked in (
        ("one", ONE, {"1": "cold rivers", "2": "goats and grass"}),
        ("two", TWO, {"1": "ships of Oslo", "2": "flour"}),
    ):
        judged = {query: (text, {query: 1}) for query, text in asked.items()}
        write_collection(tmp_path / name, documents, {"dev": judged})
    out = tmp_path / "eval"
    found = score(run, out, queries__test=f"{tmp_path}/one,dev;{tmp_path}/two,dev")
    assert [*found["collections"]] == ["one", "two"]
    for name, own in found["collections"].items():
        original = own["scores"]["original query"]
        assert (original["queries"], original["ndcg@10"]["mean"]) == (2, 1.0)
        ranked = ir_measures.read_trec_run(str(out / "trec" / name / "original.run"))
        assert {each.query_id for each in ranked} == {"1", "2"}
        assert not (run / "search" / name).exists()
    assert found["pooled"]["scores"]["original query"]["queries"] == 4
    rows = REWRITES.read(out / "original.jsonl")
    assert [row.collection for row in rows] == ["one", "one", "two", "two"]
    assert [row.ranking[0] for row in rows] == ["1", "2", "1", "2"]


def test_a_failed_search_is_no_zero(
    run: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    look = KeptResults.look
    whole = REWRITES.read(run / "eval" / "original.jsonl")
    dead = {whole[2].original}

    def broken(
        self: KeptResults, asked: Sequence[tuple[ToolTask, Look]]
    ) -> list[tuple[Document, ...] | Failure]:
        return [
            Failure("server", "status 500", 0) if step.query in dead else found
            for (_, step), found in zip(asked, look(self, asked), strict=True)
        ]

    monkeypatch.setattr(KeptResults, "look", broken)
    out = Path(shutil.copytree(run / "eval", tmp_path / "eval"))
    (out / "original.jsonl").unlink()
    found = score(run, out)["pooled"]
    original, words = (found["scores"][way] for way in ("original query", "without function words"))
    assert (original["failed"], words["failed"]) == (1, 0)
    kept = [row for place, row in enumerate(whole) if place != 2]
    assert original["ndcg@10"]["mean"] == pytest.approx(mean_ndcg(kept, out))
    # Too many of them: nothing is kept, so that the same command tries again.
    dead.update(row.original for row in whole)
    (out / "original.jsonl").unlink()
    with pytest.raises(FeedbackLost, match=f"{len(whole)} of {len(whole)}"):
        score(run, out)
    assert not (out / "original.jsonl").exists()


# ---------------------------------------------------------------- files of queries


def rewritten(run: Path, queries: Path) -> list[RewriteRow]:
    out = queries.with_suffix(".out.jsonl")
    # Random weights seldom end an output, so it may be long.
    config = with_fields(load_config(run / "config.json"), {"writing__query_tokens": 200})
    with open_rewriter(config, run, queries=queries) as rewriter:
        way = rewriter.way(rewriter.weights("last"))
        rewriter.questions.into(out, way, {}, rewriter.stop, restart=True)
    return REWRITES.read(out)


def test_a_line_has_what_became_of_a_query(run: Path, tmp_path: Path) -> None:
    listed = tmp_path / "queries.txt"
    listed.write_text("\n".join(ASKED) + "\n")
    rows = rewritten(run, listed)
    assert [row.original for row in rows] == ASKED
    folder = run / "search" / "made"
    index = BM25Index.open(folder / "bm25", StoredCorpus(folder / "corpus"))
    every = SingleStepSearch(index).search([row.query for row in rows], 100)
    for row, hits in zip(rows, every, strict=True):
        cut_off = row.outcome == "query_too_long"
        assert (row.query, row.outcome) == read_output(row.text, BARE, cut_off=cut_off)
        found = [(hit.id, hit.score) for hit in hits] if row.outcome == REWRITTEN else []
        assert [tuple(each) for each in row.found or ()] == found
        assert row.sampled > 0
    assert any(row.found for row in rows)


def test_queries_of_a_collection_that_the_run_lacks_are_not_searched_for(
    run: Path, tmp_path: Path
) -> None:
    path = tmp_path / "rows.jsonl"
    asked = [{"_id": "1", "text": ASKED[0], "collection": name} for name in ("made", "other")]
    path.write_text("".join(json.dumps(row) + "\n" for row in asked))
    one, other = rewritten(run, path)
    assert one.found is not None
    assert other.found is None
    bare = tmp_path / "run"
    shutil.copytree(run, bare, ignore=shutil.ignore_patterns("search", "eval"))
    assert [row.found for row in rewritten(bare, path)] == [None, None]
    assert not (bare / "search").exists()
