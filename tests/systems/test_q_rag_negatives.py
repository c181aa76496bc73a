"""Passages of an index that are added to training questions."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from qrag_jax import Retriever
from qrag_jax.data.loading import LoadedSamples, NegativesConfig
from qrag_jax.data.sample import Sample
from qrag_jax.errors import InputError
from qrag_jax.retrieval.bm25 import BM25Index
from qrag_jax.retrieval.corpus import StoredCorpus
from qrag_jax.retrieval.multi_step import Hit
from qrag_jax.retrieval.protocol import Queries
from qrag_jax.runtime.run import Run
from qrag_jax.systems.indexing import IndexSettings, index_corpus
from qrag_jax.systems.search import may_be_good, with_negatives
from tests.support.worlds import write_lines

pytest.importorskip("bm25s")
CITIES = ("Oslo", "Rome", "Lima", "Cairo", "Quito", "Delhi", "Paris", "Accra", "Tunis", "Dakar")


def passage(city: str) -> str:
    return f"{city} The city of {city} lies on a river near a harbour and has a mayor."


@pytest.fixture
def index(tmp_path: Path) -> Path:
    """All passages, twenty others about rivers and one with the answer, indexed by words."""
    texts = {city: passage(city)[len(city) + 1 :] for city in CITIES}
    texts |= {f"river{n}": f"A river {'and a mayor ' * n} in the city." for n in range(20)}
    texts["nile"] = "The mayor of the city lies on the Nile."
    records = (
        {"id": name, "title": name if name in CITIES else "", "text": text}
        for name, text in texts.items()
    )
    corpus = write_lines(tmp_path / "corpus.jsonl", records)
    index_corpus(corpus, tmp_path / "index", None, IndexSettings(engine="bm25"))
    return tmp_path / "index"


def loaded(cities: Sequence[str] = CITIES[:6]) -> LoadedSamples:
    """A question about each city, whose own passage supports it; the next one is its distractor."""
    samples = [
        Sample(
            id=f"q{place}",
            question=f"Which river does the city of {city} lie on, and who is its mayor?",
            chunks=(passage(cities[(place + 1) % len(cities)]), passage(city)),
            support=(1,),
            answers=("the Nile",),
            source="made",
        )
        for place, city in enumerate(cities)
    ]
    return LoadedSamples({"one": samples[:2], "two": samples[2:]}, ["read"])


def test_the_best_passages_that_are_no_answer_are_added(index: Path, tmp_path: Path) -> None:
    given = loaded()
    with Run.open(tmp_path / "run", None) as run:
        found = with_negatives(
            NegativesConfig(index=str(index), count=4, skip=1), given, run.workdir
        )
    assert [len(samples) for samples in found.by_source.values()] == [2, 4]
    engine = BM25Index.open(index / "bm25", StoredCorpus(index / "corpus"))
    for before, after in zip(given.all, found.all, strict=True):
        numbers = engine.search(Queries([before.question]), len(engine.corpus)).numbers[0]
        ranked = [one for number in numbers for one in engine.corpus.passages([number])]
        good = {*before.chunks}
        others = [one.whole for one in ranked if one.whole not in good and one.name != "nile"]
        assert after == dataclasses.replace(before, chunks=(*before.chunks, *others[1:5]))


def test_a_run_that_goes_on_has_the_same_passages(index: Path, tmp_path: Path) -> None:
    config, workdir = NegativesConfig(index=str(index), count=3), tmp_path / "run"
    with Run.open(workdir, None) as run:
        with_negatives(NegativesConfig(index=str(index), count=2), loaded(), run.workdir)
        first = with_negatives(config, loaded(), run.workdir)  # the run has not begun: again
    assert {len(sample.chunks) for sample in first.all} == {5}
    (workdir / "config.json").write_text("{}")
    shutil.rmtree(index / "bm25")  # only the passages are read again
    with Run.open(workdir, None) as run:
        assert run.has_begun
        again = with_negatives(config, loaded(), run.workdir)
        assert list(again.all) == list(first.all)
        with pytest.raises(InputError, match="negatives"):
            with_negatives(config, loaded(CITIES[:7]), run.workdir)


def hit(text: str, title: str = "") -> Hit:
    return Hit(1, 0.0, "a", title, text, {})


def test_passages_that_may_be_good() -> None:
    sample = Sample(
        id="q",
        question="Who founded Acme?",
        chunks=("Oslo. A city in Norway.", "Acme was founded by the Lee family. It sells paint."),
        support=(1,),
        answers=("The Lee family", "no"),
        source="made",
    )
    good = [
        hit("Oslo: a city in Norway"),  # its own
        hit("Acme was founded by the Lee"),  # the beginning of a supporting one
        hit("Its paint is blue.", "Acme"),  # of the same page
        hit("It belongs to the Lee  Family, they say."),  # with the answer
    ]
    bad = [
        hit("Paint is sold in Norway."),
        hit("It is cold.", "Oslo"),  # the page of a passage that supports nothing
        hit("They are a Leeds family."),  # with a part of a word
        hit("There is no paint."),
    ]
    assert [one.text for one in good if not may_be_good(sample, one)] == []
    assert [one.text for one in bad if may_be_good(sample, one)] == []


def test_a_retriever_searches_in_its_steps(exported: Path, index: Path, tmp_path: Path) -> None:
    retriever = Retriever.load(exported)
    retriever.index(tmp_path / "corpus.jsonl", index)
    config = NegativesConfig(index=str(index), search=str(exported), count=2)
    with Run.open(tmp_path / "run", None) as run:
        found = with_negatives(config, loaded(), run.workdir)
    for sample, longer in zip(loaded().all, found.all, strict=True):
        first, _ = retriever.search(sample.question)
        added = longer.chunks[len(sample.chunks) :]
        assert len(added) == 2
        if not may_be_good(sample, first):
            assert added[0] == f"{first.title} {first.text}".strip()
