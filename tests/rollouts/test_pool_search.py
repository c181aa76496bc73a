"""Searches of the policy: what is drawn, from which pool, and with which probability."""

from __future__ import annotations

import itertools
import math

import jax
import numpy as np
import pytest

from qrag_jax.environments.rag.episode import FOUND, Hop, Retrieve
from qrag_jax.llm.outcomes import Failure
from qrag_jax.policies.plackett_luce import NOTHING, PlackettLuceConfig
from qrag_jax.retrieval.protocol import NONE
from qrag_jax.rollouts.pool_search import Ask, Found, PoolSearch
from tests.rollouts.searching import OPENING, SEP, BagTower, WordIds, pool_search

TEXTS = ("red apple", "green apple", "blue sky", "grey sky", "black coal", "white snow")
CONFIG = PlackettLuceConfig(tau=0.5, pool=4, passages=2)


def asks(count: int, query: str = "apple", *, history: tuple[Hop, ...] = ()) -> list[Ask]:
    keys = jax.random.key_data(jax.random.split(jax.random.key(7), count))
    step = Retrieve(query, history)
    return [Ask("Which fruit is red?", step, np.asarray(key)) for key in keys]


def found(search: PoolSearch, *given: Ask) -> list[Found]:
    outcomes = search(given)
    assert not any(isinstance(each, Failure) for each in outcomes)
    return [each for each in outcomes if isinstance(each, Found)]


def test_the_pool_is_the_best_and_the_draw_is_from_it() -> None:
    search = pool_search(TEXTS, CONFIG, stateful=False)
    ((passages, drawn),) = found(search, *asks(1))
    vector = BagTower()([drawn.row.tolist()])[0]
    everything = search.index.vectors(np.arange(len(TEXTS))) @ vector
    np.testing.assert_array_equal(drawn.pool, np.argsort(-everything, kind="stable")[:4])
    np.testing.assert_array_equal(drawn.vectors, search.index.vectors(drawn.pool))
    logits, left, log_prob = (drawn.vectors @ vector) / 0.5, set(range(4)), 0.0
    for action in drawn.actions:
        log_prob += logits[action] - math.log(sum(math.exp(logits[i]) for i in left))
        left.remove(int(action))
    assert drawn.log_prob == pytest.approx(log_prob, abs=1e-5)
    softmax = np.exp(logits) / np.exp(logits).sum()
    assert drawn.entropy == pytest.approx(-(softmax * np.log(softmax)).sum(), abs=1e-5)
    names = tuple(f"p{drawn.pool[action]}" for action in drawn.actions)
    assert drawn.names == tuple(each.name for each in passages) == names
    assert passages[0].text == TEXTS[int(drawn.pool[drawn.actions[0]])]


def test_the_row_is_the_text_of_the_state() -> None:
    hop = Hop("What is a fruit?", "an apple", FOUND)
    search = pool_search(TEXTS, CONFIG)
    ((_, drawn),) = found(search, *asks(1, history=(hop,)))
    ask = asks(1, history=(hop,))[0]
    text = search.states.of(ask.question, ask.step)
    assert not isinstance(text, Failure)
    assert drawn.row.tolist() == [*OPENING, *WordIds().encode([text.text])[0], SEP]
    assert not drawn.cut


def test_a_draw_does_not_depend_on_the_others_of_the_batch() -> None:
    search = pool_search(TEXTS, CONFIG)
    given = asks(11)
    together = [each.drawn.actions.tolist() for each in found(search, *given)]
    alone = [found(search, each)[0].drawn.actions.tolist() for each in given]
    assert together == alone
    assert len({tuple(each) for each in together}) > 3  # episodes have draws of their own


def test_each_hop_of_an_episode_has_draws_of_its_own() -> None:
    hop = Hop("", "")
    search = pool_search(TEXTS, CONFIG, stateful=False)
    by_hop = [found(search, asks(1, history=(hop,) * n)[0])[0].drawn for n in range(8)]
    assert len({tuple(each.actions.tolist()) for each in by_hop}) > 2
    assert len({tuple(each.pool.tolist()) for each in by_hop}) == 1


def test_draws_are_as_frequent_as_they_are_probable() -> None:
    search = pool_search(TEXTS, PlackettLuceConfig(tau=0.5, pool=3, passages=2), stateful=False)
    drawn = [each.drawn for each in found(search, *asks(3000))]
    counts = {actions: 0 for actions in itertools.permutations(range(3), 2)}
    log_probs = {}
    for each in drawn:
        actions = tuple(each.actions.tolist())
        counts[actions] += 1
        log_probs[actions] = each.log_prob
    for actions, count in counts.items():
        expected = 3000 * math.exp(log_probs[actions])
        assert abs(count - expected) < 4 * math.sqrt(expected)


def test_greedy_is_the_index_order() -> None:
    search = pool_search(TEXTS, CONFIG, is_greedy=True)
    for each in found(search, *asks(3)):
        assert each.drawn.actions.tolist() == [0, 1]


def test_a_corpus_of_fewer_passages_than_the_pool() -> None:
    search = pool_search(TEXTS[:2], PlackettLuceConfig(pool=5, passages=3))
    ((passages, drawn),) = found(search, *asks(1))
    assert len(passages) == 2
    assert sorted(drawn.actions.tolist()) == [NOTHING, 0, 1]
    assert (drawn.pool[2:] == NONE).all()
    assert (drawn.vectors[2:] == 0).all()


def test_what_does_not_fit_is_cut_or_refused() -> None:
    search = pool_search(TEXTS, CONFIG, max_tokens=16)
    hops = (Hop("one two three four", "five"), Hop("six", "seven"))
    first, second = search([*asks(1, history=hops), *asks(1, "apple " * 40)])
    assert isinstance(first, Found)
    assert first.drawn.cut
    assert len(first.drawn.row) <= 16
    assert isinstance(second, Failure)
    assert second.cause == "too_long"
