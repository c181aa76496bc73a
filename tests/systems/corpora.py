"""Small corpora, collections and towers."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path

from qrag_jax.models.first_encoder import EncoderConfig, ScratchConfig, make_scratch_folder
from tests.support.worlds import write_lines

WORDS = [
    *("river", "stone", "lamp", "winter", "clock", "garden", "paper", "morning", "silver"),
    *("bridge", "letter", "window", "station", "mountain", "piano", "harbour", "forest"),
]
TINY = ScratchConfig(layers=1, hidden=16, heads=2, vocab=300, positions=64)

ONE_SHAPE = EncoderConfig(length_buckets=1, block_sizes=1)  # of blocks: fewer programs to compile


def records(count: int, seed: int = 0) -> list[dict[str, object]]:
    """Passages of 1 to 60 words; every third has a title."""
    rng = random.Random(seed)
    made: list[dict[str, object]] = []
    for number in range(count):
        text = " ".join(rng.choices(WORDS, k=rng.choice([1, 3, 5, 8, 13, 60])))
        title = " ".join(rng.choices(WORDS, k=2)).title() if number % 3 == 0 else ""
        made.append({"id": f"p{number}", "title": title, "text": text, "page": number % 4})
    return made


def write_corpus_file(path: Path, count: int, seed: int = 0) -> Path:
    """Writes `records` as JSON lines."""
    return write_lines(path, records(count, seed))


def write_tower(folder: Path, seed: int = 0) -> Path:
    """Writes a tiny encoder with random weights, whose rows have 64 tokens at most."""
    make_scratch_folder(folder, [" ".join(WORDS)] * 3, TINY, seed)
    return folder


def tree(folder: Path) -> dict[str, bytes]:
    """The content of every file below a folder."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


Judged = Mapping[str, tuple[str, Mapping[str, int]]]  # query's id → its text, its grades


def write_collection(folder: Path, texts: Mapping[str, str], splits: Mapping[str, Judged]) -> Path:
    """Writes a folder in BEIR's layout.

    Args:
        texts: of the documents, by their ids.
        splits: the judged queries of each split.
    """
    documents = ({"_id": name, "title": "", "text": text} for name, text in texts.items())
    write_lines(folder / "corpus.jsonl", documents)
    queries = {name: text for split in splits.values() for name, (text, _) in split.items()}
    rows = ({"_id": name, "text": text} for name, text in queries.items())
    write_lines(folder / "queries.jsonl", rows)
    (folder / "qrels").mkdir(exist_ok=True)
    for split, judged in splits.items():
        lines = ["query-id\tcorpus-id\tscore"]
        for name, (_, grades) in judged.items():
            lines += [f"{name}\t{document}\t{grade}" for document, grade in grades.items()]
        (folder / "qrels" / f"{split}.tsv").write_text("\n".join(lines) + "\n")
    return folder


def write_rows(path: Path, queries: Sequence[tuple[str, str, Sequence[str]]]) -> Path:
    """Writes judged queries as rows: id, text, ids of relevant documents."""
    names = ("id", "query", "relevant_doc_ids")
    return write_lines(path, (dict(zip(names, row, strict=True)) for row in queries))
