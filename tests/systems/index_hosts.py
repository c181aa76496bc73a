"""`index_hosts TOWER SOURCE OUT ADDRESS PROCESS`: one of two processes that index one corpus.

Each has four devices. They build OUT/whole without a break, OUT/broken with one, and OUT/split with
the parameters in parts on all devices.
"""

from __future__ import annotations

import sys
from pathlib import Path

import jax

from qrag_jax.runtime.interrupt import Stopped
from qrag_jax.runtime.mesh import make_mesh
from qrag_jax.systems.indexing import IndexSettings, index_corpus
from qrag_jax.systems.passage_encoder import PassageEncoder
from tests.systems.stopping import StopAfter

SETTINGS = IndexSettings(part=8)
PASSAGES = 70  # nine parts: one of the two hosts has no part in the last round


def main() -> None:
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
