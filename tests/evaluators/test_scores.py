"""Scores of evaluations: hops, rewritings, halves, episodes that are cut.

What a model broke is 0; what failed is left out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from ml_collections import ConfigDict

from qrag_jax.data.sample import Sample
from qrag_jax.environments import queries
from qrag_jax.environments.episode import Closed, Document, Ended, Failed
from qrag_jax.evaluators.episodes import TrainingScores
from qrag_jax.feedback.rewards import EpisodeRewards
from qrag_jax.llm.outcomes import Failure
from qrag_jax.metrics.facts import until_found
from qrag_jax.metrics.row_log import Hop, RewriteRow, Searched
from qrag_jax.metrics.summaries import measured
from qrag_jax.rollouts.token_episodes import Episode
from qrag_jax.rollouts.trajectories import Turn
from qrag_jax.runtime.interrupt import StopSignal
from qrag_jax.systems.config import ALL, CHOOSING, REPORTED, drawn
from qrag_jax.systems.deepretrieval import system as deepretrieval
from qrag_jax.systems.harr import system as harr
from qrag_jax.systems.leret import system as leret
from qrag_jax.systems.rlvr.config import EvalConfig
from qrag_jax.systems.scoring import ScoreOptions, begin_scoring
from qrag_jax.systems.training import MeshSystem
from tests.environments.trying import STATE
from tests.retrieval_logs import played_rows


def row(outcome: str, recall: float, ap: float, *, tokens: int = 2, read: int = 10) -> Hop:
    scores = {"recall": recall, "ap": ap, "all_gold": float(recall == 1)}
    return Hop("q", outcome, (), scores, *((read, tokens) if outcome else ()))


def hop_rows(*hops: list[Hop]) -> list[Searched]:
    played = zip(*hops, strict=True)
    return [Searched(STATE.id, STATE.question, (), STATE.pages, own) for own in played]


HOPS = [
    [
        row(queries.SEARCHED, 0.5, 0.5),
        row(queries.TOO_LONG, 0.0, 0.0, tokens=8),
        row(queries.STOPPED, 0.5, 0.25),
    ],
    [row(queries.SEARCHED, 1.0, 1.0), row(queries.EMPTY, 0.0, 0.0, tokens=1), row("", 0.5, 0.25)],
]


def test_means_are_over_all_questions() -> None:
    found = leret.hop_scores(hop_rows(*HOPS))
    means = {"hop1/recall": 1 / 3, "hop2/ap": 1.25 / 3, "hop2/all_gold": 1 / 3}
    assert {name: found[name] for name in means} == pytest.approx(means)
    assert (found["read_tokens"], found["sampled_tokens"]) == (50 / 3, 5)
    assert (found["empty_share"], found["failed_share"]) == (1 / 5, 0)  # one search had ended
    shares = leret.hop_scores(
        hop_rows(HOPS[0], [*HOPS[1][:2], row("timeout", 0.5, 0.25, tokens=0)])
    )
    for name in ("empty", "too_long", "stopped", "failed"):
        assert shares[f"{name}_share"] == pytest.approx(1 / 6)
    evaluation = leret.query_evaluation(7, hop_rows(*HOPS), "recall")
    assert evaluation.score == evaluation.scores["hop2/recall"] == pytest.approx(0.5)
    assert evaluation.metrics["eval/hop1/recall"] == evaluation.baselines["untrained/hop1/recall"]
    assert evaluation.each == [1.0, 0.0, 0.5]
    half = 1.96 * 0.5 / 3**0.5  # the deviation of these three is 0.5
    assert evaluation.metrics["eval_half_width/hop2/recall"] == pytest.approx(half)


GOLD = Sample("q", "Where?", answers=("Oslo",), grades=(("p", 1),))


def test_agents() -> None:
    ends: list[Ended] = [Closed("Oslo"), *[Failed("malformed_call", "no call.")] * 3]
    ends += [Failed("timeout", "no reply.")] * 2

    def play(places: Sequence[int]) -> list[Episode]:
        return [Episode(ends[place], (), 1) for place in places]

    found = harr.agent_evaluation(3, [GOLD] * len(ends), "f1", play)
    assert (found.score, found.scores["em"], found.scores["broken_share"]) == (0.25, 0.25, 0.5)
    assert found.scores["failed_share"] == pytest.approx(1 / 3)
    assert found.each == [1, 0, 0, 0]


def test_answers_that_reward() -> None:
    rewards = [
        EpisodeRewards((0.0, 1.0), 2),
        Failure("cut_off", "too long."),
        Failure("timeout", "no reply."),
        Failure("raised", "the user's code."),
    ]
    rows = played_rows(4, 0)
    asked: Any = SimpleNamespace(begin=lambda *_: None, wait=lambda *_: rewards)
    shown = [SimpleNamespace(chunks=())] * 4
    episodes: Any = SimpleNamespace(rows=lambda _: (rows, rows), shown=shown, batch_size=4)
    scores = TrainingScores(episodes, "return", 0.5, 0)
    found = scores.evaluate(None, 0, asked, StopSignal())
    assert (found.score, [*found.each]) == (0.25, [0.5, 0.0])
    assert (found.scores["broken_share"], found.scores["unscored_share"]) == (0.25, 0.5)


IDS = [f"q{number}" for number in range(40)]


def part(name: str, samples: int = 0, ids: list[str] = IDS) -> set[str]:
    found = drawn(ids, EvalConfig(part=name, samples=samples))
    return {ids[place] for place in found.places}


def test_halves_are_disjoint_and_together_all() -> None:
    one, other = part(CHOOSING), part(REPORTED)
    assert not one & other
    assert one | other == part(ALL) == {*IDS}
    assert min(len(one), len(other)) >= 10
    assert part(CHOOSING, samples=3) < one
    # A question keeps its half in whatever data it stands.
    assert part(CHOOSING, ids=IDS[::-2]) < one
    assert part(CHOOSING, ids=["alone"]) == part(REPORTED, ids=["alone"]) == {"alone"}


class Asking(MeshSystem[Any]):
    OF_QUESTIONS = ()


def test_the_reported_half_is_scored_by_default(tmp_path: Path) -> None:
    section = dataclasses.asdict(EvalConfig(samples=5))
    (tmp_path / "config.json").write_text('{"questions": {"dev": "own"}}')
    for given, dev, wanted in (
        ({}, "own", REPORTED),
        ({}, "other", ALL),
        ({"part": ALL}, "own", ALL),
    ):
        raw = ConfigDict({"eval": section | given, "questions": {"dev": dev}})
        raw, _, halves = begin_scoring(tmp_path, raw, ScoreOptions("last", samples=3), Asking)
        assert (raw.eval.part, raw.eval.samples) == (wanted, 3)
        found = halves(drawn(IDS, EvalConfig(**raw.eval)))
        assert found["reported"] == 3
        if dev == "own":
            assert (found["choosing"], found["apart"]) == (5, wanted == REPORTED)


# ---------------------------------------------------------------- rewritings

# Two collections; the ids of queries and documents are the same in both.
ASKED = "Where was Ada Berg born?"
SMALL = Sample("1", ASKED, answers=("Oslo",), grades=(("a", 1),), collection="x")
GRADED = Sample("1", "rain in Bergen", grades=(("b", 2), ("c", 1)), collection="y")
TASKS = [SMALL, GRADED]


def rewritten(query: str, *ids: str, tokens: int = 3, outcome: str = queries.REWRITTEN) -> Episode:
    """The episode of a query, of so many tokens, that found these documents."""
    documents = tuple(Document(each, "", "", False) for each in ids)
    sampled, log_probs = np.arange(tokens, dtype=np.int32), np.zeros(tokens, np.float32)
    turn = Turn(np.zeros(5, np.int32), sampled, log_probs, "stop")
    ended = queries.Searched(answer=query, found=documents, outcome=outcome)
    return Episode(ended, ((turn,),), 1)


def rows_of(tasks: Sequence[Sample], episodes: Sequence[Episode]) -> list[RewriteRow]:
    speech: Any = SimpleNamespace(text=lambda ids: f"{len(ids)} tokens")
    return [
        deepretrieval.played_row(*each, speech, queries.BARE)
        for each in zip(tasks, episodes, strict=True)
    ]


FAILED = Episode(Failed("timeout", "no reply"), (), 2)


def test_what_is_no_query_found_nothing_and_what_failed_has_no_score() -> None:
    tasks = [SMALL, GRADED, SMALL, SMALL]
    unreadable = rewritten("(ada berg", outcome=queries.UNREADABLE)
    too_long = rewritten("", outcome=queries.TOO_LONG)
    rows = rows_of(tasks, [rewritten("ada", "b", "a"), too_long, FAILED, unreadable])
    columns = measured(rows, ["rr@10"])
    np.testing.assert_array_equal(columns["rr@10"], [0.5, 0.0, np.nan, 0.0])
    # What the search cannot read has a format.
    shapes = deepretrieval.shape_of_rows(tasks[3:], rows[3:])
    assert (shapes["format"], shapes["readable"], shapes["query_words"]) == (1, 0, 2)


def test_an_evaluation_is_beside_that_of_the_originals() -> None:
    """The failed one is left out."""
    rows = rows_of(TASKS, [rewritten("ada", "a"), FAILED])
    originals = rows_of(TASKS, [rewritten("", "z", "a"), rewritten("", "b")])
    by: Any = {"measures": ("recall@1", "rr@10"), "best_by": "recall@1"}
    found = deepretrieval.rewrite_evaluation(7, TASKS, rows, originals=originals, **by)
    assert (found.metrics["eval/rr@10"], [*found.each]) == (1.0, [1.0])
    assert found.metrics["eval/failed_share"] == 0.5
    assert found.baselines["original/rr@10"] == 0.75
    assert found.score == found.scores["recall@1"] == 1.0


def test_an_episode_is_cut_where_all_facts_are_found() -> None:
    (row,) = played_rows(1, 0)
    row = dataclasses.replace(row, sf_idx=[3, 1], pred_idx=[1, 2, 3, 0, 4])
    cut = until_found(row)
    assert (cut.pred_idx, cut.q_values, cut.ret) == ([1, 2, 3], row.q_values[:3], 1.0)
    lost = until_found(dataclasses.replace(row, sf_idx=[3, 9]))
    assert (lost.pred_idx, lost.ret) == (row.pred_idx, 0.0)
