"""What the tools of RLVR read, by the config: a corpus's retrievers, and what is refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import pytest

from qrag_jax.environments.tools.episode import Look, ToolTask
from qrag_jax.errors import InputError
from qrag_jax.retrieval.opening import BM25, EXACT
from qrag_jax.rollouts.corpus_library import CorpusLibrary
from qrag_jax.rollouts.own_library import OwnLibrary
from qrag_jax.runtime.mesh import make_mesh
from qrag_jax.systems.indexing import IndexSettings, index_corpus
from qrag_jax.systems.passage_encoder import PassageEncoder
from qrag_jax.systems.rlvr_config import RlvrConfig, default_config
from qrag_jax.systems.rlvr_inputs import open_library, told_documents
from tests.systems.corpora import ONE_SHAPE, write_corpus_file, write_tower

GOLD = "p4"
TASK = ToolTask("q", "Which river?", ("a stone",), gold_ids=(GOLD,))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A tower, an index of words and vectors, and one of words alone."""
    folder = tmp_path_factory.mktemp("tools")
    tower = write_tower(folder / "tower")
    source = write_corpus_file(folder / "passages.jsonl", 24)
    both, words = folder / "both", folder / "words"
    encoder = PassageEncoder.of_folder(
        str(tower), dataclasses.replace(ONE_SHAPE, chunk_prefix="river ")
    )
    index_corpus(source, both, encoder, IndexSettings(engine=EXACT))
    index_corpus(source, both, None, IndexSettings(engine=BM25))
    index_corpus(source, words, None, IndexSettings(engine=BM25))
    return {"tower": str(tower), "both": str(both), "words": str(words)}


def config(**tools: Any) -> RlvrConfig:
    made = default_config()
    made.stages = ("grpo",)
    made.tools.update(**tools)
    return RlvrConfig.of(made)


def opened(**tools: Any):
    return open_library(config(**tools), make_mesh((1, 1, 1), jax.devices()[:1]))


def test_without_a_corpus_each_question_has_its_own() -> None:
    assert isinstance(opened(), OwnLibrary)


def test_what_the_tools_read_is_told() -> None:
    assert told_documents(config().tools) == "each question's documents"
    assert told_documents(config(corpus="indexes/all").tools) == "the corpus in indexes/all"


@pytest.mark.parametrize("retriever", ["bm25", "lexical", "semantic", "hybrid", "golden"])
def test_a_corpus_is_searched_by_the_retriever_of_the_config(
    retriever: str, folders: dict[str, str]
) -> None:
    library = opened(
        corpus=folders["both"],
        retriever=retriever,
        encoder=folders["tower"] if retriever in ("semantic", "hybrid") else "",
        passage_prefix="river ",
        question_prefix="lamp ",
    )
    assert isinstance(library, CorpusLibrary)
    (found,) = library.look([(TASK, Look("river stone", 4))])
    assert isinstance(found, tuple)
    assert len(found) == (1 if retriever == "golden" else 4)
    assert [each.id for each in found if each.is_supporting] in ([], [GOLD])


@pytest.mark.parametrize(
    ("tools", "told"),
    [
        ({"corpus": "nowhere"}, "config.tools.corpus is nowhere, which holds no index"),
        (
            {"corpus": "words", "retriever": "interleaved"},
            "'interleaved' is for a question's own documents; with config.tools.corpus use one of "
            "golden, bm25, lexical, semantic, hybrid.",
        ),
        (
            {"corpus": "both", "retriever": "semantic"},
            "in config.tools.encoder, or use bm25.",
        ),
        (
            {"corpus": "words", "retriever": "semantic", "encoder": "tower"},
            "compares words; use another config.tools.retriever.",
        ),
        (
            {"corpus": "both", "retriever": "semantic", "encoder": "tower"},
            "was embedded by another encoder, or with another dtype, pooling, prefix or length",
        ),
        (
            {"corpus": "both", "rerank_url": "http://127.0.0.1:1/v1"},
            "config.tools.rerank_url cannot search",
        ),
    ],
)
def test_what_cannot_be_searched(tools: dict[str, str], told: str, folders: dict[str, str]) -> None:
    given = {name: folders.get(value, value) for name, value in tools.items()}
    with pytest.raises(InputError) as error:
        opened(**given)
    assert told in str(error.value)


def test_demonstrations_read_own_documents() -> None:
    made = default_config()
    made.tools.corpus = "somewhere"
    with pytest.raises(InputError, match="set stages to grpo, or leave the corpus out"):
        RlvrConfig.of(made)
