"""LangChain's own calls of the adapter: documents are the retriever's hits."""

from __future__ import annotations

import asyncio
import pickle
import threading

import pytest

from qrag_jax import Retriever
from qrag_jax.errors import InputError
from tests.integrations.asked import QUESTION, QUESTIONS, Watched, metadata

pytest.importorskip("langchain_core", reason="needs the extra langchain")
from langchain_core.documents import Document
from langchain_core.runnables import ConfigurableField, RunnableLambda
from pydantic import ValidationError

from qrag_jax.integrations.langchain import QRagRetriever


def ids(documents: list[Document]) -> list[str]:
    assert all(document.id for document in documents)
    return [str(document.id) for document in documents]


def test_documents_are_the_hits(retriever: Retriever) -> None:
    hits = retriever.search(QUESTION, topk=9)
    documents = QRagRetriever(retriever=retriever, k=9).invoke(QUESTION)
    assert len(hits) == 9
    assert {bool(hit.title) for hit in hits} == {True, False}
    for hit, document in zip(hits, documents, strict=True):
        assert (document.id, document.page_content) == (hit.id, hit.text)
        assert document.metadata == metadata(hit) | {"score": hit.score}
    plain = QRagRetriever(retriever=retriever).invoke(QUESTION)
    assert ids(plain) == [hit.id for hit in retriever.search(QUESTION)]


def test_settings_of_the_retriever_and_of_a_call(retriever: Retriever) -> None:
    adapter = QRagRetriever(retriever=retriever, k=5, search_kwargs={"where": {"page": [0, 1]}})
    expected = retriever.search(QUESTION, topk=5, where={"page": [0, 1]})
    assert ids(adapter.invoke(QUESTION)) == [hit.id for hit in expected]
    one = adapter.invoke(QUESTION, k=2, where={"page": 3}, steps=1)
    assert ids(one) == [retriever.search(QUESTION, 1, where={"page": 3})[0].id]
    field = adapter.configurable_fields(k=ConfigurableField(id="k"))
    assert len(field.invoke(QUESTION, {"configurable": {"k": 3}})) == 3


def test_a_chain_in_threads(retriever: Retriever) -> None:
    watched = Watched(retriever)
    chain = QRagRetriever(retriever=watched, k=4) | RunnableLambda(ids)
    expected = [[hit.id for hit in retriever.search(q, topk=4)] for q in QUESTIONS]
    assert chain.batch(QUESTIONS) == expected
    watched.threads.clear()

    async def asked() -> list[list[str]]:
        return await asyncio.gather(*map(chain.ainvoke, QUESTIONS))

    assert asyncio.run(asked()) == expected
    assert watched.threads - {threading.get_ident()} == watched.threads != set()


def test_a_pickle_opens_the_folders_again(retriever: Retriever) -> None:
    adapter = QRagRetriever(retriever=retriever, k=3)
    again = pickle.loads(pickle.dumps(adapter))  # noqa: S301
    assert again.retriever is not retriever
    assert again.invoke(QUESTION) == adapter.invoke(QUESTION)


def test_wrong_settings_are_one_sentence(retriever: Retriever) -> None:
    adapter = QRagRetriever(retriever=retriever)
    with pytest.raises(InputError, match="'colour'"):
        adapter.invoke(QUESTION, where={"colour": "red"})
    with pytest.raises(InputError, match="topk is 0"):
        adapter.invoke(QUESTION, k=0)
    with pytest.raises(ValidationError, match="retriever"):
        QRagRetriever(retriever="exported")
