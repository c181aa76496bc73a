"""Token episodes as JSON, rows and blocks: each sampled token trains once, or not at all."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qrag_jax.environments import queries
from qrag_jax.environments.episode import Closed, Document, Ended, Failed, ToolTally
from qrag_jax.rollouts.environment_play import segments_of
from qrag_jax.rollouts.token_episodes import Episode
from qrag_jax.rollouts.trajectories import (
    DONE,
    MASKED,
    SCORED,
    TRUNCATED,
    BlockShape,
    TokenTrajectory,
    Turn,
    choose_shape,
    token_batch,
    token_blocks,
)
from qrag_jax.runtime.bounded_json import plain, typed
from tests.rollouts.token_setup import GROUPS, MEMBERS, made_batch, made_pairs

PROMPT = [5, 6, 7, 8]


def turn(draw: np.random.Generator, observed: list[int], count: int, finish: str = "stop") -> Turn:
    return Turn(
        np.array(observed, np.int32),
        draw.integers(0, 50, count).astype(np.int32),
        draw.normal(-2, 0.5, count).astype(np.float32),
        finish,
        "v3",
    )


def values_of(turns: Sequence[Turn]) -> list[Any]:
    arrays = [(turn.observed, turn.sampled, turn.log_probs) for turn in turns]
    values = [[(array.dtype, array.tolist()) for array in each] for each in arrays]
    return [*zip(values, ((turn.finish, turn.version) for turn in turns), strict=True)]


def episodes() -> list[TokenTrajectory]:
    """Two groups of three; the second has two prompts and a rewritten context."""
    draw = np.random.default_rng(0)
    segments = [
        ((turn(draw, PROMPT, 3), turn(draw, [9, 9], 4)),),
        ((turn(draw, PROMPT, 2), turn(draw, [1], 2, "length")),),
        ((turn(draw, [*PROMPT[:3], 4], 5),),),
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
            segments=ours,
            status=status,
            parts={} if status == "timeout" else {"em": number / 7, "reward": number / 3},
            facts={"answer": "Oslo"},
        )
        for number, (ours, status) in enumerate(zip(segments, statuses, strict=True))
    ]


TALLY = ToolTally(turns=3, searches=2, repeated=1, completed=True)
FOUND = (
    Document("a", "A page", "# A page\nof “words”", True, 0.1 + 0.2),
    Document("b", "", "other words", False, -3.5),
)
ENDED: tuple[Ended, ...] = (
    Closed("an answer", ("a",), ("a", "b"), 2, TALLY),
    Failed("timeout", "the service did not answer", TALLY),
    queries.Searched("a query", tally=TALLY, outcome="no_json", found=FOUND),
)


def sent(kind: Any, value: Any) -> Any:
    """As another host, or a run that goes on, reads it."""
    return typed(kind, json.loads(json.dumps(plain(value))))


def test_episodes_are_sent_and_saved_to_the_last_bit() -> None:
    draw = np.random.default_rng(0)
    segments = ((turn(draw, [1], 3), turn(draw, [], 2)), (turn(draw, [4, 4], 3, "length"),))
    for ended in ENDED:
        result = sent(Episode, Episode(ended, segments, 2))
        assert (type(result.ended), result.ended, result.attempts) == (type(ended), ended, 2)
        assert [*map(values_of, result.segments)] == [*map(values_of, segments)]
    for item in episodes():
        again = sent(TokenTrajectory, item)
        assert [*map(values_of, again.segments)] == [*map(values_of, item.segments)]
        assert plain(again) == plain(item)


@pytest.mark.parametrize("truncated", [MASKED, SCORED])
def test_each_sampled_token_is_in_one_row(truncated: str) -> None:
    played = episodes()
    how: Any = {"members": 3, "truncated": truncated}
    batch = token_batch(played, **how)
    row = 0
    for number, item in enumerate(played):
        is_scored = item.status == DONE or (item.status == TRUNCATED and truncated == SCORED)
        assert batch.scored[number] == is_scored
        assert batch.rewards[number] == np.float32(item.parts["reward"] if is_scored else 0)
        for segment in item.segments:
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
    failed = [TokenTrajectory(1, member, 2, (), "server") for member in range(3)]
    nothing = token_batch(failed, **how)
    assert nothing.episode.tolist() == [3]  # a row of padding
    assert not nothing.log_prob_mask.any()
    # Rows share what none of them sampled: 0 to 2 of a group, 3 and 4 of one episode, 5 of another.
    assert batch.leader.tolist() == [0, 0, 0, 3, 3, 3]
    assert batch.shared.tolist() == [3, 3, 3, 2, 2, 2]


# ---------------------------------------------------------------- branches


@st.composite
def forests(draw: st.DrawFn) -> list[tuple[int, Turn, bool]]:
    """Parts in any order of parents, and whether they train; of a third nothing was sampled."""
    parts: list[tuple[int, Turn, bool]] = []
    token = 0
    for number in range(draw(st.integers(1, 14))):
        sizes = draw(st.integers(0, 3)), draw(st.integers(0, 2)) and draw(st.integers(0, 4))
        ids = np.arange(token, token + sum(sizes), dtype=np.int32)  # each id is there once
        token += len(ids)
        sampled = ids[sizes[0] :]
        part = Turn(ids[: sizes[0]], sampled, -sampled.astype(np.float32) / 8, "stop")
        parts.append((draw(st.integers(-1, number - 1)), part, draw(st.booleans())))
    return parts


def before(parts: list[tuple[int, Turn, bool]], number: int) -> list[int]:
    """The ids up to what a part has sampled."""
    result = parts[number][1].observed.tolist()
    while (number := parts[number][0]) >= 0:
        part = parts[number][1]
        result = [*part.observed.tolist(), *part.sampled.tolist(), *result]
    return result


@given(forests())
def test_whatever_branches_each_sampled_token_trains_once(
    parts: list[tuple[int, Turn, bool]],
) -> None:
    """Behind the ids that it was sampled behind; attention sees what the loss does not count."""
    places = {int(i): n for n, (_, part, _) in enumerate(parts) for i in part.sampled}
    nodes = [
        {
            "parent": parent,
            "ids": [*part.observed.tolist(), *part.sampled.tolist()],
            "mask": [False] * len(part.observed) + [True] * len(part.sampled),
            "log_probs": part.log_probs.tolist(),
            "trains": trains,
        }
        for parent, part, trains in parts
    ]
    segments, seen = segments_of(nodes, range(0, 99, 2), "7"), []
    for segment in segments:
        row: list[int] = []
        for part in segment:
            row += part.observed.tolist()
            ours = places[int(part.sampled[0])]
            assert row == before(parts, ours)
            assert part.sampled.tolist() == parts[ours][1].sampled.tolist()
            np.testing.assert_array_equal(part.log_probs, parts[ours][1].log_probs)
            finish = "length" if part.sampled[-1] % 2 else "stop"
            assert (part.finish, part.version) == (finish, "7")
            seen += part.sampled.tolist()
            row += part.sampled.tolist()
    assert sorted(seen) == sorted(
        i for _, part, trains in parts for i in part.sampled.tolist() if trains
    )


def test_what_was_not_sampled_does_not_stand_within_a_turn() -> None:
    ids = {"parent": -1, "ids": [1, 2, 3], "log_probs": [-1.0, -1.0], "trains": True}
    with pytest.raises(ValueError):
        segments_of([ids | {"mask": [True, False, True]}], (), "")


# ---------------------------------------------------------------- blocks

SHAPE = BlockShape(tokens=60, length=24, groups=3, members=3, sampled=40)


def test_a_prompt_is_computed_once_and_groups_are_cut_where_that_fills_a_block() -> None:
    batch = made_batch()
    (blocks,) = token_blocks([batch], SHAPE._replace(tokens=400, groups=8, sampled=300))
    assert np.flatnonzero(blocks.layout.lengths.any(axis=1)).tolist() == [0]
    counts = np.asarray(blocks.layout.shared.counts[0])
    prompts = [int(batch.shared[group * MEMBERS + 1]) for group in range(GROUPS)]
    assert sorted(counts[counts > 0].tolist()) == sorted(prompts)
    rows = np.flatnonzero(batch.log_prob_mask.any(axis=1))
    alone = int((batch.lengths - batch.shared)[rows].sum())
    (filled,) = token_blocks([batch], SHAPE._replace(tokens=72, groups=8, sampled=72))
    assert filled.layout.lengths.any(axis=1).sum() <= alone / 72 + 2


@pytest.mark.parametrize("devices", [1, 3])
def test_batches_of_few_and_of_many_rows_have_as_many_blocks_and_lose_none(devices: int) -> None:
    few = made_batch()
    rows, episodes = few.episode.size, few.scored.size
    many = few._replace(**{n: np.concatenate([leaf] * 3) for n, leaf in few._asdict().items()})
    copy = np.repeat(np.arange(3, dtype=np.int32), rows)
    padding = np.tile(few.episode == episodes, 3)
    number = np.where(padding, 3 * episodes, many.episode + copy * episodes)
    many = many._replace(episode=number.astype(np.int32), leader=many.leader + copy * rows)
    both = token_blocks([few, many], SHAPE._replace(tokens=24, groups=1), devices)
    assert both[0].valid.shape == both[1].valid.shape
    used = few.log_prob_mask[few.episode < episodes].sum()
    assert [blocks.valid.sum() for blocks in both] == [used, 3 * used]


def test_a_chosen_shape_holds_the_batch_and_what_does_not_fit_is_refused() -> None:
    batch, pairs = made_batch(), made_pairs()
    for each, whole, members in ((batch, False, MEMBERS), (pairs, True, 2)):
        for size in (64, 500):
            shape = choose_shape(each, size, members, whole=whole)
            (blocks,) = token_blocks([each], shape, whole=whole)
            assert blocks.valid.sum() == each.log_prob_mask.sum()
    longer = batch._replace(lengths=np.minimum(batch.lengths + 1, 20))  # no other program
    assert choose_shape(longer, 64, MEMBERS) == choose_shape(batch, 64, MEMBERS)
    shape = choose_shape(pairs, 64, 2, whole=True)
    for wrong, of_shape, whole in (
        (pairs, shape._replace(tokens=24), True),
        (pairs, shape._replace(sampled=10), True),
        (batch, SHAPE._replace(length=10), False),
    ):
        with pytest.raises(ValueError):
            token_blocks([wrong], of_shape, whole=whole)
