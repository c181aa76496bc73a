"""Every library's adapter, by the library's own calls: what it finds are the retriever's hits.

A further adapter is tested by a class in `ADAPTERS`, and by a line in `NAMES`.
"""

from __future__ import annotations

import asyncio
import json
import pickle
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from qrag_jax import Retriever
from qrag_jax.errors import InputError
from qrag_jax.integrations import imported
from qrag_jax.integrations.remote import RemoteRetriever
from qrag_jax.retrieval.multi_step import Hit
from tests.entry_points import ROOT

QUESTION = "which river is by the silver bridge"
QUESTIONS = [QUESTION, "a clock in the garden", "paper and stone"]
# Library → its adapter, which is also the extra.
NAMES = {"langchain_core": "langchain", "llama_index": "llamaindex"}
NAMES |= {name: name for name in ("haystack", "dspy", "mteb")}


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


class LangChain:
    """Of `langchain_core`."""

    def __init__(self) -> None:
        pytest.importorskip("langchain_core", reason="needs the extra langchain")

    def adapter(self, retriever: Any, k: int | None = None, **settings: Any) -> Any:
        from qrag_jax.integrations.langchain import QRagRetriever

        return QRagRetriever(retriever=retriever, k=k, search_kwargs=settings)

    def search(self, adapter: Any, question: str, **changes: Any) -> list[Found]:
        return list(map(self.found, adapter.invoke(question, **changes)))

    @staticmethod
    def found(one: Any) -> Found:
        rest = dict(one.metadata)
        return Found(one.id, one.page_content, rest.pop("score"), rest)


class LlamaIndex:
    """Of `llama_index.core`."""

    def __init__(self) -> None:
        pytest.importorskip("llama_index.core", reason="needs the extra llamaindex")

    def adapter(self, retriever: Any, k: int | None = None, **settings: Any) -> Any:
        from qrag_jax.integrations.llamaindex import QRagRetriever

        return QRagRetriever(retriever, similarity_top_k=k, search_kwargs=settings)

    def search(self, adapter: Any, question: str) -> list[Found]:
        return list(map(self.found, adapter.retrieve(question)))

    @staticmethod
    def found(one: Any) -> Found:
        from llama_index.core.schema import MetadataMode

        assert "step" not in one.get_content(MetadataMode.LLM)  # a prompt has the title alone
        return Found(one.node_id, one.text, one.score, one.metadata)


class Haystack:
    """Of `haystack`."""

    def __init__(self) -> None:
        pytest.importorskip("haystack", reason="needs the extra haystack")

    def adapter(self, retriever: Any, k: int | None = None, **settings: Any) -> Any:
        from qrag_jax.integrations.haystack import QRagRetriever

        return QRagRetriever(retriever, k, settings)

    def search(self, adapter: Any, question: str, **changes: Any) -> list[Found]:
        if "k" in changes:
            changes["top_k"] = changes.pop("k")
        return self.found(adapter.run(question, **changes))

    @staticmethod
    def found(told: Any) -> list[Found]:
        return [Found(each.id, each.content, each.score, each.meta) for each in told["documents"]]


class DSPy:
    """Of `dspy`; its passages begin with their titles."""

    def __init__(self) -> None:
        pytest.importorskip("dspy", reason="needs the extra dspy")

    def adapter(self, retriever: Any, k: int | None = None, **settings: Any) -> Any:
        from qrag_jax.integrations.dspy import QRagRetriever

        return QRagRetriever(retriever, k, settings)

    def search(self, adapter: Any, question: str, **changes: Any) -> list[Found]:
        return self.found(adapter(question, **changes))

    @staticmethod
    def found(told: Any) -> list[Found]:
        rows = zip(told.ids, told.passages, told.scores, told.metadata, told.steps, strict=True)
        found = []
        for name, passage, score, rest, step in rows:
            title, _, text = passage.rpartition(" | ")
            more = {"step": step} | ({"title": title} if title else {})
            found.append(Found(name, text, score, rest | more))
        return found


ADAPTERS = (LangChain, LlamaIndex, Haystack, DSPy)


@pytest.fixture(scope="module", params=ADAPTERS, ids=lambda kind: kind.__name__)
def library(request: pytest.FixtureRequest) -> Any:
    return request.param()


def test_what_is_found_are_the_hits(library: Any, retriever: Retriever) -> None:
    hits = retriever.search(QUESTION, topk=9)
    assert {bool(hit.title) for hit in hits} == {True, False}
    assert {hit.step for hit in hits} == {1, 2}
    assert library.search(library.adapter(retriever, 9), QUESTION) == rows(hits)
    assert library.search(library.adapter(retriever), QUESTION) == rows(retriever.search(QUESTION))
    where: Mapping[str, Any] = {"page": [0, 1]}
    expected = retriever.search(QUESTION, 1, topk=5, where=where)
    adapter = library.adapter(retriever, 5, where=where, steps=1)
    assert library.search(adapter, QUESTION) == rows(expected)
    if not isinstance(library, LlamaIndex):  # its calls take no settings
        found = library.search(adapter, QUESTION, k=1, where={"page": 3})
        assert found == rows(retriever.search(QUESTION, 1, topk=1, where={"page": 3}))
    with pytest.raises(InputError, match="colour"):
        library.search(library.adapter(retriever, where={"colour": "red"}), QUESTION)


@pytest.mark.parametrize("kind", [LangChain, LlamaIndex])
def test_a_pickle_opens_the_folders_again(kind: Any, retriever: Retriever) -> None:
    library = kind()
    adapter = library.adapter(retriever, 3)
    again = pickle.loads(pickle.dumps(adapter))  # noqa: S301
    assert library.search(again, QUESTION) == library.search(adapter, QUESTION)


def test_asynchronous_calls_find_the_same(retriever: Retriever) -> None:
    expected = rows(retriever.search(QUESTION, topk=4))
    nodes = asyncio.run(LlamaIndex().adapter(retriever, 4).aretrieve(QUESTION))
    assert list(map(LlamaIndex.found, nodes)) == expected
    assert DSPy.found(asyncio.run(DSPy().adapter(retriever, 4).acall(QUESTION))) == expected


def test_a_pipeline_of_haystack_names_the_folders(
    retriever: Retriever, exported: Path, tmp_path: Path
) -> None:
    library = Haystack()
    from haystack import Pipeline
    from haystack.core.errors import DeserializationError

    adapter = library.adapter(retriever, 3, where={"page": [0, 1, 2]})
    pipeline = Pipeline()
    pipeline.add_component("retriever", adapter)
    text = pipeline.dumps()
    assert str(exported) in text
    with pytest.raises(DeserializationError, match="allowed_modules"):
        Pipeline.loads(text)
    again = Pipeline.loads(text, allowed_modules=["qrag_jax.integrations.haystack"])
    asked = {"retriever": {"query": QUESTION}}
    assert again.run(asked)["retriever"] == adapter.run(QUESTION)
    assert again.dumps() == text
    # Written by hand: a server.
    server = {"url": "http://127.0.0.1:8000", "timeout": 5.0}
    far = library.adapter(server)
    far.warm_up()
    assert far.retriever == RemoteRetriever(**server)  # type: ignore[arg-type]
    assert far.to_dict()["init_parameters"]["retriever"] == server
    for wrong, name in (
        ({"folder": str(exported), "indx": ""}, "indx"),
        ({"folder": str(tmp_path)}, str(tmp_path)),
        ({"url": "8000"}, "8000"),
    ):
        with pytest.raises(InputError, match=name):
            library.adapter(wrong).warm_up()


def test_programs_of_dspy_read_the_passages_and_are_saved(
    retriever: Retriever, tmp_path: Path
) -> None:
    library = DSPy()
    import dspy

    search = library.adapter(retriever, 3)
    with dspy.context(rm=search.rm):
        assert dspy.Retrieve(k=4)(QUESTION).passages == search(QUESTION, k=4).passages
    search.save(tmp_path / "search", save_program=True)
    again = dspy.load(str(tmp_path / "search"), allow_pickle=True)
    assert again(QUESTION).passages == search(QUESTION).passages
    search.save(tmp_path / "state.json")
    assert "retriever" not in (tmp_path / "state.json").read_text()
    assert search.reset_copy()(QUESTION).passages == search(QUESTION).passages


# ---------------------------------------------------------------- imports

WITHOUT = """
import importlib, json, sys
import qrag_jax
import qrag_jax.integrations.remote
libraries, names = map(json.loads, sys.argv[1:])
there = {name.partition(".")[0] for name in sys.modules}
told = {"there": sorted(there & {*libraries, "jax", "torch", "transformers"})}
sys.modules |= dict.fromkeys(libraries)  # as if they were not installed
for name in names:
    try:
        importlib.import_module(f"qrag_jax.integrations.{name}")
    except ModuleNotFoundError as error:
        told[name] = str(error)
print(json.dumps(told))
"""


def test_an_adapter_imports_one_library_and_says_what_to_install() -> None:
    command = [sys.executable, "-c", WITHOUT, json.dumps([*NAMES]), json.dumps([*NAMES.values()])]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout)
    assert told.pop("there") == []
    assert told.keys() == set(NAMES.values())
    assert all(f"'qrag_jax[{name}]'" in sentence for name, sentence in told.items())
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {*NAMES.values()} <= extras["optional-dependencies"].keys()
    # A library that lacks another one says so itself.
    with pytest.raises(ModuleNotFoundError, match="'litellm'"), imported("dspy", "dspy", "dspy"):
        raise ModuleNotFoundError("No module named 'litellm'", name="litellm")
