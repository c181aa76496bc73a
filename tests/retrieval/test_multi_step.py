"""Over a corpus that is one document, the search is the trainer's; and what a corpus adds to it."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence

import numpy as np
import pytest

from qrag_jax.data.sample import Sample
from qrag_jax.errors import InputError
from qrag_jax.retrieval import multi_step
from qrag_jax.retrieval.multi_step import Hit, MultiStepSearch, Rules
from qrag_jax.retrieval.multi_step import Path as Way
from qrag_jax.retrieval.protocol import Passage
from qrag_jax.retrieval.vectors import ScanIndex
from qrag_jax.rollouts.beam_search import BeamSearch
from qrag_jax.rollouts.chunks import RolloutConfig
from qrag_jax.runtime.retriever_config import Search
from tests.devices import mesh_of
from tests.retrieval.small_corpus import ListedCorpus, of_texts, positions
from tests.rollouts.play_setup import KINDS, ROLLOUT, planned, sample, towers_of

# More chunks than steps, fewer, just as many.
SAMPLES = [sample(seed, chunks) for seed, chunks in enumerate((6, 2, 9, 1, 3, 20))]
CORPUS = sorted({text for document in SAMPLES for text in document.chunks if text})
QUESTIONS = [document.question for document in SAMPLES]


def rules_of(rollout: RolloutConfig = ROLLOUT, beam: Search | None = None, **more) -> Rules:
    search = dataclasses.replace(beam or planned(), stop_action=rollout.stop_action)
    return Rules(search, rollout.sort_by_index, positions(rollout.positions), **more)


GREEDY = rules_of()


def search_of(texts: Sequence[str], rules: Rules, seed: int = 0) -> MultiStepSearch:
    towers = towers_of(seed)
    return MultiStepSearch(of_texts(texts, towers.chunks(texts)), towers, rules)


def taken(hits: list[Hit]) -> list[int]:
    assert all(hit.metadata == {"even": int(hit.id[1:]) % 2 == 0} for hit in hits)
    return [int(hit.id[1:]) for hit in hits]


def same(found: Sequence[list[Hit]], expected: Sequence[list[Hit]]) -> None:
    for hits, others in zip(found, expected, strict=True):
        assert [hit._replace(score=0) for hit in hits] == [h._replace(score=0) for h in others]
        scores = ([hit.score for hit in some] for some in (hits, others))
        np.testing.assert_allclose(*scores, atol=2e-5)


# ---------------------------------------------------------------------- as the trainer does


def ways(rollout: RolloutConfig, beam: Search, seed: int = 0) -> list[Way]:
    """What an evaluation of the trainer plays."""
    search = BeamSearch(mesh_of(), towers_of(seed), rollout, beam, batch_size=32)
    return [way for _, way in search.play(SAMPLES)]


def check_ways(
    rules: Rules, samples: Sequence[Sample], expected: Sequence[Way], seed: int = 0
) -> None:
    for document, way in zip(samples, expected, strict=True):
        (hits,) = search_of(document.chunks, rules, seed).search([document.question])
        assert taken(hits) == list(way.taken)
        assert [hit.step for hit in hits] == list(range(1, len(hits) + 1))
        assert [hit.text for hit in hits] == [document.chunks[i] for i in way.taken]
        np.testing.assert_allclose([hit.score for hit in hits], way.q, atol=2e-5)


@pytest.mark.parametrize(
    ("kind", "beam", "score"),
    [("stop", 1, "last"), ("absolute", 2, "sum"), ("sorted", 5, "last"), ("stop", 4, "policy")],
)
def test_the_search_is_that_of_the_evaluation(kind: str, beam: int, score: str) -> None:
    config = planned(beam=beam, beam_score=score, gamma=0.9, alpha=0.1, top_k_actions=6)
    # Towers for which STOP is the best action of some states and not of others.
    expected = ways(KINDS[kind], config, 5)
    check_ways(rules_of(KINDS[kind], config), SAMPLES, expected, 5)
    if beam == 1:
        most = [min(3, len(document.chunks)) for document in SAMPLES]
        assert {len(way.taken) < n for way, n in zip(expected, most, strict=True)} == {True, False}


def test_it_stops_before_a_passage_that_is_not_worth_it() -> None:
    beam = planned(beam=3, beam_score="sum")
    middle = float(np.median([q for way in ways(ROLLOUT, beam) for q in way.q]))
    config = dataclasses.replace(beam, stop_threshold=middle - 1e-3)
    expected = ways(ROLLOUT, config)
    assert {len(way.taken) for way in expected} >= {1, 3}
    check_ways(rules_of(ROLLOUT, config), SAMPLES, expected)
    check_ways(rules_of(beam=planned(stop_threshold=math.inf)), SAMPLES, [Way()] * len(SAMPLES))


# ---------------------------------------------------------------------- what a corpus adds


def test_questions_filters_and_steps_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Side by side as one by one; only what agrees is taken; and no more steps than asked for."""
    search = search_of(CORPUS, GREEDY)
    whole = search.search(QUESTIONS)
    assert len({hits[0].id for hits in whole}) > 1
    same([search.search([question])[0] for question in QUESTIONS], whole)
    monkeypatch.setattr(multi_step, "_STATES", 2)
    same(search.search(QUESTIONS), whole)
    assert search.search([]) == []
    relative = dataclasses.replace(ROLLOUT, positions="relative")
    beam = rules_of(relative, planned(beam=3))
    for rules in (GREEDY, beam, rules_of(per_step=2)):
        for hits in search_of(CORPUS, rules).search(QUESTIONS, where={"even": True}):
            assert len(hits) == len({*taken(hits)}) == 3 * rules.per_step
            assert all(hit.metadata["even"] for hit in hits)
    few = search_of(CORPUS[:2], GREEDY).search(["anna went to the hall"])
    assert sorted(taken(few[0])) == [0, 1]
    limits = [1 + i % 3 for i in range(len(QUESTIONS))]
    cut = [hits[:most] for hits, most in zip(whole, limits, strict=True)]
    same(search.search(QUESTIONS, steps=limits), cut)
    for questions, steps in ((QUESTIONS, 4), (["a"], [1, 2]), (["a"], 0)):
        with pytest.raises(InputError, match="steps"):
            search.search(questions, steps=steps)


def listed_by_hand(
    search: MultiStepSearch, question: str, threshold: float = -np.inf
) -> list[tuple[int, int]]:
    """Steps and passages that a search with several passages a step finds, one step at a time."""
    rules, towers = search.rules, search.towers
    vectors = search.index.vectors(range(len(CORPUS)))
    if rules.search.stop_action:
        vectors = np.concatenate([vectors, towers.chunks([""])])
    state: list[int] = []
    found: list[tuple[int, int]] = []
    for step in range(1, rules.search.max_steps + 1):
        texts = tuple(CORPUS[number] for number in state)
        q = vectors @ towers.states([(question, texts)])[0]
        order = [n for n in np.argsort(-q, kind="stable").tolist() if n not in state]
        above = [n for n in order if q[n] > threshold]
        before_stop = list(itertools.takewhile(lambda n: n != len(CORPUS), above))
        if not before_stop:
            break
        known = {number for _, number in found}
        new = [n for n in before_stop if n not in known][: rules.per_step]
        found += [(step, number) for number in new]
        state.append(before_stop[0])
    return found


def test_several_passages_a_step() -> None:
    """The best of each state, of which the very best goes into the next one; STOP and the
    threshold end them."""
    stopping = dataclasses.replace(KINDS["stop"], positions="none")
    plain = search_of(CORPUS, rules_of(per_step=2)).search(QUESTIONS)
    least = float(np.median([hit.score for hits in plain for hit in hits]))
    counts = set()
    for rules, seed in (
        (rules_of(per_step=2), 0),
        (rules_of(per_step=3), 0),
        # Towers of which STOP is seldom, often or mostly the best action.
        *((rules_of(stopping, per_step=2), seed) for seed in (1, 3, 6)),
        (rules_of(beam=planned(stop_threshold=least), per_step=2), 0),
    ):
        search, threshold = search_of(CORPUS, rules, seed), rules.search.threshold
        for question, hits in zip(QUESTIONS, search.search(QUESTIONS), strict=True):
            found = list(zip([hit.step for hit in hits], taken(hits), strict=True))
            assert found == listed_by_hand(search, question, threshold)
            if not rules.search.stop_action and threshold == -math.inf:
                assert len(hits) == 3 * rules.per_step
            if rules.search.stop_action:
                counts.add(len(hits))
    assert {0, 6} <= counts


def test_titles_stand_in_states_as_the_run_had_them() -> None:
    document, rules = SAMPLES[0], rules_of(title_separator=". ")
    titled = [(f"w{n}", text) for n, text in enumerate(document.chunks)]
    joined = [f"{title}. {text}" for title, text in titled]
    passages = [Passage(f"p{n}", text, title) for n, (title, text) in enumerate(titled)]
    towers = towers_of(0)
    index = ScanIndex(ListedCorpus(passages), towers.chunks(joined))
    (found,) = MultiStepSearch(index, towers, rules).search([document.question])
    (expected,) = search_of(joined, rules).search([document.question])
    assert [hit[:3] for hit in found] == [hit[:3] for hit in expected]
