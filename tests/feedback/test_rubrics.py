"""Rewards of agents' episodes: mixtures, hops, models' verdicts; rubrics and a user's own one."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from configs import rlvr
from qrag_jax.data.sample import Sample
from qrag_jax.environments.episode import FOUND, Closed, Document, Failed, Hop, ToolTask
from qrag_jax.errors import InputError
from qrag_jax.feedback.llm import verdict_of
from qrag_jax.feedback.rag import (
    NAMES,
    Mixture,
    Scored,
    judged_answer,
    mean_score,
    reranked_passages,
)
from qrag_jax.feedback.rubric import PARTS, Rubric, own_rubric, reward_of, score
from qrag_jax.llm.outcomes import Answer, Failure, RerankRequest
from qrag_jax.llm.text.generation import Generation
from qrag_jax.llm.text.prompts import load
from qrag_jax.retrieval.protocol import Passage
from qrag_jax.systems.rlvr.config import RlvrConfig

GRADES = (("p1", 1), ("p3", 1))
GOLD = Sample("q1", "Which country?", answers=("Norway", "Kingdom of Norway"), grades=GRADES)
HOPS = (Hop("a", "Oslo", FOUND), Hop("b", "Norway", FOUND))
ENDED = Closed("the Norway", history=HOPS)
PASSAGES = [["p1", "p2"], ["p2", "p3"]]
MODELS: dict[str, Any] = {"llm": 1.0, "relevance": (0.5, 0.25)}


def scored(names: str, *episode: Any, gold: Sample = GOLD, **models: Any) -> Scored:
    result = Mixture.of(names).score(gold, *(episode or (ENDED,)), PASSAGES, **models)
    assert isinstance(result, Scored)
    return result


def test_every_reward() -> None:
    result = scored(",".join(name for name in NAMES if name != "rouge_l"), **MODELS)
    assert result.episode.pop("ndcg") == pytest.approx((1 + 1 / 2) / (1 + 0.6309297535714575))
    assert result.episode == {"f1": 1, "em": 1, "sub_em": 1, "llm": 1, "recall": 1}
    assert result.hops.pop("hop_ndcg") == pytest.approx((0.6131471927654584, 0.6309297535714575))
    hops = {"hop_recall": (0.5, 0.5), "novelty": (1, 0.5), "relevance": (0.5, 0.25)}
    assert result.hops == hops
    # The data set's own metric counts.
    said = Closed("yes, they are", history=HOPS)
    for source, worth in ("hotpotqa", 0), ("", 0.5):
        gold = Sample("q1", "?", answers=("yes",), source=source)
        assert scored("f1", said, gold=gold) == Scored({"f1": worth}, {})
    gold = Sample("q1", "?", answers=("17", "23"), source="niah")  # all values are needed
    result = scored("f1,em,sub_em", Closed("17", history=HOPS), gold=gold)
    assert result.episode == {"f1": 0.5, "em": 0, "sub_em": 0}
    pytest.importorskip("rouge_score")
    assert scored("rouge_l").episode == {"rouge_l": pytest.approx(2 / 3)}  # "the" is a word here


def test_a_mixture_is_weighted() -> None:
    text = "f1=1, recall=0.5 ,novelty=-0.25"
    result = scored(text, Closed("Norway Sweden", history=HOPS))
    assert Mixture.of(text).total(result) == pytest.approx(-0.25 + 2 / 3 + 0.5 - 0.125)
    # To give up is a wrong answer, also without a verdict: nobody asks about an empty answer.
    result = scored("f1,em,sub_em,llm,recall", Closed("", history=HOPS))
    assert result.episode == {"f1": 0, "em": 0, "sub_em": 0, "llm": 0, "recall": 1}


def test_what_failed_has_no_reward() -> None:
    for broken in (Failed("timeout", "no reply."), Failed("no_retrieval", "none.", history=HOPS)):
        result = Mixture.of("f1,recall").score(GOLD, broken, PASSAGES)
        assert result == Failure(broken.cause, broken.message)
    failed = Failure("timeout", "no reply.")
    assert Mixture.of("f1,llm").score(GOLD, ENDED, PASSAGES, llm=failed) == failed
    relevance = (0.5, failed)
    assert Mixture.of("f1,relevance").score(GOLD, ENDED, PASSAGES, relevance=relevance) == failed


def test_what_cannot_be_scored_is_refused() -> None:
    for text in ("", "f2", "f1=nan", "f1,em,f1=2"):
        with pytest.raises(InputError, match=r"config\.reward\.mixture"):
            Mixture.of(text)
    unknown = Sample("q1", "?", answers=("x",))
    Mixture.of("f1,novelty").check(unknown)
    for mixture, gold in (("f1,ndcg", unknown), ("f1", Sample("q1", "?", grades=GRADES))):
        with pytest.raises(InputError, match="question q1"):
            Mixture.of(mixture).check(gold)


def test_verdicts_and_relevance_by_models() -> None:
    generation, judge = Generation(max_tokens=32), load("judge")
    request = judged_answer(judge, GOLD, "Norge", generation)
    assert request is not None
    for said in ("Norway; Kingdom of Norway", "Norge"):
        assert said in request.messages[1][1]
    assert judged_answer(judge, GOLD, " the.", generation) is None
    reranked = reranked_passages("q", [Passage("p1", "in Oslo", "Ada"), Passage("p2", "x")])
    assert reranked == RerankRequest("q", ("Ada. in Oslo", "x"))
    assert mean_score(Answer("[0.5, 0.25]")) == 0.375
    assert mean_score(Answer("[7.5, -2]")) == 0.5  # of a model without that range
    assert (reranked_passages("q", []), mean_score(None)) == (None, 0)
    failure = Failure("timeout", "no reply.")
    assert verdict_of(failure, generation) == mean_score(failure) == failure


# ---------------------------------------------------------------- rubrics

DOCUMENTS = tuple(Document(str(at), "", f"text {at}", at in (1, 3)) for at in range(5))
TASK = ToolTask("q", "Where?", ("New York City", "NYC"), DOCUMENTS, hops=2)


def test_parts_by_hand() -> None:
    """Said 2 of 3 words of the best alias, saw 1 of 2 gold in 3, cited 1 gold in 3, 2 fields."""
    closed = Closed("the York City", cited=("1", "9", "0", "1"), seen=("3", "0", "4"), fields=2)
    by_hand = (0.0, 0.8, 1 / 2, 1 / 3, 1 / 2, 1 / 3, 0.4, 2 / 3)
    assert score(closed, TASK) == pytest.approx(dict(zip(PARTS, by_hand, strict=True)))
    right = score(Closed("nyc.", cited=("3", "1"), seen=("1", "3"), fields=3), TASK)
    assert right == dict.fromkeys(PARTS, 1.0)
    assert score(Closed(""), TASK) == dict.fromkeys(PARTS, 0.0)
    article = dataclasses.replace(TASK, answers=("The The",))
    assert score(Closed("the"), article)["em"] == 1.0
    assert score(Closed(" \n"), article)["em"] == 0.0
    none = dataclasses.replace(TASK, documents=DOCUMENTS[:1])  # without gold ones
    ungrounded = score(Closed("NYC", cited=("0",), seen=("0",)), none)
    assert (ungrounded["recall"], ungrounded["citation"]) == (0.0, 1.0)
    corpus = ToolTask("q", "Where?", ("NYC",), hops=2, gold_ids=("p7", "p8"))
    assert score(Closed("NYC", seen=("p8",)), corpus)["recall"] == 0.5


def test_a_rubric_by_hand() -> None:
    """The numbers of RLVR's own ones are pinned."""
    given = dict(zip(PARTS, (1.0, 0.5, 0.75, 0.25, 0.6, 0.1, 0.3, 2 / 3), strict=True))
    nothing = dict.fromkeys(PARTS, 0.0)
    rubric = Rubric(**nothing | {"em": 1.0, "precision": -0.5}, hops="none", divisor=2.0)
    assert rubric.reward(given, 3) == pytest.approx(0.4375)  # a part may cost
    weights = nothing | {"em": 1.0, "f1": 0.8, "recall": 0.6}
    answers = Rubric(**weights, scales="answer", divisor=1.0)
    assert answers.reward(given, 3) == pytest.approx(1.5 * 1.4 + 0.45)
    everything = dataclasses.replace(answers, scales="all", divisor=4.0)
    assert everything.reward(given, 3) == pytest.approx(1.5 * (1.4 + 0.45) / 4)


def test_weights_are_the_configs_and_older_rubrics_are_its_variants() -> None:
    config = rlvr.get_config("tiny,X_0809")
    config.rubric.recall = -0.5
    rubric = RlvrConfig.of(config).rubric.load()
    assert isinstance(rubric, Rubric)
    parts = dict.fromkeys(PARTS, 1.0)
    assert rubric.reward(parts, 2) == pytest.approx(0.5 * 0.5 + 0.5 * 0.5 - 0.5 + 0.2)
    for field, wrong in (("hops", "twice"), ("divisor", 0.0)):
        config = rlvr.get_config("tiny")
        config.rubric[field] = wrong
        with pytest.raises(InputError, match=rf"config\.rubric\.{field}"):
            RlvrConfig.of(config)


def test_a_rubric_by_a_users_function(tmp_path: Path) -> None:
    """Its failures are those of `test_answers.py`."""
    path = tmp_path / "my_rubric.py"
    path.write_text(
        "def good(question, answers, answer, parts):\n"
        '    assert (question, answers, answer) == ("Where?", ["New York City", "NYC"], "nyc")\n'
        '    return parts["em"] + 10 * parts["recall"]\n'
        "def narrow(question, answers):\n"
        "    return 1\n"
    )
    closed = Closed("nyc", seen=("1", "0"))
    assert reward_of(own_rubric(f"{path}:good"), closed, TASK, score(closed, TASK)) == 6.0
    for wrong in (f"{path}:narrow", f"{tmp_path}/none.py:good"):
        with pytest.raises(InputError, match=r"config\.rubric\.path"):
            own_rubric(wrong)
