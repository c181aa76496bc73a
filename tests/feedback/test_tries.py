from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest

from qrag_jax.environments.query_writing.state import STOPPED
from qrag_jax.feedback.tries import StateKey, Try, TryKey, by_level, in_order
from tests.feedback.tries_maker import made, state


@pytest.mark.parametrize("seed", range(3))
def test_json_is_exact(seed: int) -> None:
    """Numbers to the last bit, and text that is not well-formed."""
    draw = random.Random(seed)
    count = draw.randint(0, 20)
    each = Try(
        question=draw.randrange(10**6),
        hop=2,
        state=1,
        variant=3,
        draw=4,
        query='wo "ist" \udc80 東京\u2028?',
        sampled=tuple(draw.randrange(50_000) for _ in range(count)),
        log_probs=tuple(float(np.float32(-draw.expovariate(1.0))) for _ in range(count)),
        finish="stop",
        outcome="searched",
        found=(("p1", draw.random()), ("p2", -draw.random() * 1e-300)),
        pool=("p0", "p1", "p2"),
        scores={"ap": draw.random(), "recall": 1 / 3, "all_gold": 0.0},
        reward=draw.random() / 3,
        version="step-7",
    )
    again = Try.from_json(json.loads(json.dumps(each.to_json())))
    assert again == each
    assert np.array(again.log_probs).tobytes() == np.array(each.log_probs).tobytes()
    assert isinstance(again.found[0], tuple)
    assert list(each.to_json()) == list(Try.__dataclass_fields__)


def test_a_try_without_a_reward() -> None:
    for each in (made("", None), made("", None, outcome="timeout", finish="")):
        assert not each.scored
        assert not each.searched
        assert Try.from_json(json.loads(json.dumps(each.to_json()))) == each


def test_names_of_a_try() -> None:
    each = made("q", 0.5, hop=2, state=3, variant=1, draw=4)
    assert each.at == StateKey(question=5, hop=2, state=3)
    assert each.key == TryKey(question=5, hop=2, state=3, variant=1, draw=4)
    assert each.scored
    assert each.searched
    assert not made("stop", 0.5, outcome=STOPPED).searched


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"log_probs": (-1.0,)}, "tokens and 1"),
        ({"outcome": "done"}, "'done'"),
        ({"finish": "eos"}, "'eos'"),
        ({"outcome": "query_too_long"}, "'query_too_long'"),
        ({"outcome": "connection"}, "'connection'"),
        ({"reward": float("nan")}, "try is nan"),
    ],
)
def test_a_try_that_cannot_be_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        made("q", **{"reward": 0.5} | fields)


def test_scored_tries_are_put_in_order() -> None:
    tries = [
        made("d", 0.1, state=1),
        made("c", 0.2, variant=1),
        made("b", 0.3, draw=1),
        made("x", None),
        made("a", 0.4),
    ]
    assert [each.query for each in in_order(tries)] == ["a", "b", "c", "d"]


def test_levels_ascend_and_keep_the_order() -> None:
    tries = state(("a", 0.5), ("b", 0.0), ("c", 0.5), ("d", 0.25))
    queries = [[each.query for each in level] for level in by_level(tries)]
    assert queries == [["b"], ["d"], ["a", "c"]]


def test_a_difference_of_the_last_bit_is_none() -> None:
    assert 0.1 + 0.2 != 0.3
    assert len(by_level(state(("a", 0.1 + 0.2), ("b", 0.3), ("c", 0.3 + 1e-5)))) == 2
