"""Over a corpus that is one document, the search is the trainer's; and what a corpus adds to it."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence

import numpy as np
import pytest

from qrag_jax.data.sample import Sample
from qrag_jax.errors import InputError
from qrag_jax.retrieval import multi_step
from qrag_jax.retrieval.chunk_positions import Placement
from qrag_jax.retrieval.multi_step import Hit, MultiStepSearch, Rules
from qrag_jax.retrieval.paths import BeamConfig
from qrag_jax.retrieval.protocol import Passage
from qrag_jax.retrieval.tower_rows import RowForm, State, Towers
from qrag_jax.rollouts.chunks import CHUNK, STATE, RolloutConfig
from qrag_jax.rollouts.mesh_tower import MeshTower
from qrag_jax.runtime.compilation import CompilationCounter
from tests.devices import mesh_of
from tests.episodes_maker import towers as two_towers
from tests.retrieval.array_index import ArrayIndex, ListedCorpus, of_texts
from tests.rollouts import test_beam_search as planned
from tests.rollouts.long_documents import QUESTION_TOKENS, ROW_TOKENS, loaded, shardings
from tests.rollouts.test_beam_search import (
    KINDS,
    ROLLOUT,
    SAMPLES,
    WIDTH,
    every_kind,
    rollout_of,
    ways,
)

pytestmark = pytest.mark.long


@functools.cache
def towers_of(seed: int) -> Towers:
    encoder, mesh = loaded().encoder, mesh_of()
    both = two_towers(encoder, seed)
    form = RowForm(
        state_opening=encoder.state_opening,
        chunk_opening=encoder.chunk_opening,
        sep_id=encoder.sep_id,
        max_question_tokens=QUESTION_TOKENS,
        max_chunk_tokens_in_state=ROLLOUT.max_chunk_tokens_in_state,
        state_tokens=WIDTH,
        chunk_tokens=ROW_TOKENS,
        max_chunks=ROLLOUT.max_steps - 1,
    )
    state, chunk = (
        MeshTower(mesh, shardings(mesh), encoder, both, number=number, row_tokens=row_tokens)
        for number, row_tokens in ((STATE, WIDTH), (CHUNK, ROW_TOKENS))
    )
    return Towers(loaded().tokenizer, form, state, chunk)


def rules_of(rollout: RolloutConfig, beam: BeamConfig = BeamConfig(), **more: object) -> Rules:  # noqa: B008
    return Rules(
        max_steps=rollout.max_steps,
        sort_by_index=rollout.sort_by_index,
        beam=beam,
        stop_action=rollout.stop_action,
        placement=Placement(rollout.positions),
        **more,  # type: ignore[arg-type]
    )


def search_of(texts: Sequence[str], rules: Rules, seed: int = 0) -> MultiStepSearch:
    towers = towers_of(seed)
    return MultiStepSearch(of_texts(texts, towers.chunks(texts)), towers, rules)


def taken(hits: list[Hit]) -> list[int]:
    assert all(hit.metadata == {"even": int(hit.id[1:]) % 2 == 0} for hit in hits)
    return [int(hit.id[1:]) for hit in hits]


def check_paths(
    rules: Rules, samples: Sequence[Sample], expected: Sequence[tuple], seed: int = 0
) -> None:
    for document, (chunks, values) in zip(samples, expected, strict=True):
        search = search_of(document.chunks, rules, seed)
        (hits,) = search.search([document.question])
        assert taken(hits) == list(chunks)
        assert [hit.step for hit in hits] == list(range(1, len(hits) + 1))
        assert [hit.text for hit in hits] == [document.chunks[i] for i in chunks]
        np.testing.assert_allclose([hit.score for hit in hits], values, atol=2e-5)


# ---------------------------------------------------------------------- as the trainer does


@every_kind
def test_greedy_is_the_rollout(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Towers for which STOP is the best action of some states and not of others.
    monkeypatch.setattr(planned, "params", lambda: two_towers(loaded().encoder, 5))
    rollout = dataclasses.replace(KINDS[kind], never_terminate=True)
    expected = rollout_of(rollout, tuple(SAMPLES))
    check_paths(rules_of(rollout), SAMPLES, expected, seed=5)
    ends = {
        len(chunks) < min(3, len(s.chunks))
        for s, (chunks, _) in zip(SAMPLES, expected, strict=True)
    }
    assert ends == ({True, False} if kind == "stop" else {False})


@every_kind
@pytest.mark.parametrize(("beam", "score"), [(2, "sum"), (5, "last"), (4, "policy")])
def test_a_beam_is_that_of_the_evaluation(kind: str, beam: int, score: str) -> None:
    config = BeamConfig(beam=beam, score=score, gamma=0.9, alpha=0.1, top_k_actions=6)
    expected = [(way.taken, way.q) for way in ways(KINDS[kind], config)]
    check_paths(rules_of(KINDS[kind], config), SAMPLES, expected)
    assert expected != [(way.taken, way.q) for way in ways(KINDS[kind])]


@pytest.mark.parametrize("beam", [1, 3])
def test_stops_before_a_passage_that_is_not_worth_it(beam: int) -> None:
    middle = float(np.median([q for way in ways(ROLLOUT) for q in way.q]))
    config = BeamConfig(beam=beam, score="sum", stop_threshold=middle - 1e-3)
    expected = [(way.taken, way.q) for way in ways(ROLLOUT, config)]
    assert {len(chunks) for chunks, _ in expected} >= {1, 3}
    check_paths(rules_of(ROLLOUT, config), SAMPLES, expected)
    nothing = BeamConfig(stop_threshold=math.inf)
    check_paths(rules_of(ROLLOUT, nothing), SAMPLES, [((), ())] * len(SAMPLES))


# ---------------------------------------------------------------------- what a corpus adds

CORPUS = sorted({text for document in SAMPLES for text in document.chunks if text})
QUESTIONS = [document.question for document in SAMPLES]
GREEDY = rules_of(ROLLOUT)


def assert_same(found: list[list[Hit]], expected: list[list[Hit]]) -> None:
    for hits, others in zip(found, expected, strict=True):
        assert [hit._replace(score=0) for hit in hits] == [hit._replace(score=0) for hit in others]
        scores = ([hit.score for hit in some] for some in (hits, others))
        np.testing.assert_allclose(*scores, atol=2e-5)


@pytest.mark.parametrize("beam", [1, 3])
def test_many_are_searched_as_one(beam: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rules = rules_of(KINDS["stop"], BeamConfig(beam=beam))
    search = search_of(CORPUS, rules)
    together = search.search(QUESTIONS)
    assert_same([search.search([question])[0] for question in QUESTIONS], together)
    monkeypatch.setattr(multi_step, "_STATES", 4 * beam)
    assert_same(search.search(QUESTIONS), together)
    assert search.search([]) == []


@pytest.mark.parametrize("positions", ["none", "relative"])
@pytest.mark.parametrize(("beam", "per_step"), [(1, 1), (3, 1), (1, 2)])
def test_no_passage_comes_twice_and_a_filter_holds(
    positions: str, beam: int, per_step: int
) -> None:
    rollout = dataclasses.replace(ROLLOUT, positions=positions)
    rules = rules_of(rollout, BeamConfig(beam=beam), per_step=per_step)
    for where, allowed in ((None, range(len(CORPUS))), ({"even": True}, range(0, len(CORPUS), 2))):
        for hits in search_of(CORPUS, rules).search(QUESTIONS, where=where):
            assert len(hits) == len(set(taken(hits))) == 3 * per_step
            assert set(taken(hits)) <= set(allowed)
    assert all(not hits for hits in search_of(["a"], rules).search(["b"], where={"even": False}))
    with pytest.raises(InputError, match="field colour"):
        search_of(CORPUS, rules).search(QUESTIONS, where={"colour": "red"})


def test_a_corpus_with_fewer_passages_than_steps() -> None:
    for rules in (GREEDY, rules_of(ROLLOUT, BeamConfig(beam=5)), rules_of(ROLLOUT, per_step=3)):
        (hits,) = search_of(CORPUS[:2], rules).search(["anna went to the hall"])
        assert sorted(taken(hits)) == [0, 1]


def test_every_question_may_have_its_own_steps() -> None:
    search = search_of(CORPUS, GREEDY)
    whole = search.search(QUESTIONS)
    limits = [1 + i % 3 for i in range(len(QUESTIONS))]
    cut = [hits[:most] for hits, most in zip(whole, limits, strict=True)]
    assert_same(search.search(QUESTIONS, steps=limits), cut)
    assert_same(search.search(QUESTIONS, steps=2), [hits[:2] for hits in whole])
    with pytest.raises(InputError, match="steps is 4"):
        search.search(QUESTIONS, steps=4)
    with pytest.raises(InputError, match="steps has 2"):
        search.search(["a"], steps=[1, 2])


def listed_by_hand(
    search: MultiStepSearch, question: str, threshold: float = -np.inf
) -> list[tuple[int, int]]:
    """Steps and passages that a search with several passages a step finds, one step at a time."""
    rules, towers = search.rules, search.towers
    vectors = search.index.vectors(range(len(CORPUS)))
    if rules.stop_action:
        vectors = np.concatenate([vectors, towers.chunks([""])])
    state: list[int] = []
    found: list[tuple[int, int]] = []
    for step in range(1, rules.max_steps + 1):
        texts = tuple(CORPUS[number] for number in state)
        q = vectors @ towers.states([State(question, texts)])[0]
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


def steps_and_passages(hits: list[Hit]) -> list[tuple[int, int]]:
    return list(zip([hit.step for hit in hits], taken(hits), strict=True))


@pytest.mark.parametrize("per_step", [2, 3])
def test_several_passages_a_step(per_step: int) -> None:
    """The best of each state, of which the very best goes into the next one."""
    search = search_of(CORPUS, rules_of(ROLLOUT, per_step=per_step))
    again = 0
    for question, hits in zip(QUESTIONS, search.search(QUESTIONS), strict=True):
        by_hand = listed_by_hand(search, question)
        assert steps_and_passages(hits) == by_hand
        assert len(hits) == 3 * per_step
        greedy = taken(search_of(CORPUS, GREEDY).search([question])[0])
        assert set(greedy) <= set(taken(hits))
        again += greedy[1] in taken(hits)[:per_step]
    assert again  # the second state's best was found before, for some


def test_several_passages_a_step_end_at_stop_and_at_the_threshold() -> None:
    stopping = dataclasses.replace(KINDS["stop"], positions="none")
    counts = set()
    for seed in (1, 3, 6):  # towers of which STOP is seldom, often or mostly the best action
        search = search_of(CORPUS, rules_of(stopping, per_step=2), seed)
        for question, hits in zip(QUESTIONS, search.search(QUESTIONS), strict=True):
            assert steps_and_passages(hits) == listed_by_hand(search, question)
            counts.add(len(hits))
    assert {0, 2 * stopping.max_steps} < counts
    plain = search_of(CORPUS, rules_of(ROLLOUT, per_step=2)).search(QUESTIONS)
    least = float(np.median([hit.score for hits in plain for hit in hits]))
    rules = rules_of(ROLLOUT, BeamConfig(stop_threshold=least), per_step=2)
    search = search_of(CORPUS, rules)
    for question, hits in zip(QUESTIONS, search.search(QUESTIONS), strict=True):
        assert steps_and_passages(hits) == listed_by_hand(search, question, least)


def test_questions_are_cut_as_in_training() -> None:
    search = search_of(CORPUS, GREEDY)
    long = "anna went to the old garden " * 3
    short = " ".join(long.split()[:QUESTION_TOKENS])
    assert search.towers.cut([long, short, ""]) == [0]
    assert_same(search.search([long]), search.search([short]))
    # An empty question is a row of special tokens alone, as for the trainer.
    (hits,) = search.search([""])
    assert len(hits) == 3


def test_titles_stand_in_states_as_the_run_had_them() -> None:
    document, rules = SAMPLES[0], rules_of(ROLLOUT, title_separator=". ")
    titled = [(f"w{n}", text) for n, text in enumerate(document.chunks)]
    joined = [f"{title}. {text}" for title, text in titled]
    passages = [Passage(f"p{n}", text, title) for n, (title, text) in enumerate(titled)]
    towers = towers_of(0)
    index = ArrayIndex(ListedCorpus(passages), towers.chunks(joined))
    (found,) = MultiStepSearch(index, towers, rules).search([document.question])
    (expected,) = search_of(joined, rules).search([document.question])
    assert [hit[:3] for hit in found] == [hit[:3] for hit in expected]
    assert len(found) > 1


def test_settings_that_cannot_be_searched_are_refused() -> None:
    for more, told in (
        (
            {"positions": "random_published"},
            "anew for every",
        ),
        ({"max_steps": 0}, "steps is 0"),
    ):
        with pytest.raises(InputError, match=told):
            search_of(["a"], rules_of(dataclasses.replace(ROLLOUT, **more)))
    with pytest.raises(InputError, match="per_step"):
        search_of(["a"], rules_of(ROLLOUT, BeamConfig(beam=3), per_step=2))


def test_nothing_compiles_after_the_first_calls() -> None:
    search = search_of(CORPUS, GREEDY)
    search.search(QUESTIONS * 8)
    search.search(QUESTIONS[:1])
    counter = CompilationCounter()
    search.search([f"{question} again" for question in QUESTIONS * 7])
    search.search(["bo took"])
    assert counter.count == 0
