"""Every library's adapter, by the library's own calls, and a server: they find the same hits.

A further adapter is tested by a class in `ADAPTERS`, and by a line in `NAMES`.
"""

from __future__ import annotations

import asyncio
import importlib
import math
import pickle
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from qrag_jax import Retriever
from qrag_jax.errors import InputError
from qrag_jax.integrations import RemoteRetriever
from qrag_jax.retrieval.multi_step import Hit
from tests.entry_points import ROOT, Commands, free_address
from tests.integrations.conftest import COUNT
from tests.json_server import listening
from tests.retrieval.test_multi_step import same
from tests.serving.served import serving

QUESTION = "which river is by the silver bridge"
QUESTIONS = [QUESTION, "a clock in the garden", "paper and stone"]
# Library → its adapter, which is also the extra.
NAMES = {"langchain_core": "langchain", "llama_index": "llamaindex", "haystack": "haystack"}
NAMES |= {"dspy": "dspy", "mteb": "mteb"}


class Found(NamedTuple):
    """A passage as a library gives it."""

    id: str
    text: str
    score: float | None
    metadata: dict[str, Any]


def rows(hits: list[Hit]) -> list[Found]:
    found = []
    for hit in hits:
        title = {"title": hit.title} if hit.title else {}
        rest = dict(hit.metadata) | {"step": hit.step} | title
        found.append(Found(hit.id, hit.text, hit.score, rest))
    return found


class Library:
    """A library; `package` is imported when it is first used."""

    package, extra = "", ""

    def __init__(self) -> None:
        pytest.importorskip(self.package, reason=f"needs the extra {self.extra}")
        module = importlib.import_module(f"qrag_jax.integrations.{self.extra}")
        self.kind: Any = module.QRagRetriever

    def adapter(self, retriever: Any, k: int | None = None, **settings: Any) -> Any:
        return self.kind(retriever, k, settings)


class LangChain(Library):
    package, extra = "langchain_core", "langchain"

    def adapter(self, retriever: Any, k: int | None = None, **settings: Any) -> Any:
        return self.kind(retriever=retriever, k=k, search_kwargs=settings)

    def search(self, adapter: Any, question: str, **changes: Any) -> list[Found]:
        found = []
        for each in adapter.invoke(question, **changes):
            rest = dict(each.metadata)
            found.append(Found(each.id, each.page_content, rest.pop("score"), rest))
        return found


class LlamaIndex(Library):
    package, extra = "llama_index.core", "llamaindex"

    def adapter(self, retriever: Any, k: int | None = None, **settings: Any) -> Any:
        return self.kind(retriever, similarity_top_k=k, search_kwargs=settings)

    def search(self, adapter: Any, question: str) -> list[Found]:
        return self.found(adapter.retrieve(question))

    @staticmethod
    def found(nodes: Any) -> list[Found]:
        from llama_index.core.schema import MetadataMode

        # A prompt has the title alone.
        assert not any("step" in node.get_content(MetadataMode.LLM) for node in nodes)
        return [Found(node.node_id, node.text, node.score, node.metadata) for node in nodes]


class Haystack(Library):
    package, extra = "haystack", "haystack"

    def search(self, adapter: Any, question: str, **changes: Any) -> list[Found]:
        if "k" in changes:
            changes["top_k"] = changes.pop("k")
        documents = adapter.run(question, **changes)["documents"]
        return [Found(each.id, each.content, each.score, each.meta) for each in documents]


class DSPy(Library):
    """Its passages begin with their titles."""

    package, extra = "dspy", "dspy"

    def search(self, adapter: Any, question: str, **changes: Any) -> list[Found]:
        return self.found(adapter(question, **changes))

    @staticmethod
    def found(reply: Any) -> list[Found]:
        columns = reply.ids, reply.passages, reply.scores, reply.metadata, reply.steps
        found = []
        for name, passage, score, rest, step in zip(*columns, strict=True):
            title, _, text = passage.rpartition(" | ")
            more = {"step": step} | ({"title": title} if title else {})
            found.append(Found(name, text, score, rest | more))
        return found


ADAPTERS = (LangChain, LlamaIndex, Haystack, DSPy)


@pytest.fixture(scope="module", params=ADAPTERS, ids=lambda kind: kind.__name__)
def library(request: pytest.FixtureRequest) -> Any:
    return request.param()


def test_what_is_found_are_the_hits(library: Any, retriever: Retriever) -> None:
    hits = retriever.search(QUESTION, topk=20)
    assert {bool(hit.title) for hit in hits} == {True, False}
    assert library.search(library.adapter(retriever, 20), QUESTION) == rows(hits)
    assert library.search(library.adapter(retriever), QUESTION) == rows(retriever.search(QUESTION))
    where: Mapping[str, Any] = {"page": [0, 1]}
    adapter = library.adapter(retriever, 5, where=where, steps=1)
    expected = retriever.search(QUESTION, 1, topk=5, where=where)
    assert library.search(adapter, QUESTION) == rows(expected)
    if not isinstance(library, LlamaIndex):  # its calls take no settings
        found = library.search(adapter, QUESTION, k=1, where={"page": 3})
        assert found == rows(retriever.search(QUESTION, 1, topk=1, where={"page": 3}))
    with pytest.raises(InputError, match="colour"):
        library.search(library.adapter(retriever, where={"colour": "red"}), QUESTION)


def test_asynchronous_calls_find_the_same(retriever: Retriever) -> None:
    expected = rows(retriever.search(QUESTION, topk=4))
    nodes = asyncio.run(LlamaIndex().adapter(retriever, 4).aretrieve(QUESTION))
    assert LlamaIndex.found(nodes) == expected
    assert DSPy.found(asyncio.run(DSPy().adapter(retriever, 4).acall(QUESTION))) == expected


def test_pipelines_of_haystack(retriever: Retriever, exported: Path) -> None:
    library = Haystack()
    from haystack import Pipeline
    from haystack.core.errors import DeserializationError

    adapter = library.adapter(retriever, 3, where={"page": [0, 1, 2]})
    pipeline = Pipeline()
    pipeline.add_component("retriever", adapter)
    text = pipeline.dumps()
    with pytest.raises(DeserializationError, match="allowed_modules"):
        Pipeline.loads(text)
    again = Pipeline.loads(text, allowed_modules=["qrag_jax.integrations.haystack"])
    assert again.run({"retriever": {"query": QUESTION}})["retriever"] == adapter.run(QUESTION)
    assert again.dumps() == text
    # Written by hand: a server.
    server = {"url": "http://127.0.0.1:8000", "timeout": 5.0}
    far = library.adapter(server)
    far.warm_up()
    assert far.retriever == RemoteRetriever(**server)  # type: ignore[arg-type]
    assert far.to_dict()["init_parameters"]["retriever"] == server
    with pytest.raises(InputError, match="indx"):
        library.adapter({"folder": str(exported), "indx": ""}).warm_up()


def test_programs_of_dspy_read_passages_and_are_saved(retriever: Retriever, tmp_path: Path) -> None:
    library = DSPy()
    import dspy

    search = library.adapter(retriever, 3)
    passages = search(QUESTION).passages
    with dspy.context(rm=search.rm):
        assert dspy.Retrieve(k=4)(QUESTION).passages == search(QUESTION, k=4).passages
    search.save(tmp_path / "search", save_program=True)
    again = dspy.load(str(tmp_path / "search"), allow_pickle=True)
    assert again(QUESTION).passages == search.reset_copy()(QUESTION).passages == passages


# ---------------------------------------------------------------------- a server


@pytest.fixture(scope="module")
def remote(commands: Commands, index: Path, exported: Path) -> Iterator[RemoteRetriever]:
    with serving(commands, index, f"--retriever={exported}", "--compute=float32") as server:
        yield RemoteRetriever(server.url)


def test_a_servers_hits_are_the_retrievers(remote: RemoteRetriever, retriever: Retriever) -> None:
    settings: dict[str, Any]
    for settings in (
        {},
        {"steps": 1, "beam": 3},
        {"threshold": -math.inf},
        {"threshold": retriever.search(QUESTION)[1].score},
        {"where": {"page": {0, 2}}, "topk": 5},
    ):
        same(remote.search(QUESTIONS, **settings), retriever.search(QUESTIONS, **settings))
    same([remote.search(QUESTION)], [retriever.search(QUESTION)])
    assert remote.search([]) == []
    many = [f"{question} {number}" for number in range(20) for question in QUESTIONS]
    same(remote.search(many), retriever.search(many))
    # Through an adapter and a pickle of it.
    library = LangChain()
    adapter = pickle.loads(pickle.dumps(library.adapter(remote, 5)))  # noqa: S301
    found = library.search(adapter, QUESTION)
    assert [each.id for each in found] == [hit.id for hit in retriever.search(QUESTION, topk=5)]


def test_what_a_server_refuses_names_it_and_the_setting(remote: RemoteRetriever) -> None:
    for name, value in (("where", {"colour": 1}), ("topk", COUNT + 1), ("threshold", math.nan)):
        said = "colour" if name == "where" else name
        with pytest.raises(InputError, match=rf"^{remote.url}: .*{said}"):
            remote.search(QUESTION, **{name: value})
    with pytest.raises(InputError, match="question"):
        remote.search([QUESTION, " "])
    with pytest.raises(InputError, match=r"a\.b") as refused:
        RemoteRetriever("http://me:secret@a.b:8000")
    assert "secret" not in str(refused.value)
    nobody = f"http://{free_address()}"
    with pytest.raises(InputError, match=nobody):
        RemoteRetriever(nobody).search(QUESTION)
    for status, answer in ((200, {"hits": [[{"id": "p1"}]]}), (404, {"detail": "Not Found"})):
        with (
            listening(lambda call, reply=(status, answer): reply) as url,
            pytest.raises(InputError, match=rf"{url}.*HTTP {status}"),
        ):
            RemoteRetriever(url).search(QUESTION)


# ---------------------------------------------------------------- imports

WITHOUT = """
import importlib, sys
import qrag_jax.integrations
library, name = sys.argv[1:]
assert not {library, "jax", "torch", "transformers"} & {*sys.modules}
sys.modules[library] = None  # as if it were not installed
try:
    importlib.import_module(f"qrag_jax.integrations.{name}")
except ModuleNotFoundError as error:
    assert f"'qrag_jax[{name}]'" in str(error)
else:
    sys.exit("it was imported")
"""


@pytest.mark.parametrize(("library", "name"), NAMES.items())
def test_an_adapter_imports_one_library_and_says_what_to_install(library: str, name: str) -> None:
    command = [sys.executable, "-c", WITHOUT, library, name]
    subprocess.run(command, cwd=ROOT, check=True)
