"""The cases that measure indexing, on a tiny tower."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
from benchmarks.retrieval_cases import indexing

from qrag_jax.systems.passage_encoder import PassageEncoder
from tests.devices import mesh_of
from tests.systems.corpora import ONE_SHAPE, records, write_corpus_file, write_tower

COUNT = 96


@pytest.fixture(scope="module")
def tower(tmp_path_factory: pytest.TempPathFactory) -> PassageEncoder:
    folder = write_tower(tmp_path_factory.mktemp("tower") / "model")
    return PassageEncoder.of_folder(str(folder), ONE_SHAPE, mesh_of())


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    plain = write_corpus_file(tmp_path / "corpus.jsonl", COUNT)
    packed = tmp_path / "corpus.jsonl.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    return packed


def row_tokens(tower: PassageEncoder, start: int, stop: int) -> int:
    texts = [f"{record['title']} {record['text']}".strip() for record in records(COUNT)]
    return sum(len(tower.row(ids)) for ids in tower.tokenizer.encode(texts[start:stop]))


def test_both_sides_embed_the_same_tokens(
    tower: PassageEncoder, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(indexing, "PART", 16)
    case = indexing.ratio_case(tower, "tiny", corpus, 64, tmp_path)
    assert case.value is not None
    assert case.peer is not None
    tokens = row_tokens(tower, 16, 80)
    assert case.details["rows"] == f"{tokens} tokens, at most 64 each"
    assert case.value == pytest.approx(tokens / float(case.details["index (s)"]))
    assert case.peer == pytest.approx(tokens / float(case.details["encoder alone (s)"]))
    assert case.ratio == case.value / case.peer


def test_growth_counts_the_tokens_of_each_size(
    tower: PassageEncoder, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(indexing, "PART", 16)
    case = indexing.growth_case(tower, "tiny", corpus, (24, 48, 96), tmp_path)
    for size in (24, 48, 96):
        assert case.details[f"{size} passages (tokens)"] == row_tokens(tower, 0, size)
        assert float(case.details[f"{size} passages (processor s)"]) > 0
    if case.value is None:  # the machine did something else meanwhile
        assert case.holds is None
    else:
        assert case.holds == (case.value <= indexing.MOST_EXPONENT)
    with pytest.raises(ValueError, match="has 96 passages, not 200"):
        indexing.part_of(corpus, 200, tmp_path)
