"""DeepRetrieval put together: updates, rewards, guards, its config, and how a run is scored."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import ir_measures
import jax
import numpy as np
import pytest

from qrag_jax.data.corpora import read_qrels
from qrag_jax.environments.episode import Document, Failed, Look, ToolTally, ToolTask
from qrag_jax.environments.queries import (
    BARE,
    REWRITTEN,
    TOO_LONG,
    RewriteTask,
    Searched,
    read_output,
)
from qrag_jax.errors import FeedbackLost, InputError
from qrag_jax.feedback.rewards import Patience
from qrag_jax.feedback.rewrite import GuardsConfig, RewriteRewardConfig
from qrag_jax.llm.outcomes import Failure
from qrag_jax.metrics.ranking import ndcg, ranking_columns
from qrag_jax.metrics.rows import REWRITES, RewriteRow
from qrag_jax.retrieval.bm25 import BM25Index
from qrag_jax.retrieval.corpus import StoredCorpus
from qrag_jax.retrieval.multi_step import SingleStepSearch
from qrag_jax.rollouts.experience import Playing, QuestionOrder
from qrag_jax.rollouts.libraries import KeptResults
from qrag_jax.rollouts.token_episodes import Episode
from qrag_jax.rollouts.trajectories import TRUNCATED, TokenTrajectory
from qrag_jax.runtime.interrupt import EndedEarly, StopSignal
from qrag_jax.systems.config import load_config
from qrag_jax.systems.deepretrieval import (
    DeepRetrieval,
    Found,
    GuardedExperience,
    open_rewriter,
    score_rewriter,
)
from qrag_jax.systems.deepretrieval_config import RewriteConfig, default_config
from qrag_jax.systems.scoring import ScoreOptions
from tests.entry_points import COURSES
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
    assert float(metrics["learning_rate"]) == pytest.approx(1e-3)
    # The sampler's log-probabilities are the learner's.
    assert float(metrics["sampler_kl"]) < 1e-5
    assert abs(float(metrics["sampler_largest_ratio"]) - 1) < 5e-3
    counted = experience.counts()
    assert {"train/gain", "train/format", "train/words"} <= counted.keys()
    assert counted["failed_episodes"] == 0
    assert counted["searches"] > 0


def test_adapters_learn_in_epochs_without_a_critic(system: DeepRetrieval, tmp_path: Path) -> None:
    ways = {"ppo__epochs": 2, "ppo__minibatches": 2, "ppo__critic": "none", "model__lora__rank": 4}
    model = str(system.inputs.model.folder)
    config = small(stages=("rl",), model__path=model, rollout__query_tokens=5, **ways)
    with opened_alone(config, tmp_path / "run") as (other, run):
        state, base = other.first_state(), jax.device_get(other.base)
        assert state.critic is None
        state, metrics = other.update(state, other.experience(run, STOP).next(state, 0, STOP))
        assert np.isfinite(float(metrics["loss"]))
        assert 0 < float(metrics["tokens"]) <= 4 * 5  # shorter in learning than in evaluation
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(other.base), base)


# ---------------------------------------------------------------- rewards


def trajectory(system: DeepRetrieval, text: str, original: float | Failure) -> TokenTrajectory:
    """Of a model that writes `text` for the first training query."""
    inputs, task = system.inputs, system.inputs.train[0]
    episode = said(inputs.agent, inputs.library, inputs.speech, task, text)
    return system.trajectory(episode, (0, 0), task, original)


def test_a_query_is_worth_what_it_finds_less_what_the_original_finds(system: DeepRetrieval) -> None:
    task, entity = system.inputs.train[0], system.inputs.script.given[0].entity
    original, k = system.measures([task], patience())[0], system.config.reward.k
    for text in (entity, task.question, "nothing of that"):
        each = trajectory(system, text, original)
        (found,) = system.searched([task], k, [text])
        value = ndcg([one.id for one in found], dict(task.grades), k)  # type: ignore[union-attr]
        assert each.parts[f"ndcg@{k}"] == pytest.approx(value)
        assert each.parts["reward"] == each.parts["gain"] == pytest.approx(value - original)
        if text == task.question:
            assert each.parts["reward"] == 0
        elif text == entity:
            assert value == 1


def test_reading_costs_what_the_corpus_says(system: DeepRetrieval) -> None:
    reward = dataclasses.replace(system.config.reward, reading_cost=0.25)
    costly = dataclasses.replace(system, config=dataclasses.replace(system.config, reward=reward))
    task, library = system.inputs.train[0], system.inputs.library.library
    passages = [passage.whole.lower() for passage in library.by_name[task.collection].corpus]

    def read(text: str) -> int:
        asked = set(re.findall(r"\w+", text.lower()))
        return sum(len(asked & set(re.findall(r"\w+", each))) for each in passages)

    text = task.question.split()[0]
    each, share = trajectory(costly, text, 0.5), read(text) / read(task.question)
    assert each.parts["read_share"] == pytest.approx(share)
    assert each.parts["reward"] == pytest.approx(each.parts["gain"] - 0.25 * share)
    assert costly.shape_of([each])["train/read_share"] == each.parts["read_share"] < 1


def test_what_is_cut_off_costs_the_originals_measure_and_what_failed_has_no_reward(
    system: DeepRetrieval,
) -> None:
    task = system.inputs.train[0]
    ended = Searched(answer="", outcome=TOO_LONG, tally=ToolTally(turns=1, truncated=True))
    cut = system.trajectory(Episode(ended, (), 1), (0, 0), task, 0.625)
    assert (cut.status, cut.parts["reward"]) == (TRUNCATED, -0.625)
    timeout = Episode(Failed("timeout", "no reply"), (), 2)
    failed = system.trajectory(timeout, (0, 0), task, 0.5)
    assert (failed.failed, failed.status, failed.parts, failed.attempt) == (True, "timeout", {}, 2)
    lost = trajectory(system, "Trarb", DEAD)
    assert (lost.failed, lost.status, lost.parts) == (True, "server", {})


# ---------------------------------------------------------------- original queries

ONE, TWO, THREE = (RewriteTask.judged(f"{n}", f"query {n}", {f"d{n}": 1}) for n in (1, 2, 3))


class Search:
    """Finds `d2`, then `d1`; the first searches for some queries fail."""

    def __init__(self, **fails: int) -> None:
        self.fails = fails  # by the last letter of the query
        self.library = None
        self.calls: list[list[str]] = []

    def look(self, asked: Sequence[tuple[ToolTask, Look]]) -> list[Found]:
        self.calls.append([step.query for _, step in asked])
        return [*map(self._one, self.calls[-1])]

    def _one(self, query: str) -> Found:
        name = f"q{query[-1]}"
        self.fails[name] = self.fails.get(name, 0) - 1
        if self.fails[name] >= 0:
            return DEAD
        return tuple(Document(each, "", "", False) for each in ("d2", "d1"))


def searching(system: DeepRetrieval, search: Search, attempts: int) -> DeepRetrieval:
    """The system with this search, of so many attempts."""
    rollout = dataclasses.replace(system.config.rollout, attempts=attempts)
    reward = RewriteRewardConfig(measure="rr", k=3)
    config = dataclasses.replace(system.config, rollout=rollout, reward=reward)
    inputs = dataclasses.replace(system.inputs, library=search)
    return dataclasses.replace(system, config=config, inputs=inputs)


def patience(share: float = 0.0) -> Patience:
    return Patience(share, STOP, pytest.fail, "", Failure)  # it says nothing


def test_searches_that_fail_are_repeated_and_few_failures_are_values(system: DeepRetrieval) -> None:
    search = Search(q1=2)
    searches = searching(system, search, 3)
    assert searches.measures([ONE, TWO, THREE], patience()) == [0.5, 1.0, 0.0]
    assert search.calls == [["query 1", "query 2", "query 3"], ["query 1"], ["query 1"]]
    failing = searching(system, Search(q1=2), 2)
    assert failing.measures([ONE, TWO], patience(0.5)) == [DEAD, 1.0]
    assert failing.measures([ONE, TWO], patience(0.5)) == [0.5, 1.0]  # they are not kept


# ---------------------------------------------------------------- guards

LONG, SHORT = {"query_words": 11.0}, {"query_words": 4.0}


def guarded(position: Any = None) -> GuardedExperience:
    playing = Playing(
        play=lambda params, numbers, step, stop: [*numbers],
        batch=lambda episodes, number: np.array(episodes),
        save=lambda episode: episode,
        restore=lambda saved: saved,
        params=lambda state: state,
        staleness=0,
        steps=100,
    )
    order, guards = QuestionOrder(12, 3, seed=1).at, GuardsConfig(max_words=10.0, patience=2)
    return GuardedExperience(order, playing, dict, guards, position=position)


def test_a_guard_ends_a_training_after_its_patience_also_when_resumed() -> None:
    played = guarded()
    first = played.next(None, 0, STOP)
    for metrics in (LONG, SHORT, LONG):
        played.look(metrics)
        assert not played.ended
    position, pending = played.position()
    assert pending == []
    second, resumed = played.next(None, 1, STOP), guarded(position)
    np.testing.assert_array_equal(resumed.next(None, 1, STOP), second)
    assert not np.array_equal(first, second)
    for experience in (played, resumed):
        experience.look(LONG)
        with pytest.raises(EndedEarly, match=r"config\.guards\.max_words"):
            experience.next(None, 2, STOP)


# ---------------------------------------------------------------- config


def of(**fields: Any) -> RewriteConfig:
    config = default_config()
    config.update_from_flattened_dict(fields)
    return RewriteConfig.of(config)


RL = {"stages": ("rl",)}
GRPO = {"algorithm": "grpo"}
REMOTE = {**RL, "search.engine": "remote"}


def test_steps_and_groups() -> None:
    both = of(**{"script.steps": 5, "train.steps": 7, "ppo.epochs": 3, "ppo.minibatches": 2})
    assert [*both.plan] == [("script", 0, 5, 0), ("rl", 5, 7, 0)]
    assert both.train.steps == 12
    assert both.optimizer.total_steps == 7 * 3 * 2
    only = of(**RL, **{"train.steps": 7})
    assert (len(only.plan), only.train.steps, only.optimizer.total_steps) == (1, 7, 7)
    by_ppo = of(**{"train.batch_size": 12})
    assert (by_ppo.rule, by_ppo.groups) == (by_ppo.ppo, 12)
    grouped = of(**GRPO, **{"train.batch_size": 12, "grpo.members": 4, "grpo.longest": 300})
    assert (grouped.rule, grouped.groups) == (grouped.grpo, 3)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"stages": ("rl", "script")}, "config.stages"),
        ({"search.engine": "remote"}, "config.stages"),
        ({"writing.prompt": "rewrite_boolean"}, "config.writing.prompt"),
        ({**GRPO, "grpo.members": 8, "train.batch_size": 12}, "config.grpo.members"),
        ({"ppo.minibatches": 3, "train.batch_size": 16}, "config.ppo.minibatches"),
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


def test_logs_of_other_settings_or_queries_are_refused(run: Path) -> None:
    for fields in ({"sampling__temperature": 0.5}, {"search__k1": 2.0}):
        with pytest.raises(InputError, match="--restart"):
            score(run, run / "eval", **fields)
    with pytest.raises(InputError, match=r"config\.queries\.made_test"):
        score(run, queries__made_test=4)


def test_weights_that_are_not_kept_are_not_scored(run: Path, tmp_path: Path) -> None:
    bare = tmp_path / "run"
    shutil.copytree(run, bare, ignore=shutil.ignore_patterns("stages", "eval"))
    found = score(bare)
    (note,) = found["notes"]
    assert "after script" in note
    assert [*found["pooled"]["scores"]] == [way for way in LOGS if "script" not in way]


NORTH = {"1": "rivers of Norway run cold", "2": "goats eat grass", "3": "the moon is far"}
SOUTH = {"1": "ships sail to Oslo", "2": "bread needs flour and salt", "3": "cats sleep long"}


def test_collections_with_the_same_ids(run: Path, tmp_path: Path) -> None:
    """Each query is searched for in its own collection, and judged there."""
    for name, documents, asked in (
        ("one", NORTH, {"1": "cold rivers", "2": "goats and grass"}),
        ("two", SOUTH, {"1": "ships of Oslo", "2": "flour"}),
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
