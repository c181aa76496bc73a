"""Scores of evaluations: of hops, of halves; what a model broke is 0, what failed is left out."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
from ml_collections import ConfigDict

from qrag_jax.environments.episode import FAILED_CAUSES, Closed, Ended, Failed
from qrag_jax.environments.queries import EMPTY, SEARCHED, STOPPED, TOO_LONG
from qrag_jax.evaluators.agents import agent_row, means, score_rows
from qrag_jax.evaluators.episodes import TrainingScores
from qrag_jax.evaluators.token_scores import HopRow, hop_scores, logged, query_evaluation
from qrag_jax.feedback.pairs import Try
from qrag_jax.feedback.rag import Gold
from qrag_jax.feedback.rewards import OWN_CAUSES, EpisodeRewards, Unscored
from qrag_jax.metrics.answers import INFRASTRUCTURE
from qrag_jax.metrics.rows import Searched
from qrag_jax.rollouts.agents import Episode
from qrag_jax.runtime.interrupt import StopSignal
from qrag_jax.systems.config import ALL, CHOOSING, REPORTED, drawn, report_on
from qrag_jax.systems.rlvr_config import EvalConfig
from tests.environments.trying import LATER, STATE
from tests.retrieval_logs import played_rows


def row(outcome: str, recall: float, ap: float, *, tokens: int = 2, read: int = 10) -> HopRow:
    scores = {"recall": recall, "ap": ap, "all_gold": float(recall == 1)}
    made = None
    if outcome:
        scored = outcome in (SEARCHED, STOPPED)
        made = Try(
            0, 1, 0, 0, 0, "q", (5,) * tokens, (-1.0,) * tokens, "stop", outcome,
            scores=scores if scored else {}, reward=ap if scored else None,
        )  # fmt: skip
    return HopRow(STATE, LATER, scores, made, read if outcome else 0)


def rows_of(*hops: list[HopRow]) -> list[Searched]:
    return logged([STATE] * len(hops[0]), hops)


HOPS = [
    [row(SEARCHED, 0.5, 0.5), row(TOO_LONG, 0.0, 0.0, tokens=8), row(STOPPED, 0.5, 0.25)],
    [row(SEARCHED, 1.0, 1.0), row(EMPTY, 0.0, 0.0, tokens=1), row("", 0.5, 0.25)],
]


def test_means_are_over_all_questions() -> None:
    found = hop_scores(rows_of(*HOPS))
    assert 3 * found["hop1/recall"] == pytest.approx(1)
    assert 3 * found["hop2/ap"] == pytest.approx(1.25)
    assert 3 * found["hop2/all_gold"] == pytest.approx(1)
    assert (found["read_tokens"], found["sampled_tokens"]) == (50 / 3, 5)
    assert (found["empty_share"], found["failed_share"]) == (1 / 5, 0)  # one search had ended
    shares = hop_scores(rows_of(HOPS[0], [*HOPS[1][:2], row("timeout", 0.5, 0.25, tokens=0)]))
    for name in ("empty", "too_long", "stopped", "failed"):
        assert shares[f"{name}_share"] == pytest.approx(1 / 6)
    none = hop_scores(rows_of([row("", 0.5, 0.25)]))  # no model writes
    assert (none["failed_share"], none["sampled_tokens"], none["hop1/ap"]) == (0, 0, 0.25)
    lost = hop_scores(rows_of([row("timeout", 0.5, 0.25, tokens=0)]))
    assert (lost["failed_share"], lost["hop1/ap"]) == (1, 0)


def test_an_evaluation() -> None:
    found = query_evaluation(7, rows_of(*HOPS), "recall")
    assert found.score == found.scores["hop2/recall"] == pytest.approx(0.5)
    assert found.metrics["eval/hop1/recall"] == found.baselines["untrained/hop1/recall"]
    assert found.each == [1.0, 0.0, 0.5]


GOLD = Gold("q", "Where?", ("Oslo",), frozenset({"p"}))


def test_agents() -> None:
    ends: list[Ended] = [
        Closed("Oslo"),
        *[Failed("malformed_call", "no call.")] * 3,
        *[Failed("timeout", "no reply.")] * 2,
    ]
    found = means(score_rows([agent_row(GOLD, Episode(ended, (), 1)) for ended in ends]))
    assert (found["em"], found["f1"], found["broken_share"]) == (0.25, 0.25, 0.5)
    assert found["failed_share"] == pytest.approx(1 / 3)


def test_answers_that_reward() -> None:
    rewards = [
        EpisodeRewards((0.0, 1.0), 2),
        Unscored("cut_off", "too long."),
        Unscored("timeout", "no reply."),
        Unscored("raised", "the user's code."),
    ]
    rows = played_rows(4, 0)
    asked: Any = SimpleNamespace(begin=lambda *_: None, wait=lambda *_: rewards)
    shown = [SimpleNamespace(chunks=())] * 4
    episodes: Any = SimpleNamespace(rows=lambda _: (rows, rows), shown=shown, batch_size=4)
    scores = TrainingScores(episodes, "return", 0.5, 2, stop_action=False)
    found = scores.evaluate(None, 0, asked, StopSignal())
    assert (found.score, [*found.each]) == (0.25, [0.5, 0.0])
    assert (found.scores["broken_share"], found.scores["unscored_share"]) == (0.25, 0.5)


IDS = [f"q{number}" for number in range(40)]


def part(name: str, samples: int = 0, ids: list[str] = IDS) -> list[str]:
    found = drawn(ids, EvalConfig(part=name, samples=samples))
    return [ids[place] for place in found.places]


def test_halves_are_disjoint_and_together_all() -> None:
    one, other = part(CHOOSING), part(REPORTED)
    assert not {*one} & {*other}
    assert sorted([*one, *other]) == sorted(part(ALL)) == sorted(IDS)
    assert min(len(one), len(other)) >= 10
    assert {*part(CHOOSING, samples=3)} < {*one}
    # A question keeps its half in whatever data it stands.
    assert {*part(CHOOSING, ids=IDS[::-2])} < {*one}


def test_what_cannot_be_halved_does_both() -> None:
    for name in (CHOOSING, REPORTED):
        found = drawn(["alone"], EvalConfig(part=name))
        assert (found.places, found.choosing, found.apart) == ([0], 1, False)


def test_the_reported_half_is_scored_by_default() -> None:
    section = dataclasses.asdict(EvalConfig(samples=5))
    for given, others, wanted in (
        ({}, False, REPORTED), ({}, True, ALL), ({"part": ALL}, False, ALL),
    ):  # fmt: skip
        config = ConfigDict({"eval": section | given})
        assert report_on(config, 3, others=others) == 5
        assert (config.eval.part, config.eval.samples) == (wanted, 3)
    found = drawn(IDS, EvalConfig(part=REPORTED, samples=3)).summary(5, others=False)
    assert (found["choosing"], found["reported"], found["apart"]) == (5, 3, True)


def test_every_cause_has_its_side() -> None:
    of_model = {*FAILED_CAUSES, *OWN_CAUSES} - INFRASTRUCTURE
    text = "empty too_long filtered tool_call unfinished_thinking cut_off no_text no_retrieval"
    assert of_model == {*text.split(), "malformed_call", "own_code"}
    assert {*FAILED_CAUSES, *OWN_CAUSES} >= INFRASTRUCTURE
