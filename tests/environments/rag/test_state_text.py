"""The text of the policy's state, and what is left out of one that is too long."""

from __future__ import annotations

import json
import random

import pytest

from qrag_jax.environments.rag.episode import FOUND, NOT_FOUND, Hop, Retrieve
from qrag_jax.environments.rag.state_text import STATEFUL, STATELESS, Fitted, StateText, as_json
from qrag_jax.llm.outcomes import Failure

QUESTION = "Of which country is\nAda Berg's birthplace the capital?"
HOPS = (
    Hop("Where was Ada born?", "about Bergen", NOT_FOUND),
    Hop('Where was "Ada Berg" born?', "Malmö\n日本", FOUND),
)
STEP = Retrieve("Of which country is\nMalmö the capital? ", HOPS)


def words(text: str) -> int:
    return len(text.split())


def test_stateful() -> None:
    assert StateText().of(QUESTION, STEP) == Fitted(
        f"Instruct: {STATEFUL}\n"
        "Original Question: Of which country is Ada Berg's birthplace the capital?\n"
        'History: [{"sub_query": "Where was Ada born?", "status": "NOT_FOUND", "answer": "about '
        'Bergen"}, {"sub_query": "Where was \\"Ada Berg\\" born?", "status": "FOUND", "answer": '
        '"Malmö\\n日本"}]\n'
        "Query: Of which country is Malmö the capital?"
    )


def test_stateless_is_the_query_alone() -> None:
    query = "Query: Of which country is Malmö the capital?"
    assert StateText(stateful=False).of(QUESTION, STEP) == Fitted(f"Instruct: {STATELESS}\n{query}")
    assert StateText(False, "").of(QUESTION, STEP) == Fitted(query)
    assert StateText(False, "Find\nit.").of(QUESTION, STEP) == Fitted(
        f"Instruct: Find it.\n{query}"
    )


def test_the_first_state_has_an_empty_history() -> None:
    found = StateText(instruction="").of("Q?", Retrieve("q?", ()))
    assert found == Fitted("Original Question: Q?\nHistory: []\nQuery: q?")


def test_a_hop_without_a_status_has_no_such_field() -> None:
    assert json.loads(as_json((Hop("q", "a"),))) == [{"sub_query": "q", "answer": "a"}]


def test_half_a_surrogate_pair_does_not_stop_the_tokenizer() -> None:
    found = StateText().of("Q\ud800?", Retrieve("q\udfff?", (Hop("a", "\ud800"),)))
    assert isinstance(found, Fitted)
    assert "Q\ufffd?" in found.text
    found.text.encode()


def test_the_oldest_hops_go_first_then_the_end_of_the_question() -> None:
    whole = StateText(instruction="", count=words)
    full = whole.of(QUESTION, STEP)
    assert isinstance(full, Fitted)
    length = words(full.text)
    cuts = []
    for most in range(length, 0, -1):
        found = StateText(True, "", most, words).of(QUESTION, STEP)
        if isinstance(found, Failure):
            assert found.cause == "too_long"
            break
        assert words(found.text) <= most
        assert found.text.endswith("\nQuery: Of which country is Malmö the capital?")
        history = json.loads(found.text.splitlines()[1].removeprefix("History: "))
        assert history == json.loads(as_json(HOPS[found.hops :]))
        kept = len(QUESTION.split()) - found.words
        question = " ".join(["Original Question:", *QUESTION.split()[:kept]])
        assert found.text.splitlines()[0].strip() == question
        cuts.append((found.hops, found.words))
    assert cuts[0] == (0, 0)
    assert cuts == sorted(cuts)
    assert {hops for hops, _ in cuts} == {0, 1, 2}
    assert all(hops == 2 for hops, words_ in cuts if words_)  # hops before words
    assert cuts[-1] == (2, len(QUESTION.split()))
    assert most == words("Original Question: History: [] Query:") + 7 - 1


def test_no_smaller_cut_would_have_fitted() -> None:
    rng = random.Random(0)
    for _ in range(200):
        hops = tuple(
            Hop("a " * rng.randint(1, 9), "b " * rng.randint(0, 9), FOUND)
            for _ in range(rng.randint(0, 5))
        )
        question, step = "c " * rng.randint(1, 20), Retrieve("d " * rng.randint(1, 5), hops)
        most = rng.randint(10, 80)
        found = StateText(True, "", most, words).of(question, step)
        every = [(n, 0) for n in range(len(hops) + 1)]
        every += [(len(hops), n) for n in range(1, words(question) + 1)]
        fitting = [cut for cut in every if words(written(question, step, *cut)) <= most]
        if fitting:
            assert found == Fitted(written(question, step, *fitting[0]), *fitting[0])
        else:
            assert isinstance(found, Failure)


def written(question: str, step: Retrieve, hops: int, cut: int) -> str:
    kept = question.split()[: words(question) - cut]
    lines = [f"Original Question: {' '.join(kept)}", f"History: {as_json(step.history[hops:])}"]
    return "\n".join([*lines, f"Query: {step.sub_query.strip()}"])


def test_a_query_that_does_not_fit_is_never_cut() -> None:
    for stateful in (True, False):
        found = StateText(stateful, max_tokens=40, count=words).of("Q?", Retrieve("d " * 40, ()))
        assert isinstance(found, Failure)
        assert "longer than 40 tokens" in found.message


def test_a_limit_needs_a_count() -> None:
    with pytest.raises(ValueError, match="needs a function"):
        StateText(max_tokens=10)
