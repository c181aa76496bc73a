"""What single kinds of logs have beside what all have (tests/conformance): fields and means."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from qrag_jax.errors import InputError
from qrag_jax.metrics.rows import RETRIEVALS, AgentRow, Hop, Searched, read_retrievals
from qrag_jax.metrics.summaries import (
    agent_summary,
    hop_gains,
    hop_summary,
    hop_table,
    judged,
    pass_at,
    reward_lines,
    reward_row,
)
from tests.retrieval_logs import played_rows

ROW = dataclasses.replace(
    played_rows(1, 0)[0],
    sf_idx=[0, 3],
    sf_texts=["a", "b"],
    pred_idx=[3, 1],
    pred_texts=["b", "c"],
    q_values=[0.5, -0.25],
)


# ---------------------------------------------------------------------- retrieval


def test_rows_without_known_facts(tmp_path: Path) -> None:
    """What needs the facts is left out of the line, and never 0."""
    path = tmp_path / "log.jsonl"
    bare = {"sf_idx": [], "sf_texts": [], "ret": None, "f1": None, "em": None}
    unknown = dataclasses.replace(ROW, id="own-1", **bare)  # type: ignore[arg-type]
    rewarded = dataclasses.replace(unknown, id="own-2", ret=0.5)
    rows = [unknown, rewarded, ROW]
    RETRIEVALS.append(path, rows)
    lines = path.read_text().splitlines()
    assert not {"return", "f1", "em"} & json.loads(lines[0]).keys()
    assert read_retrievals(path, needs_facts=False) == RETRIEVALS.read_partial(path) == rows
    with pytest.raises(InputError, match="sf_idx"):
        read_retrievals(path)


# ---------------------------------------------------------------------- agents


AGENT = AgentRow("q1", "Wo?", ("Köln",), "Köln", "", 1.0, 1.0, 0.5, ({"query": "Wo?"},))


def test_what_the_model_broke_is_wrong_and_what_the_server_broke_is_left_out() -> None:
    failed = dataclasses.replace(AGENT, answer="", broken="timeout", em=0.0, f1=0.0, recall=None)
    malformed = dataclasses.replace(failed, broken="malformed_call", recall=0.0, searches=())
    found = agent_summary([AGENT, failed, *[malformed] * 3])
    assert (found["questions"], found["broken"], found["failed"]) == (5, 3, 1)
    assert (found["broken_share"], found["failed_share"]) == (0.6, 0.2)
    assert found["em"]["mean"] == found["f1"]["mean"] == found["hops"]["mean"] == 0.25
    assert found["recall"]["mean"] == 0.125


def test_pass_at_k_is_the_share_of_draws_with_a_right_one() -> None:
    episodes = [True, True, False, False, False]
    for k in range(1, 6):
        draws = list(itertools.combinations(episodes, k))
        assert pass_at(k, 2, 5) == pytest.approx(sum(map(any, draws)) / len(draws))
    assert pass_at(3, 0, 3) == 0.0


# ---------------------------------------------------------------------- hops


def searched(name: str, *recalls: float) -> Searched:
    hops = tuple(
        Hop("a", "searched", ("p1",), {"recall": r, "ap": r / 2, "all_gold": float(r == 1)}, 20, 4)
        for r in recalls
    )
    return Searched(name, f"{name}?", ("x",), ("g1", "g2"), hops)


ROWS = [searched("a", 0.5, 1.0), searched("b", 0.0, 0.5)]


def test_means_and_paired_differences_after_each_hop() -> None:
    found = hop_summary(ROWS)
    assert found["hop1/recall"]["mean"] == 0.25
    assert found["hop2/all_gold"]["mean"] == 0.5
    assert (found["read_tokens"], found["sampled_tokens"]) == (40, 8)
    assert found["outcomes"] == {"searched": 4}
    gains = hop_gains(ROWS, [searched("a", 0.0, 0.5), searched("b", 0.0, 0.0)])
    assert gains["hop2/recall"] == {"mean": 0.5, "low": 0.5, "high": 0.5}
    assert gains["hop1/recall"]["mean"] == 0.25


def test_what_failed_is_left_out_and_counted() -> None:
    first, second = ROWS[1].hops
    lost = dataclasses.replace(
        ROWS[1], hops=(dataclasses.replace(first, outcome="timeout"), second)
    )
    found = hop_summary([ROWS[0], lost])
    assert (found["failed"], found["failed_share"], found["hop2/recall"]["mean"]) == (1, 0.5, 1.0)
    assert hop_gains(ROWS, [ROWS[0], lost])["hop1/recall"]["mean"] == 0
    assert hop_gains([lost], [ROWS[0]]) == {}
    assert len(hop_table({"lost": hop_summary([lost]), "all": found}, 2)) == 3


# ---------------------------------------------------------------------- rewards

ASKED = ("q1", "Wo?")


def test_mean_and_deviation_of_rewards() -> None:
    rewards = np.random.default_rng(0).random(8).round(3).tolist()
    row = reward_row(ASKED, rewards)
    assert row.mean == pytest.approx(np.mean(rewards))
    assert row.std == pytest.approx(np.std(rewards))
    assert (row.rewards, row.scored, row.broken, row.kept) == (rewards, 8, [], True)
    assert not judged(row, 1.0).kept
    assert judged(judged(row, 1.0), 0.0) == row


def test_an_episode_without_reward_is_not_0() -> None:
    row = reward_row(ASKED, [0.5, "timeout", 0.5, "too_long"])
    assert (row.mean, row.std, row.kept) == (0.5, 0.0, False)
    assert (row.rewards, row.scored) == ([0.5, None, 0.5, None], 2)
    assert row.broken == ["timeout", "too_long"]
    nothing = reward_row(ASKED, ["timeout", "timeout"])
    assert (nothing.mean, nothing.std, nothing.kept) == (None, None, False)
    lines = reward_lines([row, nothing, reward_row(ASKED, [0.0, 1.0])], 0.0)
    told = " ".join(" ".join(lines).split())
    for part in ("1 of 3", "0.500 of 4", "3 timeout", "1 too_long"):
        assert part in told


def test_equal_rewards_do_not_vary() -> None:
    """np.std of these is above 0 by rounding."""
    for value, count in itertools.product((0.1, 1 / 3, 2 / 3, 0.7), range(2, 12)):
        row = reward_row(ASKED, [value] * count)
        assert (row.std, row.kept) == (0.0, False)
    assert not reward_row(ASKED, [0.3, 0.1 + 0.2]).kept
