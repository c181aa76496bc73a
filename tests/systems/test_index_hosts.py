"""Two hosts index one corpus on one disk."""

from __future__ import annotations

import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from qrag_jax.retrieval.corpus import StoredCorpus
from qrag_jax.retrieval.index_folder import open_vectors
from qrag_jax.runtime.interrupt import Stopped
from qrag_jax.runtime.mesh import make_mesh
from qrag_jax.systems.indexing import IndexSettings, index_corpus
from qrag_jax.systems.passage_encoder import PassageEncoder
from tests.devices import mesh_of, run_two_processes
from tests.systems.corpora import StopAfter, tree, write_corpus_file, write_tower

SETTINGS = IndexSettings(part=8)
PASSAGES = 70  # nine parts: one of the two hosts has no part in the last round


def vectors(out: Path) -> np.ndarray:
    return open_vectors(out / "exact", count=PASSAGES).vectors.rows(range(PASSAGES))


@pytest.mark.slow
def test_two_hosts_build_what_one_does(tmp_path: Path) -> None:
    tower = write_tower(tmp_path / "tower")
    source = write_corpus_file(tmp_path / "corpus.jsonl", PASSAGES)
    run_two_processes("tests.systems.test_index_hosts", str(tower), str(source), str(tmp_path))
    assert all((tmp_path / f"stopped-{number}").exists() for number in (0, 1))
    encoder = PassageEncoder.of_folder(str(tower), mesh=mesh_of(), max_tokens=32)
    index_corpus(source, tmp_path / "alone", encoder, IndexSettings(part=8))
    assert StoredCorpus(tmp_path / "whole" / "corpus").digest
    assert tree(tmp_path / "broken") == tree(tmp_path / "whole")
    alone = vectors(tmp_path / "alone")
    for name in ("whole", "split"):
        np.testing.assert_allclose(vectors(tmp_path / name), alone, atol=2e-6)


def main() -> None:
    """One of two processes, each with four devices: TOWER SOURCE OUT ADDRESS PROCESS."""
    tower, source, out = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    jax.distributed.initialize(sys.argv[4], num_processes=2, process_id=int(sys.argv[5]))
    copied = PassageEncoder.of_folder(tower, max_tokens=32)
    split = PassageEncoder.of_folder(tower, mesh=make_mesh((1, 8, 1)), max_tokens=32)
    assert split.digest() == copied.digest()
    index_corpus(source, out / "whole", copied, SETTINGS)
    # A signal reaches the second host alone.
    stop = StopAfter(2 if jax.process_index() else 1000)
    try:
        index_corpus(source, out / "broken", copied, SETTINGS, stop)
    except Stopped:
        (out / f"stopped-{jax.process_index()}").touch()
    index_corpus(source, out / "broken", copied, SETTINGS)
    index_corpus(source, out / "split", split, SETTINGS)


if __name__ == "__main__":
    main()
