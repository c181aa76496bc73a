"""DeepRetrieval put together: updates, rewards, guards, its config, and how a run is scored."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ir_measures
import jax
import numpy as np
import pytest

from qrag_jax.data.corpora import read_qrels, read_query_list
from qrag_jax.data.sample import Sample
from qrag_jax.environments.episode import Failed, Look, ToolTally, ToolTask
from qrag_jax.environments.queries import BARE, REWRITTEN, TOO_LONG, Searched, read_output
from qrag_jax.errors import FeedbackLost, InputError
from qrag_jax.feedback.rewrite import GuardsConfig
from qrag_jax.llm.outcomes import Failure
from qrag_jax.metrics.ranking import ndcg, ranking_columns
from qrag_jax.metrics.row_log import REWRITES, RewriteRow
from qrag_jax.retrieval.bm25 import BM25Index
from qrag_jax.retrieval.corpus import StoredCorpus
from qrag_jax.retrieval.multi_step import SingleStepSearch
from qrag_jax.rollouts.libraries import KeptResults
from qrag_jax.rollouts.token_episodes import Episode
from qrag_jax.rollouts.trajectories import TRUNCATED, TokenTrajectory
from qrag_jax.runtime.interrupt import EndedEarly, StopSignal
from qrag_jax.systems.config import load_config
from qrag_jax.systems.deepretrieval.config import RewriteConfig, default_config
from qrag_jax.systems.deepretrieval.system import DeepRetrieval
from qrag_jax.systems.scoring import ScoreOptions, open_predictor, score_run
from tests.entry_points import COURSES
from tests.support.worlds import write_lines
from tests.systems.corpora import write_collection
from tests.systems.small_runs import opened_alone, said, with_fields
from tests.systems.small_runs import small_deepretrieval as small

STOP = StopSignal()
DEAD = Failure("server", "status 500")
SCRIPT_STEPS = 2  # of `small`


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with opened_alone(small(), tmp_path_factory.mktemp("deepretrieval") / "run") as made:
        yield made


@pytest.fixture
def system(both: Any) -> DeepRetrieval:
    return both[0]


# ---------------------------------------------------------------- stages


def test_stages_follow_each_other_with_moments_and_a_critic_of_their_own(both: Any) -> None:
    system, run = both
    state, kept = system.first_state(), []
    system.keep = lambda step, params: kept.append(step)
    experience = system.experience(run, STOP)
    for step in range(SCRIPT_STEPS):
        state, metrics = system.update(state, experience.next(state, step, STOP))
        assert "return" not in metrics
    before = jax.device_get(state)
    assert kept == []
    state, metrics = system.update(state, experience.next(state, SCRIPT_STEPS, STOP))
    assert kept == [SCRIPT_STEPS]
    after = jax.device_get(state)
    counts = [int(x) for x in jax.tree.leaves(after.opt_state) if np.shape(x) == ()]
    assert set(counts) == {1}
    assert int(after.step) == SCRIPT_STEPS + 1
    # The KL is to the weights with which the stage began, of which the critic began as a copy.
    jax.tree.map(np.testing.assert_array_equal, after.reference, before.params)
    assert float(metrics["kl"]) == pytest.approx(0, abs=1e-6)
    # Its map begins with zeros, through which no gradient comes to its tower.
    jax.tree.map(np.testing.assert_array_equal, after.critic.tower, before.params)
    assert float(np.abs(after.critic.weights).max()) > 0
    # The sampler's log-probabilities are the learner's.
    assert float(metrics["sampler_kl"]) < 1e-5
    assert abs(float(metrics["sampler_largest_ratio"]) - 1) < 5e-3


# ---------------------------------------------------------------- rewards


def trajectory(system: DeepRetrieval, text: str, original: float | Failure) -> TokenTrajectory:
    """Of a model that writes `text` for the first training query."""
    inputs, task = system.inputs, system.inputs.train[0]
    episode = said(inputs.agent, inputs.library, inputs.speech, task, text)
    return system.trajectory(episode, (0, 0), task, original)


def test_a_query_is_worth_what_it_finds_less_what_the_original_finds(system: DeepRetrieval) -> None:
    task, entity = system.inputs.train[0], system.inputs.script.given[0].entity
    ((_, original),) = system.judged_by([task], STOP)
    k = system.config.reward.k
    for text in (entity, task.question, "nothing of that"):
        each = trajectory(system, text, original)
        (found,) = system.searched([task], k, STOP, {task.question: text}.get)
        value = ndcg([one.id for one in found], dict(task.grades), k)  # type: ignore[union-attr]
        assert each.parts[f"ndcg@{k}"] == pytest.approx(value)
        assert each.parts["reward"] == each.parts["gain"] == pytest.approx(value - original)
        if text == task.question:
            assert each.parts["reward"] == 0
        elif text == entity:
            assert value == 1


def test_what_is_cut_off_costs_and_what_failed_has_no_reward(system: DeepRetrieval) -> None:
    task = system.inputs.train[0]
    ended = Searched(answer="", outcome=TOO_LONG, tally=ToolTally(turns=1, truncated=True))
    cut = system.trajectory(Episode(ended, (), 1), (0, 0), task, 0.625)
    assert (cut.status, cut.parts["reward"]) == (TRUNCATED, -0.625)
    timeout = Episode(Failed("timeout", "no reply"), (), 2)
    failed = system.trajectory(timeout, (0, 0), task, 0.5)
    assert (failed.failed, failed.status, failed.parts) == (True, "timeout", {})
    lost = trajectory(system, "Trarb", DEAD)
    assert (lost.failed, lost.status, lost.parts) == (True, "server", {})


# ---------------------------------------------------------------- original queries


def test_searches_that_fail_are_repeated(system: DeepRetrieval) -> None:
    """Those alone; each result stands at the place of its query."""
    calls: list[list[str]] = []

    def look(asked: Sequence[tuple[ToolTask, Look]]) -> list[Any]:
        calls.append([step.query for _, step in asked])
        return [DEAD if query == "b" and len(calls) < 3 else (query,) for query in calls[-1]]

    inputs = dataclasses.replace(system.inputs, library=SimpleNamespace(library=None, look=look))
    tasks = [Sample(text, text, grades=(("d1", 1),)) for text in "abc"]
    for attempts, second in ((3, ("b",)), (2, DEAD)):
        calls.clear()
        rollout = dataclasses.replace(system.config.rollout, attempts=attempts)
        config = dataclasses.replace(system.config, rollout=rollout)
        searches: Any = dataclasses.replace(system, config=config, inputs=inputs)
        assert searches.searched(tasks, 5, STOP) == [("a",), second, ("c",)]
        assert calls == [[*"abc"], ["b"], ["b"]][:attempts]


# ---------------------------------------------------------------- guards

LONG, SHORT = {"query_words": 11.0}, {"query_words": 4.0}


def test_a_guard_ends_a_training_after_its_patience_also_when_resumed(both: Any) -> None:
    system, run = both
    limits = {"guards": GuardsConfig(max_words=10.0, patience=2)}
    config, progress = dataclasses.replace(system.config, **limits), run.progress
    played = dataclasses.replace(system, config=config)
    experience = played.experience(run, STOP)
    for metrics in (LONG, SHORT, LONG):
        played.look(metrics)
        played.prepare(None, 1, STOP)
    run.progress = dataclasses.replace(progress, batches=experience.position()[0])
    resumed = dataclasses.replace(system, config=config)
    resumed.experience(run, STOP)
    run.progress = progress
    for guarded in (played, resumed):
        guarded.look(LONG)
        with pytest.raises(EndedEarly, match=r"config\.guards\.max_words"):
            guarded.prepare(None, 2, STOP)


# ---------------------------------------------------------------- config


def of(**fields: Any) -> RewriteConfig:
    config = default_config()
    config.update_from_flattened_dict(fields)
    return RewriteConfig.of(config)


RL = {"stages": ("rl",)}
GRPO = {"algorithm": "grpo"}
REMOTE = {**RL, "search.engine": "remote"}


def test_the_schedule_ends_with_the_last_update() -> None:
    both = of(**{"script.steps": 5, "train.steps": 7, "ppo.epochs": 3, "ppo.minibatches": 2})
    assert (both.train.steps, both.optimizer.total_steps) == (5 + 7, 7 * 3 * 2)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"stages": ("rl", "script")}, "config.stages"),
        ({"writing.prompt": "rewrite_boolean"}, "config.writing.prompt"),
        ({**GRPO, "grpo.members": 8, "train.batch_size": 12}, "config.grpo.members"),
        ({**GRPO, "grpo.longest": 255, "train.batch_size": 64}, "config.grpo.longest"),
        ({"guards.max_kl": 0.5, "ppo.kl": 0.0}, "config.guards.max_kl"),
        ({"ppo.critic": "none", "ppo.critic_warmup": 2}, "config.ppo.critic_warmup"),
        ({**REMOTE, "reward.measure": "answer_rank"}, "config.reward.measure"),
        ({**REMOTE, "engine.most": 999, "eval.measures": ("ndcg@10", "ap")}, "config.eval.measur"),
    ],
)
def test_what_does_not_go_together_is_refused(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(InputError, match=re.escape(named)):
        of(**fields)


# ---------------------------------------------------------------- a run is scored

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
    return score_run(run, config, ScoreOptions("last", out=out))


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
    assert len(rows[MAIN]) > 2
    assert found["scores"].keys() == means.keys()
    for way, mean in means.items():
        assert found["scores"][way]["ndcg@10"]["mean"] == pytest.approx(mean)
        if way != MAIN:
            gain = found["gains"][way]["ndcg@10"]["mean"]
            assert gain == pytest.approx(means[MAIN] - mean)


def test_other_queries_need_a_folder_of_their_own(run: Path) -> None:
    with pytest.raises(InputError, match=r"config\.queries\.made_test"):
        score(run, queries__made_test=4)


def test_collections_with_the_same_ids(run: Path, tmp_path: Path) -> None:
    """Each query is searched for in its own collection, and judged there."""
    folders = []
    for name, documents, asked in (
        ("one", {"1": "rivers of Norway run cold", "2": "goats eat grass"}, "cold rivers"),
        ("two", {"1": "ships sail to Oslo", "2": "bread needs flour"}, "ships of Oslo"),
    ):
        folders.append(f"{tmp_path / name},dev")
        write_collection(tmp_path / name, documents, {"dev": {"1": (asked, {"1": 1})}})
    out = tmp_path / "eval"
    found = score(run, out, queries__test=";".join(folders))
    assert [*found["collections"]] == ["one", "two"]
    for name, own in found["collections"].items():
        original = own["scores"]["original query"]
        assert (original["queries"], original["ndcg@10"]["mean"]) == (1, 1.0)
        ranked = ir_measures.read_trec_run(str(out / "trec" / name / "original.run"))
        assert {each.query_id for each in ranked} == {"1"}
        assert not (run / "search" / name).exists()
    assert found["pooled"]["scores"]["original query"]["queries"] == 2


def test_many_failed_searches_leave_no_log(
    run: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """So that the same command tries again; a few failed ones are no zeros."""
    look, dead = KeptResults.look, set[str]()
    hopeless = Failure("filtered", "no")  # no later search changes that

    def broken(library: KeptResults, asked: Sequence[tuple[ToolTask, Look]]) -> list[Any]:
        found = zip(asked, look(library, asked), strict=True)
        lost = DEAD if len(dead) == 1 else hopeless
        return [lost if step.query in dead else result for (_, step), result in found]

    monkeypatch.setattr(KeptResults, "look", broken)
    out = Path(shutil.copytree(run / "eval", tmp_path / "eval"))
    first, *others = REWRITES.read(out / "original.jsonl")
    for failing in ([first], [first, *others]):
        dead.update(row.original for row in failing)
        (out / "original.jsonl").unlink()
        if len(failing) == 1:
            original = score(run, out)["pooled"]["scores"]["original query"]
            assert original["failed"] == 1
            assert original["ndcg@10"]["mean"] == pytest.approx(mean_ndcg(others, out))
        else:
            with pytest.raises(FeedbackLost):
                score(run, out)
            assert not (out / "original.jsonl").exists()


# ---------------------------------------------------------------- files of queries


def test_a_line_has_what_became_of_a_query(run: Path, tmp_path: Path) -> None:
    """One that asks another collection than the run has is not searched for."""
    rows = [{"_id": str(n), "text": text, "collection": "made"} for n, text in enumerate(ASKED)]
    rows[0]["collection"] = "other"
    queries = write_lines(tmp_path / "queries.jsonl", rows)
    # Random weights seldom end an output, so it may be long.
    config = with_fields(load_config(run / "config.json"), {"writing__query_tokens": 200})
    listed, options = read_query_list(queries), ScoreOptions("last")
    with open_predictor(DeepRetrieval, config, run, options, listed=listed) as rewriter:
        way = rewriter.way(rewriter.weights("last"))
        rewriter.into(tmp_path / "out.jsonl", way, rewriter.stop, restart=True)
    other, *rows = REWRITES.read(tmp_path / "out.jsonl")
    assert other.found is None
    assert [row.original for row in rows] == ASKED[1:]
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
