"""The tiny retriever over a small corpus, for the adapters, and other libraries kept quiet."""

from __future__ import annotations

import os
from pathlib import Path

import huggingface_hub.constants
import pytest

from qrag_jax import LoadSettings, Retriever
from tests.systems.corpora import write_corpus_file

COUNT = 40  # passages

# Read by the libraries when they are imported: tests send nothing.
os.environ |= {
    "HAYSTACK_TELEMETRY_ENABLED": "False",
    "LANGSMITH_TRACING": "false",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
}


@pytest.fixture(autouse=True)
def the_hub_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


@pytest.fixture(scope="session")
def index(exported: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An index of `COUNT` passages, every third with a title, all with the field page."""
    folder = tmp_path_factory.mktemp("integrations")
    corpus = write_corpus_file(folder / "corpus.jsonl", COUNT)
    Retriever.load(exported, LoadSettings(dtype="float32")).index(corpus, folder / "index")
    return folder / "index"


@pytest.fixture(scope="session")
def retriever(exported: Path, index: Path) -> Retriever:
    """A retriever of two steps, with the index open."""
    made = Retriever.load(exported, LoadSettings(dtype="float32"))
    made.open(index)
    return made
