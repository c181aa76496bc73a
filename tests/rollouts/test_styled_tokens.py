"""Demonstrations of query writing as the tokens that a policy would sample."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from qrag_jax.environments.query_writing.prompt import QueryPrompt
from qrag_jax.environments.query_writing.state import Searched
from qrag_jax.environments.query_writing.styles import (
    BRIDGE,
    PASSAGE,
    Start,
    Style,
    StyledPlay,
    Written,
    style_variants,
)
from qrag_jax.environments.tools.episode import ToolTally
from qrag_jax.errors import InputError
from qrag_jax.llm.text.prompts import load
from qrag_jax.rollouts.scripted_tokens import styled_episodes
from qrag_jax.rollouts.token_episodes import Speech
from qrag_jax.rollouts.trajectories import DONE, BatchRules, TokenTrajectory, token_batch
from tests.environments.query_writing.trying import WorldSearch, tiny_speech, world, world_state

PROMPT = QueryPrompt(load("bare_query"), style_variants())


@pytest.fixture(scope="module")
def speech(tmp_path_factory: pytest.TempPathFactory) -> Speech:
    return tiny_speech(tmp_path_factory.mktemp("lm"), turn=150, room=900)


@pytest.fixture(scope="module")
def hops() -> tuple[Written, ...]:
    question = world(1)[0]
    styles = (Style(BRIDGE, True), Style(PASSAGE, False))
    start = Start(world_state(question), question, styles)
    (played,) = StyledPlay(WorldSearch(world(4))).play([start])
    return played


def test_each_hop_is_one_turn(speech: Speech, hops: tuple[Written, ...]) -> None:
    episodes = styled_episodes(hops, PROMPT, speech)
    for hop, episode in zip(hops, episodes, strict=True):
        ((turn,),) = episode.segments
        messages = PROMPT.messages(hop.state)
        np.testing.assert_array_equal(turn.observed, speech.scaffold.opening(messages))
        ids = speech.tokenizer(hop.query, add_special_tokens=False).input_ids
        assert turn.sampled.tolist() == [*ids, speech.scaffold.stop_ids[0]]
        assert speech.text(turn.sampled) == hop.query
        assert episode.ended == Searched(
            answer=hop.query,
            seen=tuple(each.id for each in hop.found),
            tally=ToolTally(turns=1, searches=1),
            found=hop.found,
        )
        assert (episode.status, episode.attempts) == (DONE, 1)
    marked, bare = (speech.tokenizer.decode(e.segments[0][0].observed) for e in episodes)
    assert "style: bridge" in marked
    assert "style:" not in bare


def test_all_of_a_query_trains_and_nothing_else(speech: Speech, hops: tuple[Written, ...]) -> None:
    episodes = styled_episodes(hops, PROMPT, speech)
    trajectories = [TokenTrajectory(0, 0, 1, e.segments, e.status) for e in episodes]
    batch = token_batch(trajectories, BatchRules(1, (), "masked", 900))
    for row, episode in enumerate(episodes):
        ((turn,),) = episode.segments
        start, end = len(turn.observed), batch.lengths[row]
        assert end == start + len(turn.sampled)
        expected = np.zeros(batch.tokens.shape[1], bool)
        expected[start:end] = True
        np.testing.assert_array_equal(batch.loss_mask[row], expected)


def test_what_does_not_fit_is_refused(speech: Speech, hops: tuple[Written, ...]) -> None:
    short = dataclasses.replace(speech, room=60)
    with pytest.raises(InputError) as caught:
        styled_episodes(hops, PROMPT, short)
    assert str(caught.value).startswith(f"a demonstration of question {world(1)[0].id!r} does not")
    assert str(caught.value).endswith(
        "there is room for 60); raise config.sampling.room, or show fewer words of passages."
    )
    with pytest.raises(InputError, match=r"a turn may sample 20; raise .*config\.styles\.most_wor"):
        styled_episodes(hops, PROMPT, dataclasses.replace(speech, turn=20))
