"""Two hosts index one corpus on one disk."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from qrag_jax.retrieval.corpus import StoredCorpus
from qrag_jax.retrieval.vector_files import open_vectors
from qrag_jax.systems.indexing import IndexSettings, index_corpus
from qrag_jax.systems.passage_encoder import PassageEncoder
from tests.devices import mesh_of, run_two_processes
from tests.systems.corpora import tree, write_corpus_file, write_tower
from tests.systems.index_hosts import PASSAGES


def vectors(out: Path) -> np.ndarray:
    return open_vectors(out / "exact", count=PASSAGES).vectors.rows(range(PASSAGES))


@pytest.mark.slow
def test_two_hosts_build_what_one_does(tmp_path: Path) -> None:
    tower = write_tower(tmp_path / "tower")
    source = write_corpus_file(tmp_path / "corpus.jsonl", PASSAGES)
    run_two_processes("tests.systems.index_hosts", str(tower), str(source), str(tmp_path))
    assert all((tmp_path / f"stopped-{number}").exists() for number in (0, 1))
    encoder = PassageEncoder.of_folder(str(tower), mesh=mesh_of(), max_tokens=32)
    index_corpus(source, tmp_path / "alone", encoder, IndexSettings(part=8))
    assert StoredCorpus(tmp_path / "whole" / "corpus").digest
    assert tree(tmp_path / "broken") == tree(tmp_path / "whole")
    alone = vectors(tmp_path / "alone")
    for name in ("whole", "split"):
        np.testing.assert_allclose(vectors(tmp_path / name), alone, atol=2e-6)
