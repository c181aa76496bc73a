"""Played episodes go to other hosts as text, and come back to the last bit."""

from __future__ import annotations

import json

import numpy as np
import pytest

from qrag_jax.environments.query_rewriting.task import Rewritten
from qrag_jax.environments.query_writing.state import Searched
from qrag_jax.environments.tools.episode import Closed, Document, Ended, Failed, ToolTally
from qrag_jax.rollouts.episode_texts import from_text, to_text
from qrag_jax.rollouts.token_episodes import TokenEpisode
from qrag_jax.rollouts.trajectories import Turn

TALLY = ToolTally(turns=3, searches=2, repeated=1, completed=True)
FOUND = (
    Document("a", "A page", "# A page\nof “words” \ud800", True, 0.1 + 0.2),
    Document("b", "", "other words", False, -3.5),
)
ENDED: dict[str, Ended] = {
    "closed": Closed("an answer", ("a",), ("a", "b"), 2, TALLY),
    "failed": Failed("timeout", "the service did not answer", TALLY),
    "rewritten": Rewritten("a query", tally=TALLY, outcome="no_json", found=FOUND),
    "searched": Searched("a query", tally=TALLY, found=FOUND[::-1]),
}


def episode(ended: Ended) -> TokenEpisode:
    drawn = np.random.default_rng(0)

    def turn(version: str) -> Turn:
        log_probs = drawn.normal(size=3).astype(np.float32)
        return Turn(
            drawn.integers(0, 9, 4, np.int32),
            drawn.integers(0, 9, 3, np.int32),
            log_probs,
            "stop",
            version,
        )

    return TokenEpisode(ended, ((turn(""), turn("")), (turn("7"),)), 2)


@pytest.mark.parametrize("name", ENDED)
def test_they_come_back(name: str) -> None:
    given = episode(ENDED[name])
    (found,) = from_text(to_text([given]))
    assert type(found.ended) is type(given.ended)
    assert found.ended == given.ended
    assert (found.attempts, found.status) == (given.attempts, given.status)
    for mine, theirs in zip(found.segments, given.segments, strict=True):
        for one, other in zip(mine, theirs, strict=True):
            for field in ("observed", "sampled", "log_probs"):
                array = getattr(one, field)
                assert array.dtype == getattr(other, field).dtype
                np.testing.assert_array_equal(array, getattr(other, field))
            assert (one.finish, one.version) == (other.finish, other.version)


def test_a_document_is_sent_once() -> None:
    given = [episode(ENDED["rewritten"]), episode(ENDED["searched"]), episode(ENDED["rewritten"])]
    text = to_text(given)
    assert len(json.loads(text)["documents"]) == len(FOUND)
    assert [each.ended for each in from_text(text)] == [each.ended for each in given]


def test_no_episodes() -> None:
    assert from_text(to_text([])) == []
