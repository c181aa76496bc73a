"""DSPy's own programs with the adapter: passages are the retriever's hits."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from qrag_jax import Retriever
from qrag_jax.errors import InputError
from qrag_jax.retrieval.multi_step import Hit
from tests.integrations.asked import QUESTION, QUESTIONS, Watched

dspy = pytest.importorskip("dspy", reason="needs the extra dspy")
from dspy.utils import DummyLM

from qrag_jax.integrations.dspy import QRagRetriever


class Answers(dspy.Module):
    """A program as users write it."""

    def __init__(self, retriever: Retriever) -> None:
        super().__init__()
        self.search = QRagRetriever(retriever, k=3)
        self.answer = dspy.Predict("context: list[str], question -> answer")

    def forward(self, question: str) -> dspy.Prediction:
        context = self.search(question).passages
        return self.answer(context=context, question=question)


def texts(hits: list[Hit]) -> list[str]:
    return [f"{hit.title} | {hit.text}" if hit.title else hit.text for hit in hits]


def test_passages_are_the_hits(retriever: Retriever) -> None:
    hits = retriever.search(QUESTION, topk=9)
    found = QRagRetriever(retriever, k=9)(QUESTION)
    assert {bool(hit.title) for hit in hits} == {True, False}
    assert found.passages == texts(hits)
    assert found.ids == [hit.id for hit in hits]
    assert found.steps == [1] * 5 + [2] * 4
    assert found.scores == [hit.score for hit in hits]
    assert found.metadata == [dict(hit.metadata) for hit in hits]
    assert QRagRetriever(retriever)(QUESTION).passages == texts(retriever.search(QUESTION))


def test_settings_of_the_module_and_of_a_call(retriever: Retriever) -> None:
    search = QRagRetriever(retriever, 5, {"where": {"page": [0, 1]}})
    expected = retriever.search(QUESTION, topk=5, where={"page": [0, 1]})
    assert search(QUESTION).passages == texts(expected)
    one = search(QUESTION, k=2, where={"page": 3}, steps=1)
    assert one.passages == texts(retriever.search(QUESTION, 1, where={"page": 3}))


def test_the_retrieval_model_of_others(retriever: Retriever) -> None:
    search = QRagRetriever(retriever)
    with dspy.context(rm=search.rm):
        found = dspy.Retrieve(k=4)(QUESTION)
    hits = retriever.search(QUESTION, topk=4)
    assert found.passages == texts(hits)
    assert [(p.long_text, p["id"], p.score) for p in search.rm(QUESTION, k=4)] == [
        (text, hit.id, hit.score) for text, hit in zip(texts(hits), hits, strict=True)
    ]


def test_a_program_reads_the_passages(retriever: Retriever) -> None:
    program = Answers(retriever)
    model = DummyLM([{"answer": "Oslo"}])
    with dspy.context(lm=model):
        assert program(question=QUESTION).answer == "Oslo"
    prompt = str(model.history[-1]["messages"])
    assert all(text in prompt for text in texts(retriever.search(QUESTION, topk=3)))


def test_threads(retriever: Retriever) -> None:
    watched = Watched(retriever)
    search = QRagRetriever(watched, k=4)

    async def asked() -> list[dspy.Prediction]:
        return await asyncio.gather(*map(search.acall, QUESTIONS))

    expected = [texts(retriever.search(question, topk=4)) for question in QUESTIONS]
    assert [found.passages for found in asyncio.run(asked())] == expected
    assert watched.threads - {threading.get_ident()} == watched.threads != set()
    examples = [dspy.Example(query=q).with_inputs("query") for q in QUESTIONS]
    found = search.batch(examples, num_threads=3, disable_progress_bar=True)
    assert [each.passages for each in found] == expected


def test_copies_share_what_a_saved_program_opens_again(
    retriever: Retriever, tmp_path: Path
) -> None:
    program = Answers(retriever)
    copied = program.reset_copy()
    assert copied.search is not program.search
    assert copied.search.retriever._backend is retriever._backend
    program.search.save(tmp_path / "search", save_program=True)
    again = dspy.load(str(tmp_path / "search"), allow_pickle=True)
    assert again(QUESTION).passages == program.search(QUESTION).passages
    program.save(tmp_path / "state.json")
    assert "retriever" not in (tmp_path / "state.json").read_text()


def test_wrong_settings_are_one_sentence(retriever: Retriever) -> None:
    search = QRagRetriever(retriever)
    with pytest.raises(InputError, match="'colour'"):
        search(QUESTION, where={"colour": "red"})
    with pytest.raises(InputError, match="topk is 0"):
        search(QUESTION, k=0)
