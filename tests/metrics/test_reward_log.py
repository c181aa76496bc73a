"""The log of rewards: mean and standard deviation, what is kept, and files that are refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from qrag_jax.errors import InputError
from qrag_jax.metrics import answer_log, reward_log
from qrag_jax.metrics.reward_log import RewardRow, judged, row

ASKED = ("q1", "Wo?")
FIELD = "config.questions.kept"


def test_mean_and_deviation() -> None:
    rewards = np.random.default_rng(0).random(8).round(3).tolist()
    made = row(ASKED, rewards)
    assert made.mean == pytest.approx(np.mean(rewards))
    assert made.std == pytest.approx(np.std(rewards))
    assert (made.rewards, made.scored, made.broken) == (rewards, 8, [])
    assert made.kept
    assert not judged(made, 1.0).kept
    assert judged(judged(made, 1.0), 0.0) == made


@pytest.mark.parametrize("value", [0.1, 1 / 3, 2 / 3, 0.7])
def test_equal_rewards_do_not_vary(value: float) -> None:
    """np.std of these is above 0 by rounding."""
    for count in range(2, 12):
        made = row(ASKED, [value] * count)
        assert made.std == 0.0
        assert not made.kept
    assert not row(ASKED, [0.3, 0.1 + 0.2]).kept


def test_an_episode_without_reward_is_not_0() -> None:
    made = row(ASKED, [0.5, "timeout", 0.5, "too_long"])
    assert (made.mean, made.std, made.kept) == (0.5, 0.0, False)
    assert (made.rewards, made.scored) == ([0.5, None, 0.5, None], 2)
    assert made.broken == ["timeout", "too_long"]
    nothing = row(ASKED, ["timeout", "timeout"])
    assert (nothing.mean, nothing.std, nothing.kept) == (None, None, False)
    told = reward_log.summary([made, nothing, row(ASKED, [0.0, 1.0])], 0.0)
    assert told == [
        "kept             1 of 3 questions, standard deviation above 0",
        "all the same     1",
        "without reward   1",
        "mean reward      0.500 of 4 episodes",
        "broken episodes  3 timeout, 1 too_long",
    ]


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    rows = [row(ASKED, [0.5, "timeout", 1.0]), row(("q2", "Où?"), ["timeout", "timeout"])]
    answer_log.append(path, rows)
    assert reward_log.read(path, FIELD) == rows
    assert answer_log.read_partial(path, RewardRow) == rows


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (None, f"{FIELD} is .*, which cannot be read .No such file"),
        ("{}\n", "line 1.*missing"),
        ("[" * 100_000 + "\n", "line 1.*deep"),
        ('{"id": "q1"', "filter_data"),
    ],
)
def test_refusals(text: str | None, told: str, tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    if text is not None:
        path.write_text(text)
    with pytest.raises(InputError, match=told):
        reward_log.read(path, FIELD)
    if text is not None:
        assert path.read_text() == text


def test_a_wrong_type(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    answer_log.append(path, [row(ASKED, [0.5, 1.0])])
    path.write_text(path.read_text().replace("[0.5, 1.0]", '[0.5, "1"]'))
    with pytest.raises(InputError, match="rewards"):
        reward_log.read(path, FIELD)
