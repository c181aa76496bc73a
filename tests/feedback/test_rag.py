"""Rewards of an agent's episodes: mixtures, hops, models' verdicts, and what has no reward."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from qrag_jax.environments.rag.episode import FOUND, Broken, Finished, Hop, Seen
from qrag_jax.errors import InputError
from qrag_jax.feedback import rag_judging
from qrag_jax.feedback.language_model import Unscored
from qrag_jax.feedback.rag import NAMES, Gold, Mixture, Scored
from qrag_jax.llm.outcomes import Answer, Failure, RerankRequest
from qrag_jax.llm.text.generation import Generation
from qrag_jax.llm.text.prompts import load

GOLD = Gold("q1", "Which country?", ("Norway", "Kingdom of Norway"), frozenset({"p1", "p3"}))
HOPS = (Hop("a", "Oslo", FOUND), Hop("b", "Norway", FOUND))
ENDED = Finished("the Norway", HOPS)
PASSAGES = [["p1", "p2"], ["p2", "p3"]]
MODELS: dict[str, Any] = {"llm": 1.0, "relevance": (0.5, 0.25)}


def test_every_reward() -> None:
    names = [name for name in NAMES if name != "rouge_l"]
    scored = Mixture(dict.fromkeys(names, 1.0)).score(GOLD, ENDED, PASSAGES, **MODELS)
    assert isinstance(scored, Scored)
    assert scored.searches == 2
    assert scored.episode.pop("ndcg") == pytest.approx((1 + 1 / 2) / (1 + 0.6309297535714575))
    assert scored.episode == {"f1": 1, "em": 1, "sub_em": 1, "llm": 1, "recall": 1}
    assert scored.hops.pop("hop_ndcg") == pytest.approx((0.6131471927654584, 0.6309297535714575))
    assert scored.hops == {
        "hop_recall": (0.5, 0.5),
        "novelty": (1, 0.5),
        "relevance": (0.5, 0.25),
    }


def test_rouge_l_is_one_of_them() -> None:
    if importlib.util.find_spec("rouge_score") is None:
        with pytest.raises(InputError, match="needs the package"):
            Mixture.of("rouge_l")
        pytest.skip("the package rouge-score is not installed")
    scored = Mixture.of("rouge_l").score(GOLD, ENDED, PASSAGES)
    assert isinstance(scored, Scored)
    assert scored.episode == {"rouge_l": pytest.approx(2 / 3)}  # "the" is a word here


def test_a_mixture_is_weighted_and_the_last_hop_has_the_episodes_rewards() -> None:
    mixture = Mixture.of("f1=1, recall=0.5 ,novelty=-0.25")
    assert mixture.weights == {"f1": 1, "recall": 0.5, "novelty": -0.25}
    ended = Finished("Norway Sweden", HOPS)
    scored = mixture.score(GOLD, ended, PASSAGES)
    assert isinstance(scored, Scored)
    steps = mixture.steps(scored)
    assert steps == pytest.approx((-0.25, 2 / 3 + 0.5 - 0.125))
    assert mixture.total(scored) == pytest.approx(sum(steps))
    assert Mixture.of("em").weights == {"em": 1}


def test_a_broken_episode_has_no_reward() -> None:
    for broken in (Broken("timeout", "no reply."), Broken("no_retrieval", "none.", HOPS)):
        scored = Mixture.of("f1,recall").score(GOLD, broken, PASSAGES)
        assert scored == Unscored(broken.cause, broken.message)


def test_to_give_up_is_a_wrong_answer() -> None:
    scored = Mixture.of("f1,em,sub_em,llm,recall").score(GOLD, Finished("", HOPS), PASSAGES)
    assert isinstance(scored, Scored)  # without a verdict: nobody asks about an empty answer
    assert scored.episode == {"f1": 0, "em": 0, "sub_em": 0, "llm": 0, "recall": 1}


def test_the_data_sets_own_metric_counts() -> None:
    gold = Gold("q1", "?", ("yes",), frozenset(), rule="hotpotqa")
    said = Finished("yes, they are", HOPS)
    assert Mixture.of("f1").score(gold, said, PASSAGES) == Scored({"f1": 0}, {}, 2)
    squad = Gold("q1", "?", ("yes",), frozenset())
    assert Mixture.of("f1").score(squad, said, PASSAGES) == Scored({"f1": 0.5}, {}, 2)


def test_all_values_of_ruler_are_needed() -> None:
    gold = Gold("q1", "?", ("17", "23"), frozenset(), rule="ruler")
    mixture = Mixture.of("f1,em,sub_em,rouge_l")
    half = mixture.score(gold, Finished("17", HOPS), PASSAGES)
    assert isinstance(half, Scored)
    assert half.episode == pytest.approx({"f1": 0.5, "em": 0, "sub_em": 0, "rouge_l": 2 / 3})
    both = mixture.score(gold, Finished("17, 23", HOPS), PASSAGES)
    assert isinstance(both, Scored)
    assert set(both.episode.values()) == {1}


def test_a_model_that_failed_leaves_the_episode_without_a_reward() -> None:
    failed = Unscored("timeout", "no reply.")
    assert Mixture.of("f1,llm").score(GOLD, ENDED, PASSAGES, llm=failed) == failed
    relevance = (0.5, failed)
    assert Mixture.of("f1,relevance").score(GOLD, ENDED, PASSAGES, relevance=relevance) == failed


def test_mistakes_of_the_program() -> None:
    with pytest.raises(ValueError, match="needs the verdict"):
        Mixture.of("llm").score(GOLD, ENDED, PASSAGES)
    with pytest.raises(ValueError, match="needs a score"):
        Mixture.of("relevance").score(GOLD, ENDED, PASSAGES, relevance=(1.0,))
    with pytest.raises(ValueError, match="2 hops found"):
        Mixture.of("f1").score(GOLD, ENDED, PASSAGES[:1])


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("", "names no reward; use f1, em"),
        ("f2", "has 'f2'; use one of f1, em"),
        ("f1=", "has 'f1='; write NAME=NUMBER"),
        ("f1=one", "has 'f1=one'; write NAME=NUMBER"),
        ("f1=nan", "the weight nan for f1"),
        ("f1=inf", "the weight inf for f1"),
        ("f1=0", "the weight 0.0 for f1"),
        ("f1,em,f1=2", "has f1 twice"),
    ],
)
def test_mixtures_that_cannot_be_used(text: str, wrong: str) -> None:
    with pytest.raises(InputError, match=f"config.reward.mixture .*{wrong}"):
        Mixture.of(text)


def test_questions_that_cannot_be_scored() -> None:
    Mixture.of("f1,recall").check(GOLD)
    Mixture.of("f1,novelty").check(Gold("q1", "?", ("x",), frozenset()))
    with pytest.raises(InputError, match="question q1"):
        Mixture.of("f1,ndcg").check(Gold("q1", "?", ("x",), frozenset()))
    with pytest.raises(InputError, match="question q1"):
        Mixture.of("f1").check(Gold("q1", "?", (), frozenset({"p"})))
    with pytest.raises(InputError, match="'meteor'"):
        Mixture.of("f1").check(Gold("q1", "?", ("x",), frozenset(), rule="meteor"))


def test_a_judges_verdict_is_1_or_0() -> None:
    generation, judge = Generation(max_tokens=32), load("judge")
    request = rag_judging.correctness_request(judge, GOLD, "Norge", generation)
    assert request is not None
    assert "<golds>Norway; Kingdom of Norway</golds>" in request.messages[1][1]
    assert "<prediction>Norge</prediction>" in request.messages[1][1]
    assert rag_judging.correctness_request(judge, GOLD, " the.", generation) is None
    assert rag_judging.correctness(Answer("Final answer: yes"), generation) == 1
    assert rag_judging.correctness(Answer("Final answer: no"), generation) == 0
    unclear = rag_judging.correctness(Answer("Perhaps."), generation)
    assert isinstance(unclear, Unscored)
    assert unclear.cause == "unclear_verdict"
    failed = rag_judging.correctness(Failure("server", "HTTP 500."), generation)
    assert failed == Unscored("server", "HTTP 500.")


def test_relevance_is_the_mean_score_of_the_passages() -> None:
    request = rag_judging.relevance_request("q", [Seen("p1", "in Oslo", "Ada"), Seen("p2", "x")])
    assert request == RerankRequest("q", ("Ada. in Oslo", "x"))
    assert rag_judging.relevance(Answer("[0.5, 0.25]")) == 0.375
    assert rag_judging.relevance(Answer("[7.5, -2]")) == 0.5  # of a model without that range
    assert rag_judging.relevance_request("q", []) is None
    assert rag_judging.relevance(None) == 0
    failed = rag_judging.relevance(Failure("timeout", "no reply."))
    assert failed == Unscored("timeout", "no reply.")
