"""Haystack's own pipelines with the adapter: documents are the retriever's hits."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from qrag_jax import LoadSettings, Retriever
from qrag_jax.errors import InputError
from tests.integrations.asked import QUESTION, Watched, metadata

pytest.importorskip("haystack", reason="needs the extra haystack")
from haystack import Document, Pipeline
from haystack.core.errors import DeserializationError

from qrag_jax.integrations.haystack import QRagRetriever
from qrag_jax.integrations.remote import RemoteRetriever

ALLOWED = ["qrag_jax.integrations.haystack"]


def pipeline_of(adapter: QRagRetriever) -> Pipeline:
    made = Pipeline()
    made.add_component("retriever", adapter)
    return made


def ids(documents: list[Document]) -> list[str]:
    return [document.id for document in documents]


def test_documents_are_the_hits(retriever: Retriever) -> None:
    hits = retriever.search(QUESTION, topk=9)
    pipeline = pipeline_of(QRagRetriever(retriever, top_k=9))
    documents = pipeline.run({"retriever": {"query": QUESTION}})["retriever"]["documents"]
    assert {bool(hit.title) for hit in hits} == {True, False}
    for hit, document in zip(hits, documents, strict=True):
        assert (document.id, document.content, document.score) == (hit.id, hit.text, hit.score)
        assert document.meta == metadata(hit)
    plain = QRagRetriever(retriever).run(QUESTION)["documents"]
    assert ids(plain) == [hit.id for hit in retriever.search(QUESTION)]


def test_settings_of_the_component_and_of_a_call(retriever: Retriever) -> None:
    adapter = QRagRetriever(retriever, 5, {"where": {"page": [0, 1]}, "steps": 1})
    expected = retriever.search(QUESTION, 1, topk=5, where={"page": [0, 1]})
    assert ids(adapter.run(QUESTION)["documents"]) == [hit.id for hit in expected]
    found = pipeline_of(adapter).run({"query": QUESTION, "top_k": 1, "where": {"page": 3}})
    expected = retriever.search(QUESTION, 1, where={"page": 3})
    assert ids(found["retriever"]["documents"]) == [hit.id for hit in expected]


def test_an_asynchronous_pipeline_searches_in_a_thread(retriever: Retriever) -> None:
    watched = Watched(retriever)
    pipeline = pipeline_of(QRagRetriever(watched))
    found = asyncio.run(pipeline.run_async({"retriever": {"query": QUESTION}}))
    assert ids(found["retriever"]["documents"]) == [h.id for h in retriever.search(QUESTION)]
    assert watched.threads - {threading.get_ident()} == watched.threads != set()


def test_a_file_names_the_folders(retriever: Retriever, exported: Path, index: Path) -> None:
    adapter = QRagRetriever(retriever, 3, {"where": {"page": [0, 1, 2]}})
    text = pipeline_of(adapter).dumps()
    assert f"folder: {exported}" in text
    assert f"index: {index}" in text
    with pytest.raises(DeserializationError, match="allowed_modules"):
        Pipeline.loads(text)
    again = Pipeline.loads(text, allowed_modules=ALLOWED)
    assert again.dumps() == text  # before the folders are opened
    asked = {"retriever": {"query": QUESTION}}
    assert again.run(asked)["retriever"] == adapter.run(QUESTION)
    assert again.dumps() == text
    made = again.get_component("retriever").retriever
    assert made.deployment == retriever.deployment
    assert made.deployment.settings == LoadSettings(dtype="float32")


def test_a_file_written_by_hand(exported: Path, index: Path) -> None:
    settings = {"backend": "torch", "device": "cpu"}
    place = {"folder": str(exported), "index": str(index), "settings": settings}
    adapter = QRagRetriever(place, 3)
    assert adapter.to_dict()["init_parameters"]["retriever"] == place
    made = Retriever.load(exported, LoadSettings(**settings))  # type: ignore[arg-type]
    made.open(index)
    found = adapter.run(QUESTION)["documents"]
    assert ids(found) == [hit.id for hit in made.search(QUESTION, topk=3)]
    server = {"url": "http://127.0.0.1:8000", "timeout": 5.0}
    far = QRagRetriever(server)
    far.warm_up()
    assert far.retriever == RemoteRetriever(**server)  # type: ignore[arg-type]
    assert far.to_dict()["init_parameters"]["retriever"] == server


def test_wrong_settings_are_one_sentence(
    retriever: Retriever, exported: Path, tmp_path: Path
) -> None:
    for place, told in (
        ({"folder": str(exported), "indx": ""}, "cannot be read .*indx.*; give url, or folder"),
        ({"index": "my-index"}, "cannot be read .*folder.*; give url"),
        ({"folder": str(tmp_path)}, "holds no retriever"),
        ({"folder": str(exported), "settings": {"backend": "numpy"}}, "backend is 'numpy'"),
        ({"url": "8000"}, "'8000'"),
    ):
        with pytest.raises(InputError, match=told):
            QRagRetriever(place).warm_up()
    with pytest.raises(InputError, match="file cannot name"):
        QRagRetriever(Watched(retriever)).to_dict()
    with pytest.raises(InputError, match="topk is 0"):
        QRagRetriever(retriever).run(QUESTION, top_k=0)
