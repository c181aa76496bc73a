"""Trajectories as JSON and as rows: each sampled token trains once, or not at all."""

from __future__ import annotations

import json

import numpy as np
import pytest

from qrag_jax.errors import InputError
from qrag_jax.rollouts.trajectories import (
    DONE,
    MASKED,
    SCORED,
    TRUNCATED,
    BatchRules,
    TokenTrajectory,
    Turn,
    token_batch,
)

PROMPT = [5, 6, 7, 8]


def turn(
    draw: np.random.Generator, observed: list[int], sampled: int, finish: str = "stop"
) -> Turn:
    return Turn(
        np.array(observed, np.int32),
        draw.integers(0, 50, sampled).astype(np.int32),
        draw.normal(-2, 0.5, sampled).astype(np.float32),
        finish,
        "v3",
    )


def episodes() -> list[TokenTrajectory]:
    """Two groups of three; the second has two prompts and a rewritten context."""
    draw = np.random.default_rng(0)
    one = [
        ((turn(draw, PROMPT, 3), turn(draw, [9, 9], 4)),),
        ((turn(draw, PROMPT, 2), turn(draw, [1], 2, "length")),),
        ((turn(draw, [*PROMPT[:3], 4], 5),),),
    ]
    other = [
        ((turn(draw, [2, 3], 2),), (turn(draw, [2, 3, 4, 4], 3),)),
        (),
        ((turn(draw, [2, 3], 1),),),
    ]
    statuses = [DONE, TRUNCATED, DONE, DONE, "timeout", DONE]
    return [
        TokenTrajectory(
            question=number // 3 + 10,
            member=number % 3,
            attempt=1,
            segments=segments,
            status=status,
            parts={} if status == "timeout" else {"em": number / 7, "reward": number / 3},
            facts={"answer": "Oslo"},
        )
        for number, (segments, status) in enumerate(zip([*one, *other], statuses, strict=True))
    ]


def test_json_is_exact() -> None:
    for each in episodes():
        again = TokenTrajectory.from_json(json.loads(json.dumps(each.to_json())))
        assert again.to_json() == each.to_json()
        for segment, same in zip(each.segments, again.segments, strict=True):
            for before, after in zip(segment, same, strict=True):
                for name in ("observed", "sampled", "log_probs"):
                    first, second = getattr(before, name), getattr(after, name)
                    assert first.dtype == second.dtype
                    np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize("truncated", [MASKED, SCORED])
def test_each_sampled_token_is_in_one_row(truncated: str) -> None:
    given = episodes()
    batch = token_batch(given, BatchRules(3, ("reward", "em"), truncated, longest=20))
    row = 0
    for number, each in enumerate(given):
        is_scored = each.status == DONE or (each.status == TRUNCATED and truncated == SCORED)
        assert batch.scored[number] == is_scored
        expected = [each.parts["reward"], each.parts["em"]] if is_scored else [0, 0]
        np.testing.assert_array_equal(batch.rewards[number], np.float32(expected))
        for segment in each.segments:
            place = 0
            assert batch.episode[row] == number
            for part in segment:
                for token in part.observed:
                    assert batch.tokens[row, place] == token
                    assert not batch.log_prob_mask[row, place]
                    place += 1
                for token, log_prob in zip(part.sampled, part.log_probs, strict=True):
                    assert batch.tokens[row, place] == token
                    assert batch.log_prob_mask[row, place]
                    assert batch.loss_mask[row, place] == is_scored
                    assert batch.sampler_log_probs[row, place] == log_prob
                    place += 1
            assert batch.lengths[row] == place
            assert not batch.log_prob_mask[row, place:].any()
            row += 1
    assert row == len(batch.tokens)


def test_rows_share_what_none_of_them_sampled() -> None:
    batch = token_batch(episodes(), BatchRules(3, ("reward",), MASKED, longest=20))
    # Rows: 0, 1, 2 of the first group; 3 and 4 of one episode, 5 of another.
    assert batch.leader.tolist() == [0, 0, 0, 3, 3, 3]
    assert batch.shared.tolist() == [0, 4, 3, 0, 2, 2]
    for row, leader, shared in zip(range(6), batch.leader, batch.shared, strict=True):
        np.testing.assert_array_equal(batch.tokens[row, :shared], batch.tokens[leader, :shared])
        assert not batch.log_prob_mask[row, :shared].any()
        assert not batch.log_prob_mask[leader, :shared].any()


def test_a_batch_in_which_all_failed_has_a_row_of_padding() -> None:
    failed = [TokenTrajectory(1, member, 2, (), "server") for member in range(3)]
    batch = token_batch(failed, BatchRules(3, ("reward",), MASKED, longest=20))
    assert not batch.scored.any()
    assert batch.episode.tolist() == [3]
    assert not batch.log_prob_mask.any()


def test_what_cannot_be() -> None:
    given, rules = episodes(), BatchRules(3, ("reward",), MASKED, longest=20)
    with pytest.raises(ValueError, match="5 episodes are no groups of 3"):
        token_batch(given[:5], rules)
    with pytest.raises(ValueError, match="episode 2 has another question"):
        token_batch([*given[:2], *given[3:], given[2]], rules)
    with pytest.raises(ValueError, match="a row has 13 tokens; 12 is the most"):
        token_batch(given, BatchRules(3, ("reward",), MASKED, longest=12))
    with pytest.raises(InputError, match=r"config\.tools\.truncated is 'no'"):
        BatchRules(3, ("reward",), "no", longest=12)
    with pytest.raises(ValueError, match="2 tokens and 1 log-probabilities"):
        Turn(np.zeros(0, np.int32), np.zeros(2, np.int32), np.zeros(1, np.float32), "stop")
    with pytest.raises(ValueError, match="not 'end'"):
        Turn(*[np.zeros(0, np.int32)] * 3, "end")
