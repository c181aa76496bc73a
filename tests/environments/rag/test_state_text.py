"""The text of the policy's state, and what is left out of one that is too long."""

from __future__ import annotations

import json
import random

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


def test_the_state() -> None:
    stateful, stateless = (
        StateText().of(QUESTION, STEP),
        StateText(stateful=False).of(QUESTION, STEP),
    )
    query = "Query: Of which country is Malmö the capital?"
    assert isinstance(stateful, Fitted)
    instruction, question, history, last = stateful.text.split("\n")
    assert instruction == f"Instruct: {STATEFUL}"
    assert question.endswith(": " + " ".join(QUESTION.split()))
    assert json.loads(history.partition(": ")[2]) == [
        {"sub_query": hop.sub_query, "status": hop.status, "answer": hop.answer} for hop in HOPS
    ]
    assert last == query
    assert stateless == Fitted(f"Instruct: {STATELESS}\n{query}")
    assert StateText(False, "").of(QUESTION, STEP) == Fitted(query)
    assert json.loads(as_json((Hop("q", "a"),))) == [{"sub_query": "q", "answer": "a"}]


def test_half_a_surrogate_pair_does_not_stop_the_tokenizer() -> None:
    found = StateText().of("Q\ud800?", Retrieve("q\udfff?", (Hop("a", "\ud800"),)))
    assert isinstance(found, Fitted)
    assert "Q\ufffd?" in found.text
    found.text.encode()


def test_the_oldest_hops_go_first_then_the_end_of_the_question() -> None:
    """No smaller cut would have fitted; the query is never cut."""
    rng, cuts = random.Random(0), set()
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
            cuts.add((fitting[0][0] > 0, fitting[0][1] > 0))
        else:
            assert isinstance(found, Failure)
            assert found.cause == "too_long"
    assert {(False, False), (True, False), (True, True)} <= cuts
    for stateful in (True, False):
        found = StateText(stateful, max_tokens=40, count=words).of("Q?", Retrieve("d " * 40, ()))
        assert isinstance(found, Failure)


def written(question: str, step: Retrieve, hops: int, cut: int) -> str:
    kept = question.split()[: words(question) - cut]
    lines = [f"Original Question: {' '.join(kept)}", f"History: {as_json(step.history[hops:])}"]
    return "\n".join([*lines, f"Query: {step.sub_query.strip()}"])
