"""LlamaIndex's own calls of the adapter: nodes are the retriever's hits."""

from __future__ import annotations

import asyncio
import pickle
import threading

import pytest

from qrag_jax import Retriever
from qrag_jax.errors import InputError
from tests.integrations.asked import QUESTION, QUESTIONS, Watched, metadata

pytest.importorskip("llama_index.core", reason="needs the extra llamaindex")
from llama_index.core.llms import MockLLM
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.schema import MetadataMode, NodeWithScore

from qrag_jax.integrations.llamaindex import QRagRetriever


def ids(nodes: list[NodeWithScore]) -> list[str]:
    return [node.node_id for node in nodes]


def test_nodes_are_the_hits(retriever: Retriever) -> None:
    hits = retriever.search(QUESTION, topk=9)
    nodes = QRagRetriever(retriever, similarity_top_k=9).retrieve(QUESTION)
    assert {bool(hit.title) for hit in hits} == {True, False}
    for hit, node in zip(hits, nodes, strict=True):
        assert (node.node_id, node.text, node.score) == (hit.id, hit.text, hit.score)
        assert node.metadata == metadata(hit)
        prompt = node.get_content(MetadataMode.LLM)
        assert (f"title: {hit.title}" in prompt) == bool(hit.title)
        assert "step" not in prompt
    assert ids(QRagRetriever(retriever).retrieve(QUESTION)) == [
        hit.id for hit in retriever.search(QUESTION)
    ]


def test_further_settings(retriever: Retriever) -> None:
    settings = {"where": {"page": 3}, "beam": 2}
    adapter = QRagRetriever(retriever, search_kwargs=settings)
    expected = retriever.search(QUESTION, beam=2, where={"page": 3})
    assert ids(adapter.retrieve(QUESTION)) == [hit.id for hit in expected]


def test_a_query_engine_and_threads(retriever: Retriever) -> None:
    watched = Watched(retriever)
    adapter = QRagRetriever(watched, similarity_top_k=4)
    engine = RetrieverQueryEngine.from_args(adapter, llm=MockLLM())  # it answers with the prompt
    hits = [retriever.search(question, topk=4) for question in QUESTIONS]
    expected = [[hit.id for hit in own] for own in hits]
    for question, own in zip(QUESTIONS, hits, strict=True):
        answer = engine.query(question)
        assert ids(answer.source_nodes) == [hit.id for hit in own]
        assert all(hit.text in str(answer) for hit in own)
    watched.threads.clear()

    async def asked() -> list[list[NodeWithScore]]:
        return await asyncio.gather(*map(adapter.aretrieve, QUESTIONS))

    assert [ids(nodes) for nodes in asyncio.run(asked())] == expected
    assert watched.threads - {threading.get_ident()} == watched.threads != set()


def test_a_pickle_opens_the_folders_again(retriever: Retriever) -> None:
    adapter = QRagRetriever(retriever, similarity_top_k=3)
    again = pickle.loads(pickle.dumps(adapter))  # noqa: S301
    assert again.retriever is not retriever
    assert ids(again.retrieve(QUESTION)) == ids(adapter.retrieve(QUESTION))


def test_wrong_settings_are_one_sentence(retriever: Retriever) -> None:
    with pytest.raises(InputError, match="'colour'"):
        QRagRetriever(retriever, search_kwargs={"where": {"colour": "red"}}).retrieve(QUESTION)
    with pytest.raises(InputError, match="topk is 0"):
        QRagRetriever(retriever, similarity_top_k=0).retrieve(QUESTION)
