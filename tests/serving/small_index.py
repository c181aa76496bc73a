"""A small stored index of words, and faults in its files."""

from __future__ import annotations

from pathlib import Path

from qrag_jax.retrieval.bm25 import BM25Index
from qrag_jax.retrieval.corpus import LINES, StoredCorpus, write_corpus
from qrag_jax.retrieval.protocol import Passage

WORDS = [
    *("cats", "dogs", "birds", "trees", "rivers", "mountains", "stars"),
    *("ships", "bridges", "lamps"),
]


def words_index(folder: Path) -> StoredCorpus:
    """An index of BM25 as `qrag index` lays it out: one passage for each of `WORDS`."""
    corpus = write_corpus(
        folder / "corpus",
        (
            Passage(f"p{i}", f"All about {word}\nand more of it.", word.title(), {"page": i % 3})
            for i, word in enumerate(WORDS)
        ),
    )
    BM25Index.build(corpus).save(folder / "bm25")
    return corpus


def damage(folder: Path, word: str) -> None:
    """Spoils the stored passage of a word, in the file that a server has open."""
    path = folder / "corpus" / LINES
    data = path.read_bytes()
    line = next(line for line in data.split(b"\n") if word.encode() in line)
    with path.open("r+b") as file:
        file.seek(data.index(line))
        file.write(b"x" * len(line))
