"""Scores of a DeepRetrieval run: beside all that it is compared with, and what goes wrong."""

from __future__ import annotations

import json
import shutil
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import ir_measures
import numpy as np
import pytest

from qrag_jax.environments.query_rewriting.output import OUTCOMES, REWRITTEN
from qrag_jax.environments.tools.episode import Document, Look, ToolTask
from qrag_jax.evaluators import rewrite_log
from qrag_jax.feedback.service import FeedbackLost
from qrag_jax.llm.outcomes import Failure
from qrag_jax.metrics import trec
from qrag_jax.metrics.ranking import ranking_columns
from qrag_jax.rollouts.kept_results import KeptResults
from qrag_jax.systems.deepretrieval_config import load_config
from qrag_jax.systems.deepretrieval_scoring import score_rewriter
from qrag_jax.systems.scored_ways import WayOptions
from tests.entry_points import Commands, refusal
from tests.systems.rewriting_run import QUERIES, SCRIPT, STEPS, collection, train

pytestmark = pytest.mark.long

MAIN = f"last checkpoint of step {STEPS}"
LOGS = {
    MAIN: f"last-{STEPS}",
    f"SFT alone, step {SCRIPT}": f"script-{SCRIPT}",
    "untrained": "untrained",
    "original query": "original",
    "without function words": "content_words",
}


@pytest.fixture(scope="module")
def run(commands: Commands, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(commands, tmp_path_factory.mktemp("deepretrieval") / "run")


@pytest.fixture(scope="module")
def scored(commands: Commands, run: Path) -> tuple[Path, str]:
    return run / "eval", commands.succeed("evaluate", *of(run))


def of(run: Path) -> tuple[str, ...]:
    return f"--workdir={run}", "--checkpoint=last"


def summary_of(folder: Path) -> dict:
    return json.loads((folder / "summary.json").read_text())


def test_the_ways_beside_each_other(scored: tuple[Path, str]) -> None:
    folder, out = scored
    found = summary_of(folder)
    assert found["main"] == MAIN
    assert [*found["pooled"]["scores"]] == [*LOGS]
    assert found["pooled"] == found["collections"]["made"]
    assert found["pooled"]["queries"] == found["pooled"]["scored"] == QUERIES
    assert found["notes"] == []
    winner = found["pooled"]["winner"]
    assert winner["by"] == "ndcg@10"
    assert f"made: won by {' and '.join(winner['ways'])}, ndcg@10 {winner['mean']:.3f}, +" in out
    assert (folder / "table.txt").read_text() in out


def test_scores_are_those_of_the_logs(scored: tuple[Path, str]) -> None:
    folder, _ = scored
    found = summary_of(folder)["pooled"]
    qrels = trec.read_qrels(folder / "trec" / "made" / "qrels.txt")
    by_way = {}
    for told, name in LOGS.items():
        rows = rewrite_log.read(folder / f"{name}.jsonl")
        assert [row.id for row in rows] == [*qrels]
        rankings = {row.id: row.ranking for row in rows}
        (values,) = ranking_columns(rankings, qrels, ["ndcg@10"]).values()
        by_way[told] = np.array([*values.values()])
        assert found["scores"][told]["ndcg@10"]["mean"] == pytest.approx(by_way[told].mean())
    for told, gain in found["gains"].items():
        difference = (by_way[MAIN] - by_way[told]).mean()
        assert gain["ndcg@10"]["mean"] == pytest.approx(difference)
    rivals = {told: values.mean() for told, values in by_way.items()}
    assert found["winner"]["ways"][0] == max(rivals, key=lambda told: rivals[told])


def test_runs_can_be_scored_by_others(scored: tuple[Path, str]) -> None:
    """Read back by their scores, as trec_eval orders documents, they have the same measures."""
    folder, _ = scored
    runs, found = folder / "trec" / "made", summary_of(folder)["pooled"]["scores"]
    qrels = [*ir_measures.read_trec_qrels(str(runs / "qrels.txt"))]
    assert {path.stem for path in runs.glob("*.run")} == {*LOGS.values()}
    for told, name in LOGS.items():
        run = [*ir_measures.read_trec_run(str(runs / f"{name}.run"))]
        own = ir_measures.calc_aggregate([ir_measures.nDCG @ 10], qrels, run)
        expected = found[told]["ndcg@10"]["mean"]
        assert own[ir_measures.nDCG @ 10] == pytest.approx(expected, abs=1e-6)


def test_what_the_models_write(scored: tuple[Path, str]) -> None:
    folder, _ = scored
    shapes = summary_of(folder)["shapes"]
    assert [*shapes] == [*LOGS][:3]
    for told, shape in shapes.items():
        rows = rewrite_log.read(folder / f"{LOGS[told]}.jsonl")
        assert {row.outcome for row in rows} <= {*OUTCOMES}
        assert shape["readable"] == np.mean([row.outcome == REWRITTEN for row in rows])
        assert shape["sampled_tokens"] == np.mean([row.sampled for row in rows])
        words = [len(row.query.split()) for row in rows if row.query]
        assert shape["query_words"] == (pytest.approx(np.mean(words)) if words else None)
        assert all(row.outcome == REWRITTEN for row in rows if row.found)


def test_an_export_has_the_scores(
    scored: tuple[Path, str], commands: Commands, run: Path, tmp_path: Path
) -> None:
    out = tmp_path / "exported"
    commands.succeed("export", *of(run), f"--out={out}")
    own = summary_of(scored[0])["collections"]["made"]["scores"][MAIN]
    card = (out / "README.md").read_text()
    assert "| collection | ndcg@10 | recall@100 | rr@10 |" in card
    cells = [f"{own[name]['mean']:.3f}" for name in ("ndcg@10", "recall@100", "rr@10")]
    assert f"| made, {QUERIES} queries | {' | '.join(cells)} |" in card


def test_queries_that_no_model_writes(scored: tuple[Path, str]) -> None:
    folder, _ = scored
    for row in rewrite_log.read(folder / "original.jsonl"):
        assert (row.query, row.outcome, row.sampled) == (row.original, "", 0)
    for row in rewrite_log.read(folder / "content_words.jsonl"):
        kept = row.query.split()
        assert 0 < len(kept) < len(row.original.split())
        assert all(word in row.original for word in kept)


def test_killed_between_ways(
    commands: Commands, run: Path, scored: tuple[Path, str], tmp_path: Path
) -> None:
    """The ways that are there stay; the others are as if nobody had killed it."""
    folder, out = scored[0], tmp_path / "eval"
    process = commands.start("evaluate", *of(run), f"--out={out}")
    while process.poll() is None and not (out / "untrained.jsonl").exists():
        time.sleep(0.005)
    process.kill()
    process.communicate(timeout=300)
    assert process.returncode == -signal.SIGKILL
    assert not (out / "summary.json").exists()
    before = {path: path.stat().st_mtime_ns for path in out.glob("*.jsonl")}
    assert 3 <= len(before) < len(LOGS)
    commands.succeed("evaluate", *of(run), f"--out={out}")
    assert before == {path: path.stat().st_mtime_ns for path in before}
    for name in LOGS.values():
        assert (out / f"{name}.jsonl").read_bytes() == (folder / f"{name}.jsonl").read_bytes()
    one, other = summary_of(out), summary_of(folder)
    assert {**one, "date": ""} == {**other, "date": ""}


def test_what_is_refused(
    commands: Commands, run: Path, scored: tuple[Path, str], tmp_path: Path
) -> None:
    # Of play, and of every search.
    for changed in ("sampling.temperature=0.5", "search.k1=2.0"):
        given = (f"--config.{changed}", f"--out={scored[0]}")
        assert "--restart" in refusal(commands.run("evaluate", *of(run), *given))
    told = refusal(commands.run("evaluate", *of(run), "--samples=2"))
    assert "was begun with other settings, data or weights; give --restart" in told
    told = refusal(commands.run("evaluate", *of(run), "--config.queries.made_test=4"))
    assert "(not as in its config: config.queries.made_test); give --out=FOLDER" in told
    assert "for runs of agents" in refusal(commands.run("evaluate", *of(run), "--sampled=2"))
    assert "runs of rlvr" in refusal(commands.run("evaluate", *of(run), "--retrievers=bm25"))
    out = tmp_path / "eval"
    shutil.copytree(scored[0], out)
    with (out / "original.jsonl").open("a") as file:
        file.write('{"id": "x"}\n')
    told = refusal(commands.run("evaluate", *of(run), f"--out={out}"))
    assert f"original.jsonl, line {QUERIES + 1}: is no row of this log (the field" in told
    whole = (scored[0] / "original.jsonl").read_text().splitlines(keepends=True)
    (out / "original.jsonl").write_text("".join(whole[1:]))
    told = refusal(commands.run("evaluate", *of(run), f"--out={out}"))
    assert "original.jsonl has other queries; give --restart" in told


ONE = {"1": "rivers of Norway run cold", "2": "goats eat grass", "3": "the moon is far"}
TWO = {"1": "ships sail to Oslo", "2": "bread needs flour and salt", "3": "cats sleep long"}
ASKED_ONE = {"1": "cold rivers", "2": "goats and grass"}
ASKED_TWO = {"1": "ships of Oslo", "2": "flour"}


def test_collections_with_the_same_ids(commands: Commands, run: Path, tmp_path: Path) -> None:
    """Each query is searched for in its own collection, and judged there."""
    one = collection(tmp_path / "one", ONE, ASKED_ONE)
    two = collection(tmp_path / "two", TWO, ASKED_TWO)
    out = tmp_path / "eval"
    told = commands.succeed(
        "evaluate", *of(run), f"--config.queries.test={one},dev;{two},dev", f"--out={out}"
    )
    found = summary_of(out)
    assert [*found["collections"]] == ["one", "two"]
    for name in ("one", "two"):
        own = found["collections"][name]
        assert own["queries"] == 2
        assert own["scores"]["original query"]["ndcg@10"]["mean"] == 1.0
        assert f"{name}: won by " in told
        runs = out / "trec" / name
        assert [*trec.read_run(runs / "original.run")] == ["1", "2"]
        assert (out / "search" / name / "corpus" / "corpus.json").exists()
        assert not (run / "search" / name).exists()
    assert "all collections: won by " in told
    assert found["pooled"]["queries"] == 4
    rows = rewrite_log.read(out / "original.jsonl")
    assert [(row.collection, row.id) for row in rows] == [
        *(("one", "1"), ("one", "2"), ("two", "1"), ("two", "2"))
    ]
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
    run: Path,
    scored: tuple[Path, str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    whole = rewrite_log.read(scored[0] / "original.jsonl")
    failing(monkeypatch, [whole[2].original])
    out = tmp_path / "eval"
    config = load_config(run / "config.json")
    found = score_rewriter(run, config, WayOptions("last", out=out))["pooled"]
    assert found["failed"]["original query"] == 1
    assert found["failed"]["without function words"] == 0
    assert (found["queries"], found["scored"]) == (QUERIES, QUERIES - 1)
    assert (
        f"made: {QUERIES - 1} queries; 1 more failed in one of the ways" in capsys.readouterr().out
    )
    kept = [row for place, row in enumerate(whole) if place != 2]
    qrels = trec.read_qrels(out / "trec" / "made" / "qrels.txt")
    own = {row.id: qrels[row.id] for row in kept}
    (values,) = ranking_columns({r.id: r.ranking for r in kept}, own, ["ndcg@10"]).values()
    mean = found["scores"]["original query"]["ndcg@10"]["mean"]
    assert mean == pytest.approx(np.mean([*values.values()]))
    assert found["gains"]["original query"]["queries"] == QUERIES - 1
    assert found["gains"]["without function words"]["queries"] == QUERIES
    assert whole[2].id not in trec.read_run(out / "trec" / "made" / "original.run")


def test_too_many_failed_searches(
    run: Path, scored: tuple[Path, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Nothing is kept of them, so that the same command tries again."""
    whole = rewrite_log.read(scored[0] / "original.jsonl")
    failing(monkeypatch, [row.original for row in whole])
    out = tmp_path / "eval"
    shutil.copytree(scored[0], out)
    (out / "original.jsonl").unlink()
    config = load_config(run / "config.json")
    with pytest.raises(FeedbackLost, match="6 of 6 searches failed, for example: status 500; "):
        score_rewriter(run, config, WayOptions("last", out=out))
    assert not (out / "original.jsonl").exists()
