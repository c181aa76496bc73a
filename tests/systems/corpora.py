"""Small corpora and towers for tests of indexes."""

from __future__ import annotations

import json
import random
from pathlib import Path

from qrag_jax.models.encoder_config import EncoderConfig
from qrag_jax.models.scratch import ScratchConfig, make_scratch_folder

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
    lines = (json.dumps(record) + "\n" for record in records(count, seed))
    path.write_text("".join(lines))
    return path


def write_tower(folder: Path, seed: int = 0) -> Path:
    """Writes a tiny encoder with random weights, whose rows have 64 tokens at most."""
    make_scratch_folder(folder, [" ".join(WORDS)] * 3, TINY, seed)
    return folder


def tree(folder: Path) -> dict[str, bytes]:
    """The content of every file below a folder."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}
